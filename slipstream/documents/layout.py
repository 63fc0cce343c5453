"""Lines and regions of a page put in order: which regions are one, which lines are in them, what is read first. Pure.

The reading order is a recursive cut at white gaps (XY-cut: Nagy and Seth 1984). Columns are cut apart before bands, and
bands are joined again as long as the same columns run through them; so a head over both columns stays above them, and
gaps between paragraphs that happen to be level do not tear columns into rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeVar

from slipstream.documents.messages import Box, Origin, Region, RegionKind, TextLine

ItemT = TypeVar("ItemT")

# -- reading order -----------------------------------------------------------------------------------------------------

_SHRINK = 0.06
"""Of a box's width and height on each side: boxes of real layouts overlap by a little, which would hide the gap."""


def reading_order(boxes: Sequence[Box]) -> list[int]:
    """Indices of the boxes in the order in which they are read."""
    if not boxes:
        return []
    slack = max(1.0, 0.5 * median(box.height for box in boxes))
    spans = [_Spans.of(box, slack) for box in boxes]
    return _ordered(list(range(len(boxes))), spans, depth=0)


@dataclass(frozen=True)
class _Spans:
    """Of a shrunk box, along both directions."""

    x: tuple[float, float]
    y: tuple[float, float]

    @classmethod
    def of(cls, box: Box, slack: float) -> "_Spans":
        dx, dy = min(slack, _SHRINK * box.width), min(slack, _SHRINK * box.height)
        return cls((box.left + dx, box.right - dx), (box.top + dy, box.bottom - dy))


_MAX_DEPTH = 40


def _ordered(items: list[int], spans: Sequence[_Spans], depth: int) -> list[int]:
    if len(items) < 2 or depth == _MAX_DEPTH:
        return sorted(items, key=lambda item: (spans[item].y[0], spans[item].x[0]))
    parts = _runs(items, lambda item: spans[item].x)
    if len(parts) == 1:
        parts = _join_bands(_runs(items, lambda item: spans[item].y), spans)
    if len(parts) == 1:
        parts = _take_first(items, spans)
    return [item for part in parts for item in _ordered(part, spans, depth + 1)]


def _runs(items: Sequence[int], span: Callable[[int], tuple[float, float]]) -> list[list[int]]:
    """The items cut at every gap of the projection, in ascending order."""
    runs: list[list[int]] = []
    end = float("-inf")
    for item in sorted(items, key=lambda one: span(one)[0]):
        if span(item)[0] >= end or not runs:
            runs.append([])
        runs[-1].append(item)
        end = max(end, span(item)[1])
    return runs


def _join_bands(bands: list[list[int]], spans: Sequence[_Spans]) -> list[list[int]]:
    """Bands one below the other that the same gap between columns runs through count as one."""
    joined: list[list[int]] = []
    for band in bands:
        if (joined and _num_columns(joined[-1], spans) == _num_columns(joined[-1] + band, spans) > 1) or (
            joined and len(joined[-1]) == 1 and _starts_columns(joined[-1], band, spans)
        ):
            joined[-1] = joined[-1] + band
        else:
            joined.append(band)
    return joined


def _num_columns(items: list[int], spans: Sequence[_Spans]) -> int:
    return len(_runs(items, lambda item: spans[item].x))


def _starts_columns(above: list[int], band: list[int], spans: Sequence[_Spans]) -> bool:
    """Whether a single box is the top of one of the columns below: it stands over that column alone, and as wide."""
    columns = _runs(band, lambda item: spans[item].x)
    if len(columns) < 2 or _num_columns(above + band, spans) != len(columns):
        return False
    left, right = spans[above[0]].x
    widths = [max(spans[item].x[1] for item in column) - min(spans[item].x[0] for item in column) for column in columns]
    return right - left >= 0.8 * min(widths)


def _take_first(items: list[int], spans: Sequence[_Spans]) -> list[list[int]]:
    """Boxes that no straight cut parts: the one that begins highest, then the others."""
    first = min(items, key=lambda item: (spans[item].y[0], spans[item].x[0]))
    return [[first], [item for item in items if item != first]]


# -- overlapping regions -----------------------------------------------------------------------------------------------

SAME = 0.5
"""Intersection over union from which two regions are one."""
WITHIN = 0.8
"""Share of a region that lies in a surer one from which it is left out."""


