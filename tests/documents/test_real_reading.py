"""Pages through the real models: text layers, scans, fakes, unknown scripts, kinds of images."""

import io
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from PIL import Image, ImageDraw

from slipstream.documents.messages import DocumentLimits, DocumentRequest, Origin, PageDraft, PagePicture
from slipstream.documents.page_reader import NO_TEXT, UNSURE
from slipstream.documents.pool import ReaderPool
from slipstream.documents.surfaces import page_text
from tests.support.documents import (
    drawn_picture,
    font_of,
    image_bytes,
    needs_documents,
    paragraph,
    pdf_of,
    scan_of,
    sentence,
    two_columns,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_documents]
BILLS = ["Bills of lading", "from April 1899", "were never paid"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[ReaderPool]:
    made = ReaderPool(DocumentLimits())
    yield made
    made.close()


async def read(pool: ReaderPool, data: bytes, request: DocumentRequest | None = None) -> PageDraft:
    said = [event async for event in pool.read(data, request or DocumentRequest())]
    assert isinstance(said[-1], PageDraft)
    return said[-1]


def plain(text: str) -> str:
    return " ".join(text.replace("#", " ").split())


def error_rate(truth: str, text: str) -> float:
    """Characters wrong, by edit distance over those of the truth."""
    row = list(range(len(text) + 1))
    for count, wanted in enumerate(truth, start=1):
        above, row[0] = row[0], count
        for place, char in enumerate(text, start=1):
            above, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, above + (char != wanted))
    return row[-1] / len(truth)


async def picture_of(pool: ReaderPool, data: bytes) -> Image.Image:
    async for event in pool.read(data, DocumentRequest(pictures=True)):
        if isinstance(event, PagePicture):
            return Image.frombytes("RGB", (event.width, event.height), event.pixels)
    raise AssertionError("no picture")


async def test_a_genuine_text_layer_is_taken_word_by_word_in_reading_order(pool: ReaderPool) -> None:
    content, truth = two_columns()
    draft = await read(pool, pdf_of([content]))
    assert {region.origin for region in draft.regions if region.text} == {Origin.TEXT_LAYER}
    assert plain(page_text(draft.regions)) == plain(truth)


async def test_a_scan_of_two_columns_is_read_in_order(pool: ReaderPool) -> None:
    content, truth = two_columns(seed=4)
    scan = scan_of(await picture_of(pool, pdf_of([content])))
    draft = await read(pool, scan)
    assert {region.origin for region in draft.regions} == {Origin.OCR}
    assert error_rate(plain(truth), plain(page_text(draft.regions))) <= 0.03


async def test_a_scan_whose_hidden_text_says_something_else_is_read(pool: ReaderPool) -> None:
    lie = [sentence(seed, 5) for seed in range(6)]
    draft = await read(pool, scan_of(drawn_picture(BILLS, size=(1000, 1414)), lie))
    text = plain(page_text(draft.regions))
    assert "Bills of lading" in text and "1899" in text and lie[0] not in text
    assert "not what the page shows" in draft.warnings[0]


@pytest.mark.long
async def test_the_layer_can_be_left_alone(pool: ReaderPool) -> None:
    draft = await read(pool, pdf_of([paragraph(72, 700, [sentence(1, 8)], 14)]), DocumentRequest(text_layer=False))
    assert {region.origin for region in draft.regions} == {Origin.OCR}
    assert plain(page_text(draft.regions)) == sentence(1, 8)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("PNG", "1"),
        ("TIFF", "LAB"),
        ("WEBP", "RGB"),
        *(
            pytest.param(kind, mode, marks=pytest.mark.long)
            for kind, mode in (("PNG", "P"), ("PNG", "I;16"), ("JPEG", "L"), ("WEBP", "RGBA"), ("TIFF", "RGBA"))
        ),
    ],
)
async def test_images_of_every_kind_are_read(pool: ReaderPool, kind: str, mode: str) -> None:
    draft = await read(pool, image_bytes(drawn_picture(), kind, mode))
    assert "Quiet harbour towns" in plain(page_text(draft.regions))


