"""A session's work on the model's thread, in blocks, and its steps packed with those of other sessions."""

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.budget import MIB, Reservation, trim_memory
from slipstream.engine.rides import Rides
from slipstream.engine.row_prefill import Ride
from slipstream.engine.segments import GreedyRows, Window, num_new
from slipstream.engine.thread import Lane, ModelThread, Pause, is_device_lost
from slipstream.engine.video_lm import DecodeState, PromptPlan, VideoLM
from slipstream.errors import SessionGone
from slipstream.families.adapter import Pixels
from slipstream.families.preprocess import frames_at_once
from slipstream.logs import get_logger, heard
from slipstream.messages import Frames
from slipstream.session_messages import PassFacts, SessionStart
from slipstream.speculation.company import CompanyCosts

# -- work -------------------------------------------------------------------------------------------------------------

T = TypeVar("T")
FRAMES_PER_BLOCK = 16
"""Frames are encoded in blocks, and layers run one by one, so that windows of other sessions fit in between."""
LARGE_BYTES = 8 * MIB
"""Sessions with so many bytes of frames leave so much freed memory behind that the system is to have it back."""
_tickets = itertools.count()
_preprocessing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pixels")


class SessionWork:
    """One session's share of the model, and its memory. After `close`, what is queued is refused and memory is freed.

    Args:
        frames_place: in the budget of frames; given back when they are freed.
    """

    def __init__(self, thread: ModelThread, frames_place: Reservation | None = None) -> None:
        self.in_background = False
        """Nobody waits for its text."""
        self.frames: Frames | None = None
        """Received and not encoded yet. Nobody else keeps them, so their memory ends with this."""
        self._frames_place = frames_place
        self._is_large = frames_place is not None and frames_place.num_bytes >= LARGE_BYTES
        self._released: asyncio.Future[None] | None = None
        self._thread = thread
        self._order = next(_tickets)
        self._state: DecodeState | None = None
        self._releases: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        return self._released is not None

    @property
    def state(self) -> DecodeState:
        """The cache that decoding goes on from; there is one after the prefill."""
        assert self._state is not None, "the prompt is prefilled first"
        return self._state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = state

    @property
    def received_frames(self) -> Frames:
        """The frames, which are not to be kept. Raises `SessionGone` once they are freed."""
        frames = self.frames
        if frames is None:
            raise SessionGone("the session has ended")
        return frames

    @property
    def may_have_frames(self) -> bool:
        """There is room for them."""
        return self._frames_place is None or self._frames_place.admitted_at is not None

    async def wait_for_frames(self) -> AsyncIterator[int]:
        """Until the frames may be received: how many sessions are ahead, whenever that changes. Raises `Overloaded`."""
        if self._frames_place is not None:
            async for num_ahead in self._frames_place.wait():
                yield num_ahead

    def free_frames(self) -> None:
        """They are not needed any more. On the event loop; a block that reads them now still does."""
        self.frames = None
        if self._frames_place is not None:
            self._frames_place.release()

    def on_release(self, release: Callable[[], None]) -> None:
        """Has `release` called on the model's thread when the session has ended. Call this on that thread."""
        self._releases.append(release)

    async def run(self, work: Callable[[], T], lane: Lane = Lane.PREFILL) -> tuple[T, float]:
        """What `work()` returns on the model's thread, and its seconds. Raises `SessionGone` after `close`.

        Prefills are served session by session; decoding comes in turn, or a late session would never have its.
        """

        def timed() -> tuple[T, float]:
            self._check_open()
            start = time.perf_counter()
            result = work()
            return result, time.perf_counter() - start

        return await self._thread.run(timed, lane, self._order if lane is Lane.PREFILL else 0)

    def run_blocks(self, blocks: Iterator[T | Pause]) -> AsyncIterator[T]:
        """Runs an iterator block by block on the model's thread. Raises `SessionGone` after `close`."""

        def guarded() -> Iterator[T | Pause]:
            while True:
                self._check_open()
                try:
                    item = next(blocks)
                except StopIteration:
                    return
                yield item

        return self._thread.run_blocks(guarded(), self._order)

    def close(self, then: Callable[[], None] = lambda: None) -> asyncio.Future[None]:
        """Ends the session; its memory is freed after the block that may be running, and then `then()` is called.

        Returns what is done when all this has happened. It need not be awaited.
        """
        self.free_frames()
        if self._released is None:
            self._released = heard(asyncio.ensure_future(self._thread.run(self._release)))
            self._released.add_done_callback(lambda done: then())
            if self._is_large:
                self._released.add_done_callback(_trim_memory)
        return self._released

    def _check_open(self) -> None:
        if self.closed:
            raise SessionGone("the session has ended")

    def _release(self) -> None:
        releases, self._releases = self._releases, []
        for release in releases:
            try:
                release()
            except Exception as error:  # the others free what they hold
                self._thread.note(error)
                get_logger().exception("session.release_failed")


