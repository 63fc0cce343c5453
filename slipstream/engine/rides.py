"""Prompts that ride along: decoding passes carry their rows, and while nobody decodes they run alone.

Everything happens on the model's thread.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.engine.ride_plan import RideCounts, RidePlanner, alone_counts
from slipstream.engine.row_prefill import Ride, RowPrefill
from slipstream.engine.thread import Lane, ModelThread, Pause


@dataclass(eq=False)
class RidingPrompt(Pause):
    """A prompt whose rows wait for a pass; what its session's blocks yield until some have run."""

    prefill: RowPrefill
    spent_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Up to layer L, and behind it: what its rows took alone, and what they added to other passes."""
    carried: int = 0
    """Of its work what other passes did, see `RowPrefill.work_of`."""
    failure: Exception | None = None
    _go_on: Callable[[], None] | None = None

    def begin(self, go_on: Callable[[], None]) -> None:
        self._go_on = go_on

    def end(self) -> None:
        """Some rows have run, or cannot."""
        go_on, self._go_on = self._go_on, None
        if go_on is not None:
            go_on()

    def check(self) -> None:
        """Raises what went wrong with its rows."""
        if self.failure is not None:
            raise self.failure

    def spend(self, counts: RideCounts, seconds: float) -> None:
        """What these rows took."""
        shares = self.prefill.work_of(counts)
        for stage, share in enumerate(shares):
            self.spent_s[stage] += seconds * share / max(sum(shares), 1)


class Rides:
    """The prompts of one model, first come, first served.

    Args:
        share: how much longer a pass may become, see `RidePlanner`.
    """

    def __init__(self, thread: ModelThread, share: float) -> None:
        self._thread = thread
        self._planner = RidePlanner(share)
        self._prompts: list[RidingPrompt] = []
        self._rider: RidingPrompt | None = None
        """Whose rows the newest pass was to carry."""
        self._moved: RidingPrompt | None = None
        self._is_queued = False

    def join(self, prefill: RowPrefill) -> RidingPrompt:
        """A prompt whose rows are to run from now on."""
        prompt = RidingPrompt(prefill)
        self._prompts.append(prompt)
        self._queue_alone()
        return prompt

    def leave(self, prompt: RidingPrompt) -> None:
        """It is done, it failed, or its session has ended. May be told again."""
        if prompt in self._prompts:
            self._prompts.remove(prompt)

    def next_ride(self, num_rows: int, *, beside_people: bool) -> Ride | None:
        """What a pass over so many rows is to carry; see `RidePlanner.next_counts`."""
        self._rider = self._first()
        if self._rider is None:
            return None
        prefill = self._rider.prefill
        counts = self._planner.next_counts(num_rows, prefill.num_done, prefill.num_rows, beside_people=beside_people)
        return Ride(prefill, counts) if counts.most else None

    def passed(self, num_rows: int, ride: Ride | None, seconds: float) -> None:
        """The pass over so many rows, with what it carried, took so long."""
        extra_s = self._planner.observe(num_rows, ride.counts if ride is not None else RideCounts(0, 0), seconds)
        if ride is not None:
            assert self._rider is not None, "a ride is somebody's"
            self._moved = self._rider
            self._moved.spend(ride.counts, extra_s)
            self._moved.carried += sum(ride.prompt.work_of(ride.counts))

    def failed(self, error: Exception | None) -> None:
        """A pass failed, of whose rows some may have run. `error`: it went well without them, and their prompt ends
        with this."""
        assert self._rider is not None, "a ride is somebody's"
        self._moved = self._rider
        if error is not None:
            self._moved.failure = error
            self.leave(self._moved)

    def go_on(self) -> None:
        """After a pass, when those who wait for their tokens have them: the prompt whose rows rode goes on."""
        moved, self._moved = self._moved, None
        if moved is not None:
            moved.end()

    def _first(self) -> RidingPrompt | None:
        """Whose rows are next. One whose rows have all run may be here until its session takes note of it."""
        while self._prompts and self._prompts[0].prefill.is_done:
            self._prompts.pop(0)
        return self._prompts[0] if self._prompts else None

    def _queue_alone(self) -> None:
        if self._prompts and not self._is_queued:
            self._is_queued = True
            self._thread.submit(self._run_alone, Lane.IDLE)

    def _run_alone(self) -> None:
        """The job: a chunk of the first prompt."""
        self._is_queued = False
        prompt = self._first()
        if prompt is not None:
            prefill, started = prompt.prefill, time.perf_counter()
            counts = alone_counts(prefill.num_done, prefill.num_rows)
            try:
                prefill.run_alone(counts)
                took_s = time.perf_counter() - started
                prompt.spend(counts, took_s)
                self._planner.observe_alone(sum(prefill.work_of(counts)) * prefill.num_rows / prefill.work, took_s)
            except Exception as error:
                self._thread.note(error)
                prompt.failure = error
                self.leave(prompt)
            prompt.end()
        self._queue_alone()
