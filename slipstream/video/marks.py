"""Whether there is anything to see in a video: black, frozen and static ones are marked. Pure: arrays in, names out."""

import numpy as np
from numpy.typing import NDArray

from slipstream.video.messages import SampledVideo

BLACK, FROZEN, STATIC = "black", "frozen", "static"
MARKS = (BLACK, FROZEN, STATIC)
"""Each holds for more videos than the one before. Black: all frames are. Frozen: one frame is repeated. Static: nothing
moves, but the picture is made anew, such as one of a still camera."""

PIXELS_A_SIDE = 64
"""Looked at, at most; evenly, which is every seventh of a row of 448."""
BLACK_LEVEL, BLACK_SHARE = 0.1 * 255, 0.98
"""A frame is black when this share of its pixels is no brighter; as `blackdetect` of ffmpeg has it."""
FROZEN_CHANGE = 0.001 * 255
"""Mean difference of frames up to which they are one, repeated; as `freezedetect` of ffmpeg has it."""
STATIC_CHANGE = 8.0
"""Mean difference of a block of a frame from that of the first one, up to which nothing moves in it."""
BLOCKS = 8
"""A side."""


def marks_of(video: SampledVideo) -> tuple[str, ...]:
    """The strongest mark that the video has, if it has any. One frame can be black, but not stand still."""
    frames = _thinned(video.frames)
    light = frames @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    if ((light <= BLACK_LEVEL).mean(axis=(1, 2)) >= BLACK_SHARE).all():
        return (BLACK,)
    if len(frames) == 1:
        return ()
    changes = np.abs(frames[1:] - frames[0]).mean(axis=3)
    if changes.mean(axis=(1, 2)).max() <= FROZEN_CHANGE:
        return (FROZEN,)
    return (STATIC,) if _blocks(changes).max() <= STATIC_CHANGE else ()


def is_skipped(marks: tuple[str, ...], weakest: str) -> str:
    """The mark for which a video gets no text, where those up to `weakest` get none; empty: it is captioned."""
    skipped = MARKS[: MARKS.index(weakest) + 1] if weakest in MARKS else ()
    return next((mark for mark in marks if mark in skipped), "")


def _thinned(frames: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[n, at most PIXELS_A_SIDE, the same, 3]"""
    down, across = (-(-side // PIXELS_A_SIDE) for side in frames.shape[1:3])
    return frames[:, ::down, ::across].astype(np.float32)


def _blocks(changes: NDArray[np.float32]) -> NDArray[np.float32]:
    """Means over blocks of [n, height, width]; what does not fill a block at the end counts with the one before."""
    for axis in (1, 2):
        size = changes.shape[axis]
        starts = np.arange(0, size - size % BLOCKS or 1, max(size // BLOCKS, 1))
        lengths = np.diff([*starts, size])
        shape = [-1 if other == axis else 1 for other in range(3)]
        sums = np.add.reduceat(changes, starts, axis=axis)
        changes = np.asarray(sums / lengths.reshape(shape), dtype=np.float32)
    return changes
