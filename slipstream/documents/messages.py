"""What is asked of a document and what is said of its pages, as plain frozen types; and how little of it is believed.

Whoever reads a document may be under an attacker's control, be it the confined process or a service at the other end of
a wire. So both sides send what they say through `checked_draft` before anybody else sees it.
"""

import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

# -- a page, in words --------------------------------------------------------------------------------------------------


class RegionKind(StrEnum):
    """What a region is, as far as the layout tells."""

    TEXT = "text"
    HEADING = "heading"
    FIGURE = "figure"
    CAPTION = "caption"
    TABLE = "table"
    HEADER = "header"
    """The running head, which every page repeats."""
    FOOTER = "footer"
    REFERENCE = "reference"
    FORMULA = "formula"


class Origin(StrEnum):
    """Where a region's text is from."""

    TEXT_LAYER = "text_layer"
    OCR = "ocr"


class Box(NamedTuple):
    """A rectangle in pixels of the page's picture; `right` and `bottom` are exclusive."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        """In pixels."""
        return self.right - self.left

    @property
    def height(self) -> int:
        """In pixels."""
        return self.bottom - self.top

    @property
    def area(self) -> int:
        """In pixels; 0 for a box that is turned inside out."""
        return max(0, self.width) * max(0, self.height)

    def common(self, other: "Box") -> int:
        """Pixels that both have."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0, width) * max(0, height)


@dataclass(frozen=True)
class TextLine:
    """One line of text, or one cell's line of a table."""

    box: Box
    text: str
    score: float = 1.0
    """How sure whoever read it is, 0 to 1."""


@dataclass(frozen=True)
class Region:
    """One part of a page."""

    box: Box
    kind: RegionKind
    order: int
    """Place in the reading order of the page, from 0."""
    text: str
    """Lines end with a newline; cells of a table's row are parted by tabs. Empty for a picture."""
    score: float
    """How sure the reading is, 0 to 1."""
    origin: Origin


@dataclass(frozen=True)
class PageDraft:
    """What a page seems to say."""

    page: int
    """From 1."""
    width: int
    """Of the picture that the boxes are in, in pixels."""
    height: int
    regions: tuple[Region, ...]
    """In reading order."""
    warnings: tuple[str, ...] = ()
    """Why there may be less than one would expect."""
    seconds: float = 0.0
    """That the reading took, without the picture."""

    @property
    def text(self) -> str:
        """Of all regions in reading order."""
        return "\n\n".join(region.text for region in self.regions if region.text)


@dataclass(frozen=True)
class PagePicture:
    """What a page looks like."""

    page: int
    width: int
    height: int
    dpi: float
    """Resolution of the picture, which may be lower than was asked for; 0 for an image, which has none of its own."""
    pixels: bytes = b""
    """[height, width, 3] RGB, or empty where none were asked for."""


@dataclass(frozen=True)
class DocumentFacts:
    """What is known of a document once it is open."""

    num_pages: int
    """In the whole document."""
    pages: tuple[int, ...]
    """That will be read, from 1, in this order."""


@dataclass(frozen=True)
class ReaderInfo:
    """What a reader service takes."""

    version: str = ""
    max_bytes: int = 0
    max_pages: int = 0
    max_page_pixels: int = 0
    max_documents: int = 0
    """That are read at once."""


ReadEvent = DocumentFacts | PagePicture | PageDraft
"""In this order: the facts once, then for each page its picture and its draft."""

# -- what the target did -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegionStage:
    """What the target's reading of a page's regions was, whose texts became hints for that of the page."""

    num_regions: int = 0
    num_read: int = 0
    """Regions that were given to the target, and those whose texts became hints; of the others the reader's did."""
    num_tokens: int = 0
    passes: int = 0
    """Tokens of those texts, and passes after the prefill, counted by region: the model packs those of several."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    """Of the reader's words, as in `Speculation`."""
    seconds: float = 0.0
    """From the moment that the reader's words were there to the last region's text."""


# -- request and limits ------------------------------------------------------------------------------------------------

MIN_DPI, MAX_DPI = 20, 600


@dataclass(frozen=True)
class DocumentRequest:
    """What to read of a document."""

    pages: str = ""
    """Such as "1-5,9"; empty for all."""
    dpi: int = 150
    """Of the pictures."""
    ocr_dpi: int = 0
    """Of the pictures that the OCR sees, for making it worse on purpose; 0: the pictures that are sent."""
    pictures: bool = False
    """Whether the pixels are wanted, or their size alone."""
    text_layer: bool = True
    """Whether a text that the document brings along is taken, if it passes the check."""
    ocr: bool = True
    """Whether pages without such a text are read by OCR, or have an empty draft."""


