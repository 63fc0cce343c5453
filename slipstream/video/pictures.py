"""What a decoded picture looks like on a screen: whole, not interlaced, upright, in its true shape and SDR's colours.

Of a plain picture only how it stands is looked at here. Frames are sampled seconds apart, so nothing here needs a
neighbour in time.
"""

from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from av.filter import Graph
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame
from numpy.typing import NDArray

# -- interlaced -------------------------------------------------------------------------------------------------------


def upper_field(frame: VideoFrame) -> VideoFrame:
    """Of an interlaced frame the lines of one moment: half as high."""
    return _filtered(frame, [("field", "type=top")])


def _filtered(frame: VideoFrame, filters: Iterable[tuple[str, str]]) -> VideoFrame:
    """A frame behind filters of libav, each with what it is told."""
    graph = Graph()
    graph.threads = 1  # a confined decoder may start no other
    source = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base or Fraction(1)
    )
    graph.link_nodes(source, *(graph.add(*each) for each in filters), graph.add("buffersink")).configure()
    graph.vpush(frame)
    return graph.vpull()


# -- orientation ------------------------------------------------------------------------------------------------------


def orientation(frame: VideoFrame) -> tuple[int, bool]:
    """What puts a frame upright: degrees clockwise, 0, 90, 180 or 270, and whether it is turned upside down before, as
    those of front cameras are, which are mirrored. A matrix without an angle turns nothing."""
    clockwise = round(-frame.rotation / 90) % 4 * 90 if -180 <= frame.rotation <= 180 else 0
    found = _beside(frame)
    if "DISPLAYMATRIX" not in found:
        return clockwise, False
    matrix = np.frombuffer(found["DISPLAYMATRIX"], dtype=np.int32).astype(np.int64)
    return clockwise, bool(matrix[0] * matrix[4] < matrix[1] * matrix[3])


_NOT_KNOWN = sorted(set(range(64)) - {kind.value for kind in Type})
"""Kinds of what comes with a frame that PyAV has no name for. One of them, such as the EXIF of a JPEG, and it tells of
none."""


def _beside(frame: VideoFrame) -> Any:
    """What comes with a frame, as far as PyAV knows it, by name."""
    try:
        return frame.side_data
    except ValueError:
        return _filtered(frame, [("sidedata", f"mode=delete:type={kind}") for kind in _NOT_KNOWN]).side_data


# -- shape ------------------------------------------------------------------------------------------------------------

MOST_STRETCH = 4
"""Of a pixel, either way. Files that state more are damaged, or lie."""
_LEAST_STRETCH = Fraction(101, 100)
"""Less than this is rounding of whoever made the file."""


def shown_size(width: int, height: int, pixel_aspect: Fraction | None) -> tuple[int, int]:
    """(width, height) of a stored picture whose pixels are `pixel_aspect` times as wide as high. The side that a
    screen stretches grows; the other stays."""
    stretch = pixel_aspect or Fraction(1)
    if stretch <= 0 or not _LEAST_STRETCH < max(stretch, 1 / stretch) <= MOST_STRETCH:
        return width, height
    return (round(width * stretch), height) if stretch > 1 else (width, round(height / stretch))


# -- colours ----------------------------------------------------------------------------------------------------------

_PQ, _HLG = 16, 18
HDR_TRANSFERS = frozenset({_PQ, _HLG})
"""`color_trc` of pictures whose numbers mean more light than SDR has: SMPTE ST 2084, and ARIB STD-B67."""
_BT2020 = 9
"""`color_primaries`."""
WHITE_NITS = 203.0
"""What white paper has in HDR (ITU-R BT.2408), and so what SDR is measured against."""
HLG_PEAK_NITS = 1000.0
_KNEE = 0.5
"""Light up to here, as a share of white, is left as it is; above it approaches the brightest that SDR has."""
_TO_BT709 = np.array(
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], dtype=np.float32
)
"""Linear light from the primaries of BT.2020 (ITU-R BT.2087)."""
_LUMINANCE = np.array([0.2627, 0.6780, 0.0593], dtype=np.float32)
"""Of BT.2020."""
_NUM_LEVELS = 65536
HDR_PIXELS = 1920 * 1080
"""Larger pictures are to be scaled down to this before their colours are mapped: it takes time for each pixel."""


def to_sdr(codes: NDArray[np.uint16], transfer: int, primaries: int) -> NDArray[np.uint8]:
    """[height, width, 3] of HDR's codes to those of SDR. Highlights are compressed, and no hue is changed but by
    clipping colours that SDR lacks.

    Args:
        transfer, primaries: a frame's `color_trc`, one of `HDR_TRANSFERS`, and `color_primaries`.
    """
    light = _light_of(transfer)[codes]
    if transfer == _HLG:  # a screen's own gamma, BT.2100
        light *= (HLG_PEAK_NITS / WHITE_NITS) * np.maximum(light @ _LUMINANCE, 1e-6)[..., None] ** np.float32(0.2)
    if primaries == _BT2020:
        light = np.maximum(light @ _TO_BT709.T, 0)
    brightest = light.max(axis=-1, keepdims=True)
    compressed = 1 - (1 - _KNEE) ** 2 / (np.maximum(brightest, _KNEE) + 1 - 2 * _KNEE)
    light *= np.where(brightest > _KNEE, compressed / np.maximum(brightest, _KNEE), 1)
    return _codes_of_sdr()[np.minimum(light * (_NUM_LEVELS - 1), _NUM_LEVELS - 1).astype(np.uint16)]


@cache
def _light_of(transfer: int) -> NDArray[np.float32]:
    """[65536] linear light of a code: of PQ as a share of white, of HLG as a share of the brightest scene."""
    code = np.linspace(0, 1, _NUM_LEVELS)
    if transfer == _PQ:
        root = code ** (1 / 78.84375)
        share = (np.maximum(root - 0.8359375, 0) / (18.8515625 - 18.6875 * root)) ** (1 / 0.1593017578125)
        return (share * (10_000 / WHITE_NITS)).astype(np.float32)
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(code <= 0.5, code**2 / 3, (np.exp((code - c) / a) + b) / 12).astype(np.float32)


@cache
def _codes_of_sdr() -> NDArray[np.uint8]:
    """[65536] sRGB's code of linear light up to white."""
    light = np.linspace(0, 1, _NUM_LEVELS)
    code = np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.round(code * 255).astype(np.uint8)
