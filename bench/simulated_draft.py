"""A draft and the clock that it runs by, both simulated: time passes from event to event. Knows no target.

A simulated token is AGREED where the draft agrees with the target at that output position, else DISAGREED.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from slipstream.speculation.actions import AdvanceLine, RestartLine

AGREED, DISAGREED = 1, 0


class SimulatedClock:
    """A heap of what happens when. Among simultaneous events, a lower `rank` comes first."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def after(self, delay_ns: int, event: Callable[[], None], *, rank: int = 0) -> None:
        heapq.heappush(self._events, (self.now_ns + delay_ns, rank, next(self._serial), event))

    def step(self) -> None:
        self.now_ns, _, _, event = heapq.heappop(self._events)
        event()


class SimulatedDraft:
    """Writes a token every T_q up to its limit; sends `first_chunk` tokens of a line at once, then one by one."""

    def __init__(
        self,
        clock: SimulatedClock,
        send: Callable[[int, int, tuple[int, ...]], None],
        *,
        agreement: Sequence[bool],
        pass_ns: int,
        restart_ns: int,
    ) -> None:
        self._clock = clock
        self._send = send
        self._agreement = agreement
        self._pass_ns = pass_ns
        self._restart_ns = restart_ns
        self._epoch = self._position = self._write_until = 0
        self._chunk = 1
        self._unsent: list[int] = []
        self._writing = False

    def restart(self, line: RestartLine) -> None:
        self._epoch, self._position = line.epoch, line.keep + len(line.suffix)
        self._write_until, self._chunk = line.write_until, line.first_chunk
        self._unsent.clear()
        self._writing = False
        self._go_on(self._restart_ns)

    def advance(self, line: AdvanceLine) -> None:
        if line.epoch == self._epoch:
            self._write_until = line.write_until
            self._go_on()

    def _go_on(self, delay_ns: int = 0) -> None:
        if not self._writing and self._position < self._write_until:
            self._writing = True
            self._clock.after(delay_ns + self._pass_ns, partial(self._wrote, self._epoch))

    def _wrote(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._writing = False
        self._unsent.append(AGREED if self._agreement[self._position % len(self._agreement)] else DISAGREED)
        self._position += 1
        if len(self._unsent) >= self._chunk or self._position == self._write_until:
            self._send(epoch, self._position - len(self._unsent), tuple(self._unsent))
            self._unsent.clear()
            self._chunk = 1
        self._go_on()
