"""Pages, without the process around it: which way images are up, what of a file is a page, what a text layer says."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageDraw

from slipstream.documents.layout import make_regions
from slipstream.documents.messages import DocumentLimits, Origin, TextLine
from slipstream.documents.render import OpenDocument, open_document
from slipstream.documents.surfaces import page_text
from slipstream.errors import LimitExceeded
from tests.support.documents import paragraph, pdf_of, stream

TURNED = 6
"""The orientation of a photo whose top is on its right."""


def picture(mode: str = "RGB") -> Image.Image:
    """60 by 40, white, with a black corner in the top left."""
    image = Image.new("RGB", (60, 40), "white")
    ImageDraw.Draw(image).rectangle((0, 0, 10, 10), fill="black")
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    return image.convert(mode)


def opened(image: Image.Image, kind: str, **options: object) -> OpenDocument:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return open_document(data.getvalue(), DocumentLimits())


@pytest.mark.parametrize(
    ("dpi", "size"),
    [
        ((204, 98), (60, 83)),
        ((204, 196), (60, 41)),
        ((204, 204), (60, 40)),
        ((100, 200), (120, 40)),
        ((72, 1), (60, 40)),
    ],
)
@pytest.mark.parametrize("orientation", [1, TURNED])
def test_a_fax_is_as_high_as_it_was_on_paper(dpi: tuple[int, int], size: tuple[int, int], orientation: int) -> None:
    """Coarse ones have half as many rows an inch as columns."""
    document = opened(picture("1"), "TIFF", dpi=dpi, tiffinfo={274: orientation})
    shown, again = (document.draw(1, 72, 10**6)[0] for _ in range(2))
    assert shown.shape == again.shape
    assert shown.shape[1::-1] == (size if orientation == 1 else size[::-1])
    corner = shown[:8, :8] if orientation == 1 else shown[:8, -8:]
    assert corner.max() < 128 < shown[-8:, 8:-8].min(), "upright"


def turned(degrees: int, lines: int, mode: int = 0) -> bytes:
    """Lines of words that stand turned on the page, counter-clockwise."""
    across, down = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    content = b""
    for number in range(lines):
        x, y = {0: (72, 760 - 30 * number), 90: (72 + 30 * number, 72)}.get(degrees, (0, 0))
        x, y = {180: (520, 72 + 30 * number), 270: (520 - 30 * number, 760)}.get(degrees, (x, y))
        words = f"BT {mode} Tr /F 14 Tf {across} {down} {-down} {across} {x} {y} Tm (line {number} of the page) Tj ET\n"
        content += words.encode()
    return content


def shown(content: bytes, rotate: int) -> tuple[tuple[int, ...], list[TextLine]]:
    """The picture's shape, and the text layer in it."""
    data = pdf_of([content]).replace(b"/Type /Page /Parent", b"/Type /Page /Rotate %d /Parent" % rotate)
    document = open_document(data, DocumentLimits())
    picture, _ = document.draw(1, 72, 10**6)
    assert np.array_equal(document.draw(1, 72, 10**6)[0], picture)
    return picture.shape, document.text_lines(1, picture)


@pytest.mark.parametrize("rotate", [0, 90, 180, 270])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_a_page_stands_as_nearly_all_its_letters_do(degrees: int, rotate: int) -> None:
    shape, lines = shown(turned(degrees, 9), rotate)
    assert shape[:2] == ((842, 595) if degrees in (0, 180) else (595, 842))
    assert [line.text for line in lines] == [f"line {number} of the page" for number in range(9)]
    assert all(line.box.width > line.box.height for line in lines)
    assert [line.box.top for line in lines] == sorted(line.box.top for line in lines)


@pytest.mark.parametrize("rotate", [0, 90])
@pytest.mark.parametrize(
    "content",
    [turned(90, 9, mode=3), turned(90, 1)[:-30] + b"(a) Tj ET\n", turned(0, 5) + turned(90, 5)],
    ids=["not seen", "few", "both ways"],
)
def test_a_page_whose_letters_say_nothing_clear_stands_as_it_says(content: bytes, rotate: int) -> None:
    shape, _ = shown(content, rotate)
    assert shape[:2] == ((595, 842) if rotate else (842, 595))


def test_a_fax_that_is_scaled_down_keeps_its_shape() -> None:
    height, width = opened(picture("1"), "TIFF", dpi=(204, 98)).draw(1, 72, 1200)[0].shape[:2]
    assert height * width <= 1200 and height / width == pytest.approx(83 / 60, rel=0.05)


