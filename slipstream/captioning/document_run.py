"""One document on its way through the gateway.

A page is encoded and prefilled as soon as its picture is there, while the reader still makes out what it says; that
follows as late hints. So the reader's time is hidden, and whatever it says or fails to say changes the speed alone.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from slipstream.captioning.page_source import missing_draft
from slipstream.documents.messages import DocumentFacts, PageDraft, PagePicture, ReadEvent
from slipstream.documents.reading import DocumentEvent
from slipstream.messages import CaptionEvent

MOST_UNTOLD = 8
"""Pages that are read and held, as a page before them is not, or as nobody takes what is said: some 6 MB each."""


class PageRun:
    """A page that the target reads."""

    def __init__(self, picture: PagePicture) -> None:
        self.picture = picture
        self.draft: asyncio.Future[PageDraft] = asyncio.get_running_loop().create_future()
        """Of the reader; empty where it was lost."""
        self._said: asyncio.Queue[CaptionEvent | None] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None

    def emit(self, event: CaptionEvent) -> None:
        """What the page's caption says, the `Caption` at its end included."""
        self._said.put_nowait(event)

    def start(self, read: Callable[["PageRun"], Awaitable[None]], then: Callable[[], None]) -> asyncio.Task[None]:
        """Reads the page in a task, and calls `then` at its end."""

        async def reading() -> None:
            await read(self)

        def ended(_: object) -> None:
            self._said.put_nowait(None)
            then()

        self._reading = asyncio.create_task(reading())
        self._reading.add_done_callback(ended)
        return self._reading

    async def events(self, *, pixels: bool) -> AsyncIterator[DocumentEvent]:
        """All that is said of the page, to its draft. Raises what ended it."""
        yield self.picture if pixels else without_pixels(self.picture)
        while (event := await self._said.get()) is not None:
            yield event
        assert self._reading is not None, "a page is started before it is heard"
        await self._reading
        yield await asyncio.shield(self.draft)


class DocumentRun:
    """Reads the pages of one document, some at once.

    Args:
        source: what the reader says, see `PageSource.events`.
        read: the target's reading of one page; it emits what is said of it.
        pages_at_once: pages that the target reads. The picture of one more is held ready. Behind one that takes long
            only so many are read as `MOST_UNTOLD` allows.
        pixels: whether the pictures are passed on with their pixels.
    """

    def __init__(
        self,
        source: AsyncGenerator[ReadEvent, None],
        read: Callable[[PageRun], Awaitable[None]],
        *,
        pages_at_once: int,
        pixels: bool,
    ) -> None:
        self._source = source
        self._read = read
        self._pixels = pixels
        self._room = asyncio.Semaphore(pages_at_once)
        self._untold = asyncio.Semaphore(pages_at_once + MOST_UNTOLD)
        self._upcoming: asyncio.Queue[DocumentFacts | PageRun | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def events(self) -> AsyncGenerator[DocumentEvent, None]:
        """In the order of the pages, each event as soon as the pages before have ended. Closed, it ends all work.

        Raises what the source raises, once the pages before have been told, and what ended a page.
        """
        feeding = asyncio.create_task(self._feed())
        self._tasks.add(feeding)
        try:
            while (item := await self._upcoming.get()) is not None:
                if isinstance(item, DocumentFacts):
                    yield item
                    continue
                async for event in item.events(pixels=self._pixels):
                    yield event
                self._untold.release()
            await feeding
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _feed(self) -> None:
        page: PageRun | None = None
        try:
            async with aclosing(self._source) as events:
                async for event in events:
                    match event:
                        case DocumentFacts():
                            self._upcoming.put_nowait(event)
                        case PagePicture():
                            await self._untold.acquire()
                            await self._room.acquire()
                            page = self._start(event)
                        case PageDraft():
                            assert page is not None, "a draft follows its picture"
                            page.draft.set_result(event)
        finally:
            if page is not None and not page.draft.done():
                page.draft.set_result(missing_draft(page.picture, "the document has ended"))
            self._upcoming.put_nowait(None)

    def _start(self, picture: PagePicture) -> PageRun:
        page = PageRun(picture)
        self._tasks.add(page.start(self._read, then=self._room.release))
        self._upcoming.put_nowait(page)
        return page


def without_pixels(picture: PagePicture) -> PagePicture:
    """How large it is."""
    return PagePicture(picture.page, picture.width, picture.height, picture.dpi)
