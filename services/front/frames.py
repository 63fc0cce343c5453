"""JPEG, PNG or WebP pictures as the frames of a video, byte by byte as they are: an AVI of Motion JPEG, PNG or VP8.
Nothing is decoded here, so pictures of strangers are parsed by the gateway's confined process alone."""

import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Literal

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.json_body import Media, Window

MAX_AVI_BYTES = 2**31
_PNG_HEAD = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"
_MAX_SIDE = 65_535
_SIZES = {0xC0, 0xC1, 0xC2}
"""JPEG markers that tell the size: baseline, extended, progressive."""
_MAX_SEGMENTS = 1000
"""Looked at in search of that one: each holds up to 64 KiB of metadata. Of a WebP's chunks as many."""
_MAX_EXIF_BYTES = 64 * 1024
"""Looked at in search of how a WebP is turned, which stands at its beginning; a JPEG's holds no more."""
_ORDERS: Mapping[str, Literal["little", "big"]] = {"<": "little", ">": "big"}
_HAS_INDEX, _KEY_FRAME = 0x10, 0x10


@dataclass(frozen=True)
class Frame:
    """A picture as an AVI holds it."""

    codec: bytes
    """FourCC."""
    width: int
    height: int
    data: Window
    """The picture; of a WebP what VP8 has written in it, without what it says of transparency."""

    @property
    def kind(self) -> tuple[bytes, int, int]:
        """What the frames of one video have in common."""
        return self.codec, self.width, self.height


def frame_of(picture: Window) -> Frame:
    """A JPEG, PNG or WebP as a frame. Raises ValueError for what is none of them."""
    picture.seek(0)
    head = picture.read(len(_PNG_HEAD) + 8)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp(picture)
    if not head.startswith(_PNG_HEAD):
        return Frame(b"MJPG", *jpeg_size(picture), picture)
    width, height = struct.unpack(">II", head[len(_PNG_HEAD) :]) if len(head) == len(_PNG_HEAD) + 8 else (0, 0)
    if not (0 < width <= _MAX_SIDE and 0 < height <= _MAX_SIDE):
        raise ValueError(f"it is a PNG without a size of at most {_MAX_SIDE} at its beginning")
    return Frame(b"MPNG", width, height, picture)


def _webp(picture: Window) -> Frame:
    """By its chunks. AVI has no name for those that VP8 has not written, and cannot say how to turn a picture."""
    found: Frame | None = None
    for name, start, length in _webp_chunks(picture):
        if name in (b"VP8L", b"ANIM"):
            raise ValueError(f"it is {'a lossless' if name == b'VP8L' else 'an animated'} WebP; send PNGs instead")
        picture.seek(start)
        if name == b"EXIF" and exif_orientation(picture.read(min(length, _MAX_EXIF_BYTES))) > 1:
            raise ValueError("it is a WebP that is shown turned, as its EXIF says; turn it, or send a JPEG instead")
        if name == b"VP8 " and found is None:
            head = picture.read(10)
            if len(head) < 10 or head[3:6] != b"\x9d\x01\x2a":
                break
            width, height = (side & 0x3FFF for side in struct.unpack("<HH", head[6:]))
            if not width or not height:
                break
            found = Frame(b"VP80", width, height, picture.part(start, start + length))
    if found is None:
        raise ValueError("it is a WebP without a picture at its beginning")
    return found


def _webp_chunks(picture: Window) -> Iterator[tuple[bytes, int, int]]:
    """Name, beginning and length of each."""
    position = 12
    for _ in range(_MAX_SEGMENTS):
        picture.seek(position)
        head = picture.read(8)
        if len(head) < 8:
            return
        length = int.from_bytes(head[4:], "little")
        yield head[:4], position + 8, length
        position += 8 + length + length % 2


