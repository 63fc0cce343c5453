"""Which pages of a document are wanted, and how large their pictures may be. Pure."""

import math
import re
from collections.abc import Sequence

from slipstream.config import check_kind, check_text
from slipstream.documents.messages import MAX_DPI, MIN_DPI, DocumentLimits, DocumentRequest
from slipstream.errors import InvalidRequest, LimitExceeded

POINTS_PER_INCH = 72
MAX_RANGE_CHARS = 1000
_RANGE = re.compile(r"(\d{1,7})(?:\s*-\s*(\d{1,7})?)?", re.ASCII)


def parse_pages(asked: str, num_pages: int, max_pages: int) -> tuple[int, ...]:
    """Page numbers from 1, each once, in the order asked for: "1-5,9", "3-" (to the end), "" (all).

    Raises:
        InvalidRequest: the text is no list of pages, or names one that the document does not have.
        LimitExceeded: more pages than `max_pages`.
    """
    if len(asked) > MAX_RANGE_CHARS:
        raise InvalidRequest(f"pages: at most {MAX_RANGE_CHARS} characters are read")
    wanted: dict[int, None] = {}
    for part in asked.split(",") if asked.strip() else ["1-"]:
        wanted |= dict.fromkeys(_parse_range(part.strip(), num_pages))
        if len(wanted) > max_pages:  # before the next range, of which there may be hundreds of as many pages
            raise LimitExceeded(
                f"pages: {len(wanted)} or more are asked for, and this server reads at most {max_pages} at a time; ask"
                f' for them in parts, such as pages "1-{max_pages}"'
            )
    return tuple(wanted)


def page_ranges(pages: Sequence[int]) -> str:
    """What `parse_pages` makes these pages of, in their order."""
    parts: list[list[int]] = []
    for page in pages:
        if parts and page == parts[-1][-1] + 1:
            parts[-1][1:] = [page]
        else:
            parts.append([page])
    return ",".join("-".join(map(str, part)) for part in parts)


def first_ranges(pages: Sequence[int]) -> str:
    """The same of as many of the first of them as a request may name."""
    asked = page_ranges(pages)
    return asked if len(asked) <= MAX_RANGE_CHARS else asked[: MAX_RANGE_CHARS + 1].rpartition(",")[0]


def _parse_range(part: str, num_pages: int) -> range:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise InvalidRequest(f'pages: {part!r} is no page and no range of pages; write "1-5,9"')
    first = int(found[1])
    last = first if "-" not in part else int(found[2] or num_pages)
    if found[2] and last < first:
        raise InvalidRequest(f'pages: {part!r} ends before it begins; write "{last}-{first}"')
    if not 1 <= first <= last <= num_pages:
        raise InvalidRequest(f"pages: {part!r} is not within the document, which has pages 1 to {num_pages}")
    return range(first, last + 1)


def check_request(request: DocumentRequest) -> None:
    """Raises InvalidRequest for resolutions that are not served, and for what is of another type."""
    check_text("pages", request.pages)
    check_kind("pictures", request.pictures, bool)
    check_kind("text_layer", request.text_layer, bool)
    for name, dpi in (("dpi", request.dpi), ("ocr_dpi", request.ocr_dpi or MIN_DPI)):
        check_kind(name, dpi, int)
        if not MIN_DPI <= dpi <= MAX_DPI:
            raise InvalidRequest(f"{name} is {dpi}; ask for {MIN_DPI} to {MAX_DPI}")


def picture_scale(width_pt: float, height_pt: float, dpi: float, max_pixels: int) -> float:
    """Pixels a point at that resolution, or fewer so that the picture has at most `max_pixels`.

    Raises LimitExceeded for a page whose size is no size, or whose picture would have no pixel in one direction.
    """
    if not (0 < width_pt < math.inf and 0 < height_pt < math.inf):
        raise LimitExceeded(f"a page of {width_pt:g} x {height_pt:g} points cannot be drawn")
    scale = min(dpi / POINTS_PER_INCH, math.sqrt(max_pixels / (width_pt * height_pt)))
    while math.ceil(width_pt * scale) * math.ceil(height_pt * scale) > max_pixels:
        scale *= 0.99
    if min(width_pt, height_pt) * scale < 1:
        raise LimitExceeded(
            f"a page of {width_pt:g} x {height_pt:g} points is too long and thin to be drawn in {max_pixels} pixels"
        )
    return scale


def check_image(width: int, height: int, limits: DocumentLimits) -> None:
    """Raises LimitExceeded for an image that is not decoded for its size."""
    if width * height > limits.max_source_pixels:
        raise LimitExceeded(
            f"an image of {width} x {height} pixels is larger than the {limits.max_source_pixels} that are decoded;"
            " scale it down"
        )
