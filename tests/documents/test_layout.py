"""Reading order, double regions, and lines sorted into regions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.documents.layout import Zone, make_regions, reading_order, rows_of, without_doubles
from slipstream.documents.messages import Box, Origin, RegionKind, TextLine

TEXT, HEADING, FIGURE, TABLE = RegionKind.TEXT, RegionKind.HEADING, RegionKind.FIGURE, RegionKind.TABLE
HEAD = Box(50, 20, 950, 80)
LEFT = [Box(50, 100, 480, 300), Box(50, 320, 480, 600), Box(50, 620, 480, 900)]
RIGHT = [Box(520, 100, 950, 300), Box(520, 320, 950, 600), Box(520, 620, 950, 900)]
FOOT = Box(50, 920, 950, 980)
PAGES = {
    "a head over two columns whose gaps are level": [HEAD, *LEFT, *RIGHT],
    "and a foot below": [HEAD, *LEFT, *RIGHT, FOOT],
    "one column": [HEAD, Box(50, 100, 950, 400), Box(50, 420, 900, 700)],
    "a centred head": [Box(300, 20, 700, 80), *LEFT, *RIGHT],
    "a figure over both columns between them": [
        HEAD,
        LEFT[0],
        RIGHT[0],
        Box(50, 320, 950, 600),
        LEFT[2],
        RIGHT[2],
    ],
    "a left column that ends early": [HEAD, LEFT[0], *RIGHT],
    "a left column that begins early": [HEAD, Box(50, 90, 480, 140), Box(50, 150, 480, 300), *LEFT[1:], *RIGHT],
    "three columns": [HEAD, *(Box(x, y, x + 280, y + 180) for x in (50, 350, 650) for y in (100, 300, 500))],
    "boxes that overlap by a little": [
        Box(50, 20, 950, 108),
        Box(50, 100, 505, 306),
        Box(50, 300, 505, 600),
        Box(495, 100, 950, 306),
        Box(495, 300, 950, 600),
    ],
}


@pytest.mark.parametrize("name", PAGES)
def test_order_of_pages(name: str) -> None:
    boxes = PAGES[name]
    for step in (1, 5, 7, 11):  # however they come
        shuffled = sorted(range(len(boxes)), key=lambda index, step=step: (index * step + 3) % 13)
        order = reading_order([boxes[index] for index in shuffled])
        assert [shuffled[index] for index in order] == list(range(len(boxes)))


BOXES = st.builds(
    lambda left, top, width, height: Box(left, top, left + width, top + height),
    st.integers(0, 900),
    st.integers(0, 900),
    st.integers(1, 500),
    st.integers(1, 500),
)


@given(st.lists(BOXES, max_size=30))
def test_every_box_is_read_once(boxes: list[Box]) -> None:
    assert sorted(reading_order(boxes)) == list(range(len(boxes)))


def test_a_thousand_boxes_on_one_heap_are_ordered() -> None:
    boxes = [Box(index, index, index + 500, index + 500) for index in range(1000)]
    assert reading_order(boxes) == list(range(1000))


def test_doubles_are_left_out_and_small_parts_within_large_ones_are_not_lost() -> None:
    page = Box(0, 0, 100, 100)
    table, again, inner, cell = Box(0, 0, 100, 40), Box(2, 0, 100, 42), Box(5, 5, 30, 20), Box(0, 60, 50, 80)
    zones = [Zone(again, TEXT, 0.6), Zone(table, TABLE, 0.9), Zone(inner, TEXT, 0.5), Zone(cell, TEXT, 0.95)]
    assert without_doubles(zones) == [zones[3], zones[1]]
    assert without_doubles([Zone(page, TEXT, 0.5), zones[3]]) == [zones[3], Zone(page, TEXT, 0.5)]
    assert without_doubles([Zone(Box(5, 5, 5, 9), TEXT, 1.0)]) == []


def test_lines_in_rows() -> None:
    cells = [Box(60, 12, 90, 30), Box(0, 10, 30, 30), Box(0, 40, 30, 60)]
    assert rows_of(cells, lambda box: box) == [[cells[1], cells[0]], [cells[2]]]


def line(left: int, top: int, text: str, height: int = 20) -> TextLine:
    return TextLine(Box(left, top, left + 10 * len(text), top + height), text, 0.9)


def test_lines_find_their_zones_and_orphans_make_blocks() -> None:
    zones = [
        Zone(Box(0, 0, 400, 60), TEXT, 1.0),
        Zone(Box(0, 300, 400, 400), TABLE, 1.0),
        Zone(Box(0, 500, 9, 9), TEXT, 1),
    ]
    lines = [
        line(0, 5, "one"),
        line(0, 30, "two"),
        line(0, 100, "Alone and large", 40),
        line(0, 160, "three"),
        line(0, 182, "four"),
        line(0, 310, "a"),
        line(200, 312, "b"),
        line(0, 350, "c"),
    ]
    regions = make_regions(zones, lines, Origin.OCR)
    assert [(region.order, region.kind, region.text) for region in regions] == [
        (0, TEXT, "one\ntwo"),
        (1, HEADING, "Alone and large"),
        (2, TEXT, "three\nfour"),
        (3, TABLE, "a\tb\nc"),
    ]
    assert all(region.score <= 0.9 and region.origin is Origin.OCR for region in regions)


def test_lines_of_two_columns_under_a_paragraph_over_both_are_three_blocks() -> None:
    wide = [line(0, top, "x" * 80) for top in (0, 25)]
    columns = [line(left, top, word * 9) for top in (50, 75, 100) for left, word in ((0, "left"), (440, "rght"))]
    regions = make_regions([], [*wide, *columns], Origin.OCR)
    assert [region.text.split()[0][:4] for region in regions] == ["xxxx", "left", "rght"]


def test_figures_stay_without_their_words_and_zones_without_text_go() -> None:
    zones = [Zone(Box(0, 0, 100, 100), FIGURE, 1.0), Zone(Box(0, 200, 100, 300), TEXT, 1.0)]
    regions = make_regions(zones, [line(10, 10, "x axis")], Origin.OCR)
    assert [(region.kind, region.text) for region in regions] == [(FIGURE, "")]


def grid(rows: list[list[str]], width: int, pitch: int = 20, top: int = 0) -> list[TextLine]:
    """Cells, 10 pixels a letter and 12 high, in columns of that width."""
    return [
        TextLine(Box(x * width, top + y * pitch, x * width + 10 * len(cell), top + y * pitch + 12), cell, 1.0)
        for y, row in enumerate(rows)
        for x, cell in enumerate(row)
        if cell
    ]


TABLE_ROWS = [["by", "been"], ["turzat", "31"], ["joasts", "0:39"]]
COLUMN_ROWS = [["the first", "a second"], ["column", "beside"], ["is longer", "ends"], ["than it", ""]]


@pytest.mark.parametrize("zones", [[], [Zone(Box(0, 15, 300, 110), FIGURE, 0.9)]], ids=["no zone", "a figure"])
def test_rows_of_short_cells_are_a_table_and_lines_of_columns_are_none(zones: list[Zone]) -> None:
    head = [TextLine(Box(0, 0, 130, 12), "over the table", 1.0)]
    (text, table) = make_regions(zones, head + grid(TABLE_ROWS, 120, top=20), Origin.OCR)
    assert (text.kind, text.text) == (TEXT, "over the table")
    assert (table.kind, table.text) == (TABLE, "by\tbeen\nturzat\t31\njoasts\t0:39")
    regions = make_regions(zones, grid(COLUMN_ROWS, 120, top=20), Origin.OCR)
    assert [region.text for region in regions] == ["the first\ncolumn\nis longer\nthan it", "a second\nbeside\nends"]


def test_labels_of_a_drawing_make_no_table_of_it() -> None:
    zones = [Zone(Box(0, 0, 600, 300), FIGURE, 0.9)]
    labels = grid([["1.0"], ["0.5"], ["0.0"], ["", "10", "20", "30"]], 150, pitch=70)
    assert [(region.kind, region.text) for region in make_regions(zones, labels, Origin.OCR)] == [(FIGURE, "")]


def test_what_the_layer_lacks_comes_from_the_ocr() -> None:
    zones = [Zone(Box(0, 0, 300, 50), TEXT, 1.0), Zone(Box(0, 100, 300, 150), TEXT, 1.0)]
    layer, seen = [line(0, 10, "layer")], [line(0, 10, "layen"), line(0, 110, "stamp")]
    regions = make_regions(zones, layer, Origin.TEXT_LAYER, also=seen)
    assert [(region.text, region.origin) for region in regions] == [
        ("layer", Origin.TEXT_LAYER),
        ("stamp", Origin.OCR),
    ]


def test_running_heads_come_first_and_feet_last() -> None:
    zones = [
        Zone(Box(0, 900, 300, 950), RegionKind.FOOTER, 1.0),
        Zone(Box(500, 0, 800, 50), RegionKind.HEADER, 1.0),
        Zone(Box(0, 0, 300, 800), TEXT, 1.0),
    ]
    lines = [line(0, 910, "foot"), line(510, 10, "head"), line(0, 100, "body")]
    assert [region.text for region in make_regions(zones, lines, Origin.OCR)] == ["head", "body", "foot"]


LEFT = ("Import the", "error is", "raised", "where it", "was left.")
RIGHT = ("Decided", "waiting", "parses", "again.", "Keep")


def columns(right_begins: int, num_right: int) -> list[TextLine]:
    """Short lines on one grid, the right column from that row on, with a paragraph's gap in it."""
    left = [line(0, 28 * row, text, 14) for row, text in enumerate(LEFT)]
    places = [right_begins + row + (row >= 2) for row in range(num_right)]
    return left + [line(150, 28 * place, text, 14) for place, text in zip(places, RIGHT, strict=False)]


@pytest.mark.parametrize("kind", [None, TABLE])
@pytest.mark.parametrize(("right_begins", "num_right"), [(0, 5), (3, 5), (1, 3)])
def test_columns_of_short_lines_are_no_table(kind: RegionKind | None, right_begins: int, num_right: int) -> None:
    zones = [] if kind is None else [Zone(Box(0, 0, 300, 300), kind, 0.7)]
    regions = make_regions(zones, columns(right_begins, num_right), Origin.OCR)
    assert {region.kind for region in regions} == {TEXT}
    assert "\n".join(region.text for region in regions).split("\n") == [*LEFT, *RIGHT[:num_right]]


def test_a_sum_below_the_right_cells_is_a_row_of_the_table() -> None:
    cells = [
        line(200 * (place % 2), 28 * (place // 2), text, 14) for place, text in enumerate(["Tea", "20", "Milk", "3"])
    ]
    lines = [*cells, line(200, 56, "23", 14)]
    (table,) = make_regions([Zone(Box(0, 0, 300, 80), TABLE, 0.7)], lines, Origin.OCR)
    assert (table.kind, table.text) == (TABLE, "Tea\t20\nMilk\t3\n23")
