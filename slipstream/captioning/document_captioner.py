"""Documents for both of the gateway's doors, the interactive call and the archive: plan, receive, read page by page."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import structlog
from numpy.typing import NDArray

from slipstream.captioning.caption_run import Emit
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_run import DocumentRun, PageRun
from slipstream.captioning.late_hints import LateHints
from slipstream.captioning.ocr_gate import OcrGate, OcrWatch
from slipstream.captioning.page_regions import PageRegions
from slipstream.captioning.page_source import PageSource
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.captioning.stats import CaptionStats
from slipstream.documents.messages import PagePicture
from slipstream.documents.reading import PAGE_OPTIONS, DocumentEvent, DocumentOptions
from slipstream.documents.surfaces import PARAGRAPHS, SURFACES, surface_of
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    UnreadableDocument,
)
from slipstream.frame_size import ANY_SIZE, FrameSize, fit
from slipstream.logs import get_logger
from slipstream.messages import Caption
from slipstream.rpc.reader import RemoteReader
from slipstream.speculation.methods import TOLERANT_METHOD
from slipstream.time_limits import within_limit
from slipstream.video.files import VideoFile
from slipstream.video.messages import SampledVideo


class DocumentCaptioner:
    """Reads documents with the target of a `GatewayCaptioner`.

    Args:
        reader: makes pictures and drafts of pages; None: this gateway reads no documents.
    """

    def __init__(self, config: GatewayConfig, captioner: GatewayCaptioner, reader: RemoteReader | None) -> None:
        self._config = config
        self._captioner = captioner
        self._reader = reader
        self._turns = asyncio.Semaphore(config.documents_at_once)
        self._regions = asyncio.Semaphore(config.regions_at_once)
        self._ocr_gate = OcrGate()

    def plan(self, asked: DocumentOptions, *, path: str = "", request_id: str = "", owner: str = "") -> CaptionPlan:
        """What each page's caption is to be.

        Raises:
            InvalidConfig: this gateway has no reader.
            InvalidRequest, LimitExceeded: options that are not served; the message names them.
        """
        self._check_reader()
        options = asked.check().caption.over(PAGE_OPTIONS)
        return _checked(asked, make_plan(options, self._config, path=path, request_id=request_id, owner=owner))

    async def read_interactively(
        self, asked: DocumentOptions, plan: CaptionPlan, upload: AsyncIterator[bytes]
    ) -> AsyncGenerator[DocumentEvent, None]:
        """All that is done for a caller's document: receive it, wait for its turn, read it. `upload` is read where the
        plan names no path. Close it to end the work.

        Each page that is read at once takes one of the places for captions. Where there is but one, so it is for pages.
        A document that waits for its turn takes none.

        Raises:
            Overloaded: too many captions are in work.
            ServiceUnavailable: no target, or no reader to draw a page.
            DeadlineExceeded: a page took longer than this server allows.
            SlipstreamError: whatever is wrong with the document, the request or the models.
        """
        captioner = self._captioner
        captioner.places.check()
        plan = captioner.settled(plan, await captioner.check(plan, wait_for_ready=True))
        async with self._opened(plan, upload) as source, self._turns:
            with captioner.places.held() as take:
                data = await read_document(source, self._config.max_document_bytes)
                at_once = _pages_at_once(take, self._config.pages_at_once)
                async with aclosing(self.events(data, asked, plan, pages_at_once=at_once)) as events:
                    async for event in events:
                        yield event

    async def events(
        self, data: bytes, asked: DocumentOptions, plan: CaptionPlan, *, pages_at_once: int
    ) -> AsyncGenerator[DocumentEvent, None]:
        """What is said of the document, see `DocumentEvent`. Needs a `check` of the captioner's shortly before. Raises
        what `PageSource.events` and `GatewayCaptioner.caption` raise, and what `plan` does."""
        plan = _checked(asked, plan)
        # A tolerant text depends on what is drafted, which must not depend on a clock.
        gate = self._ocr_gate if asked.ocr == "paying" and not plan.is_tolerant else None
        watch = OcrWatch(gate, pages_at_once)
        is_useless = asked.ocr == "paying" and not plan.method.takes_hints
        source = PageSource(
            self._check_reader(),
            data,
            replace(asked.request, ocr=asked.ocr != "never" and not is_useless),
            wait_s=self._config.reader_wait_s,
            silence_s=self._config.reader_silence_s,
            request_id=plan.request_id,
            watch=watch,
        )

        async def read(page: PageRun) -> None:
            caption = None
            watch.on_begun()
            try:
                caption = await self._read_page(page, plan, asked)
            finally:
                watch.on_ended(caption)

        run = DocumentRun(source.events(), read, pages_at_once=pages_at_once, pixels=asked.request.pictures)
        async with aclosing(run.events()) as events:
            async for event in events:
                yield event

    def regions_of(self, picture: PagePicture, emit: Emit) -> PageRegions:
        """The region stage of a page, see there. Needs a `check` of the captioner's shortly before."""

        async def read(region: PagePicture, plan: CaptionPlan) -> Caption:
            stats = CaptionStats(arrived=asyncio.get_running_loop().time())
            return await self._read_picture(region, plan, lambda event: None, stats)

        return PageRegions(picture, self._frame_size, self._regions, read, emit)

    def surface(self, asked: DocumentOptions) -> str:
        """The surface that hints are written in: that asked for, or the one that the target writes."""
        target = self._captioner.peers.target.model
        return surface_of(asked.surface, "" if target is None else target.surface)

    @contextlib.asynccontextmanager
    async def _opened(self, plan: CaptionPlan, upload: AsyncIterator[bytes]) -> AsyncIterator[VideoFile]:
        """The document's file. Raises what `Media.open` and `Media.open_source` raise, and LimitExceeded."""
        media, limit = self._captioner.media, self._config.max_document_bytes
        if plan.path:
            opened = media.open_source(plan.path, owner=plan.owner, whole=True, most_bytes=limit, counts=True)
        else:
            opened = media.open("", _bounded(upload, limit), owner=plan.owner)
        async with opened as source:
            yield source

    def _check_reader(self) -> RemoteReader:
        if self._reader is None:
            raise InvalidConfig(
                "this gateway reads no documents; start it with --reader, the address of a reader service"
            )
        return self._reader

    async def _read_page(self, page: PageRun, plan: CaptionPlan, asked: DocumentOptions) -> Caption:
        plan = plan.named(f"-p{page.picture.page}")
        structlog.contextvars.bind_contextvars(request_id=plan.request_id)
        undone = f"page {page.picture.page} was not read"
        with self._captioner.metrics.captioning(plan.method.name):
            async with within_limit(self._config.request_timeout_s, undone):
                return await self._caption_page(page, plan, asked)

    async def _caption_page(self, page: PageRun, plan: CaptionPlan, asked: DocumentOptions) -> Caption:
        stats = CaptionStats(arrived=asyncio.get_running_loop().time())
        regions = self.regions_of(page.picture, page.emit) if asked.reads_regions else None
        by_stage: Sequence[PageRegions | None] = [regions]
        if regions is not None and plan.method.name != TOLERANT_METHOD:  # which is as its paper has it
            by_stage = [None, regions]
        hints = [asyncio.create_task(_hints_of(page, plan, self.surface(asked), stage)) for stage in by_stage]
        try:
            late_hints = None
            if plan.is_tolerant:  # the text depends on what is drafted, which must not depend on a clock
                plan = plan.hinted(await hints[-1])
            elif plan.method.takes_hints:
                late_hints = LateHints(hints)
            caption = await self._read_picture(page.picture, plan, page.emit, stats, late_hints)
        finally:
            for coming in hints:
                coming.cancel()  # a text that is whole needs no hints
            await asyncio.wait(hints)
        page.emit(caption if regions is None else replace(caption, regions=regions.facts))
        return caption

    async def _read_picture(
        self,
        picture: PagePicture,
        plan: CaptionPlan,
        emit: Emit,
        stats: CaptionStats,
        late_hints: LateHints | None = None,
    ) -> Caption:
        with await self._frame(picture, in_background=plan.in_background) as video:
            stats.sampled = asyncio.get_running_loop().time()
            return await self._captioner.caption(
                plan, video, emit, stats, resume_wait_s=self._config.resume_wait_s, late_hints=late_hints
            )

    @property
    def _frame_size(self) -> FrameSize:
        """Of pictures, as the target wants them now."""
        target = self._captioner.peers.target.model
        return (ANY_SIZE if target is None else target.frame_size).within(self._config.max_page_pixels)

    async def _frame(self, picture: PagePicture, *, in_background: bool) -> SampledVideo:
        """The picture as the target wants it, as a video of one frame. Its memory counts in the gateway's budget for
        frames until it is closed. Raises Overloaded, LimitExceeded or InvalidRequest."""
        size = self._frame_size
        num_pixels = picture.width * picture.height
        if not size.is_known and num_pixels > self._config.max_page_pixels:
            raise LimitExceeded(f"page {picture.page} has {num_pixels} pixels; ask for it at a lower dpi")
        most_bytes = 3 * max(num_pixels, size.most_pixels(1))
        async with self._captioner.media.frames.admitted(most_bytes, in_background=in_background) as place:
            frames = await asyncio.to_thread(_fitted, picture, size)
            place.shrink(frames.nbytes)
        return SampledVideo(
            frames=frames,
            timestamps_s=(0.0,),
            duration_s=1.0,
            source_width=picture.width,
            source_height=picture.height,
            codec="",
            rotation=0,
            warnings=(),
            on_close=place.release,
        )


