"""Interlaced, mirrored, anamorphic and HDR pictures: as a screen shows them, also in a confined decoder."""

import asyncio
import io
import struct
import tempfile
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from av.video.stream import VideoStream
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.frame_size import FrameSize
from slipstream.video.decode import sample_video
from slipstream.video.film_windows import sample_windows
from slipstream.video.messages import DecodeLimits, SampledVideo
from slipstream.video.pictures import MOST_STRETCH, WHITE_NITS, shown_size
from slipstream.video.pool import DecodePool
from tests.support.media import index_picture, read_index, turned_mp4
from tests.support.written_clips import make_avi

WIDTH, HEIGHT = 64, 48
PQ, HLG, BT2020, BT709 = 16, 18, 9, 1
INTERLACED = {"flags": "+ildct+ilme"}
SHARP = {"libx264": {"qp": "1"}, "mpeg2video": {"qmin": "1", "qmax": "1", "b": "20M"}}
Picture = Callable[[int], NDArray[np.uint8]]


def encoded(
    codec: str,
    picture: Picture,
    container: str = "matroska",
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    aspect: Fraction | None = None,
    colours: tuple[int, int] | None = None,
) -> bytes:
    """A clip of 6 pictures; `colours`: transfer function and primaries, whose codes the pictures then are."""
    target = io.BytesIO()
    with av.open(target, "w", format=container) as output:
        stream = output.add_stream(codec, rate=25, options=options or {})
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, pix_fmt
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        for index in range(6):
            frame = av.VideoFrame.from_ndarray(picture(index), format="rgb24")
            if colours is not None:
                frame = frame.reformat(format=pix_fmt, dst_colorspace="bt2020")
                for tagged in (stream.codec_context, frame):
                    tagged.color_trc, tagged.color_primaries = colours
                    tagged.colorspace, tagged.color_range = BT2020, 1
            frame.pts = index
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return target.getvalue()


def sample(data: bytes, size: FrameSize | None = None) -> SampledVideo:
    return sample_video(io.BytesIO(data), 3, DecodeLimits(), **({"size": size} if size else {}))


def confined(data: bytes) -> NDArray[np.uint8]:
    """The frames of a decoder process."""

    async def decode() -> NDArray[np.uint8]:
        pool = DecodePool(1, DecodeLimits())
        try:
            with tempfile.TemporaryFile() as file:
                file.write(data)
                file.flush()
                return np.array((await pool.sample(file.fileno(), 3)).frames)
        finally:
            pool.close()

    return asyncio.run(decode())


# -- interlaced -------------------------------------------------------------------------------------------------------


def two_moments(index: int) -> NDArray[np.uint8]:
    """The upper field shows the index, the lower one its complement."""
    picture = index_picture(index, WIDTH, HEIGHT)
    picture[1::2] = index_picture(~index & 0xFFFF, WIDTH, HEIGHT)[1::2]
    return picture


