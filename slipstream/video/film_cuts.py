"""Where a film is cut into segments: by a stride, or where one shot ends and the next begins. Pure: no I/O, no codec.

A segment begins with a frame of its own and ends where the next one begins, so segments lie side by side without gaps
and every frame belongs to one of them.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidRequest, LimitExceeded
from slipstream.video.frame_times import TIME_TOLERANCE_S, PacketTimes

MAX_SEGMENTS = 10_000
"""Of one film; a job of the archive has no more parts."""
LEAST_STRIDE_S = 0.001
SHOT_PIECE_S = 30.0
"""A film's shots are looked for in pieces of this length."""
MOST_LOST_S = 300.0
"""Seconds that pieces of one film may take in which then no shots could be looked for."""
_FIXED = re.compile(r"fixed:([0-9]+(?:\.[0-9]+)?|\.[0-9]+)s?", re.ASCII)
_WAYS = "fixed:SECONDS such as fixed:10s, shots, or none"


@dataclass(frozen=True)
class Cut:
    """How a film is cut."""

    stride_s: float
    """Length of a segment; 0: a segment is a shot."""


def parse_segments(text: str) -> Cut | None:
    """What the option `segments` says; None: the film is captioned as a whole. Raises `InvalidRequest`."""
    if text == "none":
        return None
    if text == "shots":
        return Cut(0.0)
    if (found := _FIXED.fullmatch(text)) is None:
        raise InvalidRequest(f"segments {text!r} is unknown; say {_WAYS}")
    stride_s = float(found[1])
    if not LEAST_STRIDE_S <= stride_s < math.inf:
        raise InvalidRequest(f"segments {text!r}: a segment has at least {LEAST_STRIDE_S:g} s, such as fixed:10s")
    return Cut(stride_s)


def fixed_starts(shown_s: NDArray[np.float64], stride_s: float) -> NDArray[np.float64]:
    """When each segment begins: the first frame at or after each multiple of the stride, where there is one before the
    next multiple.

    Args:
        shown_s: [n] when frames are shown, ascending from 0; n is at least 1.
        stride_s: length of a segment.
    """
    number = np.floor((shown_s + TIME_TOLERANCE_S) / stride_s)
    return shown_s[np.diff(number, prepend=-1.0) > 0]


def bounds_of(starts_s: NDArray[np.float64], end_s: float) -> tuple[float, ...]:
    """[num_segments + 1] where segments begin, and where the last one ends; in microseconds, which a message can hold.

    Raises `LimitExceeded` for more than `MAX_SEGMENTS`.
    """
    rounded = np.unique(np.round(starts_s, 6))
    if len(rounded) > MAX_SEGMENTS:
        raise LimitExceeded(
            f"the film would have {len(rounded)} segments, more than the {MAX_SEGMENTS} served; ask for longer ones, "
            "or cut the film"
        )
    return (*map(float, rounded), max(float(np.round(end_s, 6)), float(rounded[-1])))


def warn_short(bounds: Sequence[float], stride_s: float) -> tuple[str, ...]:
    """What to say of a film that is shorter than a segment."""
    if len(bounds) > 2 or stride_s <= bounds[-1]:
        return ()
    return (f"the film lasts {bounds[-1]:.3f} s, less than a segment of {stride_s:g} s: it is one",)


class FoundShots:
    """The shots of a film, piece by piece. A piece that cannot be looked at is a segment of its own, as what is wrong
    with it would be wrong with a segment that has it in its midst."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: where pieces begin, and where the last one ends."""
        self.pieces = list(pairwise(bounds))
        self.starts_s = [bounds[0]]
        """Of the shots until now."""
        self._end_s, self._skipped = bounds[-1], list[tuple[float, float]]()
        self._num_seen, self._lost_s = 0, 0.0

    def add(self, bounds: Sequence[float]) -> None:
        """When the last shot before a piece began, when shots begin in it, and when it ends."""
        self.starts_s += bounds[1:-1]
        self._num_seen += 1

    def skip(self, piece: tuple[float, float], error: Exception, lost_s: float) -> None:
        """One that cannot be looked at, which took `lost_s` seconds to find out. Raises the error where that is so of
        all, or took too long of some; where it is too much for this server from the beginning, at once."""
        self._skipped.append(piece)
        self._lost_s += lost_s
        is_too_large = isinstance(error, LimitExceeded) and not self._num_seen
        if is_too_large or self._lost_s > MOST_LOST_S or len(self._skipped) == len(self.pieces):
            raise error
        self.starts_s += [bound for bound in piece if bound < self._end_s]

    def bounds(self) -> tuple[float, ...]:
        """See `bounds_of`."""
        return bounds_of(np.asarray(self.starts_s), self._end_s)

    def warnings(self) -> tuple[str, ...]:
        """What to say of pieces that were left out."""
        if not self._skipped:
            return ()
        seconds = sum(end_s - start_s for start_s, end_s in self._skipped)
        since_s = self._skipped[0][0]
        return (f"no shots could be looked for in {seconds:.1f} s of the film, the first from {since_s:.1f} s on",)


def check_times(packets: PacketTimes) -> None:
    """Raises `InvalidRequest` for frames that all are shown at the same time: nothing can be said of when they are."""
    if int(packets.is_shown.sum()) > 1 and len(packets.shown_s()) < 2:
        raise InvalidRequest(
            "the frames of this file have no times of their own, so it has no segments; write it anew with timestamps, "
            "or ask for segments none"
        )


def groups(numbers: Sequence[int], size: int) -> list[list[int]]:
    """Segments to decode together: at most `size` that follow on one another."""
    gathered: list[list[int]] = []
    for number in numbers:
        if gathered and len(gathered[-1]) < size and number == gathered[-1][-1] + 1:
            gathered[-1].append(number)
        else:
            gathered.append([number])
    return gathered