def _trim_memory(released: asyncio.Future[None]) -> None:
    released.get_loop().run_in_executor(None, trim_memory)


async def plan_session(
    model: VideoLM, request: SessionStart, num_frames: int, frame_size: tuple[int, int] | None
) -> PromptPlan:
    """The prompt of a session, planned on another thread: positions of a long video take tens of milliseconds. Raises
    what `VideoLM.plan_prompt` and `plan_text` do."""
    if not request.has_video:
        return await asyncio.to_thread(model.plan_text, request.prompt)
    return await asyncio.to_thread(
        model.plan_prompt,
        request.prompt,
        num_frames,
        frame_size=frame_size,
        seconds_per_frame=request.seconds_per_frame,
        times_s=request.times_s,
    )


def frames_bytes(num_frames: int, frame_size: tuple[int, int] | None) -> int:
    """What frames of this height and width take; 0 of a size that is not known."""
    height, width = frame_size or (0, 0)
    return num_frames * height * width * 3


def encode_blocks(model: VideoLM, work: SessionWork, num_frames: int) -> Iterator[tuple[torch.Tensor, float]]:
    """Video embeddings [tokens, hidden] of one block of the session's frames after another, with the seconds of each.
    The next block's pixels are made on another thread meanwhile. Raises `SessionGone` when the session ends."""
    at_once = frames_at_once(model.info.device, work.received_frames.shape[1:3])
    size = max(FRAMES_PER_BLOCK, at_once)
    blocks = [slice(first, first + size) for first in range(0, num_frames, size)]

    def prepare(block: slice) -> Future[list[Pixels]]:
        return _preprocessing.submit(model.preprocess, work.received_frames[block], num_frames)

    ahead = prepare(blocks[0])
    try:
        for following in (*blocks[1:], None):
            started = time.perf_counter()
            pixels = ahead.result()
            if following is not None:
                ahead = prepare(following)
            embeddings = model.encode(pixels)
            del pixels
            yield embeddings, time.perf_counter() - started
    finally:
        ahead.cancel()  # what waits in that thread's queue knows the frames


# -- batcher ----------------------------------------------------------------------------------------------------------

MAX_STEPS = 32
"""Most sessions in one pass; the others are in the next."""
GATHER_SHARE, MAX_GATHER_S = 0.15, 0.004
"""A pass begins when every session of the last one is back, or so long after that one ended: this share of its time,
at most that many seconds. Else the first to return would run alone and the others behind it, pass after pass."""

RowsT = TypeVar("RowsT")
ResultT = TypeVar("ResultT", covariant=True)


@dataclass(eq=False)
class Step:
    """New tokens of one session, and who is told what follows them, on the model's thread."""

    work: SessionWork
    """Once this is closed, the step is dropped, and `on_error` hears `SessionGone`."""
    state: DecodeState
    window: Window
    on_logits: Callable[..., bool]
    """Takes logits [n, vocab] and what the pass was, and where it `takes_largest` the likeliest token of each row, see
    `GreedyRows`. Returns whether the session will soon be back."""
    on_error: Callable[[Exception], None]
    takes_largest: bool = False
    is_drafting: bool = False
    """It judges nothing, and its state may be a smaller one than the session's own: it takes less than others."""
    handed_in_s: float = field(default_factory=time.perf_counter)
    kept_s: float = 0.0
    """How long it has waited since then while the thread did other work than passes."""


