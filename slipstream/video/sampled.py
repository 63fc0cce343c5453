"""What sampling one video may cost, and what it gives. Needs no decoder to be imported."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
