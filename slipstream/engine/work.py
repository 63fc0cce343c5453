"""Runs a session's work on the model's thread in blocks, refuses more after its end, and frees what it held once."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.thread import Lane, ModelThread
from slipstream.engine.video_lm import DecodeState, VideoLM
from slipstream.errors import SessionGone

T = TypeVar("T")
FRAMES_PER_BLOCK = 16
"""Frames are encoded in blocks, and layers run one by one, so that windows of other sessions fit in between."""
_tickets = itertools.count()


class SessionWork:
    """One session's share of the model. After `close`, what is queued is refused and memory is freed."""

    def __init__(self, thread: ModelThread) -> None:
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

    def run_blocks(self, blocks: Iterator[T]) -> AsyncIterator[T]:
        """Runs an iterator block by block on the model's thread. Raises `SessionGone` after `close`."""

        def guarded() -> Iterator[T]:
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
        if self._released is None:
            self._released = asyncio.ensure_future(self._thread.run(self._release))
            self._released.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._released.add_done_callback(lambda done: then())
        return self._released

    def _check_open(self) -> None:
        if self.closed:
            raise SessionGone("the session has ended")

    def _release(self) -> None:
        for release in self._releases:
            release()
        self._releases.clear()


def encode_blocks(model: VideoLM, frames: NDArray[np.uint8]) -> Iterator[tuple[torch.Tensor, float]]:
    """Video embeddings [tokens, hidden] of one block of frames after another, with the seconds of each."""
    for first in range(0, len(frames), FRAMES_PER_BLOCK):
        started = time.perf_counter()
        embeddings = model.encode_frames(frames[first : first + FRAMES_PER_BLOCK])
        yield embeddings, time.perf_counter() - started
