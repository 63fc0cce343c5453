"""Small clips of codecs that PyAV decodes and cannot encode: the few bits that such pictures need, written by hand.

Pictures are those of `tests.support.media`, whose cells are whole blocks of 8 x 8, so a mean for each block is all.
"""

import io
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

from tests.support.media import ClipSpec, index_picture, make_clip

WIDTH, HEIGHT, GREY = 64, 48, 128
MACROBLOCKS = [(x, y) for y in range(HEIGHT // 16) for x in range(WIDTH // 16)]
Blocks = NDArray[np.int64]
"""[HEIGHT / 8, WIDTH / 8] luma of blocks; chroma is grey throughout."""


class Bits:
    """Numbers of so many bits, the highest first."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def put(self, *numbers: tuple[int, int]) -> "Bits":
        """Each with its length."""
        self._text += [f"{number:0{length}b}" for number, length in numbers if length]
        return self

    def text(self, bits: str) -> "Bits":
        """Bits as they are read; spaces are none."""
        self._text.append(bits.replace(" ", ""))
        return self

    def done(self, stop: str = "") -> bytes:
        """Filled up with zeros."""
        text = "".join(self._text) + stop
        text += "0" * (-len(text) % 8)
        return int(text, 2).to_bytes(len(text) // 8, "big")


def luma_blocks(index: int) -> Blocks:
    """Of the picture of this number."""
    return index_picture(index, WIDTH, HEIGHT)[::8, ::8, 0].astype(np.int64)


def luma_of(x: int, y: int) -> list[tuple[int, int]]:
    """(row, column) of the four luma blocks of a macroblock, as they are written."""
    return [(2 * y, 2 * x), (2 * y, 2 * x + 1), (2 * y + 1, 2 * x), (2 * y + 1, 2 * x + 1)]


# -- Windows Media 9 and VC-1 -----------------------------------------------------------------------------------------

# SMPTE 421M. Intra pictures whose blocks have a DC coefficient alone: PQUANT is 3, so a step of it is 8.

PQUANT = "00011"
STEP = 8
_NO_LUMA_CHANGE, _NO_CHROMA_CHANGE, _ESCAPE = "1", "00", (0x6078F, 24)
"""Of the DC tables for high motion."""
_NONE_CODED = "1"
"""A macroblock without AC coefficients."""


def dc_level(pixel: int) -> int:
    """The DC coefficient whose inverse transform is nearest to this."""
    return round(pixel * 64 / 9 / STEP)


def _put_intra_blocks(bits: Bits, levels: Blocks, predict: Callable[[Blocks, int, int], int]) -> None:
    """All macroblocks; chroma is what is predicted without any."""
    for x, y in MACROBLOCKS:
        bits.text(_NONE_CODED + "0")  # no prediction of AC coefficients
        for row, column in luma_of(x, y):
            if change := int(levels[row, column]) - predict(levels, row, column):
                bits.put(_ESCAPE, (abs(change), 8), (int(change < 0), 1))
            else:
                bits.text(_NO_LUMA_CHANGE)
        bits.text(_NO_CHROMA_CHANGE * 2)


def _predict(levels: Blocks, row: int, column: int, outside: int | None) -> int:
    """From the block to the left or above, whichever changes less. `outside`: of blocks that there are not; None: they
    are not looked at."""
    has_above, has_left = row > 0, column > 0
    if outside is None and not (has_above and has_left):
        return int(levels[row, column - 1]) if has_left else int(levels[row - 1, column]) if has_above else 0
    none = outside or 0
    above = int(levels[row - 1, column]) if has_above else none
    left = int(levels[row, column - 1]) if has_left else none
    corner = int(levels[row - 1, column - 1]) if has_above and has_left else none
    return left if abs(above - corner) <= abs(corner - left) else above


def wmv3_header() -> bytes:
    """Simple profile: transforms and motion of chroma are the fast ones, all else is off."""
    return Bits().text("00 0 0 000 00000 0 0 0 1 1 0 00 0 0 0 0 0 000 00 0 1").done()


def wmv3_picture(blocks: Blocks) -> bytes:
    """An intra picture of the simple profile."""
    levels = np.vectorize(dc_level)(blocks)
    bits = Bits().text("00 0 0000000").text(PQUANT).text("0 0 0 0")
    _put_intra_blocks(bits, levels, lambda known, row, column: _predict(known, row, column, 1024 // STEP))
    return bits.done()


def wmv3_repeat() -> bytes:
    """A predicted picture of the simple profile, all of whose macroblocks are skipped: the one before, again."""
    all_skipped = "1 010 000"
    return Bits().text("00 1").text(PQUANT).text("0 1").text(all_skipped).text("00 00 0 0").done()


def vc1_header() -> bytes:
    """Advanced profile, progressive: what is said of the sequence, and of an entry point."""
    size = ((WIDTH // 2 - 1, 12), (HEIGHT // 2 - 1, 12))
    sequence = Bits().text("11 000 01 000 00000 0").put(*size).text("0 0 0 0 1 0 0 0")
    entry = Bits().text("0 1 0 0 0 1 0 00 0 0 00 0 0 0")
    return _unit(0x0F, sequence.done("1")) + _unit(0x0E, entry.done("1"))


def vc1_picture(blocks: Blocks) -> bytes:
    """An intra picture of the advanced profile, whose coefficients are about grey."""
    levels = np.vectorize(lambda pixel: dc_level(pixel - GREY))(blocks)
    bits = Bits().text("110 0").text(PQUANT).text("0").text("0 0000").text("0 0 0")
    _put_intra_blocks(bits, levels, lambda known, row, column: _predict(known, row, column, None))
    return _unit(0x0D, bits.done("1"))


def _unit(kind: int, payload: bytes) -> bytes:
    """Behind a start code, none of which the payload may look like."""
    safe = bytearray()
    for byte in payload:
        if byte < 4 and safe[-2:] == bytes(2):
            safe.append(3)
        safe.append(byte)
    return bytes((0, 0, 1, kind)) + safe


# -- MS MPEG-4 1, Intel H.263 -----------------------------------------------------------------------------------------

_MPEG4_DC_LUMA = ("011", "11", "10", "010", "001", "0001", "00001", "000001", "0000001")
"""How many bits a change of DC has."""


def msmpeg4v1_picture(blocks: Blocks) -> bytes:
    """An intra picture: one slice, each block's mean as the change from the block before, and from grey in front."""
    bits = Bits().put((0x100, 32), (0, 5)).text("00").put((3, 5), (HEIGHT // 16, 5))
    before = GREY
    for x, y in MACROBLOCKS:
        before = before if x else GREY
        bits.text("1 0011")  # without AC coefficients
        for row, column in luma_of(x, y):
            change, before = int(blocks[row, column]) - before, int(blocks[row, column])
            size = abs(change).bit_length()
            bits.text(_MPEG4_DC_LUMA[size].translate({48: 49, 49: 48}))
            bits.put((change if change > 0 else change + 2**size - 1, size))
        bits.text("00 00")
    return bits.done()


def h263_pictures(count: int) -> list[bytes]:
    """Baseline H.263, which Intel's is, too."""
    times_ms = [1000 // RATE * number for number in range(count)]
    clip = make_clip(ClipSpec(times_ms, container="avi", codec="h263", width=176, height=144))
    with av.open(io.BytesIO(clip)) as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.size]


# -- pictures by themselves -------------------------------------------------------------------------------------------


def hap_picture(index: int) -> bytes:
    """Hap without a second compression: S3's tiles of 4 x 4 with a colour each."""
    luma = index_picture(index, WIDTH, HEIGHT)[::4, ::4, 0].astype(np.uint16)
    colours = (luma >> 3 << 11) | (luma >> 2 << 5) | luma >> 3
    tiles = b"".join(struct.pack("<HHI", colour, colour, 0) for colour in colours.ravel().tolist())
    return len(tiles).to_bytes(3, "little") + bytes([0xAB]) + tiles


def lagarith_picture(index: int) -> bytes:
    """Luma that is predicted and not compressed, and grey chroma."""
    luma = index_picture(index, WIDTH, HEIGHT)[..., 0].astype(np.int64)
    above = np.vstack([np.zeros((1, WIDTH), dtype=np.int64), luma[:-1]])
    flat = luma.ravel()
    left = np.concatenate([[0], flat[:-1]]).reshape(luma.shape)
    corner = np.concatenate([[0], above.ravel()[:-1]]).reshape(luma.shape)
    corner[1, 0] = luma[0, 0]
    middle = np.median([left, above, (left + above - corner) & 0xFF], axis=0).astype(np.int64)
    middle[0] = left[0]
    plane = b"\x04" + ((luma - middle) & 0xFF).astype(np.uint8).tobytes()
    grey = b"\xff\x80"
    places = struct.pack("<II", 9 + len(plane), 9 + len(plane) + len(grey))
    return b"\x0a" + places + plane + grey + grey


def mjpegb_picture(jpeg: bytes) -> bytes:
    """A JPEG of the other kind: segments without marks, found by their places, and nothing stuffed into the data."""
    segments: dict[int, bytes] = {}
    place = 2
    while 0xDA not in segments:
        size = int.from_bytes(jpeg[place + 2 : place + 4], "big")
        segments[jpeg[place + 1]] = segments.get(jpeg[place + 1], b"") + jpeg[place + 2 : place + 2 + size]
        place += 2 + size
    body, places = bytearray(48), {}
    for kind in (0xDB, 0xC4, 0xC0, 0xDA):
        places[kind] = len(body)
        body += segments[kind]
    data = len(body)
    body += jpeg[place:-2].replace(b"\xff\x00", b"\xff")
    offsets = (0, places[0xDB], places[0xC4], places[0xC0], places[0xDA], data)
    body[:40] = struct.pack(">4s4s8I", b"", b"mjpg", len(body), len(body), *offsets)
    return bytes(body)


# -- AVI --------------------------------------------------------------------------------------------------------------

# PyAV gives a stream that nobody encodes no private data, so its file is written here.

RATE = 25
_IS_KEY, _HAS_INDEX = 0x10, 0x10


def make_avi(fourcc: str, packets: Sequence[bytes], private: bytes = b"", key_every: int = 1) -> bytes:
    """Pictures at 25 a second. `private`: what decoders are told before the first one."""
    largest, tag = max(map(len, packets)), fourcc.encode()
    main = struct.pack("<14I", 10**6 // RATE, 0, 0, _HAS_INDEX, len(packets), 0, 1, largest, WIDTH, HEIGHT, 0, 0, 0, 0)
    stream = struct.pack("<4s4s10I", b"vids", tag, 0, 0, 0, 1, RATE, 0, len(packets), largest, 0, 0)
    stream += struct.pack("<4h", 0, 0, WIDTH, HEIGHT)
    form = struct.pack("<3I2H4s5I", 40 + len(private), WIDTH, HEIGHT, 1, 24, tag, WIDTH * HEIGHT * 3, 0, 0, 0, 0)
    streams = _list(b"strl", _chunk(b"strh", stream) + _chunk(b"strf", form + private))
    movie, index = b"", b""
    for number, packet in enumerate(packets):
        flags = 0 if number % key_every else _IS_KEY
        index += struct.pack("<4s3I", b"00dc", flags, len(movie) + 4, len(packet))
        movie += _chunk(b"00dc", packet)
    body = _list(b"hdrl", _chunk(b"avih", main) + streams) + _list(b"movi", movie) + _chunk(b"idx1", index)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"AVI " + body


def _list(kind: bytes, body: bytes) -> bytes:
    return _chunk(b"LIST", kind + body)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)


# -- HEIF -------------------------------------------------------------------------------------------------------------


def tiled_picture(tiles: Sequence[bytes]) -> bytes:
    """JPEGs side by side as one picture, the way that telephones write large ones."""
    grid = len(tiles) + 1
    kinds = [(number, b"jpeg") for number in range(1, grid)] + [(grid, b"grid")]
    infos = [_box(b"infe", b"\2\0\0\0", struct.pack(">2H4s", number, 0, kind), b"\0") for number, kind in kinds]
    sizes = [_box(b"ispe", _PLAIN, struct.pack(">2I", width, HEIGHT)) for width in (WIDTH, WIDTH * len(tiles))]
    has_size = [struct.pack(">H2B", number, 1, 1 + (number == grid)) for number in range(1, grid + 1)]
    facts = [
        _box(b"hdlr", bytes(8), b"pict", bytes(13)),
        _box(b"pitm", _PLAIN, struct.pack(">H", grid)),
        _box(b"iinf", _PLAIN, struct.pack(">H", grid), *infos),
        _box(b"iref", _PLAIN, _box(b"dimg", struct.pack(f">{grid + 1}H", grid, len(tiles), *range(1, grid)))),
        _box(b"iprp", _box(b"ipco", *sizes), _box(b"ipma", _PLAIN, struct.pack(">I", grid), *has_size)),
        _box(b"idat", struct.pack(">4B2H", 0, 0, 0, len(tiles) - 1, WIDTH * len(tiles), HEIGHT)),
    ]
    head = _box(b"ftyp", b"mif1", _PLAIN, b"mif1heic")
    meta = _box(b"meta", _PLAIN, *facts, _places(tiles, 0))
    return head + _box(b"meta", _PLAIN, *facts, _places(tiles, len(head + meta) + 8)) + _box(b"mdat", *tiles)


_PLAIN = bytes(4)
"""Version and flags of a box."""


def _places(tiles: Sequence[bytes], start: int) -> bytes:
    """Where each tile lies, from the file's `start` on, and the layout, which is the whole `idat`."""
    starts = [start + sum(map(len, tiles[:number])) for number in range(len(tiles))]
    items = [(number, 0, 0, 1, at, len(tile)) for number, (at, tile) in enumerate(zip(starts, tiles, strict=True), 1)]
    items.append((len(tiles) + 1, 1, 0, 1, 0, 8))
    count = struct.pack(">H", len(items))
    return _box(b"iloc", b"\1\0\0\0\x44\0", count, *(struct.pack(">4H2I", *item) for item in items))


def _box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I", len(body) + 8) + kind + body


# -- clips ------------------------------------------------------------------------------------------------------------


def make_mov(codec: str, packets: Sequence[bytes]) -> bytes:
    """The same as a QuickTime film, without private data."""
    target = io.BytesIO()
    with av.open(target, "w", format="mov") as output:
        stream = output.add_mux_stream(codec, rate=RATE, width=WIDTH, height=HEIGHT)
        for number, data in enumerate(packets):
            packet = av.Packet(data)
            packet.pts = packet.dts = number
            packet.time_base, packet.duration, packet.is_keyframe = Fraction(1, RATE), 1, True
            packet.stream = stream
            output.mux(packet)
    return target.getvalue()


def copied(clip: bytes, container: str) -> bytes:
    """The clip's packets in another container."""
    target = io.BytesIO()
    with av.open(io.BytesIO(clip)) as source, av.open(target, "w", format=container) as output:
        stream = output.add_stream_from_template(source.streams.video[0], opaque=True)
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                output.mux(packet)
    return target.getvalue()


def _wmv3() -> bytes:
    return make_avi("WMV3", [wmv3_picture(blocks) for blocks in BLOCKS], wmv3_header())


def _wmv3_repeating() -> bytes:
    """Every third picture is intra, and shown three times."""
    pictures = [wmv3_repeat() if number % 3 else wmv3_picture(blocks) for number, blocks in enumerate(BLOCKS)]
    return make_avi("WMV3", pictures, wmv3_header(), key_every=3)


def _vc1() -> bytes:
    return make_avi("WVC1", [vc1_picture(blocks) for blocks in BLOCKS], vc1_header())


def _mjpegb() -> bytes:
    clip = make_clip(ClipSpec(TIMES_MS, container="avi", codec="mjpeg", pix_fmt="yuvj420p"))
    with av.open(io.BytesIO(clip)) as container:
        return make_mov("mjpegb", [mjpegb_picture(bytes(packet)) for packet in container.demux(video=0) if packet.size])


COUNT = 12
TIMES_MS = [number * 1000 // RATE for number in range(COUNT)]
BLOCKS = [luma_blocks(number) for number in range(COUNT)]
WRITTEN_CLIPS: dict[str, Callable[[], bytes]] = {
    "wmv3 avi": _wmv3,
    "wmv3 asf": lambda: copied(_wmv3(), "asf"),
    "vc1 avi": _vc1,
    "msmpeg4 v1 avi": lambda: make_avi("MPG4", [msmpeg4v1_picture(blocks) for blocks in BLOCKS]),
    "h263 of intel avi": lambda: make_avi("I263", h263_pictures(COUNT)),
    "lagarith avi": lambda: make_avi("LAGS", [lagarith_picture(number) for number in range(COUNT)]),
    "hap mov": lambda: make_mov("hap", [hap_picture(number) for number in range(COUNT)]),
    "mjpeg b mov": _mjpegb,
}
"""All of the tier `archive`; picture `i` shows its number, at `TIMES_MS[i]`."""
REPEATING_CLIPS: dict[str, Callable[[], bytes]] = {
    "wmv3 skipped avi": _wmv3_repeating,
    "wmv3 skipped asf": lambda: copied(_wmv3_repeating(), "asf"),
}
"""Three pictures at a time show the number of the first of them."""


def vc1_asf() -> bytes:
    """The pictures of `vc1 avi`. libav makes up when each is shown, and has the last two at the same time."""
    return copied(_vc1(), "asf")