@pytest.mark.parametrize(("codec", "container"), [("mpeg2video", "mpegts"), ("libx264", "mp4")])
def test_interlaced_pictures_are_of_one_moment(codec: str, container: str) -> None:
    data = encoded(codec, two_moments, container, options=INTERLACED | SHARP[codec])
    video = sample(data)
    assert video.frames.shape == (3, HEIGHT, WIDTH, 3) and (video.source_width, video.source_height) == (WIDTH, HEIGHT)
    assert [read_index(frame) for frame in video.frames] == [0, 2, 4]
    lines = video.frames[1, HEIGHT // 4 - 2 : HEIGHT // 4 + 2].astype(int)
    assert abs(np.diff(lines, axis=0)).max() < 40, "no comb is left"
    np.testing.assert_array_equal(confined(data), video.frames)


def test_the_same_lines_are_left_alone_where_nothing_says_that_they_are_interlaced() -> None:
    video = sample(encoded("libx264", two_moments, "mp4", options=SHARP["libx264"]))
    lines = video.frames[1, HEIGHT // 4 - 2 : HEIGHT // 4 + 2].astype(int)
    assert abs(np.diff(lines, axis=0)).max() > 150


# -- orientation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "rotation", "upright"),
    [
        ((-1, 0, 0, 1), 180, lambda stored: stored[:, ::-1]),
        ((1, 0, 0, -1), 0, lambda stored: stored[::-1]),
        ((0, 1, 1, 0), 90, lambda stored: stored.swapaxes(0, 1)),
        ((0, -1, -1, 0), 270, lambda stored: stored[::-1, ::-1].swapaxes(0, 1)),
        ((0, 0, 0, 0), 0, lambda stored: stored),
        ((0, 2, 0, 1), 0, lambda stored: stored),
    ],
)
def test_mirrored_pictures_are_shown_as_players_show_them(
    places: tuple[int, int, int, int], rotation: int, upright: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
) -> None:
    """The last two matrices say nothing."""
    stored = encoded("libx264", lambda index: index_picture(0x1235 + index, WIDTH, HEIGHT), "mp4")
    turned = turned_mp4(stored, places)
    video = sample(turned)
    assert video.rotation == rotation
    for frame, wanted in zip(video.frames, sample(stored).frames, strict=True):
        np.testing.assert_array_equal(frame, upright(wanted))
    np.testing.assert_array_equal(confined(turned), video.frames)


def with_exif(jpeg: bytes, orientation: int) -> bytes:
    """The same picture as a camera has it, which says how to turn it."""
    exif = b"Exif\0\0II*\0" + struct.pack("<IHHHIII", 8, 1, 0x0112, 3, 1, orientation, 0)
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:]


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (1, lambda stored: stored),
        (2, lambda stored: stored[:, ::-1]),
        (3, lambda stored: stored[::-1, ::-1]),
        (4, lambda stored: stored[::-1]),
        (5, lambda stored: stored.swapaxes(0, 1)),
        (6, lambda stored: stored[::-1].swapaxes(0, 1)),
        (7, lambda stored: stored[::-1, ::-1].swapaxes(0, 1)),
        (8, lambda stored: stored[:, ::-1].swapaxes(0, 1)),
    ],
)
def test_photographs_are_upright_as_they_say(
    orientation: int, upright: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
) -> None:
    """PyAV has no name for the EXIF that comes with such a frame."""
    stored = encoded("mjpeg", lambda index: index_picture(0x1235 + index, WIDTH, HEIGHT), "avi", "yuvj420p")
    with av.open(io.BytesIO(stored)) as opened:
        pictures = [bytes(packet) for packet in opened.demux(video=0) if packet.size]
    turned = make_avi("MJPG", [with_exif(picture, orientation) for picture in pictures])
    for frame, wanted in zip(sample(turned).frames, sample(stored).frames, strict=True):
        np.testing.assert_array_equal(frame, upright(wanted))
    if orientation == 5:
        np.testing.assert_array_equal(confined(turned), sample(turned).frames)


# -- shape ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
@pytest.mark.parametrize(
    ("aspect", "shown"),
    [(Fraction(16, 11), (93, 48)), (Fraction(8, 9), (64, 54)), (Fraction(1), (64, 48)), (Fraction(1, 4), (64, 192))],
)
def test_pixels_that_are_not_square_are_stretched(container: str, aspect: Fraction, shown: tuple[int, int]) -> None:
    picture: Picture = lambda index: index_picture(index, WIDTH, HEIGHT)  # noqa: E731
    video = sample(encoded("libx264", picture, container, aspect=aspect))
    assert video.frames.shape == (3, shown[1], shown[0], 3)
    assert (video.source_width, video.source_height) == (WIDTH, HEIGHT)
    assert [read_index(frame) for frame in video.frames] == [0, 2, 4]


def test_segments_are_stretched_as_clips_are() -> None:
    picture: Picture = lambda index: index_picture(index, WIDTH, HEIGHT)  # noqa: E731
    data = encoded("libx264", picture, aspect=Fraction(16, 11))
    first, second = sample_windows(io.BytesIO(data), 3, [(0.0, 0.12), (0.12, 0.24)], DecodeLimits())
    assert isinstance(first, SampledVideo) and isinstance(second, SampledVideo)
    assert first.frames.shape == second.frames.shape == (3, HEIGHT, 93, 3)
    assert [read_index(frame) for video in (first, second) for frame in video.frames] == list(range(6))


def test_a_model_that_wants_a_size_gets_it_all_the_same() -> None:
    picture: Picture = lambda index: index_picture(index, WIDTH, HEIGHT)  # noqa: E731
    video = sample(encoded("libx264", picture, aspect=Fraction(2)), FrameSize(40, 80))
    assert video.frames.shape == (3, 40, 80, 3) and [read_index(frame) for frame in video.frames] == [0, 2, 4]