@dataclass(frozen=True)
class DocumentLimits:
    """Bounds on one document; the defaults suit a server that takes files from strangers."""

    max_bytes: int = 64 * 1024**2
    max_pages: int = 500
    """That are read of one document."""
    max_page_pixels: int = 16_000_000
    """Of a page's picture. A larger page is drawn smaller: 16 megapixels are 300 dpi of a page of 20 x 9 inches."""
    max_source_pixels: int = 100_000_000
    """Width x height of an image that is a document, checked before it is decoded."""
    open_s: float = 20.0
    """Wall-clock time for opening a document."""
    page_s: float = 60.0
    """Wall-clock time for one page's picture, and as much again for its draft."""


MAX_REGIONS = 2_000
"""Of one page."""
MAX_TEXT_CHARS = 200_000
"""Of one page."""
MAX_WARNINGS, MAX_WARNING_CHARS = 8, 300
NO_OCR = "the page was not read by OCR"
"""Warning of a draft that nobody asked the OCR for, or that it was not waited for."""
MAX_DRAFT_BYTES = 4 * MAX_TEXT_CHARS + 600 * MAX_REGIONS
"""A page's draft as JSON: the text at its longest, and what stands around it."""

# -- checks ------------------------------------------------------------------------------------------------------------


class BadDraft(ValueError):
    """A draft that no sound reader would make."""


def checked_draft(draft: PageDraft, page: int, width: int, height: int) -> PageDraft:
    """The draft of that page, in reading order and with clean texts.

    Raises BadDraft when it is about another page or picture, larger than allowed, or holds figures that cannot be.
    """
    if (draft.page, draft.width, draft.height) != (page, width, height):
        raise BadDraft(f"a draft of page {draft.page} came for page {page}, or of another picture")
    if len(draft.regions) > MAX_REGIONS or sum(len(region.text) for region in draft.regions) > MAX_TEXT_CHARS:
        raise BadDraft("a page has more regions or more text than is taken")
    if not 0 <= draft.seconds < math.inf:
        raise BadDraft("a time is no time")
    if sorted(region.order for region in draft.regions) != list(range(len(draft.regions))):
        raise BadDraft("the reading order leaves places out, or takes them twice")
    regions = tuple(_checked_region(region, width, height) for region in sorted(draft.regions, key=_order))
    warnings = tuple(clean_text(warning)[:MAX_WARNING_CHARS] for warning in draft.warnings[:MAX_WARNINGS])
    return PageDraft(page, width, height, regions, warnings, draft.seconds)


def _order(region: Region) -> int:
    return region.order


def _checked_region(region: Region, width: int, height: int) -> Region:
    left, top, right, bottom = region.box
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise BadDraft("a region is not on its page")
    if not 0 <= region.score <= 1:
        raise BadDraft("a score is not between 0 and 1")
    return Region(region.box, region.kind, region.order, clean_text(region.text), region.score, region.origin)


def clean_text(text: str) -> str:
    """The text without control characters (but newlines and tabs) and without what UTF-8 cannot hold."""
    if text.isascii() and text.isprintable():
        return text
    kept = "".join(char for char in text if char in "\n\t" or char.isprintable() or char == "\u00a0")
    return kept.encode("utf-8", errors="ignore").decode()


# -- as JSON -----------------------------------------------------------------------------------------------------------


def draft_to_json(draft: PageDraft) -> dict[str, Any]:
    """The draft as one JSON object."""
    return asdict(draft)


def draft_from_json(fields: Any) -> PageDraft:
    """The draft that `draft_to_json` wrote, unchecked but for types. Raises BadDraft."""
    try:
        regions = tuple(_region_from_json(region) for region in fields["regions"])
        numbers = [_integer(fields[name]) for name in ("page", "width", "height")]
        warnings = tuple(_text(warning) for warning in fields["warnings"])
        return PageDraft(numbers[0], numbers[1], numbers[2], regions, warnings, float(fields["seconds"]))
    except (KeyError, TypeError, ValueError, OverflowError) as failure:
        raise BadDraft(f"{type(failure).__name__} in a draft") from failure


def draft_from_bytes(data: bytes) -> PageDraft:
    """The draft in the bytes of its JSON, unchecked but for types. Raises BadDraft."""
    try:
        return draft_from_json(json.loads(data))
    except (ValueError, RecursionError) as failure:
        raise BadDraft(f"{type(failure).__name__} in a draft") from failure


def _region_from_json(fields: Any) -> Region:
    left, top, right, bottom = (_integer(number) for number in fields["box"])
    return Region(
        Box(left, top, right, bottom),
        RegionKind(fields["kind"]),
        _integer(fields["order"]),
        _text(fields["text"]),
        float(fields["score"]),
        Origin(fields["origin"]),
    )


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("no whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value
