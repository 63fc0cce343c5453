"""Several targets, or several drafts, of one gateway: which of them answer, and which takes the next caption.

A gateway with one address of each has no pool.
"""

import asyncio
import contextlib
import ipaddress
import math
import socket
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from slipstream.errors import ModelNotUsable, ServiceUnavailable, SlipstreamError, with_notes
from slipstream.logs import get_logger, heard
from slipstream.rpc.session_codec import HasFrames
from slipstream.service_info import ModelInfo, PeerInfo, ServiceLoad
from slipstream.speculation.placement import Candidate, with_room

ASK_TIMEOUT_S = 2.0
PROBE_S = 0.3
"""How long one of a few is waited for that are asked before a choice: a frozen one must not delay a caption by more."""
SETTLE_S = 0.2
"""A caption that was sent somewhere counts besides what was said there until it is asked so much later: before, its
session may not have been open."""
RETRY_S = 0.2
TELL_S, TELL_AGAIN_S = 15.0, 60.0
"""After how long who waits for an answer says so, and how often."""
LOOKUP_S, LOOKUP_TIMEOUT_S = 5.0, 5.0
"""Between two look-ups of a name, and for one."""
LEAVE_S = 3600.0
"""For the sessions of a service whose address is no longer among a name's."""
NUM_ASKED = 2
MAX_KNOWN_VIDEOS = 4096
SKETCH_STEP = 32

# -- addresses --------------------------------------------------------------------------------------------------------


def split_addresses(told: str) -> tuple[str, ...]:
    """Those of an option, which separates them by ','. gRPC's own lists, `ipv4:HOST:PORT,HOST:PORT`, are read too."""
    scheme = next((each for each in ("ipv4:", "ipv6:") if told.startswith(each)), "")
    return tuple(address.strip() for address in told.removeprefix(scheme).split(","))


