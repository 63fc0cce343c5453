"""How a target writes what it reads: regions in, the text that this target would write for them out. Pure.

Drafts are matched by token, so a draft in another notation than the target's is worth nothing. One adapter for each
family of targets, by the name that `--surface`, the families and a checkpoint's config.json use.
"""

import html
import re
from collections.abc import Callable, Sequence

from slipstream.documents.messages import Region, RegionKind

Surface = Callable[[Sequence[Region]], list[str]]
"""Of a page's regions in reading order the text of each, as the target would write it; '' for one that it leaves out.
A page is these texts, joined by an empty line."""

SURFACES: dict[str, Surface] = {}
"""By name."""
USUAL_SURFACE = "markdown"
"""Of a target of which nothing is known."""
CONFIG_KEY = "slipstream_surface"
"""Key of a checkpoint's config.json that names what it writes, where that is not what its family writes."""
PARAGRAPHS = "\n\n"
"""Between two regions of a page."""


def surface(name: str) -> Callable[[Surface], Surface]:
    """Registers an adapter."""

    def register(adapter: Surface) -> Surface:
        SURFACES[name] = adapter
        return adapter

    return register


def surface_of(asked: str, target: str) -> str:
    """The surface to write in: that asked for, else the target's own as far as it is known here, else the usual one."""
    return asked or (target if target in SURFACES else USUAL_SURFACE)


def page_text(regions: Sequence[Region], name: str = USUAL_SURFACE) -> str:
    """The page as the target of that surface would write it. Raises KeyError for a name that is not registered."""
    return PARAGRAPHS.join(text for text in SURFACES[name](regions) if text)


# -- plain Markdown ----------------------------------------------------------------------------------------------------

HEADING_MARK = "# "
_HYPHENATED = re.compile(r"(?<=\w)-\n(?=[a-z])")


@surface("markdown")
def markdown(regions: Sequence[Region]) -> list[str]:
    """Plain Markdown: headings behind `#`, tables with pipes, formulas between `$$`; no running heads and feet."""
    return [_markdown_region(region, pipe_table) for region in regions]


def _markdown_region(region: Region, table: Callable[[str], str]) -> str:
    text = region.text.strip("\n")
    match region.kind:
        case RegionKind.HEADER | RegionKind.FOOTER | RegionKind.FIGURE:
            return ""
        case RegionKind.HEADING:
            return HEADING_MARK + joined_lines(text) if text else ""
        case RegionKind.TABLE:
            return table(text)
        case RegionKind.FORMULA:
            return f"$$\n{text}\n$$" if text else ""
        case _:
            return joined_paragraphs(text)


def joined_lines(text: str) -> str:
    """Lines as one; a word that a hyphen parts at a line's end is whole again."""
    return " ".join(_HYPHENATED.sub("", text).split())


_ITEM = re.compile(r"(?:[-*•‣·]|\(?\d{1,3}[.)]|\(?[a-z]\))\s", re.ASCII)
"""How an item of a list begins."""


def joined_paragraphs(text: str) -> str:
    """Lines as one, but for items of a list, each of which keeps its own line."""
    items: list[list[str]] = []
    for line in text.split("\n"):
        if not items or _ITEM.match(line):
            items.append([])
        items[-1].append(line)
    return "\n".join(joined_lines("\n".join(lines)) for lines in items)


def pipe_table(text: str) -> str:
    """A table of Markdown, from rows as lines and cells between tabs. The first row is its head."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in _rows(text)]
    if not rows:
        return ""
    width = max(map(len, rows))
    padded = [row + [""] * (width - len(row)) for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    return "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]])


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("\t")] for line in text.split("\n") if line]


# -- Markdown with tables as HTML -------------------------------------------------------------------------------------


@surface("html_tables")
def html_tables(regions: Sequence[Region]) -> list[str]:
    """Plain Markdown but for tables, which are HTML on one line: what dots.ocr and MinerU write, and Qwen2.5-VL in its
    own format for documents, whose tables alone are taken from it."""
    return [_markdown_region(region, html_table) for region in regions]


def html_table(text: str) -> str:
    """A table of HTML, from rows as lines and cells between tabs. Rows are as long as they are: a cell that spans
    several is one."""
    rows = ("".join(f"<td>{html.escape(cell, quote=False)}</td>" for cell in row) for row in _rows(text))
    content = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table>{content}</table>" if content else ""


# -- Markdown that keeps the page's lines ------------------------------------------------------------------------------

_BULLET = re.compile(r"^[•‣·]\s*", re.MULTILINE)
_NUMBER = re.compile(r"^(\d{1,3}[.)])(?=[^\s\d.,:)])", re.MULTILINE)
"""Of an item, behind which an OCR tends to lose the space."""


@surface("lines")
def lines(regions: Sequence[Region]) -> list[str]:
    """Markdown whose lines are those of the page, as the pocket reader writes it: a table has no line under its head, a
    figure is its caption, and a heading has one line."""
    return [_lines_region(region) for region in regions]


def _lines_region(region: Region) -> str:
    text = _NUMBER.sub(r"\1 ", _BULLET.sub("- ", region.text.strip("\n")))
    if not text:
        return ""
    match region.kind:
        case RegionKind.HEADING if "\n" not in text and not text.startswith("- "):
            return HEADING_MARK + text
        case RegionKind.CAPTION:
            return f"![{joined_lines(text)}]"
        case RegionKind.TABLE:
            return "\n".join("| " + row.replace("\t", " | ") + " |" for row in text.split("\n"))
        case _:
            return text
