"""A reader of documents that reads a page which it has drawn only when it is told to, by SIGUSR1; run by a `ReaderPool`
in place of its own. What is to befall it before it has read does so, whoever is scheduled first."""

import signal
import sys
import time
from types import FrameType
from typing import Any

from slipstream.documents import child

GO = signal.SIGUSR1
POLL_S = 0.01


class _Told:
    """How often this process was told to read, and how often it has."""

    told = read = 0

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.told += 1

    def wait(self) -> None:
        while self.told == self.read:
            time.sleep(POLL_S)
        self.read += 1


if __name__ == "__main__":
    orders, sound_seen = _Told(), child._Reading._seen

    def seen(self: Any, *page: Any) -> Any:
        orders.wait()
        return sound_seen(self, *page)

    signal.signal(GO, orders.hear)  # also of the processes that confining starts
    child._Reading._seen = seen  # type: ignore[method-assign, assignment]
    child.main(*map(int, sys.argv[1:]))
