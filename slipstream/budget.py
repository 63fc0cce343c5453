"""Memory that captions share: how much there is, who may use it in a budget with a bounded queue in front, and how what
they freed goes back to the system. And the cores that there are for them. Needs no torch.
"""

import asyncio
import bisect
import contextlib
import ctypes
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator
from enum import StrEnum
from pathlib import Path

from slipstream.errors import LimitExceeded, Overloaded
from slipstream.service_info import ServiceLoad

MIB = 1024 * 1024

# -- memory -----------------------------------------------------------------------------------------------------------

# How much memory there is left on this machine, and how it gets some back.

MEMORY_INFO = Path("/proc/meminfo")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUP = Path("/sys/fs/cgroup")
_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def available_bytes() -> int:
    """What can still be taken of the machine, within the limits of our control groups. Files that it has read, such as
    a checkpoint, are dropped from memory for whoever needs it, there as elsewhere."""
    left = [_meminfo_available(), *map(_left_in, _cgroups("memory"))]
    return min(each for each in left if each is not None)


def host_budget(told_mib: int, share: float) -> int:
    """A budget in host memory: as told, or this share of what is available now."""
    return told_mib * MIB if told_mib else int(share * available_bytes())


def trim_memory() -> None:
    """Has the allocator give back to the system what was freed. Takes some 10 ms for 100 MiB, in which whoever needs
    memory may have to wait; does nothing where the C library cannot."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def _meminfo_available() -> int:
    if MEMORY_INFO.exists():
        for line in MEMORY_INFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroups(controller: str) -> Iterator[Path]:
    """Folders of the control groups that bound what this process takes of one thing, its own and those around it, of
    either version. A container sees its own as the root."""
    paths = {CGROUP: "", CGROUP / controller: ""}
    with contextlib.suppress(OSError):
        for line in OWN_CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                paths[CGROUP / controller if controllers else CGROUP] = path.lstrip("/")
    for root, path in paths.items():
        yield from (each for each in (root / path, *(root / path).parents) if each.is_relative_to(root))


def _left_in(group: Path) -> int | None:
    """What a control group may still take; None where it has no limit."""
    for limit_name, used_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = _read_number(group / limit_name), _read_number(group / used_name)
        if limit is not None and used is not None:
            return max(0, limit - max(0, used - _cached_bytes(group, prefix)))
    return None


def _cached_bytes(group: Path, prefix: str) -> int:
    """Of files on disk, which a control group is charged for. What lies in memory only is not among them."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counted = dict(line.split(maxsplit=1) for line in lines)
    return sum(int(counted.get(prefix + name, 0)) for name in ("active_file", "inactive_file"))


def _read_number(path: Path) -> int | None:
    """None when there is no such file, or no limit in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# -- cores ------------------------------------------------------------------------------------------------------------


def num_cores() -> int:
    """Whole cores that this process may use: of those that it may run on as many as our control groups give time for.
    With more threads than that all of them stand still together, again and again, until the next time is given."""
    given = [cores for group in _cgroups("cpu") if (cores := _cores_given(group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *given])))


def _cores_given(group: Path) -> float | None:
    """What a control group has of them, such as 1.5; None where it has no limit."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota, period = (str(_read_number(group / f"cpu.cfs_{name}_us") or "max") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


# -- admission --------------------------------------------------------------------------------------------------------

# A budget of bytes and of places, with a bounded queue in front of it.


class MemoryUse(StrEnum):
    """What a budget's bytes are for."""

    KEYS_AND_VALUES = "keys and values"
    FRAMES = "frames"

    @property
    def flag(self) -> str:
        """The flag that sets the budget."""
        return "--frames-budget-mb" if self is MemoryUse.FRAMES else "--kv-budget-mb"


REMEMBERED = 0.9
"""Of what others have taken, by the next one."""


class Turns:
    """Who is next of those that wait for one thing: who would be done first if each had begun when it came. So a short
    one does not wait for the long one before it, and none waits for ever, as its turn does not move: only those go
    first that come later by less than it takes itself.

    Args:
        behind_people_s: one whose text nobody waits for lets those of people go first that come so much later.
        longest_s: what any of them is taken to need at most, and so lets go first.
    """

    def __init__(self, behind_people_s: float, longest_s: float = math.inf) -> None:
        self._behind_people_s, self._longest_s = behind_people_s, longest_s
        self._amount = self._seconds = 0.0
        """Of those that were served; those of long ago count for less."""

    def turn(self, came_s: float, amount: int, *, in_background: bool = False) -> float:
        """That of one that came then and asks for so much: the least is next. Until one was served, nobody knows what
        they take."""
        takes_s = amount * self._seconds / self._amount if self._amount else 0.0
        return came_s + min(takes_s, self._longest_s) + (self._behind_people_s if in_background else 0.0)

    def observe(self, amount: int, seconds: float) -> None:
        """What so much has taken."""
        self._amount = REMEMBERED * self._amount + amount
        self._seconds = REMEMBERED * self._seconds + seconds


