"""Bounds how long the target is held for the draft, and measures it. Knows no protocol."""

import asyncio
from collections.abc import Callable


class HoldTimer:
    """One hold after the other. `watch` it after every event."""

    def __init__(self, on_expired: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_expired = on_expired
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._held_s = 0.0

    def watch(self, holding: bool, longest_s: float) -> None:
        """A hold that begins may last `longest_s`; one that goes on keeps its limit; one that ended is counted."""
        if holding and self._timer is None:
            self._since = self._loop.time()
            self._timer = self._loop.call_later(longest_s, self._on_expired)
        elif not holding and self._timer is not None:
            self._held_s += self._loop.time() - self._since
            self.cancel()

    def take_held_s(self) -> float:
        """Seconds held since this was asked last."""
        held_s, self._held_s = self._held_s, 0.0
        return held_s

    def cancel(self) -> None:
        """Nothing expires any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
