"""One thread that owns a model; coroutines await its results. The event loop never runs a model pass.

Work comes in jobs of at most one block (a packed pass, some frames, one layer of a prefill), and `FairQueue` says whose
is next, so neither a long prefill nor endless decoding keeps the other waiting.
"""

import asyncio
import contextlib
import enum
import heapq
import itertools
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from slipstream.logs import get_logger

# -- whose turn it is -------------------------------------------------------------------------------------------------

# Decoding and prefill share the model's time evenly; whose prefill is next, its `order` says.
# Pure: jobs in, the next job out, the clock is the caller's. Every lane has a virtual time, the seconds it has used,
# and the lane that has used less goes first (start-time fair queueing). Jobs are not interrupted, so a lane may be owed
# time, but not more than for `CREDIT_S` or one job: who was away for long does not push the others out when it comes
# back.

JobT = TypeVar("JobT")
CREDIT_S = 0.5
"""Most seconds that a lane can be owed, unless the other lane's last job took longer still."""
PATIENCE_S = 0.003
"""A decoding session needs a round trip between two passes. So long the lane is waited for while it is owed time,
and at its own cost; a prefill's next layer, which may take much longer than a pass, would else always slip in."""


class Lane(enum.Enum):
    """Two kinds of work that share the time, and one that takes what is left."""

    DECODE = "decode"
    PREFILL = "prefill"
    IDLE = "idle"
    """Waits until neither of the others has work, and decoding has none for as long as its last job took."""


class FairQueue(Generic[JobT]):
    """Jobs that wait. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[Lane, list[tuple[float, int, JobT]]] = {lane: [] for lane in Lane}
        self._used_s = dict.fromkeys(Lane, 0.0)
        self._last_job_s = dict.fromkeys(Lane, 0.0)
        self._arrivals = itertools.count()
        self._decode_ended_at = float("-inf")
        self._lingering_since: float | None = None

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, lane: Lane, job: JobT, order: float = 0) -> None:
        """Adds a job. In its lane, lower `order` goes first, then who came first: work without end must have an order
        that others share."""
        other = Lane.PREFILL if lane is Lane.DECODE else Lane.DECODE
        if lane is not Lane.IDLE and not self._waiting[lane]:
            credit_s = max(CREDIT_S, self._last_job_s[other])
            self._used_s[lane] = max(self._used_s[lane], self._used_s[other] - credit_s)
        heapq.heappush(self._waiting[lane], (order, next(self._arrivals), job))

    def pop(self, now_s: float) -> tuple[Lane, JobT] | float:
        """The next job and its lane; or the seconds after which to ask again, if nothing is pushed before: infinity
        when nothing waits."""
        if self._lingering_since is not None:
            self._used_s[Lane.DECODE] += now_s - self._lingering_since
            self._lingering_since = None
        lanes = [lane for lane in (Lane.DECODE, Lane.PREFILL) if self._waiting[lane]]
        if not lanes:
            return self._pop_idle(now_s)
        linger_s = self._decode_ended_at + PATIENCE_S - now_s
        if lanes == [Lane.PREFILL] and linger_s > 0 and self._used_s[Lane.DECODE] < self._used_s[Lane.PREFILL]:
            self._lingering_since = now_s
            return linger_s
        lane = min(lanes, key=self._used_s.__getitem__)
        return lane, heapq.heappop(self._waiting[lane])[-1]

    def _pop_idle(self, now_s: float) -> tuple[Lane, JobT] | float:
        if not self._waiting[Lane.IDLE]:
            return float("inf")
        patience_s = min(max(PATIENCE_S, self._last_job_s[Lane.DECODE]), CREDIT_S)
        wait_s = self._decode_ended_at + patience_s - now_s
        return wait_s if wait_s > 0 else (Lane.IDLE, heapq.heappop(self._waiting[Lane.IDLE])[-1])

    def charge(self, lane: Lane, seconds: float, now_s: float) -> None:
        """Tells that a job of `lane` has taken `seconds` and ended now."""
        self._used_s[lane] += seconds
        self._last_job_s[lane] = seconds
        if lane is Lane.DECODE:
            self._decode_ended_at = now_s


# -- device -----------------------------------------------------------------------------------------------------------

# Waiting for a device. CUDA works behind the host's back: what is not waited for seems to take no time, and whatever
# reads a result next pays for it. The services time their blocks of work and share the model by these times.


def finish_work(device: torch.device) -> None:
    """Returns when `device` has done what this thread has given it. On a CPU that is at once."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def is_device_lost(error: BaseException) -> bool:
    """Whether every later call to the device fails, too: after a failed assert, an illegal address or a memory error
    CUDA gives this process no other answer. A want of memory, of which there are two kinds, is nothing like that, nor
    is what the recording of a graph does not allow. Of other errors of CUDA no list is kept: a kernel that was not
    built for this GPU, or a wrong argument, leaves the device as it was, so it is asked."""
    if "out of memory" in str(error) or "captur" in str(error):
        return False
    accelerator_error = getattr(torch, "AcceleratorError", None)  # torch 2.8
    is_cudas = accelerator_error is not None and isinstance(error, accelerator_error)
    is_cudas = is_cudas or (isinstance(error, RuntimeError) and str(error).startswith("CUDA error:"))
    return is_cudas and not device_answers()


