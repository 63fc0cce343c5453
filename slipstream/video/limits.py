"""What one video may cost: bytes, pixels, frames, time. Every bound names itself in the error it raises."""

from dataclasses import dataclass


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