def _checked(asked: DocumentOptions, plan: CaptionPlan) -> CaptionPlan:
    """The plan. Raises `InvalidRequest` for a stage that it has no use for."""
    if asked.reads_regions and not plan.method.takes_hints:
        raise InvalidRequest(
            f"stage {asked.stage!r} makes hints, and method {plan.method.name!r} drafts from none: leave the stage out,"
            " or ask for hints or hsd"
        )
    return plan


def hint_texts(texts: Sequence[str], method: str) -> tuple[str, ...]:
    """What a method is given of a page whose regions have these texts: the page, or, for `hsd`, the set of its
    regions, which has no order."""
    given = tuple(filter(None, texts))
    return given if method == TOLERANT_METHOD or not given else (PARAGRAPHS.join(given),)


async def _hints_of(page: PageRun, plan: CaptionPlan, surface: str, regions: PageRegions | None) -> tuple[str, ...]:
    """Of a page, once they are there; none where something is wrong with them."""
    draft = await asyncio.shield(page.draft)
    try:
        texts: Sequence[str] = SURFACES[surface](draft.regions)
        if regions is not None:
            texts = await regions.read_all(draft, texts, plan)
    except Exception:
        get_logger().exception("hints.failed")
        return ()
    return hint_texts(texts, plan.method.name)