def device_answers() -> bool:
    """Whether this thread's GPU still does something, however small."""
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except Exception as error:  # torch without CUDA raises an AssertionError
        return "captur" in str(error)
    return True


# -- thread -----------------------------------------------------------------------------------------------------------

T = TypeVar("T")
SWITCH_INTERVAL_S = 0.0005
"""Shorter than Python's default, so that the event loop answers while the model thread runs Python code."""


class Pause(ABC):
    """What blocks yield where somebody else's work comes first."""

    @abstractmethod
    def begin(self, go_on: Callable[[], None]) -> None:
        """The blocks wait; `go_on` has them run up to the next pause, on the model's thread."""


class _Blocks(Generic[T]):
    """An iterator that runs on the model's thread, one item a job. Nothing of it is left when it has ended."""

    def __init__(self, thread: "ModelThread", blocks: Iterator[T | Pause], order: float) -> None:
        self.outcomes: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()
        """Items, then None or what went wrong."""
        self.is_abandoned = False
        self._loop = asyncio.get_running_loop()
        self._thread = thread
        self._blocks = blocks
        self._order = order

    def run_next(self) -> None:
        """The job."""
        item = self._next()
        if item is not None:
            self._thread.submit(self.run_next, Lane.PREFILL, self._order)
            self._tell(item)

    def _go_on(self) -> None:
        """After a pause: what follows takes the model no time."""
        while (item := self._next()) is not None:
            self._tell(item)

    def _next(self) -> tuple[T] | None:
        """None at the end, which is told, and where the blocks pause."""
        if self.is_abandoned:
            if isinstance(self._blocks, Generator):
                self._blocks.close()  # frees what it holds now, not when a garbage collection finds it
            return None
        try:
            item = next(self._blocks)
        except StopIteration:
            self._tell(None)
        except BaseException as error:
            self._thread.note(error)
            self._tell(error)
        else:
            if not isinstance(item, Pause):
                return (item,)
            item.begin(self._go_on)
        return None

    def _tell(self, outcome: tuple[T] | BaseException | None) -> None:
        self._loop.call_soon_threadsafe(self.outcomes.put_nowait, outcome)


def _run_for(thread: "ModelThread", future: asyncio.Future[T], work: Callable[[], T]) -> None:
    """The job of one who awaits the future, on the model's thread."""
    if future.cancelled():
        return
    try:
        outcome: Any = work()
        settle: Callable[[Any], None] = future.set_result
    except BaseException as error:
        thread.note(error)
        outcome, settle = error, future.set_exception
    future.get_loop().call_soon_threadsafe(_settle, future, settle, outcome)
    del outcome, settle, future  # an error knows its traceback, which leads here