async def test_a_photo_on_its_side_is_read_as_its_camera_says(pool: ReaderPool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = io.BytesIO()
    drawn_picture().rotate(90, expand=True).save(data, "JPEG", exif=exif)
    draft = await read(pool, data.getvalue())
    assert (draft.width, draft.height) == (1000, 500) and "seven foxes read" in page_text(draft.regions)


async def test_long_lines_of_a_wide_page_are_compared_by_their_beginnings(pool: ReaderPool) -> None:
    lines = [sentence(seed, 90) for seed in range(3)]
    draft = await read(pool, pdf_of([paragraph(20, 700, lines, 9)], size=(3000, 792)))
    assert draft.width > 6000 and {region.origin for region in draft.regions} == {Origin.TEXT_LAYER}
    assert plain(page_text(draft.regions)) == plain(" ".join(lines))


@pytest.mark.parametrize("size", [(3000, 2), (2, 3000)])
async def test_a_picture_of_which_the_ocr_leaves_nothing_has_no_text(pool: ReaderPool, size: tuple[int, int]) -> None:
    draft = await read(pool, image_bytes(Image.new("RGB", size), "PNG"))
    assert draft.warnings == (NO_TEXT,)


async def test_a_picture_as_long_as_a_web_page_is_read_to_its_end(pool: ReaderPool) -> None:
    said = ["seven quick foxes", "read the morning paper", "over quiet harbour"]
    page = drawn_picture([], (240, 6000))
    for line, top in zip(said, (10, 3000, 5960), strict=True):
        ImageDraw.Draw(page).text((10, top), line, fill="black", font=font_of("DejaVuSans.ttf", 16))
    draft = await read(pool, image_bytes(page, "PNG"))
    assert plain(page_text(draft.regions)) == " ".join(said)
    assert draft.regions[-1].box.top > 5900


@pytest.mark.long
async def test_a_page_turned_in_its_pdf_has_its_layer_in_the_right_places(pool: ReaderPool) -> None:
    lines = [sentence(seed, 7) for seed in range(5)]
    content = b"q 0 1 -1 0 595 0 cm " + paragraph(72, 500, lines, 12) + b"Q"
    turned = pdf_of([content]).replace(b"/MediaBox", b"/Rotate 90 /MediaBox", 1)
    for rotation in (b"90", b"270"):  # the second stands upside down, by what it says
        draft = await read(pool, turned.replace(b"/Rotate 90", b"/Rotate " + rotation))
        assert draft.width > draft.height
        assert {region.origin for region in draft.regions if region.text} == {Origin.TEXT_LAYER}
        assert all(region.box.width > region.box.height for region in draft.regions if region.text)
        assert plain(page_text(draft.regions)) == plain(" ".join(lines))


@pytest.mark.long
async def test_an_ocr_that_sees_less_says_less_or_worse(pool: ReaderPool) -> None:
    content, truth = two_columns(seed=2)
    scan = scan_of(await picture_of(pool, pdf_of([content])))
    sharp, blurred = [
        error_rate(plain(truth), plain(page_text((await read(pool, scan, DocumentRequest(ocr_dpi=dpi))).regions)))
        for dpi in (150, 40)
    ]
    assert blurred > sharp + 0.1


@pytest.mark.parametrize(
    "words",
    [
        ["ყველა ადამიანი", "თავისუფალი"],
        ["כל בני אדם נולדו", "בני חורין ושווים"],
        ["ᓄᓕᒫᑦ ᐊᓂᖅᑎᕆᔪᓕᒫᑦ", "ᐃᓅᓕᖅᑎᑐᐅᕙᓐᓂᖅᑐᑦ"],
    ],
    ids=["Georgian", "Hebrew", "syllabics"],
)
@pytest.mark.long
async def test_a_scan_in_a_script_that_the_ocr_does_not_know_has_an_empty_draft(
    pool: ReaderPool, words: list[str]
) -> None:
    """It would read Latin letters and figures there."""
    draft = await read(pool, image_bytes(drawn_picture(words, font=font_of("DejaVuSans.ttf", 44)), "PNG"))
    assert (draft.regions, draft.warnings) == ((), (UNSURE,))


@pytest.mark.long
async def test_a_white_page_and_one_of_scribbles_are_empty_or_nearly_so(pool: ReaderPool) -> None:
    white = await read(pool, image_bytes(Image.new("RGB", (400, 600), "white"), "PNG"))
    assert not white.regions and white.warnings == ("no text was found",)
    noise = Image.effect_noise((400, 600), 90)
    assert len(page_text((await read(pool, image_bytes(noise, "PNG"))).regions)) < 40
