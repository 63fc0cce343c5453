"""Whether the windows of a caption that runs alone take one number of rows: by what that costs.

A window that is filled up to a fixed width goes through the same kernels on the same shapes as a token alone, so plain
and speculative text have the same bits. A GPU waits for weights and not for arithmetic, so there this may cost nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

WIDTHS = (16, 32)
"""Rows that windows may be filled up to: a window and the token before it."""
MOST_COST = 1.05
"""A fixed width may take so many times the seconds of one row by the fastest way."""


@dataclass(frozen=True)
class WidthTimes:
    """Seconds of passes over one cache, each the median of some."""

    fastest_s: float
    """One row, by the way to attend that is fastest: plain decoding's pass."""
    fixed_s: Mapping[int, float]
    """By width: so many rows, by the way whose bits do not depend on the number of real ones."""


def choose_width(times: WidthTimes) -> int:
    """The widest that is cheap enough, which the most windows fit; 0 when none is."""
    cheap = [width for width, seconds in times.fixed_s.items() if seconds <= MOST_COST * times.fastest_s]
    return max(cheap, default=0)