def _settle(future: asyncio.Future[T], settle: Callable[[Any], None], outcome: Any) -> None:
    if not future.done():
        settle(outcome)


class ModelThread:
    """Runs callables one after another on a thread of its own, with inference mode and thread count set there.

    Args:
        num_threads: of torch, for decoding.
        prefill_threads: of torch, for all other work; 0: as many. Prefills are few large products, which gain from
            every core; a step over a handful of rows mostly waits for the threads that it shares them with.
    """

    def __init__(self, num_threads: int, prefill_threads: int = 0) -> None:
        self._queue: FairQueue[Callable[[], None]] = FairQueue()
        self._changed = threading.Condition()
        self._closing = False
        self._num_threads = dict.fromkeys(Lane, prefill_threads or num_threads) | {Lane.DECODE: num_threads}
        self.on_device_lost: Callable[[BaseException], None] = lambda error: None
        """Told, on the model's thread, of an error after which the device is of no use."""
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def note(self, error: BaseException) -> None:
        """A job failed so, whoever else is told of it."""
        if is_device_lost(error):
            self.on_device_lost(error)

    @property
    def is_contended(self) -> bool:
        """Whether a job waits while another one runs."""
        return len(self._queue) > 0

    def submit(self, job: Callable[[], None], lane: Lane, order: float = 0) -> None:
        """Hands in a job that raises nothing and that nobody awaits. From any thread, also the model's own."""
        with self._changed:
            self._queue.push(lane, job, order)
            self._changed.notify()

    async def run(self, work: Callable[[], T], lane: Lane = Lane.DECODE, order: float = 0) -> T:
        """Awaits `work()`. A cancelled caller abandons work that has not begun; work that runs, runs to its end."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.submit(partial(_run_for, self, future, work), lane, order)
        try:
            return await future
        finally:
            del future  # an error knows its traceback, which leads here

    async def run_blocks(self, blocks: Iterator[T | Pause], order: float) -> AsyncIterator[T]:
        """Runs an iterator on the prefill lane, one item a job, and yields its items but for pauses.

        The next block queues before the event loop has heard of the last one, so that of two prefills the one with
        the lower `order` stays ahead. When the caller stops listening, the block that runs is the last one, and the
        iterator is closed behind it.
        """
        running = _Blocks(self, blocks, order)
        self.submit(running.run_next, Lane.PREFILL, order)
        try:
            while (outcome := await running.outcomes.get()) is not None:
                if isinstance(outcome, BaseException):
                    try:
                        raise outcome
                    finally:
                        del outcome  # its traceback leads here, and to all that the block held
                yield outcome[0]
        finally:
            running.is_abandoned = True

    def close(self) -> None:
        """Lets the work that was handed in finish, then ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _main(self) -> None:
        num_threads = 0
        with torch.inference_mode():
            while (taken := self._take()) is not None:
                lane, job = taken
                if self._num_threads[lane] != num_threads:
                    num_threads = self._num_threads[lane]
                    torch.set_num_threads(num_threads)
                started = time.perf_counter()
                try:
                    job()
                except Exception as error:
                    self.note(error)
                    get_logger().exception("model.job_failed")  # without this thread the service would only seem alive
                del job, taken  # nothing of it is kept until there is a next one
                now = time.perf_counter()
                with self._changed:
                    self._queue.charge(lane, now - started, now)

    def _take(self) -> tuple[Lane, Callable[[], None]] | None:
        with self._changed:
            while True:
                taken = self._queue.pop(time.perf_counter())
                if isinstance(taken, tuple):
                    return taken
                if self._closing and not len(self._queue):
                    return None
                self._changed.wait(None if taken == float("inf") else taken)
