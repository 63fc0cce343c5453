"""Where a model and the OCR read a page differently, as one HTML page for proof-readers. Pure.

The file stands alone: pictures are within it, nothing is fetched, no script runs, and every text is escaped.
"""

import base64
import html
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from slipstream.documents.messages import PagePicture, Region

# -- words -------------------------------------------------------------------------------------------------------------

MAX_WORDS = 3000
"""Of a region or of a page that are compared, which takes two seconds at worst. Those behind them differ as a whole;
of a page they go to its last region."""


@dataclass(frozen=True)
class Passage:
    """Words on which both agree, or which differ."""

    ocr: str
    model: str

    @property
    def agrees(self) -> bool:
        """Whether both say the same."""
        return self.ocr == self.model


def compare_words(ocr: str, model: str) -> list[Passage]:
    """Both texts in passages, word by word. Spaces and line ends do not differ."""
    ocr_words, model_words = ocr.split(), model.split()
    matcher = SequenceMatcher(None, ocr_words[:MAX_WORDS], model_words[:MAX_WORDS], autojunk=False)
    passages = [
        Passage(" ".join(ocr_words[start:end]), " ".join(model_words[model_start:model_end]))
        for _, start, end, model_start, model_end in matcher.get_opcodes()
    ]
    rest = Passage(" ".join(ocr_words[MAX_WORDS:]), " ".join(model_words[MAX_WORDS:]))
    return [*passages, rest] if rest.ocr or rest.model else passages


def split_by_regions(regions: Sequence[str], text: str) -> list[str]:
    """The words of `text` by region, as many texts as `regions` has: words that both have go where the OCR has them,
    others to where their neighbours go. Where there is a region no word is lost, and their order stays; spaces and line
    ends do not. Takes time: not for an event loop."""
    if not regions:
        return []
    owners = [index for index, region in enumerate(regions) for _ in region.split()][:MAX_WORDS]
    ocr = [word for region in regions for word in region.split()][:MAX_WORDS]
    words = text.split()
    matcher = SequenceMatcher(None, ocr, words[:MAX_WORDS], autojunk=False)
    parts: list[list[str]] = [[] for _ in regions]
    last = 0
    for _, ocr_start, ocr_end, start, end in matcher.get_opcodes():
        num_ocr, num_words = ocr_end - ocr_start, end - start
        for index in range(num_words):
            if num_ocr:
                last = max(last, owners[ocr_start + index * num_ocr // num_words])
            parts[last].append(words[start + index])
    parts[-1] += words[MAX_WORDS:]
    return [" ".join(part) for part in parts]


@dataclass(frozen=True)
class RegionReadings:
    """What two have read in one region."""

    region: Region
    model_text: str

    @property
    def differs(self) -> bool:
        """Whether there is a word that they do not share."""
        return self.region.text.split() != self.model_text.split()


@dataclass(frozen=True)
class PageReadings:
    """What two have read on one page."""

    picture: PagePicture
    """With its pixels, or without: then boxes are drawn on white."""
    regions: Sequence[RegionReadings]


# -- HTML --------------------------------------------------------------------------------------------------------------

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:90rem;color:#1b1f24;background:#fff}
.page{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:1.5rem;margin:2rem 0;align-items:start}
svg{width:100%;height:auto;border:1px solid #ccd2d9}
rect{fill:#0a7d3a;fill-opacity:.06;stroke:#0a7d3a;stroke-width:2}
rect.differs{fill:#c2410c;fill-opacity:.14;stroke:#c2410c}
article{border-left:3px solid #0a7d3a;padding:.2rem .8rem;margin:0 0 .8rem}
article.differs{border-color:#c2410c}
h3{font-size:.85rem;margin:0;color:#57606a;font-weight:600}
p{margin:.2rem 0;overflow-wrap:anywhere}
.lossy{background:#fff3c4;padding:.2rem .8rem}
del{background:#ffe1d6;text-decoration-color:#c2410c} ins{background:#d9f5e3;text-decoration:none}
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


HTML_END = "</body></html>\n"
"""What stands behind the last page."""


def html_head(title: str, lossy_facts: Sequence[str] = ()) -> str:
    """What stands before the first page. Pages follow by `page_html`, and then `HTML_END`.

    Args:
        lossy_facts: in which ways the model's text need not be its own, see `Caption.lossy_facts`.
    """
    safe = html.escape(title)
    lossy = "".join(f'<p class="lossy">{html.escape(fact)}</p>' for fact in lossy_facts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{safe}</title><style>{_STYLE}</style></head><body><h1>{safe}</h1>"
        "<p><del>struck out</del>: as the OCR reads it; <ins>marked</ins>: as the model does.</p>"
        f"{lossy}"
    )


def page_html(page: PageReadings) -> str:
    """A page's picture with its boxes, and the words that differ: the OCR's struck out, the model's marked. A page on
    which both agree takes a line."""
    number, num_differ = page.picture.page, sum(reading.differs for reading in page.regions)
    heading = f'<h2 id="page-{number}">Page {number}</h2>'
    if not num_differ:
        return f"{heading}<p>Both read the same in all {len(page.regions)} regions.</p>"
    texts = "".join(_region(reading) for reading in page.regions)
    told = f"<p>{num_differ} of {len(page.regions)} regions differ.</p>"
    return f'{heading}{told}<div class="page">{_picture(page)}<div>{texts}</div></div>'


def _picture(page: PageReadings) -> str:
    width, height = page.picture.width, page.picture.height
    image = f'<image href="{_png_url(page.picture)}" width="{width}" height="{height}"/>' if page.picture.pixels else ""
    boxes = "".join(_rectangle(reading) for reading in page.regions)
    return f'<svg viewBox="0 0 {width} {height}">{image}{boxes}</svg>'


def _rectangle(reading: RegionReadings) -> str:
    box = reading.region.box
    place = f'x="{box.left}" y="{box.top}" width="{box.width}" height="{box.height}"'
    return f"<rect{_class(reading)} {place}><title>region {reading.region.order}</title></rect>"


def _region(reading: RegionReadings) -> str:
    region = reading.region
    words = " ".join(_passage(passage) for passage in compare_words(region.text, reading.model_text))
    heading = f"{region.order}: {region.kind.value}, {region.origin.value.replace('_', ' ')}"
    return f"<article{_class(reading)}><h3>{heading}</h3><p>{words}</p></article>"


def _class(reading: RegionReadings) -> str:
    return ' class="differs"' if reading.differs else ""


def _passage(passage: Passage) -> str:
    if passage.agrees:
        return html.escape(passage.ocr)
    parts = ((passage.ocr, "del"), (passage.model, "ins"))
    return " ".join(f"<{tag}>{html.escape(text)}</{tag}>" for text, tag in parts if text)


def _png_url(picture: PagePicture) -> str:
    """The pixels as a PNG in a `data:` address."""
    return "data:image/png;base64," + base64.b64encode(png_bytes(picture)).decode()


def png_bytes(picture: PagePicture) -> bytes:
    """The pixels as a file. Raises ValueError when they are not as many as the picture's size says."""
    stride = 3 * picture.width
    if len(picture.pixels) != stride * picture.height:
        raise ValueError("the picture's pixels do not fit its size")
    rows = (picture.pixels[row * stride : (row + 1) * stride] for row in range(picture.height))
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 6)  # each row: filter type 0, as it is
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
