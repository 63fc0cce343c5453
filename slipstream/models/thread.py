"""One thread that owns a model; coroutines await its results. The event loop never runs a model pass.

Work comes in jobs of at most one block (a packed pass, some frames, one layer of a prefill), and `FairQueue` says whose
is next, so neither a long prefill nor endless decoding keeps the other waiting.
"""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from slipstream.logs import get_logger
from slipstream.models.fair_queue import FairQueue, Lane

T = TypeVar("T")
SWITCH_INTERVAL_S = 0.0005
"""Shorter than Python's default, so that the event loop answers while the model thread runs Python code."""

__all__ = ["Lane", "ModelThread"]


class ModelThread:
    """Runs callables one after another on a thread of its own, with inference mode and thread count set there."""

    def __init__(self, num_threads: int) -> None:
        self._queue: FairQueue[Callable[[], None]] = FairQueue()
        self._changed = threading.Condition()
        self._closing = False
        self._num_threads = num_threads
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    @property
    def is_contended(self) -> bool:
        """Whether a job waits while another one runs."""
        return len(self._queue) > 0

    def submit(self, job: Callable[[], None], lane: Lane, order: int = 0) -> None:
        """Hands in a job that raises nothing and that nobody awaits. From any thread, also the model's own."""
        with self._changed:
            self._queue.push(lane, job, order)
            self._changed.notify()

    async def run(self, work: Callable[[], T], lane: Lane = Lane.DECODE, order: int = 0) -> T:
        """Awaits `work()`. A cancelled caller abandons work that has not begun; work that runs, runs to its end."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def deliver(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not future.done():
                set_outcome(outcome)

        def job() -> None:
            if future.cancelled():
                return
            try:
                result = work()
            except BaseException as error:
                loop.call_soon_threadsafe(deliver, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(deliver, future.set_result, result)

        self.submit(job, lane, order)
        return await future

    async def run_blocks(self, blocks: Iterator[T], order: int) -> AsyncIterator[T]:
        """Runs an iterator on the prefill lane, one item a job, and yields its items.

        The next block queues before the event loop has heard of the last one, so that of two prefills the one with
        the lower `order` stays ahead. When the caller stops listening, the block that runs is the last one.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        abandoned = False

        def job() -> None:
            outcome: tuple[str, object]
            try:
                if abandoned:
                    return
                outcome = "item", next(blocks)
                self.submit(job, Lane.PREFILL, order)
            except StopIteration:
                outcome = "end", None
            except BaseException as error:
                outcome = "error", error
            loop.call_soon_threadsafe(done.put_nowait, outcome)

        self.submit(job, Lane.PREFILL, order)
        try:
            while True:
                kind, value = await done.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise cast(BaseException, value)
                yield cast(T, value)
        finally:
            abandoned = True

    def close(self) -> None:
        """Lets the work that was handed in finish, then ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _main(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while (taken := self._take()) is not None:
                lane, job = taken
                started = time.perf_counter()
                try:
                    job()
                except Exception:
                    get_logger().exception("model.job_failed")  # without this thread the service would only seem alive
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
