"""Makes a process load, before it is confined, whatever decoding loads only when it comes to it."""

import importlib
import io
import pkgutil
from contextlib import suppress

import av
from av.video.stream import VideoStream

from slipstream.errors import UnreadableVideo
from slipstream.video.decode import sample_video
from slipstream.video.limits import DecodeLimits

_NOT_FOR_DECODING = ("av.__main__", "av.datasets")
_NUM_FRAMES = 4


def rehearse() -> None:
    """Decodes a small clip and refuses a file that is none. Takes some milliseconds."""
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.startswith(_NOT_FOR_DECODING):
            importlib.import_module(module.name)
    sample_video(io.BytesIO(_small_clip()), _NUM_FRAMES - 1, DecodeLimits(max_frame_pixels=64))
    with suppress(UnreadableVideo):
        sample_video(io.BytesIO(b"no video"), 1, DecodeLimits())


def _small_clip() -> bytes:
    clip = io.BytesIO()
    with av.open(clip, "w", format="matroska") as output:
        stream = output.add_stream("mjpeg", rate=25)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuvj420p"
        for index in range(_NUM_FRAMES):
            frame = av.VideoFrame(16, 16, "yuvj420p")
            frame.pts = index
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return clip.getvalue()
