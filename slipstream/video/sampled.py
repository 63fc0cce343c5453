"""The result of sampling one clip. Knows nothing of how it was decoded, or in which process."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
