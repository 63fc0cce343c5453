"""A model that takes as long as another device would: for benchmarks alone. Stands in for the model itself.

The model's own passes decide everything; the thread that owns it then waits until the table's time has passed. A pass
that really takes longer than its table says is counted and told, since its time is then the wrong one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import Tensor

from slipstream.engine.device_times import DeviceTimes, load_device_times
from slipstream.engine.startup import ModelServiceConfig
from slipstream.engine.video_lm import DecodeState, Prefill, PromptPlan, VideoLM
from slipstream.logs import get_logger
from slipstream.rpc.grpc_options import REPLAY_MARK
from slipstream.speculation.acceptance import TokenTree

SLACK = 1.02
"""A pass that takes longer than this many times its table's time is told of."""


def replayed(model: VideoLM, config: ModelServiceConfig, role: str, *, guidance_layer: int = 0) -> VideoLM:
    """The model at the pace of the configuration's table, or itself where there is none.

    Args:
        role: "target" or "draft": the part of the table.
        guidance_layer: L, which divides the prefill of a target.

    Raises:
        InvalidConfig: no such table.
    """
    if not config.replay:
        return model
    times = load_device_times(config.replay, role, config.replay_speed)
    get_logger().warning("replay.on", table=times.name, speed=config.replay_speed, note="passes last as a table says")
    return cast(VideoLM, Replayed(model, times, by_alpha=role == "draft", guidance_layer=guidance_layer))


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


class Replayed:
    """What `replayed` returns."""

    def __init__(
        self,
        model: VideoLM,
        times: DeviceTimes,
        *,
        by_alpha: bool,
        guidance_layer: int = 0,
        pace: Pace | None = None,
    ) -> None:
        self.info = replace(model.info, device=f"{REPLAY_MARK}{times.name}")
        self._model = model
        self._times = times
        self._by_alpha = by_alpha
        self._guidance_layer = guidance_layer
        self._pace = pace or Pace()
        self._alphas: WeakKeyDictionary[DecodeState, float] = WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_frames(self, frames: Any) -> Tensor:
        with self._pace.lasting(self._times.encode_frame_s * len(frames)):
            return self._model.encode_frames(frames)

    def start_prefill(
        self, plan: PromptPlan, video_embeddings: Tensor, *, keep: Tensor | None = None, **others: Any
    ) -> Prefill:
        prefill = self._model.start_prefill(plan, video_embeddings, keep=keep, **others)
        num_pruned = 0 if keep is None else plan.num_video_tokens - len(keep)
        alpha = num_pruned / max(plan.num_video_tokens, 1)
        return self._paced(prefill, 1 - num_pruned / plan.num_tokens, alpha)

    def resume_prefill(self, plan: PromptPlan, cache: Any, **others: Any) -> Prefill:
        share = (plan.num_tokens - plan.text_start) / plan.num_tokens
        return self._paced(self._model.resume_prefill(plan, cache, **others), share, 0.0)

    def _paced(self, prefill: Prefill, share: float, alpha: float) -> Prefill:
        def layers_s(first: int, last: int) -> float:
            layers = range(first, last)
            return share * sum(
                self._times.layer_s(layer, self.info.num_layers, self._guidance_layer) for layer in layers
            )

        def on_state(state: DecodeState) -> None:
            self._alphas[state] = alpha

        return cast(Prefill, _ReplayedPrefill(prefill, self._pace, layers_s, self.info.num_layers, on_state))

    def step(self, batch: Sequence[tuple[DecodeState, Any]]) -> list[Tensor]:
        with self._pace.lasting(self._step_s(batch)):
            return self._model.step(batch)

    def _step_s(self, batch: Sequence[tuple[DecodeState, Any]]) -> float:
        """Of a packed pass: by all its rows, or by its fullest cache."""
        if self._by_alpha:
            return self._times.pass_s(min(self._alphas.get(state, 0.0) for state, _ in batch))
        return self._times.pass_s(sum(_num_new(window) for _, window in batch))


def _num_new(window: Any) -> int:
    return len(window.new_token_ids) if isinstance(window, TokenTree) else len(window)


class _ReplayedPrefill:
    def __init__(
        self,
        prefill: Prefill,
        pace: Pace,
        layers_s: Callable[[int, int], float],
        num_layers: int,
        on_state: Callable[[DecodeState], None],
    ) -> None:
        self._prefill = prefill
        self._pace = pace
        self._layers_s = layers_s
        self._num_layers = num_layers
        self._on_state = on_state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prefill, name)

    def run_layers(self, until_layer: int) -> None:
        with self._pace.lasting(self._layers_s(self._prefill.next_layer, until_layer)):
            self._prefill.run_layers(until_layer)

    def finish(self) -> tuple[DecodeState, Tensor]:
        with self._pace.lasting(self._layers_s(self._prefill.next_layer, self._num_layers)):
            state, logits = self._prefill.finish()
        self._on_state(state)
        return state, logits
