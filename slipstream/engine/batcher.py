"""Steps of many sessions, packed: whatever is handed in while the model works is one pass when it is free again."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.engine.thread import Lane, ModelThread
from slipstream.engine.video_lm import DecodeState, VideoLM, Window
from slipstream.engine.work import SessionWork
from slipstream.errors import SessionGone

MAX_STEPS = 32
"""Most sessions in one pass; the others are in the next."""
GATHER_SHARE, MAX_GATHER_S = 0.15, 0.004
"""A pass begins when every session of the last one is back, or so long after that one ended: this share of its time,
at most that many seconds. Else the first to return would run alone and the others behind it, pass after pass."""

StepOutcome = Tensor | Exception


@dataclass(frozen=True, eq=False)
class Step:
    """New tokens of one session, and who is told what follows them, on the model's thread."""

    work: SessionWork
    """Once this is closed, the step is dropped, and `on_error` hears `SessionGone`."""
    state: DecodeState
    window: Window
    on_logits: Callable[[Tensor, float], bool]
    """Takes logits [n, vocab] and the seconds of the pass. Returns whether the session will soon be back."""
    on_error: Callable[[Exception], None]


class StepBatcher:
    """First come, first served, and a session has one step at a time: so none starves."""

    def __init__(self, model: VideoLM, thread: ModelThread, *, max_steps: int = MAX_STEPS) -> None:
        self._model = model
        self._thread = thread
        self._max_steps = max_steps
        self._waiting: deque[Step] = deque()
        self._changed = threading.Condition()
        self._is_queued = False
        self._expected: set[SessionWork] = set()
        self._expect_until = 0.0

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
        with self._changed:
            while self._is_worth_waiting and (left_s := self._expect_until - time.perf_counter()) > 0:
                self._changed.wait(left_s)
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
            if self._waiting:
                self._thread.submit(self._run, Lane.DECODE)
            else:
                self._is_queued = False

    def _run_pass(self, steps: Sequence[Step]) -> None:
        started = time.perf_counter()
        outcomes = step_each(self._model, [(step.state, step.window) for step in steps])
        ended = time.perf_counter()
        returning = {
            step.work for step, outcome in zip(steps, outcomes, strict=True) if _tell(step, outcome, ended - started)
        }
        with self._changed:
            self._expected |= returning - {step.work for step in self._waiting}
            self._expect_until = ended + min(GATHER_SHARE * (ended - started), MAX_GATHER_S)


def step_each(model: VideoLM, batch: Sequence[tuple[DecodeState, Window]]) -> list[StepOutcome]:
    """One packed pass: for every session its logits [n, vocab], or what went wrong with it.

    A pass that fails changes no session, so each is then tried alone, and one that cannot go on harms no other.
    """
    try:
        return list(model.step(batch))
    except Exception as error:
        if len(batch) == 1:
            return [error]
    return [outcome for part in batch for outcome in step_each(model, [part])]


def _tell(step: Step, outcome: StepOutcome, pass_s: float) -> bool:
    try:
        if isinstance(outcome, Exception):
            raise outcome
        return step.on_logits(outcome, pass_s)
    except Exception as error:
        step.on_error(error)
        return False
