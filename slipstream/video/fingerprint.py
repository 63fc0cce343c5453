"""Whether two videos show the same: small pictures of a few of their frames, held against each other.

Black borders are cut off first, and a small crop is found by trying, so a copy that was encoded again, scaled, cropped
or put between bars stays close, while another moment of the same scene differs in some cells of the pictures. What is
smaller than a cell, such as lips or lettering, is not seen. Pure: arrays in, numbers out.
"""

from collections import deque
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from slipstream.video.messages import SampledVideo

NUM_PICTURES = 4
"""Of a fingerprint, at most; evenly over the sampled frames."""
LIGHT, COLOUR = 16, 8
"""Cells along each side of a picture's brightness, and of each of its two colour differences."""
PICTURE_CELLS = LIGHT**2 + 2 * COLOUR**2
DURATION_SHARE, DURATION_S = 0.05, 0.5
"""Two videos may differ so much in length: this share of the longer one, or so many seconds."""

# -- borders ----------------------------------------------------------------------------------------------------------

BORDER_MEAN, BORDER_MOST = 20, 48
"""A line of pixels is border when it is no brighter than this, on average and at its brightest, in every frame."""
LEAST_INSIDE = 0.25
"""Of each side. Where less would be left the frames are dark, and nothing is cut off."""


