"""Regions in a target's own way of writing."""

from slipstream.documents.messages import Box, Origin, Region, RegionKind
from slipstream.documents.surfaces import SURFACES, USUAL_SURFACE, page_text, surface_of


def region(order: int, kind: RegionKind, text: str) -> Region:
    return Region(Box(0, order, 9, order + 1), kind, order, text, 1.0, Origin.OCR)


def test_markdown() -> None:
    regions = [
        region(0, RegionKind.HEADER, "Journal of Foxes"),
        region(1, RegionKind.HEADING, "Quiet\nharbours"),
        region(2, RegionKind.TEXT, "Seven foxes read the mor-\nning paper, state-of-\nthe-art\nand rain."),
        region(3, RegionKind.TEXT, "- one fox\nwith a hat\n- two foxes\n12. three"),
        region(4, RegionKind.TABLE, "a|b\tc\n1\t2\t3\n4"),
        region(5, RegionKind.FIGURE, ""),
        region(6, RegionKind.CAPTION, "Figure 1: foxes"),
        region(7, RegionKind.FORMULA, "E = mc2"),
        region(8, RegionKind.FOOTER, "17"),
    ]
    assert page_text(regions).split("\n\n") == [
        "# Quiet harbours",
        "Seven foxes read the morning paper, state-ofthe-art and rain.",
        "- one fox with a hat\n- two foxes\n12. three",
        "| a\\|b | c |  |\n| --- | --- | --- |\n| 1 | 2 | 3 |\n| 4 |  |  |",
        "Figure 1: foxes",
        "$$\nE = mc2\n$$",
    ]


def test_lines() -> None:
    regions = [
        region(0, RegionKind.HEADING, "Quiet harbours"),
        region(1, RegionKind.HEADING, "Seven foxes read\nthe mor-\nning paper."),
        region(2, RegionKind.TEXT, "\u2022one fox\n\u2022 two foxes"),
        region(3, RegionKind.TABLE, "a\tb\n1\t2"),
        region(4, RegionKind.FIGURE, ""),
        region(5, RegionKind.CAPTION, "Figure 1:\nfoxes"),
    ]
    assert page_text(regions, "lines").split("\n\n") == [
        "# Quiet harbours",
        "Seven foxes read\nthe mor-\nning paper.",
        "- one fox\n- two foxes",
        "| a | b |\n| 1 | 2 |",
        "![Figure 1: foxes]",
    ]


def test_tables_as_html() -> None:
    """On one line, and nothing else differs from Markdown."""
    table = region(1, RegionKind.TABLE, "a|b\t c<d \n1\t2\t3\n4 & 5")
    others = [region(0, RegionKind.HEADING, "Quiet\nharbours"), region(2, RegionKind.FORMULA, "E = mc2")]
    (written,) = SURFACES["html_tables"]([table])
    rows = ("<td>a|b</td><td>c&lt;d</td>", "<td>1</td><td>2</td><td>3</td>", "<td>4 &amp; 5</td>")
    assert written == "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
    assert SURFACES["html_tables"](others) == SURFACES["markdown"](others) == ["# Quiet harbours", "$$\nE = mc2\n$$"]


def test_whose_surface_is_taken() -> None:
    """What was asked for, then what the target writes, if that is known here."""
    assert surface_of("markdown", "lines") == "markdown"
    assert surface_of("", "lines") == "lines"
    assert surface_of("", "") == surface_of("", "of a later release") == USUAL_SURFACE == "markdown"


def test_every_surface_says_something_of_every_region() -> None:
    regions = [region(order, kind, text) for order, kind in enumerate(RegionKind) for text in ("", "word")]
    for name, adapter in SURFACES.items():
        assert len(adapter(regions)) == len(regions), name
        assert adapter([]) == []
