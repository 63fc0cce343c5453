"""Pictures as a video: the decoder sees each of them, and what is no picture is refused by its number."""

import io
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.frames import exif_orientation, frame_of, jpeg_size, write_avi
from slipstream.services.front.json_body import Window
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits
from tests.front.conftest import jpeg, png, webp

MIB = 1024**2


def windows(pictures: list[bytes]) -> list[Window]:
    spool, found = io.BytesIO(), []
    for picture in pictures:
        start = spool.tell()
        spool.write(picture)
        found.append(Window(spool, start, spool.tell()))
    return found


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("picture", [jpeg, png, webp])
def test_the_decoder_sees_them(picture: Callable[..., bytes], count: int) -> None:
    output = io.BytesIO()
    write_avi(windows([picture(30 * n, (65, 47)) for n in range(count)]), 4.0, output, "video")
    video = sample_video(io.BytesIO(output.getvalue()), count, DecodeLimits())
    shades = [int(frame.mean()) for frame in video.frames]
    assert all(abs(shade - 30 * n) < 4 for n, shade in enumerate(shades)) and not video.warnings
    assert video.timestamps_s == tuple(n / 4 for n in range(count))
    assert video.frames.shape[1:3] == (47, 65)


def test_every_kind_of_png() -> None:
    modes = ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"]
    output = io.BytesIO()
    write_avi(windows([png(255, mode=mode) for mode in modes]), 1.0, output, "video")
    video = sample_video(io.BytesIO(output.getvalue()), len(modes), DecodeLimits())
    assert len(video.frames) == len(modes) and not video.warnings
    shades = [int(frame.min()) for frame in video.frames]
    assert shades == [255] * 6 + [1], "the last says 255 of 65,535"


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_webp_that_is_upright_may_say_so(order: str) -> None:
    write_avi(windows([turned(1, order)]), 1.0, io.BytesIO(), "video")


@given(st.binary(max_size=40), st.sampled_from([b"", b"Exif\0\0", b"II*\0", b"MM\0*\0\0\0\x08"]))
def test_whatever_stands_in_exif_is_read(exif: bytes, head: bytes) -> None:
    assert 0 <= exif_orientation(head + exif) <= 65_535


@pytest.mark.parametrize("count", [1, 3])
def test_a_webp_is_what_vp8_has_written_in_it(count: int) -> None:
    """Its metadata and what it says of transparency stay behind."""
    image, written = Image.new("RGBA", (64, 48), (90, 90, 90, 128)), io.BytesIO()
    image.save(written, "WEBP", exif=b"Exif\0\0" + bytes(99), icc_profile=bytes(99))
    assert b"ALPH" in written.getvalue() and b"ICCP" in written.getvalue()
    output = io.BytesIO()
    write_avi(windows([written.getvalue()] * count), 1.0, output, "video")
    assert not any(name in output.getvalue() for name in (b"ALPH", b"ICCP", b"WEBP"))
    video = sample_video(io.BytesIO(output.getvalue()), count, DecodeLimits(formats="modern"))
    assert [abs(int(frame.mean()) - 90) < 4 for frame in video.frames] == [True] * count and not video.warnings


def other_webp(**how: Any) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(written, "WEBP", **how)
    return written.getvalue()


def turned(orientation: int, order: str = "<") -> bytes:
    entries = (0x0110, 2, 2, ord("a"), 0), (0x0112, 3, 1, orientation, 0)
    tiff = struct.pack(f"{order}IH", 8, len(entries)) + b"".join(
        struct.pack(f"{order}HHIHH", *each) for each in entries
    )
    return other_webp(exif=b"Exif\0\0" + {"<": b"II*\0", ">": b"MM\0*"}[order] + tiff + bytes(4))


ANIMATED = other_webp(save_all=True, append_images=[Image.new("RGB", (64, 48), "blue")])


@pytest.mark.parametrize(
    ("picture", "reason"),
    [
        (other_webp(lossless=True), "a lossless WebP; send PNGs"),
        (ANIMATED, "an animated WebP; send PNGs"),
        (turned(6), "shown turned, as its EXIF says"),
        (turned(3, ">"), "shown turned, as its EXIF says"),
        (webp(1)[:12], "without a picture"),
        (webp(1)[:29], "without a picture"),
        (webp(1)[:23] + bytes(7), "without a picture"),
        (b"RIFF\4\0\0\0WEBP" + b"EXIF\0\0\0\0" * 5000 + webp(1)[12:], "without a picture"),
    ],
)
def test_webps_that_are_no_frames(picture: bytes, reason: str) -> None:
    with pytest.raises(ApiError, match=f"picture 1 cannot be a frame: .*{reason}") as refused:
        write_avi(windows([webp(1), picture]), 2.0, io.BytesIO(), "video")
    assert refused.value.param == "video" and refused.value.code == "unreadable_media"


@pytest.mark.parametrize(
    "pictures",
    [
        [b"GIF89a"],
        [b""],
        [jpeg(1), b"\xff\xd8\xff"],
        [jpeg(1), jpeg(1, (32, 32))],
        [jpeg(1)[:100]],
        [png(1)[:20]],
        [png(1)[:16] + bytes(8) + png(1)[24:]],
        [png(1)[:16] + b"\xff" * 8 + png(1)[24:]],
        [png(1), jpeg(1)],
        [webp(1), jpeg(1)],
        [webp(1), webp(1, (32, 32))],
    ],
)
def test_what_is_no_picture_of_that_size(pictures: list[bytes]) -> None:
    with pytest.raises(ApiError) as refused:
        write_avi(windows(pictures), 2.0, io.BytesIO(), "video")
    assert refused.value.param == "video" and refused.value.code == "unreadable_media"


def test_a_large_picture_is_not_held_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "spool").open("w+b") as spool, (tmp_path / "video").open("w+b") as output:
        spool.write(jpeg(5) + bytes(64 * MIB))
        picture = Window(spool, 0, spool.tell())
        tracemalloc.start()
        write_avi([picture], 2.0, output, "video")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 * MIB and output.tell() > 64 * MIB


def test_sizes() -> None:
    picture, metadata = jpeg(5, (123, 45)), b"\xff\xe1\xff\xff" + bytes(0xFFFF - 2)
    for whole in (picture, picture[:2] + 3 * metadata + picture[2:]):
        assert frame_of(*windows([whole])).kind == (b"MJPG", 123, 45)
    assert frame_of(*windows([png(5, (123, 45))])).kind == (b"MPNG", 123, 45)
    assert frame_of(*windows([webp(5, (123, 45))])).kind == (b"VP80", 123, 45)
    heads = (b"", b"\xff\xd8", b"\xff\xd8" + b"\xff" * 100, b"\xff\xd8\xff\xe0\x00\x02" * 50, b"\xff\xd8" + metadata)
    for number, _ in enumerate(heads):
        with pytest.raises(ValueError, match="JPEG"):
            jpeg_size(windows([*heads, picture])[number])


def test_behind_a_window_there_is_nothing_to_read() -> None:
    first, _ = windows([b"abc", b"another's"])
    assert [first.seek(at) and first.read(9) for at in (2, 3, 4)] == [b"c", b"", b""]
