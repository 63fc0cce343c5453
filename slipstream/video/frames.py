"""Turns decoded pictures into upright RGB arrays of bounded size."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from av.video.frame import VideoFrame
from numpy.typing import NDArray

Allocate = Callable[[tuple[int, ...]], NDArray[np.uint8]]
"""Gives memory for frames of the shape [most frames, height, width, 3]."""


def on_heap(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Memory of this process; what is not written to costs nothing."""
    return np.empty(shape, dtype=np.uint8)


def bounded_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The largest (width, height) of the same shape with at most `max_pixels`; unchanged when it already fits."""
    if width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    scaled_height = min(max(1, math.floor(height * scale)), max_pixels)
    scaled_width = min(max(1, math.floor(width * scale)), max_pixels // scaled_height)
    return scaled_width, scaled_height


@dataclass
class FrameBuffer:
    """Collects the kept frames of one clip. The first decides size and rotation for all, so that they stack."""

    max_pixels: int
    capacity: int
    """Most frames that will be kept."""
    allocate: Allocate = on_heap
    times_s: list[float] = field(default_factory=list, init=False)
    source_size: tuple[int, int] = field(default=(0, 0), init=False)
    """(width, height) as stored."""
    rotation: int = field(default=0, init=False)
    """Degrees clockwise that put the frames upright: 0, 90, 180 or 270."""
    num_damaged: int = field(default=0, init=False)
    num_resized: int = field(default=0, init=False)
    _pictures: NDArray[np.uint8] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.times_s)

    def append(self, time_s: float, frame: VideoFrame) -> None:
        """Convert and keep one frame. Raises what libav raises for a picture that it cannot convert."""
        size = (frame.width, frame.height)
        if not self.times_s:
            self.source_size = size
            self.rotation = round(-frame.rotation / 90) % 4 * 90
        picture = _to_rgb(frame, bounded_size(*self.source_size, self.max_pixels))
        self.num_resized += size != self.source_size
        self.num_damaged += frame.is_corrupt
        upright = np.rot90(picture, k=-(self.rotation // 90))
        if self._pictures is None:
            self._pictures = self.allocate((self.capacity, *upright.shape))
        self._pictures[len(self.times_s)] = upright
        self.times_s.append(time_s)

    def stacked(self) -> NDArray[np.uint8]:
        """[n, height, width, 3] C-contiguous; n is at least 1."""
        assert self._pictures is not None
        return self._pictures[: len(self.times_s)]

    def warnings(self) -> list[str]:
        """What is unusual about the kept frames."""
        found = []
        if self.num_damaged:
            found.append(f"{self.num_damaged} of the sampled frames are damaged and only partly right")
        if self.num_resized:
            found.append(f"the picture size changes within the video; {self.num_resized} frames were rescaled to match")
        return found


def _to_rgb(frame: VideoFrame, size: tuple[int, int]) -> NDArray[np.uint8]:
    """[height, width, 3] as stored, not rotated; `size` is (width, height)."""
    width, height = size
    if (frame.width, frame.height) != size:
        frame = frame.reformat(width=width, height=height, format="rgb24", interpolation="BICUBIC", threads=1)
    return np.asarray(frame.to_ndarray(format="rgb24", threads=1), dtype=np.uint8)
