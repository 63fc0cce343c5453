"""Decoded pictures as upright RGB arrays, the limits of one video, and the result of sampling it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from av.video.frame import VideoFrame
from numpy.typing import NDArray

# -- limits -----------------------------------------------------------------------------------------------------------

# What one video may cost: bytes, pixels, frames, time. Every bound names itself in the error it raises.


@dataclass(frozen=True)
class DecodeLimits:
    """Bounds on one `sample_video` call; the defaults suit a server that takes files from strangers."""

    max_bytes: int = 2 * 1024**3
    """Size of the file."""
    max_duration_s: float = 6 * 3600.0
    """Time between the first and the last frame."""
    max_pixels_source: int = 8192 * 4320
    """Width x height of a coded picture, checked before decoding and on every frame."""
    max_packets: int = 2_000_000
    """Video packets in the file; six hours at 60 frames a second are 1.3 million."""
    max_frames_decoded: int = 200_000
    """Pictures decoded to reach the sampled ones."""
    max_frames_sampled: int = 1024
    """Frames that may be asked for: they are all held in memory."""
    max_frame_pixels: int = 448 * 448
    """Frames with more pixels are scaled down to this, aspect kept; the others stay pixel-exact."""
    max_corrupt_packets: int = 32
    """Packets that may be skipped because they cannot be read or decoded. One more, and the video is refused."""
    timeout_s: float = 120.0
    """Wall-clock time for the whole call."""
    decoder_threads: int = 1
    """Threads of one decoder. Several captions decode side by side, so one each uses the cores best."""


# -- frames -----------------------------------------------------------------------------------------------------------

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


# -- sampled ----------------------------------------------------------------------------------------------------------

# The result of sampling one clip.


@dataclass(frozen=True)
class SampledVideo:
    """Frames of one clip, with when they are shown."""

    frames: NDArray[np.uint8]
    """[n, height, width, 3] RGB, upright, C-contiguous; 1 <= n <= the number asked for. May be read-only."""
    timestamps_s: tuple[float, ...]
    """[n] seconds from the first frame of the clip, ascending."""
    duration_s: float
    """From the first frame to the end of the last, taken from the packets; may be 0 for a single frame."""
    source_width: int
    """Stored picture, before rotation and scaling."""
    source_height: int
    codec: str
    rotation: int
    """Degrees clockwise that the frames were turned: 0, 90, 180 or 270."""
    warnings: tuple[str, ...]
    """What the caller should know about a damaged, cut off or short file."""
    sha256: str = ""
    """Digest of the whole file in hexadecimal; empty unless it was asked for."""
    num_bytes: int = 0
    """Size of what was digested; 0 unless it was asked for."""
