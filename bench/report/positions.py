"""Where in a video the tokens lie that a pruner keeps: arithmetic over positions. Knows no model and no plot."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

END_WIDTH = 0.04
"""Of all positions, at either end: where attention gathers (paper 000, figure 4)."""


def num_positions(kept: Mapping[str, Any]) -> int:
    """How many video tokens there were to choose from."""
    rows, columns = kept["grid"]
    return int(kept["frames"] * rows * columns)


def end_shares(positions: Sequence[int], num_tokens: int, width: float = END_WIDTH) -> tuple[float, float]:
    """Of `positions`, the shares in the first and in the last `width` of all positions."""
    num_end = round(num_tokens * width)
    first = sum(position < num_end for position in positions)
    last = sum(position >= num_tokens - num_end for position in positions)
    return first / max(len(positions), 1), last / max(len(positions), 1)


def densities(positions: Sequence[int], num_tokens: int, num_stretches: int) -> NDArray[np.float64]:
    """How often tokens are kept in each stretch of the video, relative to the average: 1 if spread evenly."""
    counts, _ = np.histogram(np.asarray(positions), bins=num_stretches, range=(0, num_tokens))
    return counts * (num_stretches / max(len(positions), 1))


def kept_in_frame(positions: Sequence[int], frame: int, grid: tuple[int, int]) -> NDArray[np.bool_]:
    """Which tokens of one frame are kept, [rows, columns]."""
    size = grid[0] * grid[1]
    mask = np.zeros(size, dtype=np.bool_)
    mask[[position - frame * size for position in positions if position // size == frame]] = True
    return mask.reshape(grid)