@pytest.mark.parametrize(("width", "words"), [(60_000, "too long and thin"), (190_000_000, "scale it down")])
def test_images_that_cannot_be_drawn_in_so_few_pixels(width: int, words: str) -> None:
    """The second has more than Pillow opens."""
    header = struct.pack(">IIBBBBB", width, 1, 1, 0, 0, 0, 0)
    row = zlib.compress(bytes(1 + (width + 7) // 8))
    parts = ((b"IHDR", header), (b"IDAT", row), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)
    with pytest.raises(LimitExceeded, match=words):
        open_document(data, DocumentLimits()).draw(1, 100, 10_000)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "1", "P", "RGBA", "LA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "TIFF": ("1", "RGBA", "I;16"),
}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_the_top_is_up_whatever_the_pixels_are(kind: str, mode: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = TURNED
    pixels, _ = opened(picture(mode), kind, exif=exif).draw(1, 100, 10**6)
    assert pixels.shape == (60, 40, 3)
    assert pixels[5, -5].max() < 30 and pixels[5, 5].min() > 220


@pytest.mark.parametrize("is_white_zero", [False, True])
@pytest.mark.parametrize(("mode", "white"), [("<u1", 255), ("<u2", 65_535), ("<u2", 4095), ("<f4", 1), ("<f4", 255)])
def test_a_tiff_looks_the_same_however_its_samples_are_stored(mode: str, white: int, is_white_zero: bool) -> None:
    """Pillow itself turns those of 8 bits round."""
    samples = np.asarray(picture("L")) / 255
    samples[20, :] = 0.5
    file = io.BytesIO()
    Image.fromarray(((1 - samples if is_white_zero else samples) * white).astype(mode)).save(file, "TIFF")
    black_is_zero, white_is_zero = (struct.pack("<HHIHH", 262, 3, 1, number, 0) for number in (1, 0))
    data = file.getvalue().replace(black_is_zero, white_is_zero if is_white_zero else black_is_zero)
    pixels, _ = open_document(data, DocumentLimits()).draw(1, 100, 10**6)
    assert np.abs(pixels[:, :, 0] - samples * 255).max() <= 1


def test_samples_that_are_no_numbers_are_black() -> None:
    samples = np.asarray(picture("L")).astype(np.float32) / 255
    samples[30, :4] = np.nan, np.inf, -np.inf, -3
    pixels, _ = opened(Image.fromarray(samples), "TIFF").draw(1, 100, 10**6)
    assert pixels[30, :4].max() == 0 and pixels[30, 4].min() == 255


@pytest.mark.parametrize(("kind", "num_pages"), [("TIFF", 2), ("MPO", 1), ("PNG", 1), ("WEBP", 1)])
def test_only_a_tiff_has_pages(kind: str, num_pages: int) -> None:
    """A phone's JPEG carries a second picture, an animated PNG many."""
    document = opened(picture(), kind, save_all=True, append_images=[picture().rotate(180)])
    assert document.num_pages == num_pages
    pixels, _ = document.draw(1, 100, 10**6)
    assert pixels[5, 5].max() < 30


def test_a_word_that_a_hyphen_parts_in_a_text_layer_is_whole_again() -> None:
    """PDFium gives a control character for such a hyphen, and none for others."""
    shown = ["Seven foxes are an exam-", "ple of the years 1990-", "2000"]
    document = open_document(pdf_of([paragraph(50, 700, shown)]), DocumentLimits())
    picture, _ = document.draw(1, 150, 10**7)
    layer = document.text_lines(1, picture)
    assert [line.text for line in layer] == shown
    text = page_text(make_regions([], layer, Origin.TEXT_LAYER))
    assert text == "Seven foxes are an example of the years 1990- 2000"


RAISED = b" 5 Ts /F 8 Tf (2) Tj 0 Ts /F 12 Tf "
LOWERED = RAISED.replace(b"5", b"-3")
LAYERS = {
    "words in pieces": (b"(The ) Tj (quick) Tj (, brown fo) Tj (xes) Tj", ["The quick, brown foxes"]),
    "letters": (b" ".join(b"(%c) Tj" % letter for letter in b"The quick foxes"), ["The quick foxes"]),
    "raised and lowered": (
        b"(The H) Tj" + LOWERED + b"(O and x) Tj" + RAISED + b"(; foxes) Tj",
        ["The H2O and x2; foxes"],
    ),
    "lines that touch": (b"(The quick [jq]) Tj 0 -12 Td (\\311\\304\\326 foxes) Tj", ["The quick [jq]", "ÉÄÖ foxes"]),
    "cells of a table": (b"(Red ) Tj (pears) Tj 90 0 Td (12) Tj 30 0 Td (kg) Tj", ["Red pears", "12", "kg"]),
    "sideways": (b"0 1 -1 0 99 500 Tm (The quick) Tj 0 -13 Td (foxes read) Tj", ["The quick", "foxes read"]),
    "a letter of two": (b"(A foxes) Tj", ["\U0001d400 foxes"]),
}


@pytest.mark.parametrize("how", LAYERS)
def test_words_of_a_text_layer_are_whole_however_they_are_set(how: str) -> None:
    """`A` stands for a letter that UTF-16 has in two halves, as PDFium gives it."""
    shown, lines = LAYERS[how]
    letters = b"1 begincodespacerange <00> <FF> endcodespacerange 1 beginbfchar <41> <D835DC00> endbfchar"
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding /ToUnicode 4 0 R >>"
    page = b"BT /F 12 Tf 50 700 Td %s ET" % shown
    data = pdf_of([page], resources=b"/Font << /F 5 0 R >>", more=[stream(letters), font])
    document = open_document(data, DocumentLimits())
    picture, _ = document.draw(1, 150, 10**7)
    assert [line.text for line in document.text_lines(1, picture)] == lines


def test_what_is_filled_in_and_noted_on_a_page_is_text_of_it() -> None:
    note = b"<< /Type /Annot /Subtype /FreeText /Rect [50 600 250 620] /F 4 /AP << /N 5 0 R >> >>"
    form = b"/Type /XObject /Subtype /Form /BBox [0 0 200 20] /Resources << /Font << /F 3 0 R >> >>"
    words = stream(b"BT /F 12 Tf 2 5 Td (Approved by Mary) Tj ET", form)
    data = pdf_of([paragraph(50, 700, ["Seven foxes"])], more=[note, words])
    document = open_document(data.replace(b"/MediaBox", b"/Annots [4 0 R] /MediaBox", 1), DocumentLimits())
    picture, _ = document.draw(1, 72, 10**7)
    first, second = document.text_lines(1, picture)
    assert (first.text, second.text) == ("Seven foxes", "Approved by Mary")
    shown = np.argwhere(picture.min(axis=2) < 128)
    assert np.allclose(shown.min(axis=0), [first.box.top, first.box.left], atol=4)
    assert np.allclose(shown.max(axis=0), [second.box.bottom, second.box.right], atol=4)
