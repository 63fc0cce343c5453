"""What a decoded picture looks like on a screen: whole instead of interlaced, in its true shape, in the colours of SDR.

A plain picture is only converted to RGB. Frames are sampled seconds apart, so nothing here needs a neighbour in time.
"""

from fractions import Fraction
from functools import cache

import numpy as np
from av.filter import Graph
from av.video.frame import VideoFrame
from numpy.typing import NDArray

# -- interlaced -------------------------------------------------------------------------------------------------------


def whole_picture(frame: VideoFrame) -> VideoFrame:
    """A frame whose lines are all of one moment: of an interlaced one the upper field, which is half as high."""
    if not frame.interlaced_frame:
        return frame
    graph = Graph()
    graph.threads = 1  # a confined decoder may start no other
    source = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base or Fraction(1)
    )
    graph.link_nodes(source, graph.add("field", "type=top"), graph.add("buffersink")).configure()
    graph.vpush(frame)
    return graph.vpull()


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
HDR_TRANSFERS = (_PQ, _HLG)
"""`color_trc` of HDR: SMPTE ST 2084, and ARIB STD-B67."""
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


def screen_rgb(frame: VideoFrame, size: tuple[int, int]) -> NDArray[np.uint8]:
    """[height, width, 3] as stored, not rotated; `size` is (width, height). Raises what libav raises for a picture that
    it cannot convert."""
    frame = whole_picture(frame)
    if frame.color_trc not in HDR_TRANSFERS:
        return _resized(frame, size, "rgb24").astype(np.uint8, copy=False)
    codes = _resized(frame, size, "rgb48le").astype(np.uint16, copy=False)
    return _to_sdr(codes, frame.color_trc, frame.color_primaries == _BT2020)


def _resized(frame: VideoFrame, size: tuple[int, int], pixel_format: str) -> NDArray[np.uint8 | np.uint16]:
    width, height = size
    if (frame.width, frame.height) != size:
        frame = frame.reformat(width=width, height=height, format=pixel_format, interpolation="BICUBIC", threads=1)
    return np.asarray(frame.to_ndarray(format=pixel_format, threads=1))


def _to_sdr(codes: NDArray[np.uint16], transfer: int, is_wide: bool) -> NDArray[np.uint8]:
    """[height, width, 3] of HDR's codes to those of SDR. Highlights are compressed, and no hue is changed but by
    clipping colours that SDR lacks."""
    light = _light_of(transfer)[codes]
    if transfer == _HLG:  # a screen's own gamma, BT.2100
        light *= (HLG_PEAK_NITS / WHITE_NITS) * np.maximum(light @ _LUMINANCE, 1e-6)[..., None] ** np.float32(0.2)
    if is_wide:
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
