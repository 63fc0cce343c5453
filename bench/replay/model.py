"""A model that takes as long as another device would: which `bench.replay.service` serves.

The model's own passes decide everything; the thread that owns it then waits until the table's time has passed. A pass
that really takes longer than its table says is counted and told, since its time is then the wrong one.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import Tensor

from bench.replay.device_times import DeviceTimes
from slipstream.engine.forward import Begun, Note
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.ride_plan import RideCounts
from slipstream.engine.row_prefill import Ride, RowPrefill
from slipstream.engine.segments import Observer, PassRows, Window, num_new
from slipstream.engine.video_lm import DecodeState, Prefill, PromptPlan, VideoLM
from slipstream.families.adapter import Pixels
from slipstream.logs import get_logger
from slipstream.speculation.methods import Positions

REPLAY_MARK = "replay:"
"""Begins the name of the device of a replayed model."""
SLACK = 1.02
"""A pass that takes longer than this many times its table's time is told of."""


class Pace:
    """Makes work last as long as it should, on the thread that does it."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.num_lasted = self.num_late = 0
        self._clock = clock
        self._sleep = sleep

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """Ends no sooner than `seconds` after it began; 0 is no limit."""
        started = self._clock()
        yield
        took_s = self._clock() - started
        if seconds <= 0:
            return
        self.num_lasted += 1
        if took_s < seconds:
            self._sleep(seconds - took_s)
        elif took_s > SLACK * seconds:
            self.num_late += 1
            if self.num_late & (self.num_late - 1) == 0:  # told at 1, 2, 4, 8, ...
                get_logger().warning(
                    "replay.late", late=self.num_late, passes=self.num_lasted, table_s=seconds, took_s=round(took_s, 6)
                )


class ReplayedModel(VideoLM):
    """Another model, whose parts it shares, at the pace of a table.

    Args:
        by_alpha: passes last by the pruned share of their sessions, as a draft's, and not by their rows.
        guidance_layer: L, which divides the prefill of a target.
        overlap: how much of a decoding pass's time, in which a device waits for its memory, the arithmetic of rows that
            ride along can take: 1 all of it, 0 none. No table says it.
    """

    def __init__(
        self,
        model: VideoLM,
        times: DeviceTimes,
        *,
        by_alpha: bool,
        guidance_layer: int = 0,
        overlap: float = 1.0,
        pace: Pace | None = None,
    ) -> None:
        vars(self).update(vars(model))
        self._overlap = overlap
        self.info = replace(model.info, device=f"{REPLAY_MARK}{times.name}")
        self._times = times
        self._by_alpha = by_alpha
        self._guidance_layer = guidance_layer
        self._pace = pace or Pace()
        self._alphas: WeakKeyDictionary[DecodeState, float] = WeakKeyDictionary()

    def encode(self, chunks: Sequence[Pixels]) -> Tensor:
        with self._pace.lasting(self._times.encode_frame_s * sum(pixels.num_frames for pixels in chunks)):
            return super().encode(chunks)

    def start_prefill(
        self,
        plan: PromptPlan,
        video_embeddings: Tensor,
        *,
        keep: Tensor | None = None,
        positions: str = Positions.ORIGINAL,
        headroom: int = 512,
        observer: Observer | None = None,
    ) -> Prefill:
        prefill = super().start_prefill(
            plan, video_embeddings, keep=keep, positions=positions, headroom=headroom, observer=observer
        )
        num_pruned = 0 if keep is None else plan.num_video_tokens - len(keep)
        alpha = num_pruned / max(plan.num_video_tokens, 1)
        return self._paced(prefill, 1 - num_pruned / plan.num_tokens, alpha)

    def start_row_prefill(
        self, plan: PromptPlan, video_embeddings: Tensor, *, guidance_layer: int, headroom: int = 512
    ) -> RowPrefill:
        prefill = super().start_row_prefill(plan, video_embeddings, guidance_layer=guidance_layer, headroom=headroom)
        return _ReplayedRowPrefill(prefill, self._pace, self._layer_s())

    def resume_prefill(self, plan: PromptPlan, cache: KVCache, *, observer: Observer | None = None) -> Prefill:
        share = (plan.num_tokens - plan.text_start) / plan.num_tokens
        return self._paced(super().resume_prefill(plan, cache, observer=observer), share, 0.0)

    def _paced(self, prefill: Prefill, share: float, alpha: float) -> Prefill:
        layer_s = [share * seconds for seconds in self._layer_s()]

        def on_state(state: DecodeState) -> None:
            self._alphas[state] = alpha

        return _ReplayedPrefill(prefill, self._pace, layer_s, on_state)

    def _layer_s(self) -> list[float]:
        """Seconds of a whole prompt in each layer."""
        num_layers = self.info.num_layers
        return [self._times.layer_s(layer, num_layers, self._guidance_layer) for layer in range(num_layers)]

    def _run_ride(self, batch: Sequence[tuple[DecodeState, Window]], ride: Ride) -> list[PassRows]:
        with self._pace.lasting(self._ride_s(batch, ride)):
            return super()._run_ride(batch, ride)

    def _ride_s(self, batch: Sequence[tuple[DecodeState, Window]], ride: Ride) -> float:
        """Of a pass that carries rows: their arithmetic goes into the time in which the device only waits for its
        memory, as far as there is any left beside the arithmetic of the pass's own rows, and on top of it."""
        assert isinstance(ride.prompt, _ReplayedRowPrefill)
        ride_s, pass_s = ride.prompt.seconds_of(ride.counts), self._step_s(batch)
        own_s = sum(num_new(window) for _, window in batch) * sum(self._layer_s()) / ride.prompt.num_rows
        return pass_s + ride_s - self._overlap * min(ride_s, max(pass_s - own_s, 0.0))

    def _run_step(self, batch: Sequence[tuple[DecodeState, Window]]) -> list[PassRows]:
        with self._pace.lasting(self._step_s(batch)):
            return super()._run_step(batch)

    def write_ahead(self, batch: Begun, num_tokens: int, note: Note | None = None) -> None:
        """Every token takes a pass of the table's time."""

    @property
    def most_nodes(self) -> int:
        """None is read otherwise than by a pass, either."""
        return 0

    def _step_s(self, batch: Sequence[tuple[DecodeState, Window]]) -> float:
        """Of a packed pass: by all its rows, or by its fullest cache and the rows beyond one a session."""
        num_rows = sum(num_new(window) for _, window in batch)
        if self._by_alpha:
            alpha = min(self._alphas.get(state, 0.0) for state, _ in batch)
            return self._times.pass_s(alpha, num_rows - len(batch))
        return self._times.pass_s(num_rows)


