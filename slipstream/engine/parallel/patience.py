"""An end to waits that nothing below ends: NCCL has no timeout for making its connections, nor for a graph's sums."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CHECK_S = 0.5


class Patience:
    """Watches what one thread waits for.

    Args:
        end: told why, on another thread, when a wait takes too long; from then on nothing is watched.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        self._end = end
        self._limit: tuple[float, str] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="patience", daemon=True).start()

    @contextmanager
    def within(self, seconds: float, why: str) -> Iterator[None]:
        """Around a wait that may take so long."""
        self._limit = (time.monotonic() + seconds, why)
        try:
            yield
        finally:
            self._limit = None

    def close(self) -> None:
        """Watches nothing any more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(CHECK_S):
            limit = self._limit
            if limit is not None and time.monotonic() > limit[0]:
                return self._end(limit[1])
