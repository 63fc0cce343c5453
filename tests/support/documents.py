"""Small PDFs and images made by hand, sound and hostile, and what the tests of documents share."""

import importlib.util
import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from slipstream.documents.messages import PagePicture
from slipstream.documents.pool import NEEDED

needs_documents = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs the extra `documents`"
)
A4 = (595, 842)
WORDS = [
    "seven",
    "quick",
    "brown",
    "foxes",
    "read",
    "the",
    "morning",
    "paper",
    "while",
    "rain",
    "falls",
    "over",
    "quiet",
    "harbour",
    "towns",
]


def sentence(seed: int, num_words: int) -> str:
    """Words in an order that is the seed's own."""
    return " ".join(WORDS[(seed * 7 + index * (seed % 5 + 1)) % len(WORDS)] for index in range(num_words))


# -- PDF ---------------------------------------------------------------------------------------------------------------


def make_pdf(objects: Sequence[bytes], root: int = 1, trailer: bytes = b"") -> bytes:
    """A file of these objects, numbered from 1."""
    out, offsets = bytearray(b"%PDF-1.6\n"), []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    out += b"trailer\n<< /Size %d /Root %d 0 R %s >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        root,
        trailer,
        start,
    )
    return bytes(out)


def stream(content: bytes, fields: bytes = b"") -> bytes:
    """A stream's object."""
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), fields, content)


def pdf_of(
    pages: Sequence[bytes], size: tuple[float, float] = A4, resources: bytes = b"", more: Sequence[bytes] = ()
) -> bytes:
    """A PDF of pages with these contents. `F` is Helvetica; `more` are objects from number 4 on."""
    first = 4 + len(more)
    kids = b" ".join(b"%d 0 R" % (first + 2 * index) for index in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(pages), kids),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        *more,
    ]
    for index, content in enumerate(pages):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 %g %g] /Contents %d 0 R"
            b" /Resources << /Font << /F 3 0 R >> %s >> >>" % (*size, first + 2 * index + 1, resources)
        )
        objects.append(stream(content))
    return make_pdf(objects)


def words_at(x: float, y: float, text: str, size: float = 11, invisible: bool = False) -> bytes:
    """Drawing one line, from the left bottom of the page."""
    escaped = text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
    return f"BT /F {size} Tf {3 if invisible else 0} Tr {x} {y} Td ({escaped}) Tj ET\n".encode("latin-1")


def paragraph(x: float, y: float, lines: Sequence[str], size: float = 11) -> bytes:
    """Lines one below the other."""
    return b"".join(words_at(x, y - 1.3 * size * index, line, size) for index, line in enumerate(lines))


def two_columns(seed: int = 1) -> tuple[bytes, str]:
    """A page with a head over two columns, and its text in reading order."""
    head = "Harbour towns and their foxes"
    columns = [
        [[sentence(seed + 9 * place + 3 * part + row, 6) for row in range(8)] for part in range(3)] for place in (0, 1)
    ]
    content = words_at(72, 760, head, 22)
    for place, paragraphs in enumerate(columns):
        for part, lines in enumerate(paragraphs):
            content += paragraph((50, 310)[place], 700 - 150 * part, lines, 9)
    texts = [" ".join(lines) for paragraphs in columns for lines in paragraphs]
    return content, "\n\n".join([head, *texts])


def scan_of(picture: Image.Image, layer: Sequence[str] = ()) -> bytes:
    """A PDF that shows a picture, with an invisible text that may say something else."""
    data = io.BytesIO()
    picture.convert("RGB").save(data, "JPEG", quality=85)
    fields = b"/Type /XObject /Subtype /Image /ColorSpace /DeviceRGB /BitsPerComponent 8 /Filter /DCTDecode"
    image = stream(data.getvalue(), fields + b" /Width %d /Height %d" % picture.size)
    content = b"q %d 0 0 %d 0 0 cm /I Do Q\n" % A4
    for index, line in enumerate(layer):
        content += words_at(50, 770 - 30 * index, line, 14, invisible=True)
    return pdf_of([content], resources=b"/XObject << /I 4 0 R >>", more=[image])