@dataclass(frozen=True)
class Zone:
    """A part of the page as the layout model sees it, before anybody has read it."""

    box: Box
    kind: RegionKind
    score: float


def without_doubles(zones: Sequence[Zone]) -> list[Zone]:
    """The zones, surest first, without those that say again what a surer one said."""
    kept: list[Zone] = []
    for zone in sorted(zones, key=lambda zone: -zone.score):
        if zone.box.area and not any(_is_double(zone.box, other.box) for other in kept):
            kept.append(zone)
    return kept


def _is_double(box: Box, surer: Box) -> bool:
    common = box.common(surer)
    union = box.area + surer.area - common
    return common > SAME * union or common > WITHIN * box.area


# -- lines into regions ------------------------------------------------------------------------------------------------

HEADING_RATIO = 1.25
"""A block of at most two lines that are so much taller than the page's median is taken for a heading."""
_SAME_ROW, _SAME_LEVEL = 0.5, 0.3
_PARAGRAPH_GAP = 3.5
"""Between paragraphs of one column there are fewer line heights than that."""
_BLOCK_GAP, _BLOCK_PITCH = 1.5, 1.3
"""Lines are one block that are closer than so many line heights, and than so many of the page's usual distances from
line to line: boxes of a text layer are tight, those of an OCR are not."""


def make_regions(
    zones: Sequence[Zone], lines: Sequence[TextLine], origin: Origin, also: Sequence[TextLine] = ()
) -> list[Region]:
    """The regions of a page in reading order: the zones with the lines in them, and blocks of the lines in none.

    Zones that should hold text and do not are left out; figures stay, without a text. `also`: lines of the OCR's, for
    zones in which none of the others is.
    """
    zones = [zone for zone in without_doubles(zones) if not _is_mistaken(zone, lines)]
    held, orphans = _sorted_in(zones, lines)
    held_also, _ = _sorted_in(zones, also)
    found = []
    for zone, inside, inside_also in zip(zones, held, held_also, strict=True):
        if inside or not inside_also:
            found.append(_region(zone.box, zone.kind, inside, zone.score, origin))
        else:
            found.append(_region(zone.box, zone.kind, inside_also, zone.score, Origin.OCR))
    typical = median(line.box.height for line in lines) if lines else 0.0
    tables, orphans = _tables(orphans)
    found += [_region(around(table), RegionKind.TABLE, table, 1.0, origin) for table in tables]
    for block in _blocks(orphans):
        is_heading = len(block) <= 2 and min(line.box.height for line in block) > HEADING_RATIO * typical
        kind = RegionKind.HEADING if is_heading else RegionKind.TEXT
        found.append(_region(around(block), kind, block, 1.0, origin))
    return _in_order([region for region in found if region.text or region.kind is RegionKind.FIGURE])


FULL_OF_TEXT = 0.2
"""Share of a figure that lines of text cover, from which it is none: labels of a drawing cover less."""
ALONE = 0.2
"""Share of the rows of two columns in which one of them has no line, at least; tables have few such rows."""
MIN_TABLE_ROWS = 2
TABLE_FILL = 0.7
"""Share of its column that the middle cell of a table fills at most; lines of a text fill more of theirs."""


def _is_mistaken(zone: Zone, lines: Sequence[TextLine]) -> bool:
    """Layouts take tables, and small pages in two columns, for figures, and columns for tables."""
    if zone.kind not in (RegionKind.FIGURE, RegionKind.TABLE):
        return False
    inside = [line for line in lines if 2 * zone.box.common(line.box) > line.box.area]
    if zone.kind is RegionKind.TABLE:
        return _are_columns(rows_of(inside, lambda line: line.box))
    is_covered = len(inside) > 1 and sum(line.box.area for line in inside) >= FULL_OF_TEXT * zone.box.area
    return is_covered or bool(_tables(inside)[0])


def _are_columns(rows: Sequence[Sequence[TextLine]]) -> bool:
    """Two of them, each with its own paragraphs: in some rows only one has a line. Where that is the right one it is no
    table, whose rows begin on the left."""
    pairs = [row for row in rows if len(row) == 2]
    if len(pairs) < MIN_TABLE_ROWS or 10 * sum(len(row) > 2 for row in rows) > len(rows):
        return False
    gutter = median((row[0].box.right + row[1].box.left) / 2 for row in pairs)
    num_alone = sum(_are_words(row) and not row[0].box.left < gutter < row[0].box.right for row in rows)
    return _goes_on_right(rows) or num_alone >= ALONE * len(rows)


