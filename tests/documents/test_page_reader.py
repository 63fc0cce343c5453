"""Text layers that are believed, those that are not, and what a page of each becomes."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from slipstream.documents.layout import Zone
from slipstream.documents.messages import MAX_REGIONS, NO_OCR, Box, Origin, RegionKind, TextLine
from slipstream.documents.page_reader import (
    CUT,
    FAKE_LAYER,
    NO_TEXT,
    UNCHECKED_LAYER,
    UNSURE,
    Picture,
    parts_of,
    read_page,
    scaled,
)

PAGE: Picture = np.full((1000, 800, 3), 255, dtype=np.uint8)
SHOWN = ["Seven foxes read", "the morning paper", "while rain falls", "over harbour towns"]


def lines_of(texts: list[str]) -> list[TextLine]:
    return [TextLine(Box(50, 200 + 40 * index, 350, 220 + 40 * index), text) for index, text in enumerate(texts)]


@dataclass
class FakeEyes:
    """Reads what the page shows, whatever the picture is."""

    shown: list[TextLine] = field(default_factory=lambda: lines_of(SHOWN))
    parts: list[Zone] = field(default_factory=list)
    num_full: int = 0

    def lines(self, picture: Picture) -> list[TextLine]:
        self.num_full += 1
        return self.shown

    def read_line(self, picture: Picture, box: Box) -> str:
        return next((line.text for line in self.shown if line.box.common(box)), "")

    def zones(self, picture: Picture) -> list[Zone]:
        return self.parts

    def knows(self, char: str) -> bool:
        return char.isascii()


@pytest.mark.parametrize("has_layer", [True, False])
def test_words_on_a_page_that_is_taken_for_a_figure_are_its_text(has_layer: bool) -> None:
    """As those of a slide with a dark background."""
    ground = Zone(Box(0, 30, 800, 960), RegionKind.FIGURE, 0.8)
    title = Zone(Box(40, 190, 360, 230), RegionKind.HEADING, 0.7)
    eyes, layer = FakeEyes(parts=[ground, title]), lines_of(SHOWN) if has_layer else []
    regions, warnings = read_page(PAGE, layer, eyes)
    assert [region.kind for region in regions] == [RegionKind.HEADING, RegionKind.TEXT] and not warnings
    assert [region.text for region in regions] == [SHOWN[0], "\n".join(SHOWN[1:])]
    eyes = FakeEyes(shown=[], parts=[ground])
    regions, warnings = read_page(PAGE, [], eyes)
    assert [region.kind for region in regions] == [RegionKind.FIGURE] and warnings == [NO_TEXT]


def test_a_layer_that_is_what_the_page_shows_is_taken_without_reading_the_page() -> None:
    eyes = FakeEyes()
    noisy = [text.replace("e", "é").upper() for text in SHOWN]
    regions, warnings = read_page(PAGE, lines_of(noisy), eyes)
    assert [region.text for region in regions] == ["\n".join(noisy)]
    assert {region.origin for region in regions} == {Origin.TEXT_LAYER}
    assert not warnings and eyes.num_full == 0


@pytest.mark.parametrize(
    "layer",
    [
        ["Buy our pills now", "they are so cheap", "and cure all ills", "of every kind"],
        ["\ue001\ue002\ue003\ue004\ue005\ue006\ue007"] * 4,
        ["���������"] * 4,
        ["a", "b"],
    ],
    ids=["lie", "unmapped", "undecoded", "too short"],
)
def test_a_fake_layer_is_not_taken(layer: list[str]) -> None:
    regions, warnings = read_page(PAGE, lines_of(layer), FakeEyes())
    assert [region.text for region in regions] == ["\n".join(SHOWN)]
    assert {region.origin for region in regions} == {Origin.OCR} and warnings == [FAKE_LAYER]


def test_a_layer_in_letters_that_the_ocr_does_not_know_is_taken_with_a_warning() -> None:
    arabic = ["السلام عليكم ورحمة", "صباح الخير يا صديقي", "مدينة هادئة على البحر"]
    regions, warnings = read_page(PAGE, lines_of(arabic), FakeEyes(shown=[]))
    assert [region.text for region in regions] == ["\n".join(arabic)] and warnings == [UNCHECKED_LAYER]


def test_a_layer_in_unknown_letters_where_the_ocr_reads_well_is_fake() -> None:
    swapped = ["䴀甀氀琀椀挀漀氀漀爀", "䈀氀愀挀欀䈀氀愀挀欀", "䴀甀氀琀椀挀漀氀漀爀"]
    regions, warnings = read_page(PAGE, lines_of(swapped), FakeEyes())
    assert regions[0].text == "\n".join(SHOWN) and warnings == [FAKE_LAYER]


def test_a_stamp_beside_a_genuine_layer_is_read() -> None:
    stamp = TextLine(Box(500, 700, 700, 730), "RECEIVED 1899")
    zones = [Zone(Box(40, 190, 360, 400), RegionKind.TEXT, 1.0), Zone(Box(490, 690, 710, 740), RegionKind.TEXT, 1.0)]
    eyes = FakeEyes(shown=[*lines_of(SHOWN), stamp], parts=zones)
    regions, _ = read_page(PAGE, lines_of(SHOWN), eyes)
    assert [region.origin for region in regions] == [Origin.TEXT_LAYER, Origin.OCR]
    assert regions[1].text == "RECEIVED 1899" and eyes.num_full == 1


def test_a_table_that_is_a_picture_beside_a_genuine_layer_is_read() -> None:
    zone = Zone(Box(40, 490, 710, 740), RegionKind.TABLE, 1.0)
    cells = [TextLine(Box(x, y, x + 50, y + 20), f"{x} {y}") for y in (500, 600, 700) for x in (50, 300, 600)]
    regions, _ = read_page(PAGE, lines_of(SHOWN), FakeEyes(shown=[*lines_of(SHOWN), *cells], parts=[zone]))
    assert [(region.kind, region.origin) for region in regions] == [
        (RegionKind.TEXT, Origin.TEXT_LAYER),
        (RegionKind.TABLE, Origin.OCR),
    ]
    assert regions[1].text.splitlines()[0] == "50 500\t300 500\t600 500"


@pytest.mark.parametrize("parts", [[], [Zone(Box(40, 190, 360, 400), RegionKind.TABLE, 1.0)]], ids=["plain", "zones"])
def test_a_scan_with_a_stamp_below_is_read(parts: list[Zone]) -> None:
    """The stamp is a genuine layer, and says nothing of what is above it."""
    stamp = TextLine(Box(500, 960, 700, 980), "CONFIDENTIAL ABC-000123")
    eyes = FakeEyes(shown=[*lines_of(SHOWN), stamp], parts=parts)
    regions, warnings = read_page(PAGE, [stamp], eyes)
    assert [region.text for region in regions] == ["\n".join(SHOWN), stamp.text] and not warnings
    regions, warnings = read_page(PAGE, [stamp], eyes, ocr=False)
    assert [region.text for region in regions] == [stamp.text] and not warnings


def test_a_page_without_text_is_an_empty_draft_with_a_warning() -> None:
    assert read_page(PAGE, [], FakeEyes(shown=[])) == ([], [NO_TEXT])


def test_a_page_that_the_ocr_is_not_sure_of_is_an_empty_draft_with_a_warning() -> None:
    """Longer lines count for more, and a page is left out as a whole."""
    unsure = [replace(line, score=0.6) for line in lines_of(SHOWN)]
    assert read_page(PAGE, [], FakeEyes(shown=unsure)) == ([], [UNSURE])
    number = TextLine(Box(600, 1000, 620, 1020), "17", score=1.0)
    assert read_page(PAGE, [], FakeEyes(shown=[*unsure, number])) == ([], [UNSURE])
    sure = [*lines_of(SHOWN), replace(number, score=0.5)]
    regions, warnings = read_page(PAGE, [], FakeEyes(shown=sure))
    assert "17" in {region.text for region in regions} and not warnings


def test_a_running_head_in_the_middle_of_the_page_is_a_text() -> None:
    zones = [Zone(Box(0, 190, 400, 400), RegionKind.HEADER, 1.0)]
    regions, _ = read_page(PAGE, [], FakeEyes(parts=zones))
    assert [region.kind for region in regions] == [RegionKind.TEXT]
    head, title = Zone(Box(0, 0, 99, 40), RegionKind.HEADER, 1.0), TextLine(Box(0, 10, 90, 30), "Journal")
    with_body = FakeEyes(shown=[title, *lines_of(SHOWN)], parts=[head])
    assert [region.kind for region in read_page(PAGE, [], with_body)[0]] == [RegionKind.HEADER, RegionKind.TEXT]
    assert [region.kind for region in read_page(PAGE, [], FakeEyes([title], [head]))[0]] == [RegionKind.TEXT]


@pytest.mark.long
def test_a_page_with_more_than_is_taken_is_cut() -> None:
    dust = [TextLine(Box(x, y, x + 1, y + 1), "x") for x in range(0, 800, 12) for y in range(0, 1000, 20)]
    regions, warnings = read_page(PAGE, [], FakeEyes(shown=dust))
    assert len(dust) > MAX_REGIONS >= len(regions) and warnings == [CUT]


def test_regions_move_with_the_picture_and_stay_on_it() -> None:
    [region], _ = read_page(PAGE, [], FakeEyes())
    half = scaled(region, 0.5, 0.5, 400, 500)
    assert half.box == Box(25, 100, 175, 170) and half.text == region.text
    assert scaled(region, 0.001, 0.001, 1, 1).box == Box(0, 0, 1, 1)


def test_without_ocr_there_is_what_a_genuine_layer_says() -> None:
    eyes = FakeEyes()
    regions, warnings = read_page(PAGE, lines_of(SHOWN), eyes, ocr=False)
    assert regions == read_page(PAGE, lines_of(SHOWN), eyes)[0] and not warnings
    fake = lines_of(["quite another text", "with other words in it", "about nothing shown", "anywhere on the page"])
    for layer in ([], fake):
        assert read_page(PAGE, layer, eyes, ocr=False) == ([], [NO_OCR])
    assert not eyes.num_full


@pytest.mark.parametrize(("width", "height"), [(100, 250), (1000, 1414), (3000, 20), (2, 3000), (1, 1)])
def test_a_page_is_read_at_once(width: int, height: int) -> None:
    assert parts_of(np.zeros((height, width, 3), dtype=np.uint8)) == [slice(0, height)]


@pytest.mark.parametrize(("width", "height"), [(200, 501), (400, 9000), (40, 3999), (3, 290)])
def test_a_long_page_is_read_in_parts_that_are_cut_between_its_lines(width: int, height: int) -> None:
    page = np.full((height, width, 3), 255, dtype=np.uint8)
    page.reshape(-1)[::2] = 90
    for top in range(0, height - 13, 26):
        page[top : top + 13] = 240
    parts = parts_of(page)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == height
    assert 1 < len(parts) <= 24
    assert all(part.stop % 26 in range(4, 9) for part in parts[:-1])
