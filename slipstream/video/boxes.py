"""Walks the top-level boxes of an MP4 to see whether the file was cut off. Decodes and interprets nothing else."""

import os
from dataclasses import dataclass
from typing import BinaryIO

from slipstream.video.watch import Watch

_MAX_BOXES = 200_000


@dataclass(frozen=True)
class Extent:
    """How much of a file to read."""

    length: int
    """Bytes; less than the file when its last box is a half-written fragment header, which libav cannot stand."""
    is_cut: bool
    """Whether the last box is incomplete."""


def whole_extent(source: BinaryIO, watch: Watch) -> Extent:
    """Where the usable part of the file ends; the whole file when it is no MP4. Raises what `watch.check` raises."""
    size = source.seek(0, os.SEEK_END)
    position = 0
    for _ in range(_MAX_BOXES):
        watch.check()
        source.seek(position)
        header = source.read(16)
        if position == 0 and header[4:8] != b"ftyp":
            break
        box_size = _box_size(header, size - position)
        if box_size is None or position + box_size > size:
            is_fragment_header = len(header) < 8 or header[4:8] == b"moof"
            return Extent(position if is_fragment_header and position else size, is_cut=True)
        position += box_size
        if position == size:
            break
    return Extent(size, is_cut=False)


def _box_size(header: bytes, rest: int) -> int | None:
    """Bytes of the box that starts with `header`; None when the header is incomplete or impossible."""
    if len(header) < 8:
        return None
    size = int.from_bytes(header[:4], "big")
    if size == 0:
        return rest
    if size == 1:
        size = int.from_bytes(header[8:16], "big")
    return size if size >= 8 else None
