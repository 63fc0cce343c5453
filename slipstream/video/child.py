"""A decoder process: `python -m slipstream.video.child DESCRIPTOR MEMORY_BYTES CPU_S THREADS PARENT_PID`.

It reads hostile files, so it is given open descriptors and never a path, and has nothing worth taking. It imports
neither gRPC nor torch. What it answers is in `slipstream.video.messages`; the parent is `slipstream.video.pool`.
"""

import gc
import importlib
import io
import math
import mmap
import os
import pkgutil
import signal
import socket
import sys
from contextlib import suppress
from functools import partial

import av
import numpy as np
from av.video.stream import VideoStream
from numpy.typing import NDArray

from slipstream.errors import InvalidRequest, LimitExceeded, UnreadableVideo
from slipstream.frame_size import FrameSize
from slipstream.video.confine import confine, limit_cpu
from slipstream.video.container import Source
from slipstream.video.damage import LACKED_MEMORY
from slipstream.video.decode import sample_video
from slipstream.video.film_listing import LastListing, ListFilm
from slipstream.video.film_windows import plan_segments, plan_shots, sample_windows
from slipstream.video.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    DecodeLimits,
    DecodeRequest,
    Progress,
    Ready,
    Refused,
    Sampled,
    SampledVideo,
    SampledWindows,
    Started,
    encode_answer,
)
from slipstream.video.ranged_reader import RangedReader

# -- preloading -------------------------------------------------------------------------------------------------------

# Makes a process load, before it is confined, whatever decoding loads only when it comes to it.

_NOT_FOR_DECODING = ("av.__main__", "av.datasets")
_NUM_FRAMES = 4


def preload() -> None:
    """Decodes a small clip and refuses a file that is none. Takes some milliseconds."""
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.startswith(_NOT_FOR_DECODING):
            importlib.import_module(module.name)
    sample_video(io.BytesIO(small_clip()), _NUM_FRAMES - 1, DecodeLimits(max_frame_pixels=64))
    sample_video(io.BytesIO(small_clip()), 1, DecodeLimits(), size=FrameSize(8, 8))
    plan_segments(io.BytesIO(small_clip()), 1.0, DecodeLimits())
    plan_shots(io.BytesIO(small_clip()), (0.0, 1.0), 0.0, DecodeLimits())
    with suppress(UnreadableVideo):
        sample_video(io.BytesIO(b"no video"), 1, DecodeLimits())


def small_clip() -> bytes:
    """Four small pictures, as a file."""
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


# -- child ------------------------------------------------------------------------------------------------------------

CPU_SLACK_S = 2
_LAST_FILM = LastListing()
"""One job is done at a time."""
NICENESS = 5
"""Decodes can wait: a gateway that decides, and models on the CPU, go before them."""


def main(descriptor: int, memory_bytes: int, cpu_s: int, threads: int, parent_pid: int) -> None:
    """Serves until the parent hangs up."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends its decoders; a terminal or a supervisor does not
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    preload()
    with socket.socket(fileno=descriptor) as connection:
        confined = confine(memory_bytes, cpu_s, threads, parent_pid)
        connection.send(encode_answer(Ready(confined)))
        gc.freeze()
        while True:
            message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
            if not message:
                return
            connection.send(encode_answer(Started()))
            answer = _serve(connection, DecodeRequest.decode(message), *descriptors)
            gc.collect()  # a traceback may still hold the memory of the frames
            connection.send(encode_answer(answer))


def _serve(connection: socket.socket, request: DecodeRequest, video_descriptor: int, frames_descriptor: int) -> Answer:
    limit_cpu(math.ceil(request.limits.timeout_s * request.limits.decoder_threads) + CPU_SLACK_S)
    with _source(video_descriptor) as source, os.fdopen(frames_descriptor, "r+b") as frames:
        try:
            return _answer(connection, source, request, frames.fileno())
        except (InvalidRequest, LimitExceeded, UnreadableVideo) as error:
            return Refused(_kind(error), str(error))
        except MemoryError:
            return Refused(LimitExceeded.__name__, LACKED_MEMORY)


def _source(descriptor: int) -> Source:
    """A file, or a socket to whoever has it. It cannot be asked by `fstat`, which the filter of calls denies."""
    try:
        os.lseek(descriptor, 0, os.SEEK_CUR)
    except OSError:
        return RangedReader(descriptor)
    return os.fdopen(descriptor, "rb")


def _answer(connection: socket.socket, source: Source, request: DecodeRequest, frames: int) -> Answer:
    listed = partial(_LAST_FILM.of, request.film)
    if request.cut is not None and request.windows:
        return plan_shots(source, request.windows[0], request.cut, request.limits, listed=listed)
    if request.cut is not None:
        return plan_segments(source, request.cut, request.limits, listed=listed)
    if request.windows:
        return _sample_windows(connection, source, request, listed, frames)
    return _sampled(_sample(connection, source, request, frames))


def _kind(error: Exception) -> str:
    kinds = (UnreadableVideo, LimitExceeded, InvalidRequest)
    return next(kind.__name__ for kind in kinds if isinstance(error, kind))


def _sample(connection: socket.socket, source: Source, request: DecodeRequest, frames: int) -> SampledVideo:
    memory = mmap.mmap(frames, request.frames_bytes)

    def allocate(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        return np.frombuffer(memory, dtype=np.uint8, count=math.prod(shape)).reshape(shape)

    def progress(done: int, total: int) -> None:
        connection.send(encode_answer(Progress(done, total)))

    return sample_video(
        source,
        request.num_frames,
        request.limits,
        fps=request.fps,
        on_progress=progress,
        allocate=allocate,
        size=request.size,
    )


def _sample_windows(
    connection: socket.socket, source: Source, request: DecodeRequest, listed: ListFilm, frames: int
) -> SampledWindows:
    memory = mmap.mmap(frames, request.frames_bytes)

    def allocate(window: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        place = window * request.window_bytes
        return np.frombuffer(memory, dtype=np.uint8, count=math.prod(shape), offset=place).reshape(shape)

    def progress(done: int, total: int) -> None:
        connection.send(encode_answer(Progress(done, total)))

    windows = sample_windows(
        source,
        request.num_frames,
        request.windows,
        request.limits,
        fps=request.fps,
        listed=listed,
        on_progress=progress,
        allocate=allocate,
        size=request.size,
    )
    return SampledWindows(
        tuple(
            _sampled(window) if isinstance(window, SampledVideo) else Refused(_kind(window), str(window))
            for window in windows
        )
    )


def _sampled(video: SampledVideo) -> Sampled:
    n, height, width, _ = video.frames.shape
    return Sampled(
        (n, height, width),
        video.timestamps_s,
        video.duration_s,
        video.source_width,
        video.source_height,
        video.codec,
        video.rotation,
        video.warnings,
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
