"""Pictures in another size, bit for bit as torch makes them: `interpolate(uint8, mode=..., antialias=True)`.

That is what the video processors of transformers resize with, most in mode "bicubic", some in "lanczos". Here it needs
neither torch nor a compiler, so a decoder process can do it: once, from the picture's own size to the model's. The
arithmetic is of integers (weights of 16 bits, one rounding along the rows and one along the columns), so it can be done
in any order; float64 holds all of it exactly, and lets matrix products do the work. Source: ATen's
`UpSampleKernel.cpp`, which took it from Pillow-SIMD.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slipstream.frame_size import FrameSize

_CUBIC_SUPPORT, _LANCZOS_SUPPORT = 2.0, 3.0
"""Half the width of a kernel, in pixels of the smaller picture."""
_A = -0.5
_MAX_PRECISION = 22
_BLOCK = 16
"""Pixels of the result that are made by one product: fewer waste less on zeros, more make fewer products."""
_STRIP_BYTES = 2 * 2**20
"""Rows are taken in strips whose float64 copies stay in the processor's cache."""


def fit(picture: NDArray[np.uint8], size: FrameSize, num_frames: int) -> NDArray[np.uint8]:
    """RGB [h, w, 3] -> the same as a model wants it, in a video of `num_frames`. Raises what `FrameSize.of` raises."""
    height, width = size.on_the_way(picture.shape[0], picture.shape[1])
    picture = resample(picture, height, width, lanczos=size.lanczos)
    if size.shortest_edge:
        return _middle(picture, size.height, size.width)
    return resample(picture, *size.of(height, width, num_frames), lanczos=size.lanczos)


def _middle(picture: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """As torchvision's crop finds it."""
    top, left = (picture.shape[0] - height) // 2, (picture.shape[1] - width) // 2
    return picture[top : top + height, left : left + width]


def resample(picture: NDArray[np.uint8], height: int, width: int, *, lanczos: bool = False) -> NDArray[np.uint8]:
    """RGB [h, w, 3] -> [height, width, 3], both sizes at least 1."""
    if picture.shape[:2] == (height, width):
        return picture
    planes = np.ascontiguousarray(picture.transpose(2, 0, 1))
    if planes.shape[2] != width:
        planes = _resample_rows(planes, _kernel(planes.shape[2], width, lanczos))
    if planes.shape[1] != height:
        planes = _resample_columns(planes, _kernel(planes.shape[1], height, lanczos))
    return np.ascontiguousarray(planes.transpose(1, 2, 0))


def _resample_rows(planes: NDArray[np.uint8], kernel: "_Kernel") -> NDArray[np.uint8]:
    """[3, h, w] -> [3, h, width]."""
    width = kernel.made
    made = np.empty((*planes.shape[:2], width), dtype=np.uint8)
    rows, into = planes.reshape(-1, planes.shape[2]), made.reshape(-1, width)
    num_rows = max(1, _STRIP_BYTES // (8 * planes.shape[2]))
    for first in range(0, len(rows), num_rows):
        strip = rows[first : first + num_rows].astype(np.float64)
        for block in kernel.blocks:
            sums = strip[:, block.source] @ block.weights
            into[first : first + num_rows, block.made] = kernel.rounded(sums)
    return made


def _resample_columns(planes: NDArray[np.uint8], kernel: "_Kernel") -> NDArray[np.uint8]:
    """[3, h, w] -> [3, height, w]."""
    made = np.empty((planes.shape[0], kernel.made, planes.shape[2]), dtype=np.uint8)
    for plane, into in zip(planes, made, strict=True):
        for block in kernel.blocks:
            sums = block.weights.T @ plane[block.source].astype(np.float64)
            into[block.made] = kernel.rounded(sums)
    return made


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Block:
    made: slice
    """Pixels of the result."""
    source: slice
    """Those that they are made of."""
    weights: NDArray[np.float64]
    """[source, made], whole numbers."""


@dataclass(frozen=True, eq=False)
class _Kernel:
    """How one axis is resampled."""

    made: int
    """Pixels of the result."""
    blocks: tuple[_Block, ...]
    precision: int
    """Bits behind the point of the weights."""

    def rounded(self, sums: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Weighted sums as pixel values. Overwrites them."""
        sums += 2.0 ** (self.precision - 1)
        sums *= 2.0**-self.precision
        np.floor(sums, out=sums)
        np.clip(sums, 0.0, 255.0, out=sums)
        return sums.astype(np.uint8)


@lru_cache(maxsize=16)
def _kernel(size: int, made: int, lanczos: bool) -> _Kernel:
    starts, weights = _weights(size, made, lanczos)
    precision = _precision(float(weights.max()))
    scaled = weights * 2.0**precision
    whole = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5))
    blocks = []
    for first in range(0, made, _BLOCK):
        last = min(first + _BLOCK, made)
        low = int(starts[first:last].min())
        high = min(size, int(starts[first:last].max()) + weights.shape[1])
        dense = np.zeros((high - low, last - first))
        for pixel in range(first, last):
            start = int(starts[pixel]) - low
            taps = whole[pixel, : high - low - start]
            dense[start : start + len(taps), pixel - first] = taps
        blocks.append(_Block(slice(first, last), slice(low, high), dense))
    return _Kernel(made, tuple(blocks), precision)


def _weights(size: int, made: int, lanczos: bool) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For each pixel of the result: the first pixel it is made of, [made], and the weights from there on, [made, n]."""
    scale = size / made
    support = (_LANCZOS_SUPPORT if lanczos else _CUBIC_SUPPORT) * max(scale, 1.0)
    centers = scale * (np.arange(made) + 0.5)
    starts = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + support + 0.5).astype(np.int64), size)
    offsets = np.arange(int((ends - starts).max()))
    distances = (offsets + starts[:, None] - centers[:, None] + 0.5) * (1.0 / scale if scale >= 1.0 else 1.0)
    curve = _lanczos if lanczos else _cubic
    weights = np.where(offsets < (ends - starts)[:, None], curve(np.abs(distances)), 0.0)
    totals = np.zeros(made)
    for column in weights.T:  # in torch's order, as sums of floats depend on it
        totals += column
    return starts, weights / totals[:, None]


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys' kernel at distances [...], none negative."""
    near = ((_A + 2.0) * x - (_A + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * _A
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """A sinc in a window of a wider one, at distances [...], none negative."""
    return np.where(x < _LANCZOS_SUPPORT, _sinc(x) * _sinc(x / _LANCZOS_SUPPORT), 0.0)


def _sinc(x: NDArray[np.float64]) -> NDArray[np.float64]:
    angles = np.where(x == 0.0, 1.0, x) * np.pi
    return np.where(x == 0.0, 1.0, np.sin(angles) / angles)


def _precision(largest: float) -> int:
    """The most bits with which the largest weight still is a number of 16 bits."""
    precision = 0
    while precision < _MAX_PRECISION and int(0.5 + largest * 2 ** (precision + 1)) < 2**15:
        precision += 1
    return precision
