"""Makes small real video files in memory, each frame of which shows its own index, and breaks them on purpose."""

import io
import itertools
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.stream import Disposition
from av.video.stream import VideoStream
from numpy.typing import NDArray

INDEX_BITS = 16
_COLUMNS = 8
_DARK, _BRIGHT = 16, 235
_GREYS = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 4, axis=1) | np.array([255, 0, 0, 0], dtype=np.uint8)
"""A palette, in the order alpha, red, green, blue."""


@dataclass(frozen=True)
class ClipSpec:
    """What to encode. Frame `i` shows the number `i` as a pattern of dark and bright cells, 8 across and 2 down."""

    times_ms: Sequence[int]
    """Presentation time of each frame."""
    container: str = "mp4"
    codec: str = "libx264"
    pix_fmt: str = "yuv420p"
    width: int = 64
    height: int = 48
    codec_options: dict[str, str] = field(default_factory=dict)
    container_options: dict[str, str] = field(default_factory=dict)


def even_times_ms(num_frames: int, gap_ms: int = 40) -> list[int]:
    """Times of a clip with a constant frame rate."""
    return [i * gap_ms for i in range(num_frames)]


def make_clip(spec: ClipSpec) -> bytes:
    """The encoded file."""
    with tempfile.NamedTemporaryFile() as target:  # by name: "faststart" opens it a second time
        with _same_priority():
            _encode(spec, target.name)
        return target.read()


@contextmanager
def _same_priority() -> Iterator[None]:
    """SVT-AV1, when root runs it, gives real-time priority to the thread that opens it: for good, and to all processes
    that this thread starts. Two such test runners starve everything else."""
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)


def _encode(spec: ClipSpec, path: str) -> None:
    with av.open(path, "w", format=spec.container, options=spec.container_options) as output:
        gap_ms = spec.times_ms[1] - spec.times_ms[0] if len(spec.times_ms) > 1 else 40
        stream = output.add_stream(spec.codec, rate=Fraction(1000, gap_ms), options=spec.codec_options)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = spec.width, spec.height, spec.pix_fmt
        exact_ms = all(time_ms % gap_ms == 0 for time_ms in spec.times_ms)
        stream.codec_context.time_base = Fraction(gap_ms, 1000) if exact_ms else Fraction(1, 1000)
        for index, time_ms in enumerate(spec.times_ms):
            frame = _frame(index_picture(index, spec.width, spec.height), spec.pix_fmt)
            frame.time_base = Fraction(1, 1000)
            frame.pts = time_ms
            output.mux(stream.encode(frame))
        output.mux(stream.encode())


def _frame(picture: NDArray[np.uint8], pix_fmt: str) -> av.VideoFrame:
    """With a palette of greys where there is to be one: encoders convert to anything else themselves."""
    if pix_fmt != "pal8":
        return av.VideoFrame.from_ndarray(picture, format="rgb24")
    palette: Any = picture[..., 0], _GREYS
    return av.VideoFrame.from_ndarray(palette, format="pal8")


def index_picture(index: int, width: int, height: int) -> NDArray[np.uint8]:
    """[height, width, 3] that shows `index`."""
    rows, columns = np.mgrid[0:height, 0:width]
    cell = rows * 2 // height * _COLUMNS + columns * _COLUMNS // width
    bright = (index >> cell) & 1
    return np.repeat(np.where(bright, _BRIGHT, _DARK).astype(np.uint8)[..., None], 3, axis=2)


def read_index(picture: NDArray[np.uint8]) -> int:
    """The number that a [height, width, 3] picture shows."""
    height, width = picture.shape[:2]
    index = 0
    for bit in range(INDEX_BITS):
        row = (2 * (bit // _COLUMNS) + 1) * height // 4
        column = (2 * (bit % _COLUMNS) + 1) * width // (2 * _COLUMNS)
        index |= int(picture[row, column].mean() > (_DARK + _BRIGHT) / 2) << bit
    return index


def expected_indices(times_ms: Sequence[int], num_frames: int) -> list[int]:
    """The distinct frames nearest at or before evenly spaced times, found the slow and obvious way, in integers."""
    start_ms = times_ms[0]
    gaps = sorted(b - a for a, b in itertools.pairwise(times_ms))
    median_gap = Fraction(gaps[(len(gaps) - 1) // 2] + gaps[len(gaps) // 2], 2) if gaps else Fraction(0)
    span = times_ms[-1] - start_ms + median_gap
    found: list[int] = []
    for i in range(num_frames):
        wanted = start_ms + span * i / num_frames
        index = max(k for k, time_ms in enumerate(times_ms) if time_ms <= wanted)
        if index not in found:
            found.append(index)
    return found


def make_bomb(width: int, height: int, container: str) -> bytes:
    """A small file with one uniform picture of any size."""
    target = io.BytesIO()
    with av.open(target, "w", format=container) as output:
        stream = output.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuvj420p"
        output.mux(stream.encode(av.VideoFrame(width, height, "yuvj420p")))
        output.mux(stream.encode())
    return target.getvalue()


def make_sound(*, has_cover: bool = False) -> bytes:
    """An MP4 with sound only, and a picture of its own if wanted."""
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=16000, layout="mono")
        if has_cover:
            cover = output.add_stream("mjpeg", rate=1, width=16, height=16, pix_fmt="yuvj420p")
            cover.disposition = Disposition.attached_pic
            output.mux(cover.encode(av.VideoFrame(16, 16, "yuvj420p")))
            output.mux(cover.encode())
        for start in range(0, 16000, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, start
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return target.getvalue()


def rotated_mp4(mp4: bytes, clockwise: int) -> bytes:
    """The same file with a track matrix that asks players to turn it clockwise by 0, 90, 180 or 270 degrees."""
    cos, sin = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[clockwise]
    return turned_mp4(mp4, (cos, sin, -sin, cos))


def turned_mp4(mp4: bytes, places: tuple[int, int, int, int]) -> bytes:
    """The same file with a track matrix of these whole numbers: where a step to the right goes, then one down."""
    a, b, c, d = places
    matrix = b"".join(
        value.to_bytes(4, "big", signed=True) for value in (a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    )
    start = mp4.index(b"tkhd") + 4 + 40
    return mp4[:start] + matrix + mp4[start + len(matrix) :]


def flipped_bytes(mp4: bytes, count: int, seed: int) -> bytes:
    """The same MP4 with `count` random bytes of its media data changed; the index stays whole."""
    start = mp4.index(b"mdat") + 4
    end = start + int.from_bytes(mp4[start - 8 : start - 4], "big") - 8
    damaged = bytearray(mp4)
    chance = random.Random(seed)
    for _ in range(count):
        damaged[chance.randrange(start, end)] = chance.randrange(256)
    return bytes(damaged)
