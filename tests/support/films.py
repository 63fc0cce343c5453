"""Films with known times: each frame says when it is shown, each scene has colours of its own."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import av
import numpy as np
from av.video.stream import VideoStream
from numpy.typing import NDArray

CELLS = 4


@dataclass(frozen=True)
class Film:
    """A file, and what is true of it."""

    data: bytes
    times_s: tuple[float, ...]
    """[n] when frames are shown, by the container's clock."""
    scenes_s: tuple[float, ...]
    """When scenes begin, by the same clock."""


def frame_times(scene_frames: Sequence[int], step_s: float = 0.125, start_s: float = 0.0) -> list[float]:
    """Of a film with a constant rate whose scenes have so many frames."""
    return [start_s + number * step_s for number in range(sum(scene_frames))]


def make_film(
    scene_frames: Sequence[int],
    times_s: Sequence[float],
    *,
    seed: int = 0,
    codec: str = "libx264",
    container: str = "matroska",
    size: tuple[int, int] = (64, 48),
    key_every: int = 12,
    codec_options: Mapping[str, str] | None = None,
) -> Film:
    """Scenes of so many frames, shown at these times in whole milliseconds. `size`: width and height."""
    pictures = [picture for number, n in enumerate(scene_frames) for picture in scene(seed + number, n, size)]
    firsts = [0, *accumulate(scene_frames)][:-1]
    how: dict[str, Any] = {"codec": codec, "container": container, "codec_options": codec_options}
    data = write_film(pictures, times_s, key_every=key_every, **how)
    return Film(data, tuple(times_s), tuple(times_s[first] for first in firsts))


def scene(seed: int, num_frames: int, size: tuple[int, int] = (64, 48)) -> list[NDArray[np.uint8]]:
    """RGB pictures of tiles that change slowly."""
    width, height = size
    chance = np.random.default_rng(seed)
    first = chance.uniform(0, 255, (CELLS, CELLS, 3))
    first[..., seed % 3] = 250 - 240 * (seed % 2)
    last = np.clip(first + chance.uniform(-20, 20, first.shape), 0, 255)
    return [
        ((1 - share) * first + share * last)
        .astype(np.uint8)
        .repeat(height // CELLS, axis=0)
        .repeat(width // CELLS, axis=1)
        for share in np.linspace(0, 1, num_frames)
    ]


def write_film(
    pictures: Sequence[NDArray[np.uint8]],
    times_s: Sequence[float],
    *,
    codec: str = "libx264",
    container: str = "matroska",
    key_every: int = 12,
    codec_options: Mapping[str, str] | None = None,
) -> bytes:
    """RGB pictures [height, width, 3] as a file; with "ffv1" they are decoded as they are."""
    tick = Fraction(1, 1000)
    output_file = io.BytesIO()
    with av.open(output_file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=Fraction(25), options=dict(codec_options or {}))
        assert isinstance(stream, VideoStream)
        height, width, _ = pictures[0].shape
        stream.width, stream.height = width, height
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        stream.codec_context.time_base = stream.time_base = tick
        stream.codec_context.gop_size = key_every
        for picture, time_s in zip(pictures, times_s, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round(time_s * 1000), tick
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return output_file.getvalue()


def packets_of(data: bytes) -> list[tuple[int, int]]:
    """Where the packets of a film lie in its file, and how long they are."""
    found, place = [], 0
    with av.open(io.BytesIO(data), "r") as container:
        for packet in container.demux(video=0):
            if packet.size:
                place = data.find(bytes(packet), place)
                assert place > 0
                found.append((place, packet.size))
                place += packet.size
    return found


def torn(data: bytes, packets: Iterable[int]) -> bytes:
    """The film with nothing but zeros in these packets: they have times and no content."""
    damaged, places = bytearray(data), packets_of(data)
    for place, size in (places[number] for number in packets):
        damaged[place : place + size] = bytes(size)
    return bytes(damaged)


def make_noise_film(num_frames: int, *, key_every: int = 12, size: tuple[int, int] = (128, 96)) -> bytes:
    """An MP4 with its index, of 25 frames a second that cannot be compressed, so that it has many bytes."""
    chance = np.random.default_rng(0)
    pictures = [chance.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8) for _ in range(8)]
    output_file = io.BytesIO()
    with av.open(output_file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=Fraction(25), options={"preset": "ultrafast", "qp": "20"})
        assert isinstance(stream, VideoStream)
        stream.width, stream.height = size
        stream.pix_fmt, stream.codec_context.gop_size = "yuv420p", key_every
        for number in range(num_frames):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pictures[number % 8], format="rgb24")))
        output.mux(stream.encode())
    return output_file.getvalue()


def make_paced_clip(num_frames: int, size: tuple[int, int], bits_per_s: int = 5_000_000) -> bytes:
    """An MP4 of 24 frames a second with so many bits, a key frame every two seconds: coarse tiles that move."""
    width, height = size
    chance, output_file = np.random.default_rng(0), io.BytesIO()
    tiles = chance.integers(0, 255, (height // 16 + 8, width // 16 + 8, 3), dtype=np.uint8)
    scenery = np.kron(tiles, np.ones((16, 16, 1), np.uint8))
    options = {"preset": "ultrafast", "maxrate": str(bits_per_s), "bufsize": str(2 * bits_per_s)}
    with av.open(output_file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=Fraction(24), options=options)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.bit_rate = width, height, bits_per_s
        stream.pix_fmt, stream.codec_context.gop_size = "yuv420p", 48
        for number in range(num_frames):
            at = number % 100
            picture = scenery[at : at + height, at : at + width].copy()
            picture[::4] ^= np.uint8(number % 7 * 8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode())
    return output_file.getvalue()
