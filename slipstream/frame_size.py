"""Which size a model's processor gives the frames of a video, and pictures in that size.

Decoders resize by it, models count tokens by it. Pictures are, bit for bit, as torch makes them:
`interpolate(uint8, mode=..., antialias=True)`, which is what the video processors of transformers resize with, most in
mode "bicubic", some in "lanczos". Here it needs neither torch nor a compiler, so a decoder process can do it: once,
from the picture's own size to the model's. The arithmetic is of integers (weights of 16 bits, one rounding along the
rows and one along the columns), so it can be done in any order; float64 holds all of it exactly, and lets matrix
products do the work. Source: ATen's `UpSampleKernel.cpp`, which took it from Pillow-SIMD.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidRequest

# -- size -------------------------------------------------------------------------------------------------------------

MAX_ASPECT_RATIO = 200
"""Of Qwen2-VL's processor."""
LEAST_CAP = 1.05
"""Of Qwen3-VL's processor."""
_MOST_LOST = 4
"""Frames that are shrunk to a bound keep more than a quarter of it where both sides are cut to whole multiples."""


@dataclass(frozen=True, slots=True)
class FrameSize:
    """Either exactly `height` x `width`, perhaps by way of another size; or near the frames' own size and shape, with
    sides that are multiples of `multiple` and an area within two bounds; or, with no field set, any size as it comes.

    The second is `smart_resize` of transformers' `Qwen2VLVideoProcessor`; with `frames_per_step`, whose bounds are of
    all frames together, that of `Qwen3VLVideoProcessor`; with `shares_most`, that of `VideoLlama3VideoProcessor`; with
    `longest_edge`, `get_resize_output_image_size` of `PixtralImageProcessor`.
    """

    height: int = 0
    width: int = 0
    multiple: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    """Bounds of height * width after resizing."""
    frames_per_step: int = 0
    """0: the bounds are of each frame. Else of the whole video, which is counted in steps of so many frames."""
    frame_pixels: int = 0
    """Of a whole video's frames, none has more; 0: no bound."""
    capped_pixels: int = 0
    """Above 0, where the bounds are of the whole video: a frame has at most its even share of `max_pixels`, and at most
    this many, but may always have `LEAST_CAP` of `min_pixels` (`cap_pixels_per_frame` of `Qwen3VLVideoProcessor`)."""
    shares_most: bool = False
    """`min_pixels` is of each frame, `max_pixels` of the whole video, of which every frame may have an even share."""
    shortest_edge: int = 0
    """Above 0: frames are resized so that their shorter side is this, and `height` x `width` in the middle is kept."""
    longest_edge: int = 0
    """Above 0: frames are resized so that their longer side is this, and then again, to `height` x `width`. With a
    `multiple`: so that no side is longer than this, and then up to whole multiples, at once."""
    lanczos: bool = False
    """They are resized by Lanczos' kernel, not by the cubic one."""

    @property
    def is_known(self) -> bool:
        return bool(self.height or self.multiple)

    @property
    def has_two_steps(self) -> bool:
        """Whether frames get their size by way of another one."""
        return self.shortest_edge > 0 or (self.longest_edge > 0 and not self.multiple)

    @property
    def counts_frames(self) -> bool:
        """Whether a frame's size depends on how many there are."""
        return self.frames_per_step > 0 or self.shares_most

    def most_pixels(self, num_frames: int) -> int:
        """No frame of so many that may be resized so has more; 0 where any size comes."""
        if not self.multiple:
            return self.height * self.width
        few = min(self._counted(num_frames))
        least, most = (bound // few for bound in self._bounds(num_frames, few))
        grown = self._next_multiple(least, MAX_ASPECT_RATIO) * self._next_multiple(least, 1 / MAX_ASPECT_RATIO)
        thin = self.multiple * math.isqrt(MAX_ASPECT_RATIO * most)
        return max(most, grown, thin)

    def within(self, max_pixels: int) -> "FrameSize":
        """The same with no more pixels in a frame than that, where the model leaves a choice."""
        if not self.multiple:
            return self
        if self.counts_frames:
            return replace(self, frame_pixels=min(self.frame_pixels or max_pixels, max_pixels))
        return replace(self, min_pixels=min(self.min_pixels, max_pixels), max_pixels=min(self.max_pixels, max_pixels))

    def of(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """Height and width of frames that have these, in a video of so many.

        Raises:
            InvalidRequest: no model of this kind takes frames so narrow.
        """
        if not self.multiple:
            return (self.height, self.width) if self.height else (height, width)
        _check_shape(height, width)
        if self._is_done(height, width, num_frames):
            return height, width
        (counted, frames), side = self._counted(num_frames), self.multiple
        least, most = self._bounds(num_frames, counted)
        if self.frames_per_step and min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        if self.longest_edge:
            height, width = self._shortened(height, width)
            rows, columns = math.ceil(height / side), math.ceil(width / side)
        else:
            rows, columns = round(height / side), round(width / side)
        if counted * rows * columns * side * side > most:
            shrink = math.sqrt(frames * height * width / self._bounds(num_frames, frames)[1])
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif counted * rows * columns * side * side < least:
            grow = math.sqrt(least / (frames * height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows * side, columns * side

    def on_the_way(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that frames have before they get the exact ones; where there is no such way, their own.

        Raises:
            InvalidRequest: the frames are so narrow that they would be huge on the way.
        """
        if self.shortest_edge:
            _check_shape(height, width)
            short = min(height, width)
            return int(self.shortest_edge * height / short), int(self.shortest_edge * width / short)
        if not self.has_two_steps:
            return height, width
        ratio = width / height
        if width >= height:
            return max(1, _even(int(self.longest_edge / ratio))), self.longest_edge
        return self.longest_edge, max(1, _even(int(self.longest_edge * ratio)))

    def _is_done(self, height: int, width: int, num_frames: int) -> bool:
        """Whether frames of this size stay as they are; so those do that were resized before."""
        few, many = sorted(self._counted(num_frames))
        least, most = self._bounds(num_frames, few)
        fits = few * height * width <= most and many * height * width >= least
        if self.longest_edge:
            fits = fits and max(height, width) < self.longest_edge + self.multiple
        return fits and not height % self.multiple and not width % self.multiple

    def _shortened(self, height: int, width: int) -> tuple[int, int]:
        """Of the same shape with sides of at most `longest_edge`."""
        ratio = max(height, width) / self.longest_edge
        if ratio <= 1:
            return height, width
        return max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))

    def _counted(self, num_frames: int) -> tuple[int, int]:
        """How many frames the bounds are compared with, and how many they are shared by."""
        if not self.frames_per_step:
            return 1, 1
        return max(1, round(num_frames / self.frames_per_step)) * self.frames_per_step, max(2, num_frames)

    def _bounds(self, num_frames: int, held: int) -> tuple[int, int]:
        """Fewest and most pixels of a whole video, of which so many frames are held against them."""
        most, sharing = self.max_pixels, self._counted(num_frames)[1]
        if self.shares_most:
            most = min(max(1, most // num_frames), self.frame_pixels or most)
            return min(self.min_pixels, most // _MOST_LOST), most
        if self.capped_pixels:
            share = min(self.capped_pixels, most // sharing)
            most = max(share, int(self.min_pixels * LEAST_CAP)) * sharing
        if not self.frame_pixels:
            return self.min_pixels, most
        most = min(most, self.frame_pixels * held)
        return min(self.min_pixels, most), most

    def _next_multiple(self, least: int, ratio: float) -> int:
        """The longest side that a picture of this shape can be given to reach the least area."""
        return math.ceil(math.sqrt(least * ratio) / self.multiple + 1) * self.multiple


def _check_shape(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise InvalidRequest(f"frames of {width} x {height} pixels are too narrow for this model")


def _even(side: int) -> int:
    return side + side % 2


ANY_SIZE = FrameSize()
"""Frames keep their own."""


# -- pictures ---------------------------------------------------------------------------------------------------------

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
