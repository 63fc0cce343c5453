"""A film that is not here, as a decoder reads it: it asks whoever has the film for ranges, over a socket.

Of a film with an index only those bytes are asked for that are needed: while packets are listed none of the samples,
which read as zeros then, and while frames are decoded the samples of those runs. The
other end is `slipstream.video.ranged_film`.
"""

import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

from av.packet import Packet
from av.video.stream import VideoStream

from slipstream.errors import UnreadableVideo
from slipstream.video.boxes import Extent
from slipstream.video.frame_times import DecodeRun
from slipstream.video.ranged_wire import ASKED, GIVEN, MOST_ASKED

LEAST_ASKED = 64 * 1024
"""Bytes that are asked for where it is not known what will be read next."""
INDEXED_CODECS = frozenset({"h264", "hevc", "av1", "vp9", "mpeg4", "mjpeg", "prores", "dnxhd"})
"""Codecs of whose packets MP4's index says all that must be known before they are decoded."""
NOT_PARSED: Mapping[str, str] = {"fflags": "noparse+nofillin"}
"""What libav must be told where it lists packets without their content."""
NEARBY = 32 * 1024
"""Bytes between two wanted extents that are asked for with them: libav reads as many at once."""


class PacketExtents:
    """Where packets lie in a file, in the order in which they were listed."""

    def __init__(self) -> None:
        self._starts, self._sizes = array("q"), array("q")

    def add(self, start: int, size: int) -> None:
        """One more."""
        self._starts.append(start)
        self._sizes.append(size)

    def of(self, run: DecodeRun) -> Iterator[Extent]:
        """Of the packets of a run."""
        for number in range(run.start, min(run.stop, len(self._starts))):
            yield self._starts[number], self._starts[number] + self._sizes[number]


class RangedReader:
    """A binary file for libav, and for who looks at its boxes. Raises `UnreadableVideo` where the other end fails."""

    def __init__(self, descriptor: int) -> None:
        """Takes the socket over, and waits for the facts of the film."""
        self._descriptor = descriptor
        facts = json.loads(self._received(GIVEN.unpack(self._received(GIVEN.size))[0]))
        self._num_bytes: int = facts["num_bytes"]
        self._media: list[Extent] = [(start, end) for start, end in facts["media"]]
        self._is_indexed = bool(self._media)
        self.packets = PacketExtents()
        """Of the stream, as they were listed, here or before."""
        self._skipped: Holes | None = None
        self._position, self._piece_start, self._piece = 0, 0, b""

    def __enter__(self) -> "RangedReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up."""
        os.close(self._descriptor)

    def tell(self) -> int:
        """In bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; zeros where nobody needs what is there."""
        start = self._position
        end = self._num_bytes if size < 0 else min(start + size, self._num_bytes)
        if start >= end:
            return b""
        needed = [(start, end)] if self._skipped is None else self._skipped.needed(start, end)
        self._position = end
        if needed == [(start, end)]:
            return self._asked(start, end)
        filled = bytearray(end - start)
        for from_, to in needed:
            filled[from_ - start : to - start] = self._asked(from_, to)
        return bytes(filled)

    # -- what is needed

    def opened(self) -> Mapping[str, str]:
        """A pass over the film begins, which needs all that it reads. Returns options for libav."""
        self._skipped = None
        return NOT_PARSED if self._is_indexed else {}

    def has_index_for(self, codec: str) -> bool:
        """Whether the pass may go on as it was opened. False once, for a codec whose packets must be read to be known:
        it is to be opened again."""
        if not self._is_indexed or codec in INDEXED_CODECS:
            return True
        self._is_indexed = False
        return False

    def listed(self, packets: "Iterator[Packet[VideoStream]]") -> "Iterator[Packet[VideoStream]]":
        """The packets, none of whose content is asked for where the film has an index."""
        if self._is_indexed:
            self._skipped = Holes(self._media, ())
        self.packets = PacketExtents()
        for packet in packets:
            self.packets.add(packet.pos or 0, packet.size)
            yield packet

    def will_decode(self, runs: Sequence[DecodeRun]) -> None:
        """From here on the content of no other packets is asked for."""
        if self._is_indexed:
            self._skipped = Holes(self._media, (extent for run in runs for extent in self.packets.of(run)))

    # -- asking

    def _asked(self, start: int, end: int) -> bytes:
        """Those bytes. What is behind them comes along where it will be read too."""
        found = bytearray()
        while start < end:
            offset = start - self._piece_start
            if not 0 <= offset < len(self._piece):
                wanted = LEAST_ASKED if self._skipped is None else self._skipped.run_on(end) - start
                self._piece = self._answer(start, min(max(end - start, wanted), MOST_ASKED, self._num_bytes - start))
                self._piece_start, offset = start, 0
            piece = self._piece[offset : offset + end - start]
            found += piece
            start += len(piece)
        return bytes(found)

    def _answer(self, start: int, num_bytes: int) -> bytes:
        question = ASKED.pack(start, num_bytes)
        while question:
            question = question[os.write(self._descriptor, question) :]
        (given,) = GIVEN.unpack(self._received(GIVEN.size))
        if given != num_bytes:
            raise UnreadableVideo("its store failed")
        return self._received(given)

    def _received(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            piece = os.read(self._descriptor, num_bytes - len(data))
            if not piece:
                raise UnreadableVideo("its store is not connected any more")
            data += piece
        return bytes(data)


class Holes:
    """What of a file is needed: all but the media, and of that only the wanted extents. Pure."""

    def __init__(self, media: Iterable[Extent], wanted: Iterable[Extent]) -> None:
        kept, position = list(wanted), 0
        for start, end in sorted(media):
            kept.append((position, start))
            position = end
        kept.append((position, 2**63))
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(extent for extent in kept if extent[0] < extent[1]):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def needed(self, start: int, end: int) -> list[Extent]:
        """The parts of a range that are needed, ascending."""
        found = []
        for number in range(max(bisect_right(self._starts, start) - 1, 0), len(self._starts)):
            from_, to = max(self._starts[number], start), min(self._ends[number], end)
            if self._starts[number] >= end:
                break
            if from_ < to:
                found.append((from_, to))
        return found

    def run_on(self, position: int) -> int:
        """Until where bytes are needed from just before `position` on, small holes included."""
        number = bisect_right(self._starts, position - 1) - 1
        end = self._ends[number]
        while number + 1 < len(self._starts) and self._starts[number + 1] - end <= NEARBY:
            number += 1
            end = self._ends[number]
        return max(end, position)