def _pages_at_once(take: Callable[[int], None], most: int) -> int:
    """How many places can be had beside the first."""
    number = 1
    with contextlib.suppress(Overloaded):
        while number < most:
            take(1)
            number += 1
    return number


def _fitted(picture: PagePicture, size: FrameSize) -> NDArray[np.uint8]:
    """[1, height, width, 3]."""
    pixels = np.frombuffer(picture.pixels, dtype=np.uint8).reshape(picture.height, picture.width, 3)
    return np.ascontiguousarray(fit(pixels, size, 1) if size.is_known else pixels)[None]


async def _bounded(chunks: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    num_bytes = 0
    async for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise LimitExceeded(_TOO_LARGE.format(limit))
        yield chunk


READ_BYTES = 4 * 1024**2
"""Of a document, at a time."""
_TOO_LARGE = "a document has at most {} bytes at this server"


async def read_document(file: VideoFile, limit: int) -> bytes:
    """Its bytes, however they came. Raises `LimitExceeded` for more than so many, and `UnreadableDocument` for one that
    cannot be read to its end."""
    if file.num_bytes > limit:
        raise LimitExceeded(_TOO_LARGE.format(limit))
    data = bytearray()
    try:
        while piece := await file.files.run(os.pread, file.whole.fileno(), READ_BYTES, len(data)):
            data += piece
            if len(data) > limit:  # one that grows while it is read
                raise LimitExceeded(_TOO_LARGE.format(limit))
    except OSError as failure:
        raise UnreadableDocument(f"the document cannot be read to its end: {failure.strerror}") from None
    return bytes(data)