def many_pages(number: int) -> bytes:
    """A PDF of so many pages with a word each."""
    return pdf_of([words_at(72, 700, f"page {index + 1}", 24) for index in range(number)])


def encrypted() -> bytes:
    """A PDF that opens with a password only."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 100 100] >>",
        b"<< /Filter /Standard /V 2 /R 3 /Length 128 /P -44 /O <" + b"28" * 32 + b"> /U <" + b"37" * 32 + b"> >>",
    ]
    return make_pdf(objects, trailer=b"/Encrypt 4 0 R /ID [<0011><0011>]")


def cyclic() -> bytes:
    """A PDF whose tree of pages holds itself."""
    return make_pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Count 1000000 /Kids [2 0 R 3 0 R] /Parent 3 0 R >>",
            b"<< /Type /Pages /Count 1000000 /Kids [2 0 R 3 0 R] /Parent 2 0 R >>",
        ]
    )


def cyclic_form() -> bytes:
    """A page that draws a form which draws itself."""
    form = stream(b"/X Do", b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 4 0 R >> >>")
    return pdf_of([b"0 0 90 90 re f /X Do"], resources=b"/XObject << /X 4 0 R >>", more=[form])


def forms_within_forms(depth: int = 24, fan: int = 8) -> bytes:
    """A page whose drawing takes for ever: each of `depth` forms draws the next `fan` times."""
    forms = []
    for level in range(depth):
        inner = b"/X Do " * fan if level < depth - 1 else b"0 0 5 5 re f"
        fields = b"/Type /XObject /Subtype /Form /BBox [0 0 600 900]"
        if level < depth - 1:
            fields += b" /Resources << /XObject << /X %d 0 R >> >>" % (5 + level)
        forms.append(stream(inner, fields))
    return pdf_of([b"/X Do"], resources=b"/XObject << /X 4 0 R >>", more=forms)


# -- images ------------------------------------------------------------------------------------------------------------

DRAWN = ("Quiet harbour towns", "seven foxes read", "the morning paper")


def drawn_picture(
    lines: Sequence[str] = DRAWN, size: tuple[int, int] = (1000, 500), font: ImageFont.FreeTypeFont | None = None
) -> Image.Image:
    """Large words, black on white."""
    picture = Image.new("RGB", size, "white")
    draw, used = ImageDraw.Draw(picture), font or ImageFont.load_default(44)
    for index, line in enumerate(lines):
        draw.text((60, 60 + 110 * index), line, fill="black", font=used)
    return picture


def font_of(name: str, size: int) -> ImageFont.FreeTypeFont:
    """One of matplotlib's, which have letters of many scripts and are the same everywhere."""
    spec = importlib.util.find_spec("matplotlib")
    assert spec is not None and spec.origin is not None
    return ImageFont.truetype(Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / name, size)


def image_bytes(picture: Image.Image, kind: str, mode: str = "RGB", **options: Any) -> bytes:
    """The picture in a file of that kind."""
    data = io.BytesIO()
    converted = picture.convert(mode)
    converted.save(data, kind, **options)
    return data.getvalue()


def tiff_of(pictures: Sequence[Image.Image], **options: Mapping[str, Any]) -> bytes:
    """A TIFF of several pictures."""
    data = io.BytesIO()
    pictures[0].save(data, "TIFF", save_all=True, append_images=list(pictures[1:]), **options)
    return data.getvalue()


def page_video(picture: PagePicture) -> bytes:
    """The picture as a video of one frame, without loss. Raises ValueError when its pixels do not fit its size."""
    pixels = np.frombuffer(picture.pixels, dtype=np.uint8).reshape(picture.height, picture.width, 3)
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as output:
        stream = output.add_stream("ffv1", rate=1)
        stream.width, stream.height, stream.pix_fmt = picture.width, picture.height, "bgr0"
        stream.time_base = Fraction(1)
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame.pts = 0
        for packet in (*stream.encode(frame), *stream.encode()):
            output.mux(packet)
    return target.getvalue()
