"""Pages read by a target through the whole stack: the text is plain decoding's whatever the OCR says."""

import io
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream.client.page_reading import PageReader, PageReading, page_video
from slipstream.documents.messages import (
    Box,
    DocumentFacts,
    Origin,
    PageDraft,
    PagePicture,
    ReadEvent,
    Region,
    RegionKind,
)
from slipstream.errors import ReaderFault
from slipstream.options import CaptionOptions
from slipstream.stack.local import Stack
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits

pytestmark = pytest.mark.asyncio(loop_scope="session")

WIDTH, HEIGHT, NUM_TOKENS = 40, 24, 48
NUM_PAGES = 3


def picture(page: int) -> PagePicture:
    pixels = np.random.default_rng(page).integers(0, 256, 3 * WIDTH * HEIGHT, dtype=np.uint8)
    return PagePicture(page, WIDTH, HEIGHT, 150, pixels.tobytes())


def draft(page: int, *texts: str) -> PageDraft:
    regions = tuple(
        Region(Box(0, index, WIDTH, index + 1), RegionKind.TEXT, index, text, 1.0, Origin.OCR)
        for index, text in enumerate(texts)
    )
    return PageDraft(page, WIDTH, HEIGHT, regions)


async def reader(*texts: str, fails_at: int = 0) -> AsyncGenerator[ReadEvent, None]:
    """Says these texts of every page."""
    yield DocumentFacts(NUM_PAGES, tuple(range(1, NUM_PAGES + 1)))
    for page in range(1, NUM_PAGES + 1):
        if page == fails_at:
            raise ReaderFault("the reader was silent for 120 s")
        yield picture(page)
        yield draft(page, *texts)


def asked(**options: Any) -> CaptionOptions:
    return CaptionOptions(max_new_tokens=NUM_TOKENS, **options)


async def read(stack: Stack, events: AsyncIterator[ReadEvent], **options: Any) -> list[PageReading]:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        return [page async for page in PageReader(captioner, asked(**options)).read(events)]


def texts_of(pages: list[PageReading]) -> list[str]:
    assert [page.draft.page for page in pages] == list(range(1, len(pages) + 1))
    return [page.caption.text for page in pages]


async def test_a_page_is_a_video_of_one_frame_without_loss() -> None:
    shown = picture(1)
    video = sample_video(io.BytesIO(page_video(shown)), 1, DecodeLimits())
    assert video.frames.shape == (1, HEIGHT, WIDTH, 3) and video.frames.tobytes() == shown.pixels


@pytest.mark.parametrize("method", ["hints", "hsd"])
async def test_the_text_does_not_depend_on_the_reader(stack: Stack, method: str) -> None:
    plain = texts_of(await read(stack, reader("anything"), method="autoregressive"))
    assert len(set(plain)) == NUM_PAGES, "every page has a text of its own"
    for lies in ((), ("",), ("lies " * 500, "\u0000 \u4e2d"), (plain[1], plain[0][:20])):
        assert texts_of(await read(stack, reader(*lies), method=method)) == plain


async def test_what_the_ocr_reads_right_saves_passes(stack: Stack) -> None:
    plain = texts_of(await read(stack, reader(), method="autoregressive"))
    pages = await read(stack, reader(*plain), gate=False)
    assert texts_of(pages) == plain
    for page in pages:  # random models write what no tokenizer splits like that again, so not all of it is found
        assert page.caption.speculation.accepted_prediction_tokens > 0
        assert page.caption.speculation.passes < page.caption.num_tokens - 1


async def test_a_reader_that_fails_ends_the_document_after_its_pages(stack: Stack) -> None:
    seen = []

    async def read_on() -> None:
        async with slipstream.connect_async(stack.gateway_address) as captioner:
            async for page in PageReader(captioner, asked(), max_pages=1).read(reader("text", fails_at=3)):
                seen.append(page.draft.page)

    with pytest.raises(ReaderFault, match="silent"):
        await read_on()
    assert seen == [1, 2]


async def test_a_reading_can_be_left(stack: Stack) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        async with aclosing(PageReader(captioner, asked()).read(reader("text"))) as pages:
            async for _ in pages:
                break
        assert (await captioner.info()).target_model