def _goes_on_right(rows: Sequence[Sequence[TextLine]]) -> bool:
    """Words stand alone below the right one of two lines, or above it, no more than a paragraph's gap away."""
    return any(
        len(pair) == 2
        and _are_words(alone)
        and pair[0].box.right < alone[0].box.left
        and _is_beside(pair[1].box, alone[0].box)
        for above, below in pairwise(rows)
        for pair, alone in ((above, below), (below, above))
    )


def _are_words(row: Sequence[TextLine]) -> bool:
    """A line alone, and not only figures, which may be a table's sum."""
    return len(row) == 1 and any(map(str.isalpha, row[0].text))


def _is_beside(box: Box, other: Box) -> bool:
    gap = max(box.top, other.top) - min(box.bottom, other.bottom)
    return gap < _PARAGRAPH_GAP * box.height and _is_under(box, other)


def _tables(lines: Sequence[TextLine]) -> tuple[list[list[TextLine]], list[TextLine]]:
    """Rows one below the other of as many cells that are a table, not the lines of columns; and the other lines."""
    tables: list[list[list[TextLine]]] = []
    rows = rows_of(lines, lambda line: line.box)
    for number, row in enumerate(rows, start=1):
        if tables and _is_same_row(tables[-1][-1], row):
            tables[-1].append(row)
        else:
            tables.append([row])
        if number < len(rows) and _goes_on_alone(row, rows[number]):
            tables[-1] = [[]]
    least_cells = 3 if _goes_on_right(rows) else 2
    kept = [[line for row in rows for line in row] for rows in tables if _is_table(rows, least_cells)]
    taken = {id(line) for table in kept for line in table}
    return kept, [line for line in lines if id(line) not in taken]


def _is_near(above: Sequence[TextLine], row: Sequence[TextLine]) -> bool:
    return bool(above) and row[0].box.top - above[0].box.bottom < _BLOCK_GAP * above[0].box.height


def _is_same_row(above: Sequence[TextLine], row: Sequence[TextLine]) -> bool:
    is_alike = _is_near(above, row) and len(above) == len(row)
    return is_alike and all(map(lambda one, other: _is_under(one.box, other.box), above, row))


def _goes_on_alone(above: Sequence[TextLine], row: Sequence[TextLine]) -> bool:
    """These are lines of columns, one of which is longer than the others."""
    is_alone = len(row) == 1 < len(above) and _is_near(above, row)
    return is_alone and sum(_is_under(one.box, row[0].box) for one in above) == 1


def _is_table(rows: Sequence[Sequence[TextLine]], least_cells: int) -> bool:
    """Cells leave much of their column free, and but for the first of a row are mostly single words."""
    pairs = [pair for row in rows for pair in pairwise(row)]
    if len(rows) < MIN_TABLE_ROWS or max(map(len, rows)) < least_cells:
        return False
    fills = [cell.box.width / max(1, right.box.left - cell.box.left) for cell, right in pairs]
    num_single = sum(len(right.text.split()) == 1 for _, right in pairs)
    return median(fills) <= TABLE_FILL and 2 * num_single >= len(pairs)


def _sorted_in(zones: Sequence[Zone], lines: Sequence[TextLine]) -> tuple[list[list[TextLine]], list[TextLine]]:
    """The lines of each zone, and those of none."""
    held: list[list[TextLine]] = [[] for _ in zones]
    orphans: list[TextLine] = []
    for line in lines:
        home = _home(line.box, zones)
        (orphans if home is None else held[home]).append(line)
    return held, orphans


def _home(box: Box, zones: Sequence[Zone]) -> int | None:
    """The smallest zone that has more than half of the box."""
    inside = [index for index, zone in enumerate(zones) if 2 * zone.box.common(box) > box.area]
    return min(inside, key=lambda index: zones[index].box.area, default=None)


def _region(box: Box, kind: RegionKind, lines: Sequence[TextLine], score: float, origin: Origin) -> Region:
    if kind is RegionKind.FIGURE:
        lines = ()  # words within a picture are no text of the page
    cell_gap = "\t" if kind is RegionKind.TABLE else " "
    rows = rows_of(lines, lambda line: line.box)
    text = "\n".join(cell_gap.join(line.text.strip() for line in row) for row in rows)
    surety = score * min((line.score for line in lines), default=1.0)
    return Region(box, kind, 0, text, min(1.0, max(0.0, surety)), origin)


