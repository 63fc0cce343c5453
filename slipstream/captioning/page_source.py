"""The pages of a document from a reader that may be lost and come back: their pictures, which are needed, and their
drafts, which are not."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from slipstream.captioning.ocr_gate import OcrGivenUp, OcrWatch
from slipstream.documents.messages import (
    NO_OCR,
    DocumentFacts,
    DocumentRequest,
    Origin,
    PageDraft,
    PagePicture,
    ReadEvent,
)
from slipstream.documents.pages import first_ranges
from slipstream.errors import ReaderFault, ReaderUnavailable, ServiceUnavailable, SlipstreamError
from slipstream.logs import get_logger
from slipstream.rpc.reader import ASK_TIMEOUT_S, RemoteReader

MAX_TRIES = 3
"""Of one page's picture, by readers that were lost with it or said what cannot be."""
RETRY_S = 0.25


class PageSource:
    """One document, at one reader after the other if need be.

    Args:
        reader: the service, which may be restarted or replaced meanwhile.
        data: the document.
        request: what to read of it; pictures come with their pixels.
        wait_s: how long to wait for a reader that is not to be had.
        silence_s: a reader that says nothing for so long is lost.
        watch: says from when on pages are read by OCR, and from when on they are not, where the request has it at all.
    """

    def __init__(
        self,
        reader: RemoteReader,
        data: bytes,
        request: DocumentRequest,
        *,
        wait_s: float,
        silence_s: float,
        request_id: str = "",
        watch: OcrWatch | None = None,
    ) -> None:
        self._reader = reader
        self._data = data
        self._request = replace(request, pictures=True)
        self._wait_s = wait_s
        self._silence_s = silence_s
        self._request_id = request_id
        self._facts: DocumentFacts | None = None
        self._num_drawn = 0
        self._num_tries = 0
        """Since the last picture came."""
        self._undrafted: PagePicture | None = None
        self._watch = watch or OcrWatch()
        self._asks_ocr = request.ocr
        self._given_up_at: float | None = None
        self._trial_began: float | None = None
        """When the second reader of a late draft had the page's picture."""

    async def events(self) -> AsyncGenerator[ReadEvent, None]:
        """The facts, then each page's picture and draft; the draft is empty, with a warning, where its reader was lost.

        Raises:
            ReaderUnavailable: there is no reader.
            ServiceUnavailable: a page's picture cannot be had from any reader that is there.
            SlipstreamError: what a reader finds wrong with the document or the request.
        """
        while True:
            try:
                failure = None
                async with aclosing(self._read()) as events:
                    async for event in events:
                        yield event
            except OcrGivenUp:
                self._given_up_at = asyncio.get_running_loop().time()
                get_logger().info("ocr.given_up", num_pages=self._num_drawn)
            except (ServiceUnavailable, ReaderFault) as error:
                failure = error
                get_logger().warning("reader.given_up", reason=str(failure), num_pages=self._num_drawn)
            if (picture := self._undrafted) is not None:
                self._settle()
                yield missing_draft(picture, str(failure)) if failure is not None else empty_draft(picture, NO_OCR)
            if self._is_drawn:
                return
            if failure is not None:
                await self._find_reader(failure)

    @property
    def _is_drawn(self) -> bool:
        return self._facts is not None and self._num_drawn == len(self._facts.pages)

    @property
    def _wants_ocr(self) -> bool:
        return self._request.ocr and self._watch.wants_ocr

    async def _read(self) -> AsyncGenerator[ReadEvent, None]:
        """What one reader says of the pages that are left: of all, or until the OCR is wanted and was not asked for, or
        the other way round. Raises `OcrGivenUp` where a draft is not waited for any more."""
        self._asks_ocr = self._wants_ocr
        self._watch.on_asked(ocr=self._asks_ocr)
        request = replace(self._request, ocr=self._asks_ocr)
        if self._facts is not None:
            request = replace(request, pages=first_ranges(self._facts.pages[self._num_drawn :]))
        events = self._reader.read(self._data, request, request_id=self._request_id, silence_s=self._silence_s)
        async with aclosing(one_ahead(events)) as ahead:
            while (event := await self._next(ahead)) is not None:
                match event:
                    case DocumentFacts():
                        if self._is_news(event):
                            yield event
                    case PagePicture():
                        self._show(event)
                        yield event
                    case PageDraft():
                        draft = event if self._asks_ocr else await self._late_draft(event)
                        self._settle(draft)
                        yield draft
                        if not self._is_drawn and self._asks_ocr != self._wants_ocr:
                            return

    async def _next(self, events: AsyncGenerator[ReadEvent, None]) -> ReadEvent | None:
        async with self._watch.patience():
            return await anext(events, None)

    def _is_news(self, facts: DocumentFacts) -> bool:
        """Raises ReaderFault for those of another document."""
        is_news = self._facts is None
        self._facts = self._facts or facts
        if facts.num_pages != self._facts.num_pages:
            raise ReaderFault("another reader counts other pages in the same document")
        return is_news

    def _show(self, picture: PagePicture) -> None:
        if self._given_up_at is not None:
            self._watch.on_replaced(asyncio.get_running_loop().time() - self._given_up_at)
            self._given_up_at = None
        self._undrafted = picture
        self._num_drawn += 1
        self._num_tries = 0
        self._watch.on_shown(is_owed=self._asks_ocr)

    def _settle(self, draft: PageDraft | None = None) -> None:
        """The page has all of a draft that it gets."""
        self._undrafted = None
        by_ocr = draft is not None and any(region.origin is Origin.OCR for region in draft.regions)
        self._watch.on_drafted(draft.seconds if draft is not None and by_ocr else None)

    # -- a page that takes long ----------------------------------------------------------------------------------------

    async def _late_draft(self, draft: PageDraft) -> PageDraft:
        """The draft of a page that was not to be read by OCR. One that says nothing is held while its page is read: if
        that takes longer than the OCR would, a second reader makes one, and is given up when the page is done."""
        picture = self._undrafted
        if picture is None or draft.regions or not self._request.ocr or not await self._watch.is_outlasted():
            return draft
        self._trial_began = None
        trial = asyncio.create_task(self._read_beside(picture))
        has_room = asyncio.create_task(self._watch.wait_room())
        try:
            await asyncio.wait((trial, has_room), return_when=asyncio.FIRST_COMPLETED)
            if not trial.done():
                if self._trial_began is not None:
                    self._watch.on_slower(asyncio.get_running_loop().time() - self._trial_began)
                return draft
            return trial.result() or draft
        finally:
            trial.cancel()
            has_room.cancel()
            await asyncio.gather(trial, has_room, return_exceptions=True)

    async def _read_beside(self, picture: PagePicture) -> PageDraft | None:
        request = replace(self._request, pages=str(picture.page))
        get_logger().info("ocr.begun_late", page=picture.page)
        try:
            events = self._reader.read(self._data, request, request_id=self._request_id, silence_s=self._silence_s)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, PagePicture):  # until then it waited for its turn at the reader
                        self._trial_began = asyncio.get_running_loop().time()
                    if isinstance(event, PageDraft) and (event.width, event.height) == (picture.width, picture.height):
                        return event
        except SlipstreamError as error:
            get_logger().warning("ocr.lost", page=picture.page, reason=str(error))
        return None

    async def _find_reader(self, failure: SlipstreamError) -> None:
        """Returns when a reader answers. Raises `ServiceUnavailable` when there is none, or enough were lost."""
        self._num_tries += 1
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        while self._num_tries < MAX_TRIES and (left_s := deadline - loop.time()) > 0:
            try:
                await self._reader.ask(min(left_s, ASK_TIMEOUT_S))
                return
            except ServiceUnavailable:
                await asyncio.sleep(RETRY_S)
        error = ServiceUnavailable if self._num_tries == MAX_TRIES else ReaderUnavailable
        if self._facts is None:
            raise error(f"the document cannot be opened: {failure}")
        page = self._facts.pages[self._num_drawn]
        raise error(f"the picture of page {page} cannot be had: {failure}")


async def one_ahead(events: AsyncGenerator[ReadEvent, None]) -> AsyncGenerator[ReadEvent, None]:
    """The events, each fetched while the one before is in use: a picture is some 6 MB, which take their time to come,
    and the draft before it may be held for as long as its page is read."""
    async with aclosing(events):
        fetching = asyncio.create_task(_next_of(events))
        try:
            while (event := await fetching) is not None:
                fetching = asyncio.create_task(_next_of(events))
                yield event
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)


async def _next_of(events: AsyncGenerator[ReadEvent, None]) -> ReadEvent | None:
    return await anext(events, None)


def missing_draft(picture: PagePicture, reason: str) -> PageDraft:
    """Of a page that is read without."""
    return empty_draft(picture, f"the page was read without a draft: {reason}")


def empty_draft(picture: PagePicture, warning: str) -> PageDraft:
    """Of a page of which nothing is known but how it looks."""
    return PageDraft(picture.page, picture.width, picture.height, (), (warning,))