def is_name(address: str) -> bool:
    """Whether it may lead to several services: neither a socket's path nor numeric, nor left to gRPC by `dns:`."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and not address.startswith(("unix:", "dns:", "unix-abstract:"))
    return False


async def addresses_behind(name: str) -> tuple[str, ...]:
    """What HOST:PORT stands for now: itself, unless it leads to several machines. Of a machine with addresses of both
    families, those of version 4 count. Raises `OSError` where it leads nowhere."""
    host, _, port = name.rpartition(":")
    looking = asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    found = await asyncio.wait_for(looking, LOOKUP_TIMEOUT_S)
    hosts = {family: sorted({str(place[0]) for kind, *_, place in found if kind == family}) for family, *_ in found}
    several = hosts.get(socket.AF_INET) or hosts.get(socket.AF_INET6, [])
    if len(several) < 2:
        return (name,)
    return tuple(f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in several)


# -- pool -------------------------------------------------------------------------------------------------------------


class Service(Protocol):
    """What is pooled."""

    @property
    def load(self) -> ServiceLoad: ...

    async def ask(self) -> ModelInfo: ...

    async def close(self, grace_s: float = 0.0) -> None: ...


ServiceT = TypeVar("ServiceT", bound=Service)


class Member(Generic[ServiceT]):
    """One of a pool, and what is known of it."""

    def __init__(self, address: str, service: ServiceT, number: int) -> None:
        self.address = address
        self.service = service
        self.number = number
        self.failure: SlipstreamError | None = None
        """Why nothing is sent there; None: nothing is known against it."""
        self.model: ModelInfo | None = None
        self.num_placed = 0
        self.asking: asyncio.Task[None] | None = None
        self.heard_from = -math.inf
        """When it was asked what it answered last."""
        self._placed_at: deque[float] = deque()

    @property
    def takes_captions(self) -> bool:
        """It answered when it was heard of last."""
        return self.failure is None and self.model is not None

    def place(self, now: float) -> None:
        """A caption is sent there."""
        self.num_placed += 1
        self._placed_at.append(now)

    def candidate(self, *, holds_prefill: bool = False) -> Candidate:
        """For those who choose."""
        while self._placed_at and self._placed_at[0] < self.heard_from - SETTLE_S:
            self._placed_at.popleft()
        return Candidate(self.service.load, len(self._placed_at), holds_prefill)

    def info(self, role: str) -> PeerInfo:
        """For those who look on."""
        return PeerInfo(role, self.number, str(self.failure or ""), self.service.load, self.num_placed)


class Pool(Generic[ServiceT]):
    """Services of one role and one model.

    Args:
        told: addresses; names among them are looked up again and again.
        connect: makes the caller's side of one, from its address and the name that it was looked up by, or "".
        choose: index of the candidate that takes the next caption, by figures that are as old as this question.
    """

    def __init__(
        self,
        role: str,
        told: Sequence[str],
        connect: Callable[[str, str], ServiceT],
        choose: Callable[[Sequence[Candidate], Random], int],
        random: Random | None = None,
    ) -> None:
        self.role = role
        self.model: ModelInfo | None = None
        """What all of them serve, as one said last; None while none has answered."""
        self.members: list[Member[ServiceT]] = []
        self._behind: dict[str, tuple[str, ...]] = {each: (each,) for each in told}
        """What was told, and the addresses that it leads to."""
        self._connect = connect
        self._choose = choose
        self._random = random or Random()
        self._next_number = 1
        self._known: OrderedDict[bytes, Member[ServiceT]] = OrderedDict()
        """Who has captioned a video, by its sketch; the latest last."""
        self._looked_up_at = -math.inf
        self._tasks: set[asyncio.Task[Any]] = set()
        self._become({address: "" for address in told})

    async def ask(self, timeout_s: float = ASK_TIMEOUT_S, *, wait_for_ready: bool = False) -> ModelInfo:
        """Asks all; what the first to answer serves, while the others are still heard. Raises why there is none: when
        all have failed or, with `wait_for_ready`, after `timeout_s`."""
        if wait_for_ready:
            return await self.wait(timeout_s)
        self._look_up()
        questions = {self._ask(member): member for member in self.members}
        with contextlib.suppress(TimeoutError):
            for asking in asyncio.as_completed(questions, timeout=timeout_s):
                await asking
                if answered := next((each.model for each in _answered(questions)), None):
                    return answered
        raise self._complaint()

    async def wait(self, timeout_s: float) -> ModelInfo:
        """Asks until one answers. Raises `ServiceUnavailable` after `timeout_s`."""
        return await until_answered(self.ask, self.role, f"any of {len(self.members)} {self.role}s", timeout_s)

    async def check(self) -> None:
        """Asks all, and raises `ModelNotUsable` where those that answer serve different models."""
        await asyncio.wait([self._ask(member) for member in self.members])
        for member in self.members:
            if isinstance(member.failure, ModelNotUsable):
                raise member.failure

    async def choose(self, video: HasFrames | None = None) -> ServiceT:
        """Who takes the next caption. Two that had room are asked how full they are, and who has captioned the video
        before; all, if none of these answers. Raises why there is none."""
        self._look_up()
        for member in self.members:
            if member.failure is not None:
                self._ask(member)  # it is heard before a later choice
        sketch = None if video is None else sketch_of(video)
        holder = None if sketch is None else self._known.get(sketch)
        for asked, limit_s in ((self._few(holder), PROBE_S), (self.members, ASK_TIMEOUT_S)):
            questions = {self._ask(member): member for member in asked}
            await asyncio.wait(questions, timeout=limit_s)
            if there := [member for member in _answered(questions) if member in self.members]:
                return self._place(there, holder, sketch).service
        raise self._complaint()

    def infos(self) -> tuple[PeerInfo, ...]:
        """All members, for those who look on."""
        return tuple(member.info(self.role) for member in self.members)

    async def close(self) -> None:
        """Closes all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members:
            await member.service.close()

    def _few(self, holder: Member[ServiceT] | None) -> list[Member[ServiceT]]:
        fit = [member for member in self.members if member.failure is None] or self.members
        roomy = [fit[index] for index in with_room([member.candidate() for member in fit])] or fit
        few = self._random.sample(roomy, min(NUM_ASKED, len(roomy)))
        return [holder, *few] if holder in fit and holder not in few else few

    def _place(
        self, there: Sequence[Member[ServiceT]], holder: Member[ServiceT] | None, sketch: bytes | None
    ) -> Member[ServiceT]:
        candidates = [member.candidate(holds_prefill=member is holder) for member in there]
        chosen = there[self._choose(candidates, self._random)]
        chosen.place(asyncio.get_running_loop().time())
        if sketch is not None:
            self._known[sketch] = chosen
            self._known.move_to_end(sketch)
            if len(self._known) > MAX_KNOWN_VIDEOS:
                self._known.popitem(last=False)
        get_logger().info("caption.placed", role=self.role, number=chosen.number, reuse=chosen is holder)
        return chosen

    def _ask(self, member: Member[ServiceT]) -> asyncio.Task[None]:
        """What is being asked already is not asked twice."""
        if member.asking is None or member.asking.done():
            member.asking = self._keep(self._hear(member))
        return member.asking

    async def _hear(self, member: Member[ServiceT]) -> None:
        before, asked_at = member.failure, asyncio.get_running_loop().time()
        try:
            model = await member.service.ask()
            self._check_model(member, model)
        except SlipstreamError as error:
            member.failure = error
            if before is None:
                get_logger().warning("peer.left_out", role=self.role, number=member.number, reason=with_notes(error))
            return
        member.failure, member.model, self.model = None, model, model
        member.heard_from = asked_at
        if before is not None:
            get_logger().info("peer.regained", role=self.role, number=member.number)

    def _check_model(self, member: Member[ServiceT], model: ModelInfo) -> None:
        """Raises `ModelNotUsable` for another model than that of those that take captions."""
        for other in self.members:
            if other is member or other.failure is not None or other.model is None:
                continue
            if (other.model.revision, other.model.dtype) != (model.revision, model.dtype):
                raise ModelNotUsable(
                    f"{self.role} {member.number} serves {model.model_id!r} ({model.dtype}), another model than"
                    f" {self.role} {other.number}, {other.model.model_id!r} ({other.model.dtype}): give all"
                    f" {self.role}s of a gateway the same checkpoint and --dtype"
                )

    def _complaint(self) -> SlipstreamError:
        """Why no member can be used: the failure that may pass, if there is one."""
        failures = [member.failure for member in self.members if member.failure is not None]
        none = ServiceUnavailable(f"none of the {self.role}s answers; try again")
        return min(failures, key=lambda failure: not isinstance(failure, ServiceUnavailable), default=none)

    def _look_up(self) -> None:
        """Begins to look names up again where that is due. Nobody waits for it."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_up_at >= LOOKUP_S and any(map(is_name, self._behind)):
            self._looked_up_at = now
            self._keep(self._find())

    async def _find(self) -> None:
        """What a name stood for holds while it leads nowhere."""
        for told in filter(is_name, self._behind):
            try:
                self._behind[told] = await addresses_behind(told)
            except (OSError, ValueError, OverflowError) as error:  # nor can every text be a host's name, or a port
                get_logger().warning("peer.unknown", role=self.role, reason=str(error) or "no answer")
        self._become(
            {
                address: "" if address == told else told.rpartition(":")[0]
                for told, behind in self._behind.items()
                for address in behind
            }
        )

    def _become(self, names: dict[str, str]) -> None:
        """The members are those of these addresses from now on. Sessions of others end where they are."""
        known = {member.address: member for member in self.members}
        self.members = [known.get(address) or self._joined(address, name) for address, name in names.items()]
        for address in known.keys() - names.keys():
            get_logger().info("peer.gone", role=self.role, number=known[address].number)
            self._keep(known[address].service.close(LEAVE_S))

    def _joined(self, address: str, name: str) -> Member[ServiceT]:
        member = Member(address, self._connect(address, name), self._next_number)
        self._next_number += 1
        return member

    def _keep(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = heard(asyncio.ensure_future(work))
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _answered(questions: Mapping[asyncio.Task[None], Member[ServiceT]]) -> list[Member[ServiceT]]:
    """Those that take captions, of those whose question is over: a frozen one has none of these. It may be asked again
    by then, for another caption."""
    return [member for question, member in questions.items() if question.done() and member.takes_captions]


def one_or_pool(
    role: str,
    told: str,
    connect: Callable[[str, str], ServiceT],
    choose: Callable[[Sequence[Candidate], Random], int],
) -> ServiceT | Pool[ServiceT]:
    """What an option names: one service, or a pool of several or of what a name leads to."""
    addresses = split_addresses(told)
    if len(addresses) == 1 and not is_name(addresses[0]):
        return connect(addresses[0], "")
    return Pool(role, addresses, connect, choose)


async def until_answered(ask: Callable[[], Awaitable[ModelInfo]], role: str, who: str, timeout_s: float) -> ModelInfo:
    """Asks until there is an answer; the log says that, and why, there is none yet. Raises `ServiceUnavailable` after
    `timeout_s`."""
    clock = asyncio.get_running_loop().time
    deadline, tell_at = clock() + timeout_s, clock() + TELL_S
    while True:
        try:
            return await ask()
        except ServiceUnavailable as error:
            reason, now = with_notes(error), clock()
            if now > deadline:
                raise ServiceUnavailable(f"no answer of {who} within {timeout_s:g} s: {reason}") from None
            if now >= tell_at:
                get_logger().warning(f"{role}.awaited", reason=reason, left_s=round(deadline - now))
                tell_at = now + TELL_AGAIN_S
            await asyncio.sleep(RETRY_S)


def sketch_of(video: HasFrames) -> bytes | None:
    """Names a video by some of its pixels: two that share them are at worst placed together. None without frames."""
    frames = video.frames
    if not len(frames):
        return None
    return blake2b(frames[:, ::SKETCH_STEP, ::SKETCH_STEP].tobytes(), digest_size=16).digest()


def peer_infos(peers: Iterable[object]) -> tuple[PeerInfo, ...]:
    """Of those among these that are pools."""
    return tuple(info for peer in peers if isinstance(peer, Pool) for info in peer.infos())