def exif_orientation(exif: bytes) -> int:
    """How a picture is to be turned: 1 is not at all, or not said."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 1
    start = struct.unpack(f"{order}I", tiff[4:8])[0]
    for entry in range(start + 2, len(tiff) - 11, 12)[: int.from_bytes(tiff[start : start + 2], _ORDERS[order])]:
        tag, kind, count, value = struct.unpack(f"{order}HHIH", tiff[entry : entry + 10])
        if (tag, kind, count) == (0x0112, 3, 1):
            return int(value)
    return 1


def jpeg_size(picture: Window) -> tuple[int, int]:
    """Width and height, of which a JPEG tells behind its metadata. Raises ValueError for what is no JPEG."""
    picture.seek(0)
    if picture.read(2) != b"\xff\xd8":
        raise ValueError("it is neither JPEG nor PNG nor WebP; give a video as video_url")
    position = 2
    for _ in range(_MAX_SEGMENTS):
        picture.seek(position)
        head = picture.read(9)
        if len(head) < 9 or head[0] != 0xFF:
            break
        marker, length = head[1], int.from_bytes(head[2:4], "big")
        if marker in _SIZES:
            height, width = struct.unpack(">HH", head[5:9])
            if not width or not height:
                break
            return width, height
        position += 1 if marker == 0xFF else 2 + length
    raise ValueError("it is a JPEG without a size at its beginning")


def frame_windows(spool: IO[bytes], frames: Sequence[Media]) -> list[Window]:
    """The pictures of all media, of which one may hold several."""
    found = []
    for media in frames:
        for start, end in zip([media.start, *media.ends], media.ends, strict=False):
            found.append(Window(spool, start, end))
    return found


def write_avi(pictures: Sequence[Window], frames_per_second: float, output: IO[bytes], param: str) -> None:
    """Writes the video. Raises `ApiError` for pictures that are not JPEG, PNG or WebP, all of one kind and size."""
    frames = _alike(pictures, param)
    lengths = [frame.data.num_bytes for frame in frames]
    movi = 4 + sum(8 + length + length % 2 for length in lengths)
    header = _header(frames[0], frames_per_second, len(frames), max(lengths))
    index = b"".join(_index_entries(lengths))
    size = 4 + len(header) + 8 + movi + 8 + len(index)
    if size > MAX_AVI_BYTES:
        raise ApiError("the frames have more bytes than one video may", status=413, param=param, code="too_large")
    output.write(b"RIFF" + struct.pack("<I", size) + b"AVI " + header + b"LIST" + struct.pack("<I", movi) + b"movi")
    for frame, length in zip(frames, lengths, strict=True):
        output.write(b"00dc" + struct.pack("<I", length))
        frame.data.seek(0)
        shutil.copyfileobj(frame.data, output)
        output.write(b"\0" * (length % 2))
    output.write(b"idx1" + struct.pack("<I", len(index)) + index)


def _alike(pictures: Sequence[Window], param: str) -> list[Frame]:
    frames = []
    for index, picture in enumerate(pictures):
        try:
            frames.append(frame_of(picture))
        except ValueError as error:
            raise ApiError(
                f"picture {index} cannot be a frame: {error}", param=param, code="unreadable_media"
            ) from None
    if len({frame.kind for frame in frames}) > 1:
        raise ApiError(
            "the frames differ in size, or in what they are (JPEG, PNG, WebP); make them alike",
            param=param,
            code="unreadable_media",
        )
    return frames


def _index_entries(lengths: Sequence[int]) -> list[bytes]:
    entries, offset = [], 4
    for length in lengths:
        entries.append(b"00dc" + struct.pack("<III", _KEY_FRAME, offset, length))
        offset += 8 + length + length % 2
    return entries


def _header(first: Frame, rate: float, num_frames: int, largest: int) -> bytes:
    """The list `hdrl`: an `avih`, and one stream with its `strh` and `strf`."""
    codec, width, height = first.kind
    scale, per_scale = 1000, max(round(rate * 1000), 1)
    main = struct.pack(
        "<14I", round(1e6 / rate), 0, 0, _HAS_INDEX, num_frames, 0, 1, largest, width, height, 0, 0, 0, 0
    )
    stream = struct.pack(
        "<IHHIIIIIIIIHHHH", 0, 0, 0, 0, scale, per_scale, 0, num_frames, largest, 0xFFFFFFFF, 0, 0, 0, width, height
    )
    num_bytes = min(width * height * 3, 2**32 - 1)  # nobody reads it, and a picture may say 65,535 squared
    picture = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, codec, num_bytes, 0, 0, 0, 0)
    strl = _list(b"strl", _chunk(b"strh", b"vids" + codec + stream) + _chunk(b"strf", picture))
    return _list(b"hdrl", _chunk(b"avih", main) + strl)


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data


def _list(name: bytes, data: bytes) -> bytes:
    return _chunk(b"LIST", name + data)
