"""Makes small clips whose pictures differ from seed to seed, and samples their frames as the gateway does."""

import io
import tempfile
from fractions import Fraction

import av
import numpy as np
from av.video.stream import VideoStream
from numpy.typing import NDArray

from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits, SampledVideo

WIDTH, HEIGHT, CELLS = 64, 48, 4


def make_colour_clip(
    seed: int, num_frames: int = 24, frames_per_second: int = 8, size: tuple[int, int] = (WIDTH, HEIGHT)
) -> bytes:
    """An H.264 MP4 of coloured tiles that change over time. `size`: width and height, multiples of 4."""
    width, height = size
    chance = np.random.default_rng(seed)
    colours = chance.uniform(0, 255, (2, CELLS, CELLS, 3))
    with tempfile.NamedTemporaryFile(suffix=".mp4") as target:
        with av.open(target.name, "w") as output:
            stream = output.add_stream("libx264", rate=Fraction(frames_per_second))
            assert isinstance(stream, VideoStream)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for share in np.linspace(0, 1, num_frames):
                tiles = ((1 - share) * colours[0] + share * colours[1]).astype(np.uint8)
                picture = tiles.repeat(height // CELLS, axis=0).repeat(width // CELLS, axis=1)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            output.mux(stream.encode())
        return target.read()


def sample_clip(clip: bytes, num_frames: int) -> SampledVideo:
    """The clip's frames, in their own size, and when they are shown."""
    return sample_video(io.BytesIO(clip), num_frames, DecodeLimits())


def sample_frames(clip: bytes, num_frames: int) -> NDArray[np.uint8]:
    """RGB frames [n, height, width, 3] of the clip."""
    return sample_clip(clip, num_frames).frames