class StepBatcher:
    """First come, first served, and a session has one step at a time: so none starves."""

    def __init__(
        self, model: VideoLM, thread: ModelThread, *, max_steps: int = MAX_STEPS, rides: Rides | None = None
    ) -> None:
        """`rides`: prompts whose rows the passes carry along."""
        self._model = model
        self._rides = rides
        self._thread = thread
        self._max_steps = max_steps
        self._costs = CompanyCosts(max_steps)
        self._waiting: deque[Step] = deque()
        self._changed = threading.Condition()
        self._is_queued = False
        self._free_s = 0.0  # when the thread was done with the last pass
        self._expected, self._expect_until = set[SessionWork](), 0.0

    def submit(self, step: Step) -> None:
        """Hands in a step. From any thread."""
        with self._changed:
            self._waiting.append(step)
            self._expected.discard(step.work)
            self._changed.notify()
            if not self._is_queued:
                self._is_queued = True
                self._thread.submit(self._run, Lane.DECODE)

    def forget(self, work: SessionWork) -> None:
        """The session has ended; no pass waits for it."""
        with self._changed:
            self._expected.discard(work)
            self._changed.notify()

    @property
    def _is_worth_waiting(self) -> bool:
        """Somebody is expected, and the next pass has room for them."""
        return bool(self._expected) and len(self._waiting) < self._max_steps

    def _run(self) -> None:
        began = time.perf_counter()
        with self._changed:
            while self._is_worth_waiting and (left_s := self._expect_until - time.perf_counter()) > 0:
                self._changed.wait(left_s)
            for step in self._waiting:
                step.kept_s += max(began - max(step.handed_in_s, self._free_s), 0.0)
            steps = [self._waiting.popleft() for _ in range(min(self._max_steps, len(self._waiting)))]
            self._expected.clear()
        living = []
        for step in steps:
            if step.work.closed:
                step.on_error(SessionGone("the session has ended"))
            else:
                living.append(step)
        if living:
            self._run_pass(living)
        with self._changed:
            self._free_s = time.perf_counter()
            if self._waiting:
                self._thread.submit(self._run, Lane.DECODE)
            else:
                self._is_queued = False

    def _run_pass(self, steps: Sequence[Step]) -> None:
        started = time.perf_counter()
        batch = [(step.state, step.window) for step in steps]
        ride = self._next_ride(steps)
        outcomes: Sequence[Tensor | GreedyRows | Exception]
        if any(step.takes_largest for step in steps):
            outcomes = self._step_each(self._model.step_and_choose, batch, ride)
        else:
            outcomes = self._step_each(self._model.step, batch, ride)
        ended = time.perf_counter()
        self._note_errors(outcomes)
        facts = self._facts(steps, ended - started, is_pure=ride is None)
        returning = {step.work for step, back in zip(steps, map(_tell, steps, outcomes, facts), strict=True) if back}
        del outcomes  # an error knows its traceback, which leads here, and from here to its session
        with self._changed:
            self._expected |= returning - {step.work for step in self._waiting}
            self._expect_until = ended + min(GATHER_SHARE * (ended - started), MAX_GATHER_S)
        if self._rides is not None:
            self._rides.go_on()

    def _facts(self, steps: Sequence[Step], pass_s: float, *, is_pure: bool) -> list[PassFacts]:
        """What the pass was for each step. `is_pure`: nothing rode along, which would slow plain passes as well."""
        num_rows = sum(num_new(step.window) - 1 for step in steps)
        if is_pure and not all(step.is_drafting for step in steps):
            self._costs.observe(len(steps), num_rows, pass_s)
        speed = pass_s / self._costs(len(steps), num_rows)
        company = self._costs.company(len(steps) + len(self._waiting), speed)
        return [PassFacts(pass_s, company=company, kept_s=step.kept_s) for step in steps]

    def _next_ride(self, steps: Sequence[Step]) -> Ride | None:
        if self._rides is None:
            return None
        num_rows = sum(num_new(step.window) for step in steps)
        return self._rides.next_ride(num_rows, beside_people=not all(step.work.in_background for step in steps))

    def _step_each(
        self, run: "StepFunction[RowsT]", batch: Sequence[tuple[DecodeState, Window]], ride: Ride | None
    ) -> list[RowsT | Exception]:
        """`step_each`; the pass carries what rides. A pass that fails with it is tried without."""
        if self._rides is None:
            return step_each(run, batch)
        num_rows = sum(num_new(window) for _, window in batch)
        started, failure = time.perf_counter(), None
        try:
            outcomes = list[RowsT | Exception](run(batch, ride)) if ride is not None else step_each(run, batch)
        except Exception as error:
            if is_device_lost(error):
                return [error] * len(batch)
            failure, outcomes = error, step_each(run, batch)
        if not any(isinstance(outcome, Exception) for outcome in outcomes):
            if failure is None:
                self._rides.passed(num_rows, ride, time.perf_counter() - started)
            else:
                self._rides.failed(failure)
        del failure  # its traceback leads here
        return outcomes

    def _note_errors(self, outcomes: Sequence[object]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                self._thread.note(outcome)


class StepFunction(Protocol[ResultT]):
    """`VideoLM.step`, or what is like it."""

    def __call__(self, batch: Sequence[tuple[DecodeState, Window]], ride: Ride | None = None) -> Sequence[ResultT]: ...


def step_each(
    run: Callable[[Sequence[tuple[DecodeState, Window]]], Sequence[RowsT]],
    batch: Sequence[tuple[DecodeState, Window]],
) -> list[RowsT | Exception]:
    """One packed pass by `VideoLM.step`, or what is like it: for every session its rows, or what went wrong with it.

    A pass that fails changes no session, so each is then tried alone, and one that cannot go on harms no other.
    """
    try:
        return list(run(batch))
    except Exception as error:
        if len(batch) == 1 or is_device_lost(error):
            return [error] * len(batch)
    return [outcome for part in batch for outcome in step_each(run, [part])]


def _tell(step: Step, outcome: Tensor | GreedyRows | Exception, facts: PassFacts) -> bool:
    if isinstance(outcome, Exception):
        step.on_error(outcome)
        return False
    logits, *largest = (outcome,) if isinstance(outcome, Tensor) else (outcome.logits, outcome.largest)
    try:
        return step.on_logits(logits, facts, *(largest if step.takes_largest else ()))
    except Exception as error:
        step.on_error(error)
        return False
