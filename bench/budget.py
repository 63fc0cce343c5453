"""How long a benchmark may still take: what is measured last gives way to the clock. Knows no benchmark."""

import time
from collections.abc import Callable

MARGIN = 1.1
"""What is to come is taken to last so much longer than its like has lasted."""


class Budget:
    """A limit on the whole run, counted from now."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._limit_s = limit_s

    @property
    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    def allows(self, seconds: float, *, reserved_s: float = 0.0) -> bool:
        """Something that should take `seconds` would end in time, and leave `reserved_s` for what follows."""
        return self.spent_s + MARGIN * seconds + reserved_s <= self._limit_s
