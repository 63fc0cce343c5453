"""What one session has done on the model's thread: in blocks, timed, refused after its end, and released once."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import SessionGone
from slipstream.models.base import DecodeState, Prefill, PromptPlan, VideoLM
from slipstream.models.thread import ModelThread, Priority

T = TypeVar("T")
FRAMES_PER_BLOCK = 16
"""Frames are encoded in blocks, and layers run one by one, so that windows of other sessions fit in between."""


class SessionWork:
    """One session's share of the model. After `close`, what is queued is refused and memory is freed."""

    def __init__(self, model: VideoLM, thread: ModelThread) -> None:
        self.closed = False
        self._model = model
        self._thread = thread
        self._prefill: Prefill | None = None
        self._state: DecodeState | None = None

    @property
    def state(self) -> DecodeState:
        """The cache that decoding goes on from; there is one after `finish_prefill`."""
        assert self._state is not None, "the prompt is prefilled first"
        return self._state

    async def run(self, work: Callable[[], T], priority: Priority = Priority.PREFILL) -> tuple[T, float]:
        """What `work()` returns on the model's thread, and its seconds. Raises `SessionGone` after `close`."""

        def timed() -> tuple[T, float]:
            if self.closed:
                raise SessionGone("the session has ended")
            start = time.perf_counter()
            result = work()
            return result, time.perf_counter() - start

        return await self._thread.run(timed, priority)

    async def encode(self, frames: NDArray[np.uint8]) -> AsyncIterator[tuple[torch.Tensor, float]]:
        """Video embeddings [tokens, hidden] of one block of frames after another, with the seconds of each."""
        for start in range(0, len(frames), FRAMES_PER_BLOCK):
            yield await self.run(partial(self._model.encode_frames, frames[start : start + FRAMES_PER_BLOCK]))

    async def start_prefill(
        self,
        plan: PromptPlan,
        embeddings: torch.Tensor,
        *,
        keep: torch.Tensor | None = None,
        positions: str = "original",
    ) -> tuple[Prefill, float]:
        """The prompt before its first layer, and the seconds that took."""
        start = partial(self._model.start_prefill, plan, embeddings, keep=keep, positions=positions)
        self._prefill, _ = started = await self.run(start)
        return started

    async def run_layers(self, prefill: Prefill) -> AsyncIterator[tuple[int, float]]:
        """Runs layer after layer; yields the number of layers done and the seconds of the last."""
        for layer in range(1, self._model.info.num_layers + 1):
            _, seconds = await self.run(partial(prefill.run_layers, layer))
            yield layer, seconds

    async def finish_prefill(self, prefill: Prefill) -> tuple[torch.Tensor, float]:
        """Logits [vocab] of the first token, and the seconds that took. From here on there is a `state`."""
        (self._state, logits), seconds = await self.run(prefill.finish)
        self._prefill = None
        return logits, seconds

    def close(self) -> None:
        """Ends the session; its memory is freed after the pass that may be running."""
        if self.closed:
            return
        self.closed = True
        release = asyncio.ensure_future(self._thread.run(self._release))
        release.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _release(self) -> None:
        for holder in (self._prefill, self._state):
            if holder is not None:
                holder.close()