class _ReplayedRowPrefill(RowPrefill):
    def __init__(self, prefill: RowPrefill, pace: Pace, layer_s: Sequence[float]) -> None:
        vars(self).update(vars(prefill))
        self._pace = pace
        self._layer_s = layer_s

    def seconds_of(self, counts: RideCounts) -> float:
        """Of so many rows alone."""
        row_s = [sum(self._layer_s[first:until]) / self.num_rows for first, until in itertools.pairwise(self._layers)]
        return counts.first * row_s[0] + counts.second * row_s[1]

    def run_alone(self, counts: RideCounts) -> None:
        with self._pace.lasting(self.seconds_of(counts)):
            super().run_alone(counts)


class _ReplayedPrefill(Prefill):
    def __init__(
        self, prefill: Prefill, pace: Pace, layer_s: Sequence[float], on_state: Callable[[DecodeState], None]
    ) -> None:
        vars(self).update(vars(prefill))
        self._pace = pace
        self._layer_s = layer_s
        self._on_state = on_state

    def run_layers(self, until_layer: int) -> None:
        with self._pace.lasting(sum(self._layer_s[self.next_layer : until_layer])):
            super().run_layers(until_layer)

    def finish(self) -> tuple[DecodeState, Tensor]:
        with self._pace.lasting(sum(self._layer_s[self.next_layer :])):
            state, logits = super().finish()
        self._on_state(state)
        return state, logits
