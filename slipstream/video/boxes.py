"""Top-level boxes of an MP4: how long one is, and where the samples of a file with an index lie. Pure, no codec."""

from dataclasses import dataclass, field

HEADER_BYTES = 16
"""More than a box's header ever needs."""
MAX_INDEXED_BOXES = 32
"""A file with one index has a handful; one in fragments, whose indices are spread over it, has thousands."""

Extent = tuple[int, int]
"""From which byte to which; the end is no part of it."""


def box_size(header: bytes, rest: int) -> int | None:
    """Bytes of the box that starts with `header`; None when the header is incomplete or impossible."""
    if len(header) < 8:
        return None
    size = int.from_bytes(header[:4], "big")
    if size == 0:
        return rest
    if size == 1:
        size = int.from_bytes(header[8:16], "big")
    return size if size >= 8 else None


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
        kind, size = header[4:8], box_size(header, self.num_bytes - self.position)
        self._kinds.append(kind)
        is_sound = size is not None and self.position + size <= self.num_bytes
        if not is_sound or kind == b"moof" or self._kinds[0] != b"ftyp" or len(self._kinds) > MAX_INDEXED_BOXES:
            self._kinds, self.is_done = [], True
            return
        assert size is not None
        if kind == b"mdat":
            self._media.append((self.position + HEADER_BYTES, self.position + size))
        self.position += size
        self.is_done = self.position == self.num_bytes

    @property
    def media(self) -> tuple[Extent, ...]:
        """Where samples lie, once all boxes are known; none for a file that is cut off, in fragments, or no MP4, which
        must be read through to know its frames."""
        return tuple(self._media) if b"moov" in self._kinds and self.position == self.num_bytes else ()
