"""Synthetic pages with their exact text: what the pocket reader learns to read, and is scored on.

A page is laid out from blocks (headings, paragraphs, lists, tables, figures with captions) in one or two columns, drawn
in one of several fonts, and made a little uneven as scans are. Its text is Markdown that keeps the page's lines: a line
of the text is a line of the page, an empty line parts two blocks, and the left column comes before the right one.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from training import prose

PAGE_WIDTH, PAGE_HEIGHT = 280, 364
"""Pixels: 10 x 13 tokens of 28 x 28, the shape of a letter page."""
PITCH = 28
"""Pixels from line to line: all lines stand on one grid, one in each row of tokens."""
KINDS = ("lines", "prose", "report", "list", "table", "figure", "columns")
HELD_OUT_SEEDS = range(9_000_000, 10_000_000)
"""No training sees them."""
NO_BOX = (-1.0, -1.0, -1.0, -1)

FACES = {
    "mono": ("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf", (11.6, 11.6), True),
    "sans": ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", (12.0, 13.0), False),
    "serif": ("DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf", (12.0, 13.0), False),
    "times": ("STIXGeneral.ttf", "STIXGeneralBol.ttf", (14.0, 15.5), False),
}
"""Regular and bold font, least and greatest size, and whether every character stands in a box of 7 pixels."""
_BOX_WIDTH = 7
_SCALE = 2
"""Pages are drawn so many times larger and then resized."""

Box = tuple[float, float, float, int]
"""Left, right and middle height of a character in pixels, and its column (0 or 1)."""


@dataclass(frozen=True)
class Page:
    """`pixels` uint8 [364, 280, 3]; `boxes` has one entry for each character of `text`, `NO_BOX` if it is not drawn."""

    kind: str
    pixels: NDArray[np.uint8]
    text: str
    boxes: list[Box]


@dataclass
class _Style:
    regular: str
    bold: str
    size: float
    boxed: bool
    ink: int
    pitch: int = PITCH
    scale: int = _SCALE


@dataclass
class _Sheet:
    """A page being laid out: where the next line goes, and what has been written."""

    rng: random.Random
    style: _Style
    left: float
    right: float
    top: float
    bottom: float
    column: int = 0
    text: list[str] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    drawing: list[Callable[[ImageDraw.ImageDraw], None]] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Lines that still fit."""
        return max(0, int((self.bottom - self.top) // self.style.pitch))

    def say(self, text: str, box: Box = NO_BOX) -> None:
        """Adds characters of the page's text that are not drawn one by one."""
        self.text.extend(text)
        self.boxes.extend([box] * len(text))

    def part(self) -> None:
        """Begins a new block."""
        if self.text:
            self.say("\n\n")

    def write(self, text: str, left: float, font_name: str, size: float) -> None:
        """Draws `text` in the present line from `left` on, and adds it to the page's text."""
        scale = self.style.scale
        font = _font(font_name, round(size * scale))
        left = round(left / _BOX_WIDTH) * _BOX_WIDTH if self.style.boxed else left
        middle, ink = self.top + self.style.pitch / 2, self.style.ink
        widths = [0.0, *accumulate(_width(font, character) for character in text)]
        stretch = font.getlength(text) / (widths[-1] * scale)  # by kerning
        edges = [left + width * stretch for width in widths]
        self.text.extend(text)
        self.boxes.extend((edges[n], edges[n + 1], middle, self.column) for n in range(len(text)))
        place = (round(left * scale), round(middle * scale))
        self.drawing.append(lambda draw: draw.text(place, text, fill=ink, font=font, anchor="lm"))

    def wrap(self, words: list[str], left: float, font_name: str, size: float) -> list[str]:
        """The words in lines that fit between `left` and the right edge; a word too long for a line is left out."""
        font = _font(font_name, round(size * self.style.scale))
        width = (self.right - left) * self.style.scale
        lines: list[str] = []
        filled = width
        for word in words:
            length = sum(_width(font, character) for character in word)
            if length > width:
                continue
            filled += _width(font, " ") + length
            if filled <= width:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
                filled = length
        return lines

    def write_lines(self, lines: list[str], left: float, font_name: str, size: float) -> None:
        for number, line in enumerate(lines):
            if number:
                self.say("\n")
            self.write(line, left, font_name, size)
            self.top += self.style.pitch


def sample_page(seed: int, kind: str | None = None, face: str | None = None, draw: bool = True) -> Page:
    """The page of this seed, of a random kind and face if none is given; without `draw` it has no pixels."""
    rng = random.Random(f"page {seed}")
    kind = kind or rng.choice(KINDS)
    sheet = _empty_sheet(rng, face or rng.choice(list(FACES)))
    _LAYOUTS[kind](sheet)
    pixels = _render(sheet, seed) if draw else np.zeros((0, 0, 3), np.uint8)
    return Page(kind, pixels, "".join(sheet.text), sheet.boxes)


def _empty_sheet(rng: random.Random, face: str) -> _Sheet:
    regular, bold, sizes, boxed = FACES[face]
    style = _Style(
        regular,
        bold,
        size=rng.uniform(*sizes),
        boxed=boxed,
        ink=rng.randint(0, 80),
    )
    return _Sheet(
        rng,
        style,
        left=rng.uniform(6, 20),
        right=PAGE_WIDTH - rng.uniform(4, 12),
        top=PITCH * rng.choice((0, 0, 1, 1, 2)) + rng.uniform(-1, 1),
        bottom=PAGE_HEIGHT + 2,
    )


def _render(sheet: _Sheet, seed: int) -> NDArray[np.uint8]:
    """The drawing on grey paper, at the sheet's scale and then resized, with noise."""
    scale = sheet.style.scale
    noise = np.random.default_rng(seed)
    picture = Image.new("L", (PAGE_WIDTH * scale, PAGE_HEIGHT * scale), 255)
    draw = ImageDraw.Draw(picture)
    for step in sheet.drawing:
        step(draw)
    if scale > 1:
        picture = picture.resize((PAGE_WIDTH, PAGE_HEIGHT), Image.Resampling.BICUBIC)
    pixels = np.asarray(picture, np.float32) * np.float32(noise.uniform(0.88, 1.0))
    pixels += noise.standard_normal(pixels.shape, np.float32) * np.float32(noise.uniform(0, 4))
    grey: NDArray[np.uint8] = np.clip(pixels, 0, 255).astype(np.uint8)
    return grey[..., None].repeat(3, -1)


# -- blocks -----------------------------------------------------------------------------------------------------------


def _heading(sheet: _Sheet) -> None:
    if sheet.room < 1:
        return
    size = sheet.style.size * (1.0 if sheet.style.boxed else sheet.rng.uniform(1.1, 1.25))
    lines = sheet.wrap(prose.title(sheet.rng), sheet.left, sheet.style.bold, size)[:1]
    if lines:
        sheet.part()
        sheet.say("# ")
        sheet.write_lines(lines, sheet.left, sheet.style.bold, size)


def _paragraph(sheet: _Sheet, num_words: int | None = None) -> None:
    words = prose.words(sheet.rng, num_words or sheet.rng.randint(3, 20))
    lines = sheet.wrap(words, sheet.left, sheet.style.regular, sheet.style.size)[: sheet.room]
    if lines:
        sheet.part()
        sheet.write_lines(lines, sheet.left, sheet.style.regular, sheet.style.size)
        _gap(sheet)


def _items(sheet: _Sheet) -> None:
    numbered, style = sheet.rng.random() < 0.4, sheet.style
    for item in range(sheet.rng.randint(2, 6)):
        mark, said = (f"{item + 1}.",) * 2 if numbered else ("\u2022", "-")
        indent = sheet.left + 1.5 * style.size
        lines = sheet.wrap(prose.words(sheet.rng, sheet.rng.randint(1, 6)), indent, style.regular, style.size)
        if not lines or sheet.room < len(lines):
            return
        if item:
            sheet.say("\n")
        else:
            sheet.part()
        before = len(sheet.text)
        sheet.write(mark, sheet.left, style.regular, style.size)
        sheet.text[before:] = said
        sheet.say(" ")
        sheet.write_lines(lines, indent, style.regular, style.size)
    _gap(sheet)


def _table(sheet: _Sheet) -> None:
    """A row of headings and some of words and numbers, ruled or not; `| a | b |` in the text."""
    rng, style = sheet.rng, sheet.style
    rows, columns = min(sheet.room, rng.randint(2, 6)), rng.choice((2, 2, 3))
    if rows < 2:
        return
    ruled, width = rng.random() < 0.6, (sheet.right - sheet.left) / columns
    sheet.part()
    first_top = sheet.top
    for row in range(rows):
        sheet.say("\n" if row else "")
        font_name = style.regular if row else style.bold
        for column in range(columns):
            make = prose.number if row and column else prose.word
            left = sheet.left + column * width + 4
            cell = make(rng)
            while _font(font_name, round(style.size * style.scale)).getlength(cell) > (width - 8) * style.scale:
                cell = prose.number(rng)
            sheet.say(" | " if column else "| ")
            sheet.write(cell, left, font_name, style.size)
        sheet.say(" |")
        sheet.top += style.pitch
    if ruled:
        _rule(sheet, first_top, rows, columns)
    _gap(sheet)


def _rule(sheet: _Sheet, top: float, rows: int, columns: int) -> None:
    scale, ink, pitch = sheet.style.scale, sheet.style.ink, sheet.style.pitch
    left, right = sheet.left * scale, sheet.right * scale
    heights = [(top + row * pitch) * scale for row in range(rows + 1)]
    widths = [left + (right - left) * column / columns for column in range(columns + 1)]

    def draw_rules(draw: ImageDraw.ImageDraw) -> None:
        for height in heights:
            draw.line((left, height, right, height), fill=ink, width=scale)
        for place in widths:
            draw.line((place, heights[0], place, heights[-1]), fill=ink, width=scale)

    sheet.drawing.append(draw_rules)


def _figure(sheet: _Sheet) -> None:
    """A picture without words, and its caption: `![Figure 3: words]` in the text."""
    rng, style = sheet.rng, sheet.style
    height = rng.randint(2, 4)
    if sheet.room < height + 1:
        return
    scale = style.scale
    box = (sheet.left + 8, sheet.top + 6, sheet.right - 8, sheet.top + height * style.pitch - 4)
    frame = tuple(value * scale for value in box)
    shapes = [_shape(rng, frame) for _ in range(rng.randint(2, 6))]

    def draw_figure(draw: ImageDraw.ImageDraw) -> None:
        draw.rectangle(frame, outline=style.ink, width=scale)
        for draw_shape in shapes:
            draw_shape(draw)

    sheet.drawing.append(draw_figure)
    sheet.top += height * style.pitch
    words = [rng.choice(("Figure", "Figure", "Fig.")), f"{rng.randint(1, 20)}:", *prose.title(rng)]
    sheet.part()
    sheet.say("![")
    sheet.write_lines(
        sheet.wrap(words, sheet.left, style.regular, style.size)[:1], sheet.left, style.regular, style.size
    )
    sheet.say("]")
    _gap(sheet)


def _shape(rng: random.Random, frame: tuple[float, ...]) -> Callable[[ImageDraw.ImageDraw], None]:
    left, top, right, bottom = frame
    xs, ys = sorted(rng.uniform(left, right) for _ in "xx"), sorted(rng.uniform(top, bottom) for _ in "yy")
    fill, kind = rng.randint(40, 220), rng.choice(("ellipse", "rectangle", "line"))
    corners = (xs[0], ys[0], xs[1], ys[1])
    if kind == "line":
        return lambda draw: draw.line(corners, fill=fill, width=2)
    return lambda draw: getattr(draw, kind)(corners, fill=fill)


def _gap(sheet: _Sheet) -> None:
    """Room before the next block, which shows that this one has ended."""
    sheet.top += sheet.style.pitch


# -- kinds of pages ---------------------------------------------------------------------------------------------------


def _lines(sheet: _Sheet) -> None:
    """One to three short blocks somewhere on the page, which is what a cut-out region looks like."""
    sheet.top += sheet.style.pitch * sheet.rng.randint(0, 9)
    sheet.left += sheet.rng.choice((0, 0, 30, 80))
    for _ in range(sheet.rng.randint(1, 3)):
        sheet.rng.choice((_heading, _paragraph, _paragraph))(sheet)


def _prose(sheet: _Sheet) -> None:
    for _ in range(sheet.rng.randint(1, 5)):
        _paragraph(sheet)


def _full(sheet: _Sheet) -> None:
    """Paragraphs down to the end of the page: the most letters to learn from."""
    while sheet.room:
        _paragraph(sheet)


def _report(sheet: _Sheet) -> None:
    for _ in range(sheet.rng.randint(1, 3)):
        _heading(sheet)
        for _ in range(sheet.rng.randint(1, 2)):
            sheet.rng.choice((_paragraph, _paragraph, _paragraph, _items))(sheet)


def _list(sheet: _Sheet) -> None:
    sheet.rng.choice((_heading, _paragraph))(sheet)
    for _ in range(sheet.rng.randint(1, 2)):
        _items(sheet)


def _with_table(sheet: _Sheet) -> None:
    for block in sheet.rng.choice(((_heading, _table), (_paragraph, _table), (_heading, _table, _paragraph))):
        block(sheet)


def _with_figure(sheet: _Sheet) -> None:
    for block in sheet.rng.choice(((_figure, _paragraph), (_paragraph, _figure), (_heading, _figure, _paragraph))):
        block(sheet)


def _columns(sheet: _Sheet) -> None:
    """Two columns, under a heading as wide as the page or none."""
    if sheet.rng.random() < 0.5:
        _heading(sheet)
    gutter = sheet.rng.uniform(12, 22)
    width, left, top = (sheet.right - sheet.left - gutter) / 2, sheet.left, sheet.top
    sheet.style.size *= 1.0 if sheet.style.boxed else 0.92
    for column in range(2):
        sheet.column, sheet.top = column, top
        sheet.left = left + column * (width + gutter)
        sheet.right = sheet.left + width
        for _ in range(sheet.rng.randint(1, 3)):
            _paragraph(sheet, sheet.rng.randint(3, 14))


_LAYOUTS: dict[str, Callable[[_Sheet], None]] = {
    "lines": _lines,
    "prose": _prose,
    "full": _full,
    "report": _report,
    "list": _list,
    "table": _with_table,
    "figure": _with_figure,
    "columns": _columns,
}


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """From matplotlib's fonts, which come with it from the package registry and are the same everywhere."""
    spec = find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("synthetic pages take their fonts from matplotlib: pip install -e '.[dev]'")
    folder = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    return ImageFont.truetype(folder / name, size, layout_engine=ImageFont.Layout.BASIC)


@cache
def _width(font: ImageFont.FreeTypeFont, text: str) -> float:
    return font.getlength(text)
