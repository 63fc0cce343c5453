"""One thread that owns a model; coroutines await its results. The event loop never runs a model pass.

Work is taken by priority, then in order of arrival, so that a long prefill, which comes in blocks, lets the windows
of other sessions pass between two of them.
"""

import asyncio
import enum
import itertools
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
SWITCH_INTERVAL_S = 0.0005
"""Shorter than Python's default, so that the event loop answers while the model thread runs Python code."""


class Priority(enum.IntEnum):
    """Lower goes first."""

    DECODE = 0
    PREFILL = 1
    STOP = 2


class ModelThread:
    """Runs callables one after another on a thread of its own, with inference mode and thread count set there."""

    def __init__(self, num_threads: int) -> None:
        self._queue: queue.PriorityQueue[tuple[Priority, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._num_threads = num_threads
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    async def run(self, work: Callable[[], T], priority: Priority = Priority.DECODE) -> T:
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

        self._queue.put((priority, next(self._order), job))
        return await future

    def close(self) -> None:
        """Lets the work that was handed in finish, then ends the thread."""
        self._queue.put((Priority.STOP, next(self._order), None))
        self._thread.join()

    def _main(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while (job := self._queue.get()[2]) is not None:
                job()
