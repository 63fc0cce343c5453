"""Pages that a model and a reader are shown, and readers that fail on the way: what the part `pages` is made of.

A page is synthetic and held out, its text is known. The target gets its pixels as they are; the reader gets a PDF with
the page as a picture, so that its resolution can be made worse.
"""

import asyncio
import io
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from bench.common import PROC
from bench.documents.waiting_reader import GO
from slipstream import AsyncCaptioner
from slipstream.captioning.document_captioner import hint_texts
from slipstream.documents.messages import DocumentFacts, DocumentRequest, PageDraft, PagePicture, ReadEvent
from slipstream.documents.pool import ReaderPool
from slipstream.documents.reading import PAGE_OPTIONS, PageReading
from slipstream.documents.surfaces import SURFACES
from slipstream.options import CaptionOptions
from slipstream.speculation.methods import METHODS
from tests.support.documents import page_video
from training.evaluate_reader import held_out_pages
from training.pages import KINDS
from training.reader import reader_tokenizer

DPI = 72
"""At which the PDF is as many pixels as the page."""
FAULTS = ("well", "killed", "frozen", "slow", "lying")
STRIKES = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "slow": signal.SIGSTOP}
SLOW_S = 1.0
"""That a slow reader rests after it has drawn the page."""
SURFACE = "lines"
"""How the pocket reader writes."""


@dataclass(frozen=True)
class ShownPage:
    """A page as the target sees it, and its text."""

    kind: str
    text: str
    picture: PagePicture


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


def document_of(pages: Sequence[ShownPage]) -> bytes:
    """A PDF of the pages, each a picture: nobody can take its text from it but by reading."""
    images = [Image.frombytes("RGB", (page.picture.width, page.picture.height), page.picture.pixels) for page in pages]
    out = io.BytesIO()
    images[0].save(out, "PDF", save_all=True, append_images=images[1:], resolution=DPI, quality=95)
    return out.getvalue()


# -- readers ----------------------------------------------------------------------------------------------------------


async def read_live(
    pool: ReaderPool, pages: Sequence[ShownPage], ocr_dpi: int, fault: str = "well"
) -> AsyncGenerator[ReadEvent, None]:
    """What the pool's reader says of a document of these pages, their pictures being the target's own. A fault of
    `STRIKES` comes when a page is drawn and not yet read: the pool's readers are those of `waiting_reader`."""
    request = DocumentRequest(dpi=max(DPI, ocr_dpi), ocr_dpi=ocr_dpi, text_layer=False)
    await pool.wait_prepared()
    waking = set()
    try:
        async with aclosing(pool.read(document_of(pages), request)) as events:
            async for event in events:
                if isinstance(event, PagePicture):
                    yield replace(pages[event.page - 1].picture, page=event.page)
                    readers = pool.reading_pids  # on a busy machine not the first that had the page
                    if fault in STRIKES:
                        _signal(readers, STRIKES[fault])
                        _signal(readers, GO)
                    if fault == "slow":
                        waking.add(asyncio.get_running_loop().call_later(SLOW_S, _signal, readers, signal.SIGCONT))
                elif isinstance(event, PageDraft):
                    yield _lied(event, pages) if fault == "lying" else event
                else:
                    yield event
    finally:
        for timer in waking:
            timer.cancel()


def _lied(draft: PageDraft, pages: Sequence[ShownPage]) -> PageDraft:
    """Every region says a part of the truth backwards, and then what no page says."""
    lie = pages[draft.page - 1].text[::-1] + " lies" * 50
    return replace(draft, regions=tuple(replace(region, text=lie[region.order :]) for region in draft.regions))


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    """To the processes and all that they have started: a confined one lives below the one that is known."""
    for pid in pids:
        with suppress(OSError):
            children = (PROC / str(pid) / "task" / str(pid) / "children").read_text().split()
            _signal([int(child) for child in children], number)
            os.kill(pid, number)


async def read_again(pages: Sequence[ShownPage], drafts: Sequence[PageDraft]) -> AsyncIterator[ReadEvent]:
    """The same pages with drafts that are there already."""
    yield DocumentFacts(len(pages), tuple(range(1, len(pages) + 1)))
    for number, (page, draft) in enumerate(zip(pages, drafts, strict=True), start=1):
        yield replace(page.picture, page=number)
        yield replace(draft, page=number)


async def drafts_of(events: AsyncIterator[ReadEvent]) -> list[PageDraft]:
    """The reader's drafts alone."""
    return [event async for event in events if isinstance(event, PageDraft)]


# -- target -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageReader:
    """Reads pages at a gateway.

    Args:
        captioner: the gateway.
        options: of each page; what is left out is: as in `PAGE_OPTIONS`.
        surface: how the target writes, one of `SURFACES`.
        max_pages: read at once.
        timeout_s: of one page.
    """

    captioner: AsyncCaptioner
    options: CaptionOptions
    surface: str = "markdown"
    max_pages: int = 2
    timeout_s: float = 600.0

    async def read(self, events: AsyncIterator[ReadEvent]) -> AsyncGenerator[PageReading, None]:
        """The pages in their order, each when it is done. The reader works at the next pages meanwhile, so its time
        is hidden but for the first page's. Raises what the reader or the gateway raise."""
        running: deque[asyncio.Task[PageReading]] = deque()
        upcoming: asyncio.Task[ReadEvent | None] | None = asyncio.create_task(_next(events))
        picture: PagePicture | None = None
        try:
            while upcoming is not None or running:
                awaited = [upcoming] if upcoming is not None and len(running) < self.max_pages else []
                await asyncio.wait([*awaited, *list(running)[:1]], return_when=asyncio.FIRST_COMPLETED)
                if running and running[0].done():
                    yield await running.popleft()
                elif upcoming is not None and upcoming.done():
                    event = await upcoming
                    upcoming = asyncio.create_task(_next(events)) if event is not None else None
                    if isinstance(event, PagePicture):
                        picture = event
                    elif isinstance(event, PageDraft) and picture is not None and event.page == picture.page:
                        running.append(asyncio.create_task(self._read_page(picture, event)))
        finally:
            left = [*running, *([upcoming] if upcoming is not None else [])]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _read_page(self, picture: PagePicture, draft: PageDraft) -> PageReading:
        options = self._asked(draft)
        video = await asyncio.to_thread(page_video, picture)
        caption = await self.captioner.caption(video, timeout_s=self.timeout_s, **options.given())
        return PageReading(picture, draft, caption)

    def _asked(self, draft: PageDraft) -> CaptionOptions:
        """The options with the page's hints, where the method takes any."""
        asked = self.options.over(PAGE_OPTIONS)
        if not METHODS[asked.method].takes_hints:
            return asked
        texts = hint_texts(SURFACES[self.surface](draft.regions), asked.method)
        return replace(asked, prediction=(*asked.get("prediction", ()), *texts)) if texts else asked


async def _next(events: AsyncIterator[ReadEvent]) -> ReadEvent | None:
    return await anext(events, None)


async def read_pages(
    captioner: AsyncCaptioner, events: AsyncIterator[ReadEvent], max_pages: int, **options: Any
) -> list[PageReading]:
    """The target's readings of a document, as videos of one frame."""
    reader = PageReader(captioner, CaptionOptions(**options), SURFACE, max_pages)
    return [page async for page in reader.read(events)]


def token_ids(page: PageReading) -> tuple[int, ...]:
    return tuple(token.token_id for token in page.caption.tokens)