def _in_order(regions: list[Region]) -> list[Region]:
    """Running heads first, then the body, then running feet; each numbered."""
    ranks = {RegionKind.HEADER: 0, RegionKind.FOOTER: 2}
    ordered: list[Region] = []
    for rank in range(3):
        group = [region for region in regions if ranks.get(region.kind, 1) == rank]
        ordered += [group[index] for index in reading_order([region.box for region in group])]
    return [
        Region(region.box, region.kind, order, region.text, region.score, region.origin)
        for order, region in enumerate(ordered)
    ]


def rows_of(items: Sequence[ItemT], box_of: Callable[[ItemT], Box]) -> list[list[ItemT]]:
    """Items that stand beside each other in one row each, from left to right; rows from top to bottom."""
    rows: list[list[ItemT]] = []
    for item in sorted(items, key=lambda item: box_of(item).top):
        box = box_of(item)
        last = box_of(rows[-1][0]) if rows else None
        if last is not None:
            common = min(box.bottom, last.bottom) - max(box.top, last.top)
            if common > _SAME_ROW * max(1, min(box.height, last.height)):
                rows[-1].append(item)
                continue
        rows.append([item])
    return [sorted(row, key=lambda item: box_of(item).left) for row in rows]


def _blocks(lines: Sequence[TextLine]) -> list[list[TextLine]]:
    """Lines that are near each other and alike, as paragraphs are. Lines with another one beside them are in columns,
    and no part of a paragraph above the columns; one without may be part of a column that is as wide."""
    ordered = sorted(lines, key=lambda line: (line.box.top, line.box.left))
    pitch, beside = _usual_pitch([line.box for line in ordered]), _with_neighbours([line.box for line in ordered])
    blocks: list[tuple[list[TextLine], bool]] = []
    for line, has_neighbour in zip(ordered, beside, strict=True):
        for block, is_column in reversed(blocks):
            is_alike = is_column is has_neighbour or (is_column and _is_within(line.box, block))
            if is_alike and _continues(block[-1].box, line.box, pitch):
                block.append(line)
                break
        else:
            blocks.append(([line], has_neighbour))
    return [block for block, _ in blocks]


def _with_neighbours(boxes: Sequence[Box]) -> list[bool]:
    """For boxes from top to bottom, whether another one is on the same level."""
    found = [False] * len(boxes)
    for index, box in enumerate(boxes):
        for place in range(index + 1, len(boxes)):
            other = boxes[place]
            if other.top >= box.bottom:
                break
            if min(box.bottom, other.bottom) - other.top > _SAME_LEVEL * min(box.height, other.height):
                found[index] = found[place] = True
    return found


def _usual_pitch(boxes: Sequence[Box]) -> float:
    """From line to line below, by the median; boxes from top to bottom."""
    pitches = []
    for index, box in enumerate(boxes):
        below = (
            other.top - box.top for other in boxes[index + 1 :] if other.top >= box.bottom and _is_under(box, other)
        )
        if (pitch := next(below, None)) is not None:
            pitches.append(pitch)
    return median(pitches) if pitches else 0.0


def _is_under(above: Box, box: Box) -> bool:
    return min(above.right, box.right) > max(above.left, box.left)


def _continues(above: Box, box: Box, pitch: float) -> bool:
    gap, height = box.top - above.bottom, min(above.height, box.height)
    is_alike = max(above.height, box.height) < 1.5 * max(1, height)
    is_near = -height < gap < _BLOCK_GAP * height and box.top - above.top <= _BLOCK_PITCH * pitch
    return is_alike and is_near and _is_under(above, box)


def _is_within(box: Box, column: Sequence[TextLine]) -> bool:
    left, right = min(line.box.left for line in column), max(line.box.right for line in column)
    return box.left >= left - box.height and box.right <= right + box.height


def around(lines: Sequence[TextLine]) -> Box:
    """The smallest box that has all of them."""
    boxes = [line.box for line in lines]
    return Box(
        min(box.left for box in boxes),
        min(box.top for box in boxes),
        max(box.right for box in boxes),
        max(box.bottom for box in boxes),
    )
