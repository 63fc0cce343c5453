"""Top-level boxes of an MP4: where the samples of a file with one index lie. Pure, and loads no codec."""

from dataclasses import dataclass, field

HEADER_BYTES = 16
"""More than a box's header ever needs."""
MAX_INDEXED_BOXES = 32
"""A file with one index has a handful; one in fragments, whose indices are spread over it, has thousands."""

Extent = tuple[int, int]
"""From which byte to which; the end is no part of it."""


@dataclass
class IndexedBoxes:
    """Goes through the boxes of a file of `num_bytes`: it is told the header at `position`, until `is_done`."""

    num_bytes: int
    position: int = 0
    is_done: bool = field(default=False, init=False)
    _media: list[Extent] = field(default_factory=list, init=False)
    _kinds: list[bytes] = field(default_factory=list, init=False)

    def add(self, header: bytes) -> None:
        """The first `HEADER_BYTES` at `position`, or as many as there are."""
        kind, size = header[4:8], int.from_bytes(header[:4], "big")
        if size < 2:  # up to the end of the file, or a number of 64 bits behind the kind
            size = int.from_bytes(header[8:16], "big") if size else self.num_bytes - self.position
        self._kinds.append(kind)
        is_sound = len(header) >= 8 and 8 <= size <= self.num_bytes - self.position
        if not is_sound or kind == b"moof" or self._kinds[0] != b"ftyp" or len(self._kinds) > MAX_INDEXED_BOXES:
            self._kinds, self.is_done = [], True
            return
        if kind == b"mdat":
            self._media.append((self.position + HEADER_BYTES, self.position + size))
        self.position += size
        self.is_done = self.position == self.num_bytes

    @property
    def media(self) -> tuple[Extent, ...]:
        """Where samples lie, once all boxes are known; none for a file that is cut off, in fragments, or no MP4, which
        must be read through to know its frames."""
        return tuple(self._media) if b"moov" in self._kinds and self.position == self.num_bytes else ()
