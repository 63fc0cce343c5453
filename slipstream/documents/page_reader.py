"""One page: what its text layer or the OCR says, in regions. Knows neither files nor processes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.documents.layout import Zone, make_regions
from slipstream.documents.messages import (
    MAX_REGIONS,
    MAX_TEXT_CHARS,
    NO_OCR,
    Box,
    Origin,
    Region,
    RegionKind,
    TextLine,
)
from slipstream.documents.trust import LayerVerdict, judge_layer

Picture = NDArray[np.uint8]
"""[height, width, 3] RGB."""
FAKE_LAYER = "the text that the document brings along is not what the page shows; the page was read by OCR"
UNCHECKED_LAYER = "the text layer is in a script that the OCR does not know; it was taken unchecked"
NO_TEXT = "no text was found"
UNSURE = "the OCR is not sure of what it read, as in a script that it does not know; it was left out"
LEAST_SURE = 0.75
"""Mean score of a page's lines by their lengths. Scripts that the OCR was never shown have 0.59 to 0.72, and Armenian,
which looks Latin to it, 0.83; printed words 0.97 and more, blurred beyond what people like to read 0.89."""
CUT = "the page holds more text than is taken; the rest was left out"
EDGE = 0.12
"""Share of the page's height in which running heads and feet begin and end."""
GROUND = 0.75
"""Share of the page from which a figure with words on it is their background, as that of a slide, and no figure."""
_MARGINS = frozenset({RegionKind.HEADER, RegionKind.FOOTER})
"""A page that has nothing but these has a body that looks like one of them."""
_WITH_TEXT = frozenset(RegionKind) - {RegionKind.FIGURE, RegionKind.FORMULA}


class Reads(Protocol):
    """What reads pictures."""

    def lines(self, picture: Picture) -> list[TextLine]:
        """The lines of text of a picture."""

    def read_line(self, picture: Picture, box: Box) -> str:
        """What stands in a box that holds one line."""

    def zones(self, picture: Picture) -> list[Zone]:
        """The parts of a page."""

    def knows(self, char: str) -> bool:
        """Whether it can read that letter."""


def read_page(
    picture: Picture, layer: Sequence[TextLine], reads: Reads, *, ocr: bool = True
) -> tuple[list[Region], list[str]]:
    """The regions of a page in reading order, and warnings. `layer`: its text layer, which may be a lie. Without `ocr`
    a page that has no genuine layer has no regions, and what a layer leaves out is not read."""
    if not layer and not ocr:
        return [], [NO_OCR]
    zones = [_in_place(zone, picture.shape[0]) for zone in reads.zones(picture)]
    warnings: list[str] = []
    regions: list[Region] | None = None
    if layer and not (ocr and _is_of_margins(layer, picture.shape[0])):
        verdict = judge_layer(layer, lambda line: reads.read_line(picture, line.box), reads.knows)
        if verdict is LayerVerdict.FAKE:
            warnings.append(FAKE_LAYER)
        else:
            regions = _with_gaps_read(picture, layer, zones, reads, ocr=ocr)
        if verdict is LayerVerdict.UNKNOWN_SCRIPT:
            warnings.append(UNCHECKED_LAYER)
    if regions is None and not ocr:
        return [], [NO_OCR]
    if regions is None:
        lines = reads.lines(picture)
        if _is_unsure(lines):
            return [], [*warnings, UNSURE]
        regions = make_regions(_without_ground(zones, lines, picture), lines, Origin.OCR)
    if {region.kind for region in regions if region.text} <= _MARGINS:
        regions = [replace(region, kind=RegionKind.TEXT) if region.text else region for region in regions]
    if not any(region.text for region in regions):
        warnings.append(NO_TEXT)
    bounded = _bounded(regions)
    return bounded, [*warnings, CUT] if len(bounded) < len(regions) else warnings


def _is_of_margins(layer: Sequence[TextLine], height: int) -> bool:
    """Whether a layer says nothing of the page's body: a stamp on a scan, or what a portal wrote below a paper."""
    return all(line.box.bottom < EDGE * height or line.box.top > (1 - EDGE) * height for line in layer)


