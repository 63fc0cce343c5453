"""Pages that a model and a reader are shown: synthetic and held out, so that their text is known.

A document shows them as pictures, so that nobody can take their text from it but by reading.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from slipstream.documents.messages import DocumentRequest, PageDraft, PagePicture
from slipstream.documents.pool import ReaderPool
from slipstream.documents.reading import PageReading
from training.evaluate_reader import held_out_pages
from training.pages import KINDS
from training.reader import reader_tokenizer

DPI = 72
"""At which the document is as many pixels as its pages."""
SURFACE = "lines"
"""How the pocket reader writes."""


@dataclass(frozen=True)
class ShownPage:
    """A page as the target sees it, and its text."""

    kind: str
    text: str
    picture: PagePicture


Pages = Mapping[str, Sequence[ShownPage]]
"""By kind."""


def shown_pages(model: Path, count: int) -> dict[str, list[ShownPage]]:
    """Held-out pages by kind, as evenly as `count` allows."""
    tokenizer = reader_tokenizer(model)
    pages: dict[str, list[ShownPage]] = {}
    for number, kind in enumerate(KINDS):
        of_kind = count // len(KINDS) + (number < count % len(KINDS))
        for page in held_out_pages(tokenizer, kind, of_kind):
            height, width, _ = page.pixels.shape
            picture = PagePicture(1, width, height, DPI, page.pixels.tobytes())
            pages.setdefault(kind, []).append(ShownPage(kind, page.text, picture))
    return pages


def flat(pages: Pages) -> list[ShownPage]:
    """All of them, kind after kind."""
    return [page for of_kind in pages.values() for page in of_kind]


def document_of(pages: Sequence[ShownPage]) -> bytes:
    """A PDF of the pages, each a picture."""
    images = [Image.frombytes("RGB", (page.picture.width, page.picture.height), page.picture.pixels) for page in pages]
    out = io.BytesIO()
    images[0].save(out, "PDF", save_all=True, append_images=images[1:], resolution=DPI, quality=95)
    return out.getvalue()


def request_at(ocr_dpi: int) -> DocumentRequest:
    """For the pages in their own pixels, and an OCR that sees them at that resolution."""
    return DocumentRequest(dpi=DPI, ocr_dpi=ocr_dpi, text_layer=False)


async def drafts_of(pool: ReaderPool, pages: Sequence[ShownPage], ocr_dpi: int) -> list[PageDraft]:
    """What the OCR says of a document of these pages."""
    events = pool.read(document_of(pages), request_at(ocr_dpi))
    return [event async for event in events if isinstance(event, PageDraft)]


def token_ids(page: PageReading) -> tuple[int, ...]:
    return tuple(token.token_id for token in page.caption.tokens)
