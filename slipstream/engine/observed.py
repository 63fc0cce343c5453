"""A model whose passes are counted. Stands in for the model itself, whatever is asked of it."""

import time
from collections.abc import Sequence
from typing import Any, cast

from slipstream.engine.video_lm import VideoLM
from slipstream.metrics import ModelMetrics


def observed(model: VideoLM, metrics: ModelMetrics) -> VideoLM:
    """The same model, which tells `metrics` of each decoding pass."""
    return cast(VideoLM, _Observed(model, metrics))


class _Observed:
    def __init__(self, model: VideoLM, metrics: ModelMetrics) -> None:
        self._model = model
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, batch: Sequence[Any]) -> Any:
        started = time.perf_counter()
        outcomes = self._model.step(batch)
        self._metrics.passed(len(batch), time.perf_counter() - started)
        return outcomes
