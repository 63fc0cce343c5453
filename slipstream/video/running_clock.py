"""The clock of recordings that were joined as they are: within the file it begins anew, and is counted on from there.

Whoever goes through the packets from the beginning sees the same times, each time.
"""

from av.packet import Packet
from av.video.stream import VideoStream

JOINED = frozenset({"mpegts", "mpeg", "flv"})
"""Containers that can be joined by writing one file behind the other."""
LEAST_S = 1.0
"""How far back is taken for a new beginning."""
_NEVER = -(2**63)


class RunningClock:
    """Of one video, for one pass over its packets at a time."""

    def __init__(self, container: str, counts_on: bool) -> None:
        """Not `counts_on`: times stay as they are, and what goes back is counted alone."""
        self._may_restart = container in JOINED
        self._counts_on = counts_on
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self.num_restarts = 0
        self.num_behind = 0
        """Packets that are shown before what came before a new beginning has ended."""
        self._last_ticks = _NEVER
        """When the packet before is decoded, as the file has it."""
        self._offset, self._end, self._end_before = 0, _NEVER, _NEVER

    def follow(self, packet: "Packet[VideoStream]") -> None:
        """Has a packet behind a new beginning shown behind all that came before, or counts it."""
        ticks = packet.pts if packet.pts is not None else packet.dts
        if ticks is None or not self._may_restart:
            return
        if packet.dts is not None:
            if (self._last_ticks - packet.dts) * float(packet.time_base or 0) > LEAST_S:
                self.num_restarts += 1
                self._offset, self._end_before = self._end - ticks if self._counts_on else 0, self._end
            self._last_ticks = packet.dts
        ticks += self._offset
        self.num_behind += ticks < self._end_before
        self._end = max(self._end, ticks + max(packet.duration or 0, 1))
        if self._offset:
            packet.pts = packet.pts + self._offset if packet.pts is not None else None
            packet.dts = packet.dts + self._offset if packet.dts is not None else None