FIRST_ESTIMATE_S = 5.0
LEAST_RETRY_S, MOST_RETRY_S = 0.5, 120.0
SMOOTHING = 0.3
ROOM_BEHIND_PEOPLE_S = 60.0
"""See `Turns`. A place is held for a whole caption, so it is more than for a prompt."""
MOST_TO_PEOPLE, MOST_TO_SHORTER = 0.5, 0.25
"""Shares of how long one may wait, that it may wait for others which go first: those of people, and shorter ones."""


class Admission:
    """Admits sessions by their turns (`Turns`) while their bytes fit. Belongs to one event loop.

    Args:
        budget_bytes: what all admitted sessions may take together.
        max_sessions: sessions admitted at once.
        max_queued: sessions that may wait; one more is refused.
        queue_timeout_s: seconds after which a waiting session is refused.
        what: what this service is, for messages.
        of: what the bytes are for.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        max_sessions: int,
        max_queued: int,
        queue_timeout_s: float,
        what: str,
        of: MemoryUse = MemoryUse.KEYS_AND_VALUES,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_admitted = 0
        self.on_admitted: Callable[[float], None] = lambda waited_s: None
        """Told how long a session waited, when it gets its place."""
        self._max_sessions = max_sessions
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._what = what
        self._of = of
        self._queue: list[Reservation] = []
        """The next one first."""
        behind_people_s = min(ROOM_BEHIND_PEOPLE_S, MOST_TO_PEOPLE * queue_timeout_s)
        self._turns = Turns(behind_people_s, MOST_TO_SHORTER * queue_timeout_s)
        self._mean_stay_s = FIRST_ESTIMATE_S

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def load(self) -> ServiceLoad:
        """For those who choose among several services."""
        return ServiceLoad(self.num_admitted, self._max_sessions, self.num_queued, self.used_bytes, self.budget_bytes)

    def check(self, num_bytes: int) -> None:
        """Raises `LimitExceeded` for more bytes than the whole budget; waiting would not help."""
        if num_bytes > self.budget_bytes:
            raise LimitExceeded(
                f"the caption needs {-(-num_bytes // MIB)} MiB of {self._of}, but the {self._what} has"
                f" {self.budget_bytes // MIB} MiB in all; ask for fewer frames or tokens, or raise {self._of.flag}"
            )

    def reserve(self, num_bytes: int, *, in_background: bool = False) -> "Reservation":
        """A place: admitted at once when there is room and it is next, else in the queue by its turn. Where that is
        full, one `in_background`, whose text nobody waits for, makes way for a caption that somebody waits for.

        Raises:
            LimitExceeded: see `check`.
            Overloaded: the queue is full.
        """
        self.check(num_bytes)
        reservation = Reservation(self, num_bytes, in_background=in_background)
        bisect.insort(self._queue, reservation, key=lambda waiting: waiting.turn)
        self._admit_next()
        if len(self._queue) > self._max_queued and (in_background or not self._make_way()):
            self._queue.remove(reservation)
            raise self.refusal(f"{self._occupancy()} and {len(self._queue)} wait")
        return reservation

    @contextlib.asynccontextmanager
    async def admitted(
        self,
        num_bytes: int,
        on_queued: Callable[[int], None] = lambda num_ahead: None,
        *,
        in_background: bool = False,
    ) -> AsyncIterator["Reservation"]:
        """A place that is admitted, for what is made in the block: where that fails the place is released, and else by
        whoever has what was made. `on_queued` hears how many wait ahead. Raises what `reserve` and `wait` do."""
        place = self.reserve(num_bytes, in_background=in_background)
        try:
            async for num_ahead in place.wait():
                on_queued(num_ahead)
            yield place
        except BaseException:
            place.release()
            raise

    def refusal(self, why: str) -> Overloaded:
        """The error that says when to come back: a guess from how long sessions have stayed so far."""
        ahead = len(self._queue) + 1
        estimate_s = self._mean_stay_s * ahead / max(1, self.num_admitted)
        retry_after_s = min(max(estimate_s, LEAST_RETRY_S), MOST_RETRY_S)
        message = f"the {self._what} has no room: {why}; try again in about {max(1, round(retry_after_s))} s"
        return Overloaded(message, retry_after_s=retry_after_s)

    def _occupancy(self) -> str:
        free_mib = (self.budget_bytes - self.used_bytes) // MIB
        return f"{self.num_admitted} of at most {self._max_sessions} captions are served, {free_mib} MiB are free"

    def _fits(self, reservation: "Reservation") -> bool:
        in_budget = self.used_bytes + reservation.num_bytes <= self.budget_bytes
        return in_budget and self.num_admitted < self._max_sessions

    def _admit(self, reservation: "Reservation") -> None:
        self.used_bytes += reservation.num_bytes
        self.num_admitted += 1
        reservation.admitted_at = asyncio.get_running_loop().time()
        self.on_admitted(reservation.admitted_at - reservation.asked_at)

    def _release(self, reservation: "Reservation") -> None:
        if reservation.admitted_at is None:
            if reservation in self._queue:
                self._queue.remove(reservation)
        else:
            self.used_bytes -= reservation.num_bytes
            self.num_admitted -= 1
            stay_s = asyncio.get_running_loop().time() - reservation.admitted_at
            self._turns.observe(reservation.asked_bytes, stay_s)
            self._mean_stay_s += SMOOTHING * (stay_s - self._mean_stay_s)
        self._admit_next()

    def _admit_next(self) -> None:
        while self._queue and self._fits(self._queue[0]):
            self._admit(self._queue[0])
            self._queue.pop(0).moved.set()
        for waiting in self._queue:
            waiting.moved.set()

    def _make_way(self) -> bool:
        """Whether there was one in the background, the last of which waits no longer."""
        gives_way = next((waiting for waiting in reversed(self._queue) if waiting.in_background), None)
        if gives_way is not None:
            self._queue.remove(gives_way)
            gives_way.gave_way = True
            gives_way.moved.set()
            self._admit_next()
        return gives_way is not None


class Reservation:
    """One session's place, in the queue or behind it."""

    def __init__(self, admission: Admission, num_bytes: int, *, in_background: bool) -> None:
        self.num_bytes = self.asked_bytes = num_bytes
        self.in_background = in_background
        self.asked_at = asyncio.get_running_loop().time()
        self.turn = admission._turns.turn(self.asked_at, num_bytes, in_background=in_background)
        self.admitted_at: float | None = None
        self.gave_way = False
        self.moved = asyncio.Event()
        self._admission = admission
        self._released = False

    async def wait(self) -> AsyncIterator[int]:
        """Until admitted: how many wait before this one, at first and whenever that changes.

        Raises:
            Overloaded: it took too long, or it gave way to captions that people wait for.
        """
        admission, loop = self._admission, asyncio.get_running_loop()
        deadline, last_ahead = loop.time() + admission._queue_timeout_s, -1
        while self.admitted_at is None:
            assert not self._released, "a place that was given up is not waited for"
            if self.gave_way:
                self.release()
                raise admission.refusal("captions that people wait for fill the queue")
            self.moved.clear()
            ahead = admission._queue.index(self)
            if ahead != last_ahead:
                last_ahead = ahead
                yield ahead
            try:
                async with asyncio.timeout_at(deadline):
                    await self.moved.wait()
            except TimeoutError:
                if self.admitted_at is None:
                    self.release()
                    waited = f"no place became free within {admission._queue_timeout_s:g} s"
                    raise admission.refusal(waited) from None

    def shrink(self, num_bytes: int) -> None:
        """Less is needed than was reserved. Of a place that is admitted."""
        assert self.admitted_at is not None and num_bytes <= self.num_bytes, "a place that is taken can only shrink"
        if not self._released:
            self._admission.used_bytes -= self.num_bytes - num_bytes
            self.num_bytes = num_bytes
            self._admission._admit_next()

    def release(self) -> None:
        """Gives the place back, in the queue or behind it; may be called again. The next in line are woken."""
        if not self._released:
            self._released = True
            self._admission._release(self)


class Countdown:
    """Calls `then` when it has been called `count` times; at once where there is nothing to count."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._left, self._then = count, then
        if not count:
            then()

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self._then()