def _is_unsure(lines: Sequence[TextLine]) -> bool:
    num_chars = sum(len(line.text) for line in lines)
    return sum(line.score * len(line.text) for line in lines) < LEAST_SURE * num_chars


def _in_place(zone: Zone, height: int) -> Zone:
    """What the layout takes for a running head or foot and is not at the edge of the page is a text."""
    is_off_head = zone.kind is RegionKind.HEADER and zone.box.top > EDGE * height
    is_off_foot = zone.kind is RegionKind.FOOTER and zone.box.bottom < (1 - EDGE) * height
    return replace(zone, kind=RegionKind.TEXT) if is_off_head or is_off_foot else zone


def _without_ground(zones: Sequence[Zone], lines: Sequence[TextLine], picture: Picture) -> list[Zone]:
    """Words within a figure are left out, which on a dark page would be all: layouts take such a page for a figure."""
    least = GROUND * picture.shape[0] * picture.shape[1]
    return [
        zone
        for zone in zones
        if zone.kind is not RegionKind.FIGURE
        or zone.box.area < least
        or not any(2 * zone.box.common(line.box) > line.box.area for line in lines)
    ]


def _with_gaps_read(
    picture: Picture, layer: Sequence[TextLine], zones: Sequence[Zone], reads: Reads, *, ocr: bool
) -> list[Region]:
    """The layer's regions, and by OCR those that look like text and are not in the layer: stamps, scanned parts."""
    zones = _without_ground(zones, layer, picture)
    empty = [zone for zone in zones if zone.kind in _WITH_TEXT and not any(zone.box.common(line.box) for line in layer)]
    if not empty or not ocr:
        return make_regions(zones, layer, Origin.TEXT_LAYER)
    inside = [
        line for line in reads.lines(picture) if any(2 * zone.box.common(line.box) > line.box.area for zone in empty)
    ]
    return make_regions(zones, layer, Origin.TEXT_LAYER, also=inside)


def _bounded(regions: list[Region]) -> list[Region]:
    kept, num_chars = [], 0
    for region in regions[:MAX_REGIONS]:
        num_chars += len(region.text)
        if num_chars > MAX_TEXT_CHARS:
            break
        kept.append(region)
    return kept


def scaled(region: Region, across: float, down: float, width: int, height: int) -> Region:
    """The region in a picture that is so much larger, of that size."""
    left, top = int(region.box.left * across), int(region.box.top * down)
    right, bottom = round(region.box.right * across), round(region.box.bottom * down)
    left, top = min(left, width - 1), min(top, height - 1)
    box = Box(left, top, min(width, max(right, left + 1)), min(height, max(bottom, top + 1)))
    return replace(region, box=box)


LONG, PART = 2.5, 1.5
"""A picture that is higher than so many of its widths is read in parts of so many: models shrink what they get, and of
a whole web page or a long receipt no letter would be left."""
MOST_PARTS, LEAST_ROWS = 16, 64
"""Bounds on those of narrow pictures, but that parts are cut where the page is blank, up to a third earlier."""
TOO_LONG = 100
"""Widths from which a picture has nothing to read."""
BLANK_ROWS = 9
"""That are looked for between two parts."""


def parts_of(picture: Picture) -> list[slice]:
    """The rows that are read at once: all, or one part after the other, cut where the page is blank."""
    height, width = picture.shape[:2]
    starts = [0]
    if LONG * width < height < TOO_LONG * width:
        most = max(round(PART * width), height // MOST_PARTS, LEAST_ROWS)
        while height - starts[-1] > most:
            first = starts[-1] + 2 * most // 3
            starts.append(first + _blankest(picture[first : starts[-1] + most]))
    return list(map(slice, starts, [*starts[1:], height]))


def _blankest(rows: Picture) -> int:
    """The row that is in the middle of those that are most alike from left to right."""
    spread = rows.max(axis=(1, 2)).astype(int) - rows.min(axis=(1, 2))
    return int(np.convolve(spread, np.ones(BLANK_ROWS), "valid").argmin()) + BLANK_ROWS // 2