@given(st.integers(1, 5000), st.integers(1, 5000), st.fractions(0, 10, max_denominator=1000) | st.none())
def test_one_side_grows_and_no_more_than_is_believed(width: int, height: int, aspect: Fraction | None) -> None:
    shown_width, shown_height = shown_size(width, height, aspect)
    assert width <= shown_width <= MOST_STRETCH * width and height <= shown_height <= MOST_STRETCH * height
    assert shown_width == width or shown_height == height
    if not aspect or aspect > MOST_STRETCH or aspect < Fraction(1, MOST_STRETCH) or aspect == 1:
        assert (shown_width, shown_height) == (width, height)
    elif abs(aspect - 1) > 0.02:
        stretch = aspect if aspect > 1 else 1 / aspect
        assert abs(max(shown_width / width, shown_height / height) - stretch) * min(width, height) <= 1


# -- colours ----------------------------------------------------------------------------------------------------------


def pq_code(nits: float) -> float:
    """ST 2084's code, 0 to 1, as the standard writes it."""
    power = (nits / 10_000) ** 0.1593017578125
    return ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375


def hlg_code(light: float) -> float:
    """BT.2100's code of scene light, 0 to 1."""
    return (3 * light) ** 0.5 if light <= 1 / 12 else 0.17883277 * np.log(12 * light - 0.28466892) + 0.55991073


def shades(codes: list[float], colour: tuple[int, int, int] = (1, 1, 1)) -> Picture:
    """Columns of these codes."""
    columns = np.repeat(np.array(codes) * 255, WIDTH // len(codes)).round().astype(np.uint8)
    picture = np.broadcast_to(columns[None, :, None] * np.array(colour, dtype=np.uint8), (HEIGHT, len(columns), 3))
    return lambda index: np.ascontiguousarray(picture)


def hdr_clip(picture: Picture, transfer: int, primaries: int = BT2020) -> bytes:
    return encoded("ffv1", picture, pix_fmt="yuv444p10le", colours=(transfer, primaries))


def columns(data: bytes, count: int) -> NDArray[np.uint8]:
    """[count, 3] of the first frame."""
    width = WIDTH // count
    found: NDArray[np.uint8] = sample(data).frames[0, HEIGHT // 2, width // 2 :: width]
    return found


@pytest.mark.parametrize(
    ("transfer", "codes"),
    [
        (PQ, [pq_code(nits) for nits in (5, 50, WHITE_NITS, 1000)]),
        (HLG, [hlg_code(light) for light in (0.012, 0.082, 0.265, 1.0)]),
    ],
)
def test_hdr_becomes_sdr_with_its_shades_in_order(transfer: int, codes: list[float]) -> None:
    found = columns(hdr_clip(shades(codes), transfer), 4).astype(int)
    assert (np.ptp(found, axis=1) <= 3).all(), "grey stays grey"
    low, middle, white, bright = found[:, 1]
    assert low < middle < white < bright <= 255
    # 5 and 50 nits are 0.025 and 0.246 of white, and sRGB's codes for that are 43 and 136; white is 0.75 of SDR's
    assert abs(low - 43) <= 6 and abs(middle - 136) <= 6 and abs(white - 225) <= 6 and bright >= 245


def test_wide_colours_are_brought_into_the_narrow_gamut() -> None:
    codes = [pq_code(100)] * 2
    for transfer in (PQ, HLG):
        wide = columns(hdr_clip(shades(codes, (1, 0, 0)), transfer, BT2020), 2)[0].astype(int)
        narrow = columns(hdr_clip(shades(codes, (1, 0, 0)), transfer, BT709), 2)[0].astype(int)
        assert wide[0] >= narrow[0] and max(wide[1:]) <= 8, "a red that BT.709 lacks is its own brightest red"


def test_hdr_in_a_confined_decoder() -> None:
    data = hdr_clip(shades([pq_code(100), pq_code(500)]), PQ)
    np.testing.assert_array_equal(confined(data), sample(data).frames)


def test_sdr_of_many_bits_is_not_mapped() -> None:
    grey: Any = encoded("ffv1", shades([0.5]), pix_fmt="yuv444p10le", colours=(BT709, BT709))
    assert abs(int(sample(grey).frames[0, 0, 0, 1]) - 128) <= 2