def without_border(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[n, height, width, 3] without the black lines around the picture."""
    n, height, width, _ = frames.shape
    lines = frames.reshape(n, height, -1)
    rows = _lit(lines.max(axis=(0, 2)), lines.mean(axis=2, dtype=np.float32))
    most, mean = lines.max(axis=(0, 1)), lines.mean(axis=1, dtype=np.float32)
    columns = _lit(most.reshape(width, 3).max(axis=1), mean.reshape(n, width, 3).mean(axis=2))
    return frames[:, rows, columns]


def _lit(most: NDArray[np.uint8], mean: NDArray[np.float32]) -> slice:
    """From the first to the last line that is no border. `most`: [lines]; `mean`: [n, lines], of each frame."""
    lit = np.flatnonzero((most > BORDER_MOST) | (mean.max(axis=0) > BORDER_MEAN))
    if not len(lit) or lit[-1] + 1 - lit[0] < LEAST_INSIDE * len(most):
        return slice(None)
    return slice(int(lit[0]), int(lit[-1]) + 1)


# -- fingerprint ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Of one video."""

    duration_s: float
    pictures: NDArray[np.uint8]
    """[n, PICTURE_CELLS]: of each frame the brightness of its cells, then both colour differences, row by row."""


def fingerprint_of(video: SampledVideo) -> Fingerprint:
    """Takes some milliseconds; it keeps nothing of the frames."""
    n = len(video.frames)
    chosen = np.unique(np.linspace(0, n - 1, min(n, NUM_PICTURES)).round().astype(int))
    return Fingerprint(video.duration_s, _pictures(without_border(video.frames[chosen])))


def _pictures(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    n, height, width, _ = frames.shape
    rows = _averaged(frames.reshape(n, height, width * 3).astype(np.float32))
    cells = _averaged(rows.reshape(n * LIGHT, width, 3))
    red, green, blue = np.moveaxis(cells.reshape(n, LIGHT, LIGHT, 3), -1, 0)
    light = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    size = LIGHT // COLOUR
    differences = [
        128 + scale * (channel - light).reshape(n, COLOUR, size, COLOUR, size).mean(axis=(2, 4))
        for scale, channel in ((0.564, blue), (0.713, red))
    ]
    whole = np.concatenate([part.reshape(n, -1) for part in (light, *differences)], axis=1)
    levels: NDArray[np.uint8] = np.rint(whole).clip(0, 255).astype(np.uint8)
    return levels


def _averaged(lines: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, lines, any] to [n, LIGHT, any]. A line that lies in two cells counts for each by its share.

    Cell by cell: products so small are made by one thread, and leave the other cores to the models."""
    num_lines = lines.shape[1]
    edges = np.linspace(0, num_lines, LIGHT + 1)
    cells = []
    for start, end in pairwise(edges):
        numbers = np.arange(int(start), min(int(np.ceil(end)), num_lines))
        overlap = np.minimum(end, numbers + 1) - np.maximum(start, numbers)
        weights = (overlap / overlap.sum()).astype(np.float32)
        cells.append(weights @ lines[:, numbers[0] : numbers[-1] + 1])
    return np.stack(cells, axis=1)


# -- distance ---------------------------------------------------------------------------------------------------------

ZOOMS = np.linspace(-0.12, 0.12, 9)
SHIFTS = np.linspace(-0.06, 0.06, 7)
"""Of one picture against the other along one side, as shares of it: what a crop may have done. Finer than that a cell
does not see."""
WORST_LIGHT, WORST_COLOUR = 26, 7
"""Cells of a picture whose difference counts: a tenth, those that differ most."""
EDGE = 0.25
"""Of a cell: what lies so near the edge is not compared, as a crop may have cut through it."""
MOST_GAIN, MOST_LIFT = 1.2, 24.0
"""Of a copy whose range of brightness was taken for another one, such as that of television for that of a computer."""


@dataclass(frozen=True, eq=False)
class _Warps:
    """All ways to see a line of cells through a crop: what each cell is made of, and whether it is in the other picture
    at all."""

    light: NDArray[np.float32]
    """[ways, LIGHT, LIGHT]"""
    colour: NDArray[np.float32]
    """[ways, COLOUR, COLOUR]"""
    light_inside: NDArray[np.float32]
    """[ways, LIGHT], 0 or 1."""
    colour_inside: NDArray[np.float32]


def distance(one: Fingerprint, other: Fingerprint) -> float:
    """How differently they show what they show, in levels of brightness, 0 to 255 and beyond; infinite where lengths or
    numbers of frames differ."""
    if one.pictures.shape != other.pictures.shape or not _as_long(one.duration_s, other.duration_s):
        return float("inf")
    return _aligned_distance(_planes(one.pictures), _planes(other.pictures))


def _as_long(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) <= max(DURATION_S, DURATION_SHARE * max(one_s, other_s))


Planes = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Brightness [n, LIGHT, LIGHT], and colour differences [2n, COLOUR, COLOUR]."""


def _planes(pictures: NDArray[np.uint8]) -> Planes:
    light, colour = np.split(pictures.astype(np.float32), [LIGHT**2], axis=1)
    blur = _blur()
    blurred = blur @ light.reshape(-1, LIGHT, LIGHT) @ blur.T
    return np.asarray(blurred, dtype=np.float32), colour.reshape(-1, COLOUR, COLOUR)


@cache
def _blur() -> NDArray[np.float32]:
    """[LIGHT, LIGHT] that mixes each cell with its neighbours: a texture that is as fine as the cells would change with
    the crop."""
    near = np.abs(np.subtract.outer(np.arange(LIGHT), np.arange(LIGHT)))
    weights = np.where(near == 0, 2.0, np.where(near == 1, 1.0, 0.0))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float32)


def _aligned_distance(one: Planes, other: Planes) -> float:
    warps = _warps()
    identity = len(warps.light) // 2
    down = across = identity
    for _ in range(2):
        down = _best(one[0], other[0], across)
        across = _best(one[0].swapaxes(1, 2), other[0].swapaxes(1, 2), down)
    return min(_difference(one, other, *way) for way in ((down, across), (identity, identity)))


def _best(one: NDArray[np.float32], other: NDArray[np.float32], across: int) -> int:
    """The way along the first side that makes `other` most like `one`, where the second is seen in the way `across`."""
    warps = _warps()
    seen = (other @ warps.light[across].T).swapaxes(0, 1).reshape(LIGHT, -1)
    rows = (warps.light @ seen).reshape(len(warps.light), LIGHT, -1, LIGHT)
    weights = warps.light_inside[:, :, None] * warps.light_inside[across][None, None, :]
    squares = ((rows - one.swapaxes(0, 1)) ** 2).sum(axis=2) * weights
    return int((squares.sum(axis=(1, 2)) / weights.sum(axis=(1, 2))).argmin())


def _difference(one: Planes, other: Planes, down: int, across: int) -> float:
    """Of the picture that differs most."""
    warps = _warps()
    n = len(one[0])
    inside = np.outer(warps.light_inside[down], warps.light_inside[across])
    seen = _warped(other[0], warps.light, down, across)
    gain, lift = _levels(seen[:, inside > 0], one[0][:, inside > 0])
    light = inside * (gain * seen + lift - one[0]) ** 2
    seen = 128 + gain * (_warped(other[1], warps.colour, down, across) - 128)
    colour = np.outer(warps.colour_inside[down], warps.colour_inside[across]) * (seen - one[1]) ** 2
    worst_light = np.sort(light.reshape(n, -1), axis=1)[:, -WORST_LIGHT:].mean(axis=1)
    both = colour.reshape(n, 2, -1).sum(axis=1)
    worst_colour = np.sort(both, axis=1)[:, -WORST_COLOUR:].mean(axis=1)
    return float(np.sqrt((worst_light + worst_colour).max()))


def _levels(seen: NDArray[np.float32], wanted: NDArray[np.float32]) -> tuple[float, float]:
    """The gain and lift that make the brightness of all pictures most alike."""
    spread = float(seen.var())
    mean, wanted_mean = float(seen.mean()), float(wanted.mean())
    gain = float(((seen - mean) * (wanted - wanted_mean)).mean()) / spread if spread > 1 else 1.0
    gain = min(max(gain, 1 / MOST_GAIN), MOST_GAIN)
    return gain, min(max(wanted_mean - gain * mean, -MOST_LIFT), MOST_LIFT)


def _warped(planes: NDArray[np.float32], ways: NDArray[np.float32], down: int, across: int) -> NDArray[np.float32]:
    warped: NDArray[np.float32] = ways[down] @ planes @ ways[across].T
    return warped


@cache
def _warps() -> _Warps:
    pairs = [(zoom, shift) for zoom in ZOOMS for shift in SHIFTS]
    light, light_inside = zip(*(_warp(LIGHT, *pair) for pair in pairs), strict=True)
    colour, colour_inside = zip(*(_warp(COLOUR, *pair) for pair in pairs), strict=True)
    return _Warps(np.stack(light), np.stack(colour), np.stack(light_inside), np.stack(colour_inside))


def _warp(num_cells: int, zoom: float, shift: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[cells, cells] that interpolates, and [cells] whether a cell lies inside."""
    middle = (num_cells - 1) / 2
    place = middle + (np.arange(num_cells) - middle) * (1 + zoom) + shift * num_cells
    near = np.clip(place, 0, num_cells - 1)
    weights = np.clip(1 - np.abs(near[:, None] - np.arange(num_cells)), 0, 1)
    inside = (place >= EDGE) & (place <= num_cells - 1 - EDGE)
    return weights.astype(np.float32), inside.astype(np.float32)


# -- search -----------------------------------------------------------------------------------------------------------

COARSE_LIGHT, COARSE_COLOUR = 4, 2
"""Cells a side of a picture in which the nearest are looked for, before they are looked at closely."""
CANDIDATES = 4
"""That are."""


@dataclass(frozen=True)
class Found:
    """The nearest of many."""

    number: int
    """From 0, counted from the oldest that is kept."""
    distance: float


class Fingerprints:
    """The latest `most` of many, to find the nearest of."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: deque[Fingerprint] = deque(maxlen=most)
        self._coarse = np.empty((0, _COARSE_CELLS_IN_ALL), dtype=np.float32)
        """[rows, cells], of which the first `_num_rows` are filled; the last of these are those kept."""
        self._num_rows = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, fingerprint: Fingerprint) -> None:
        """One more; the oldest goes when there are too many."""
        if self._num_rows == len(self._coarse):
            kept = self._rows[-self._most + 1 :] if self._most > 1 else self._rows[:0]
            self._coarse = np.empty((2 * len(kept) + 16, _COARSE_CELLS_IN_ALL), dtype=np.float32)
            self._coarse[: len(kept)] = kept
            self._num_rows = len(kept)
        self._coarse[self._num_rows] = _coarse(fingerprint)
        self._num_rows += 1
        self._kept.append(fingerprint)

    def nearest(self, fingerprint: Fingerprint, within: float) -> Found | None:
        """The nearest one, if its distance is no more than `within`. Of many that look alike from afar only some are
        looked at closely."""
        if not self._kept:
            return None
        differences = ((self._rows - _coarse(fingerprint)) ** 2).sum(axis=1)
        some = np.argsort(differences, kind="stable")[:CANDIDATES]
        found = [Found(int(number), distance(fingerprint, self._kept[int(number)])) for number in some]
        best = min(found, key=lambda one: one.distance)
        return best if best.distance <= within else None

    @property
    def _rows(self) -> NDArray[np.float32]:
        return self._coarse[max(self._num_rows - len(self._kept), 0) : self._num_rows]


_COARSE_CELLS_A_PICTURE = COARSE_LIGHT**2 + 2 * COARSE_COLOUR**2
_COARSE_CELLS_IN_ALL = NUM_PICTURES * _COARSE_CELLS_A_PICTURE


def _coarse(fingerprint: Fingerprint) -> NDArray[np.float32]:
    """Brightness and colours of some cells of each picture; pictures that there are not have zeros."""
    n = len(fingerprint.pictures)
    light, colour = np.split(fingerprint.pictures.astype(np.float32), [LIGHT**2], axis=1)
    of_light = _pooled(light.reshape(n, 1, LIGHT, LIGHT), COARSE_LIGHT)
    of_colour = _pooled(colour.reshape(n, 2, COLOUR, COLOUR), COARSE_COLOUR)
    cells = np.zeros(_COARSE_CELLS_IN_ALL, dtype=np.float32)
    cells[: n * _COARSE_CELLS_A_PICTURE] = np.concatenate([of_light, of_colour], axis=1).ravel()
    return cells


def _pooled(planes: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """[n, planes, cells, cells] to [n, planes * side * side], by means."""
    n, num_planes, cells, _ = planes.shape
    blocks = planes.reshape(n, num_planes, side, cells // side, side, cells // side)
    return np.asarray(blocks.mean(axis=(3, 5)).reshape(n, -1), dtype=np.float32)
