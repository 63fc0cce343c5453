"""The steps of sessions, packed into passes."""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from slipstream.engine.rides import Rides
from slipstream.engine.row_prefill import Ride
from slipstream.engine.segments import GreedyRows, Window, num_new
from slipstream.engine.session_work import SessionWork
from slipstream.engine.thread import Lane, ModelThread, is_device_lost
from slipstream.engine.video_lm import DecodeState, VideoLM
from slipstream.errors import SessionGone
from slipstream.session_messages import PassFacts
from slipstream.speculation.company import CompanyCosts

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
    on_rows: Callable[[GreedyRows, PassFacts], bool]
    """Takes what the pass says of the new tokens, and what the pass was. Returns whether the session will soon be
    back."""
    on_error: Callable[[Exception], None]
    takes_largest: bool = False
    """Wants to know the likeliest token of each row."""
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
        returning = _tell_all(steps, outcomes, facts)
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
        started = time.perf_counter()
        try:
            outcomes: list[RowsT | Exception] = step_each(run, batch) if ride is None else [*run(batch, ride)]
        except Exception as error:
            if is_device_lost(error):
                return [error] * len(batch)
            traceback.clear_frames(error.__traceback__)  # what the pass held has no place beside the next
            return self._without(run, batch, error)
        if not any(isinstance(outcome, Exception) for outcome in outcomes):
            num_rows = sum(num_new(window) for _, window in batch)
            self._rides.passed(num_rows, ride, time.perf_counter() - started)
        return outcomes

    def _without(
        self, run: "StepFunction[RowsT]", batch: Sequence[tuple[DecodeState, Window]], failure: Exception
    ) -> list[RowsT | Exception]:
        """A pass that failed with what rode along, again: now it shows whose fault that was."""
        assert self._rides is not None, "something rode along"
        try:
            outcomes: list[RowsT | Exception] = [*run(batch)]
        except Exception as error:
            self._rides.failed(None)
            if len(batch) == 1 or is_device_lost(error):
                return [error] * len(batch)
        else:
            self._rides.failed(failure)
            return outcomes
        return [outcome for part in batch for outcome in step_each(run, [part])]

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
        return [*run(batch)]
    except Exception as error:
        if len(batch) == 1 or is_device_lost(error):
            return [error] * len(batch)
    return [outcome for part in batch for outcome in step_each(run, [part])]


def _tell_all(
    steps: Sequence[Step], outcomes: Sequence[Tensor | GreedyRows | Exception], facts: Sequence[PassFacts]
) -> set[SessionWork]:
    """Those who will soon be back."""
    returning = set()
    for step, outcome, of_pass in zip(steps, outcomes, facts, strict=True):
        if _tell(step, outcome, of_pass):
            returning.add(step.work)
    return returning


def _tell(step: Step, outcome: Tensor | GreedyRows | Exception, facts: PassFacts) -> bool:
    if isinstance(outcome, Exception):
        step.on_error(outcome)
        return False
    logits, largest = (outcome, ()) if isinstance(outcome, Tensor) else (outcome.logits, outcome.largest)
    try:
        return step.on_rows(GreedyRows(logits, largest if step.takes_largest else ()), facts)
    except Exception as error:
        step.on_error(error)
        return False
