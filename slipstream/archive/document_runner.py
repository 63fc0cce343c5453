"""Runs one document of the archive: each page is a part, kept as soon as it is read."""

import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from slipstream.archive.messages import JobPart
from slipstream.archive.model_runs import ModelRuns, check_digest, for_others, opened
from slipstream.archive.part_keeper import PartKeeper, PartNames
from slipstream.archive.parts import PartsState
from slipstream.archive.queue import JobQueue, JobState, Lease, Outcome
from slipstream.archive.records import (
    BatchPayload,
    JobPayload,
    make_receipt,
    parts_key,
    receipt_of_whole,
    tallies,
    write_part,
    write_parts_result,
)
from slipstream.archive.worker import RetryLater
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_captioner import read_document
from slipstream.captioning.plan import CaptionPlan
from slipstream.documents.messages import DocumentFacts
from slipstream.documents.pages import first_ranges, page_ranges
from slipstream.documents.reading import PAGE_OPTIONS, DocumentOptions, PageReading
from slipstream.errors import ReaderUnavailable, SlipstreamError
from slipstream.rpc.peers import models_of
from slipstream.service_info import ModelInfo
from slipstream.time_limits import within_limit

NAMES = PartNames("document", "page", "submit it in parts, by pages")
CUT_REGIONS = "the regions took more room than a page has in the archive; they were left out"


# -- what reads documents ----------------------------------------------------------------------------------------------


class DocumentSource(Protocol):
    """Reads documents page by page."""

    def pages(
        self, data: bytes, asked: DocumentOptions, plan: CaptionPlan
    ) -> AsyncGenerator[DocumentFacts | PageReading, None]:
        """The facts, then the pages that are asked for, in their order; what could be read before an error comes before
        it. `plan` is what to ask of every page, in place of the options' own `caption`; the source adds the page's
        hints and a request id. Closed, it ends the work.

        Raises:
            ReaderUnavailable: no reader can be had now.
            ReaderFault: the reader broke the protocol or fell silent.
            ServiceUnavailable: the target was lost.
            InvalidConfig: documents cannot be read here.
            SlipstreamError: what is wrong with the document, a page of it, or the request.
        """


# -- runner ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Content:
    """A document as it was found."""

    data: bytes
    sha256: str

    @property
    def num_bytes(self) -> int:
        return len(self.data)


@dataclass
class _Run:
    """One lease on a document."""

    lease: Lease
    plan: CaptionPlan
    asked: DocumentOptions
    content: _Content
    target: ModelInfo
    draft: ModelInfo | None
    parts: PartKeeper

    @property
    def state(self) -> PartsState:
        """What there is of its pages."""
        return self.parts.state

    @property
    def key(self) -> str:
        return parts_key(self.content.sha256, self.asked, self.plan, self.target, self.draft)

    @property
    def pages(self) -> list[int]:
        """All of the job's, by the number of the part."""
        return [page for part in self.state.layout.split(",") for page in _range(part)]

    @property
    def remaining(self) -> DocumentOptions:
        """What to ask for next: all that is left, or as much as a request can name."""
        if not self.state.total:
            return self.asked
        pages = self.pages
        left = first_ranges([pages[number] for number in self.state.missing])
        return replace(self.asked, request=replace(self.asked.request, pages=left))


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


class DocumentRunner:
    """Turns leases on documents into outcomes. A document has one of the gateway's archive slots while it is read."""

    def __init__(
        self,
        config: GatewayConfig,
        captioner: GatewayCaptioner,
        queue: JobQueue,
        models: ModelRuns,
        source: DocumentSource | None,
    ) -> None:
        self._config = config
        self._captioner = captioner
        self._queue = queue
        self._models = models
        self._source = source

    async def run(self, lease: Lease, job: JobPayload, batch: BatchPayload, progress: Callable[[str], None]) -> Outcome:
        """Raises what a worker's handler may."""
        if self._source is None:
            raise for_others("this gateway reads no documents")
        asked = job.merged_document(batch)
        options = job.page_options(batch).over(PAGE_OPTIONS)
        async with self._models.slots:
            plan = await self._models.plan(lease, options)
            most_bytes = self._config.max_document_bytes
            media = self._captioner.media
            async with opened(media, job.source, plan.owner, whole=True, most_bytes=most_bytes) as (file, _):
                data = await read_document(file, most_bytes)
            content = _Content(data, hashlib.sha256(data).hexdigest())
            check_digest(job.sha256, content.sha256)
            target, draft = models_of(self._captioner.peers)
            parts = PartKeeper(self._queue, lease, NAMES, progress)
            run = _Run(lease, plan, asked, content, target, draft, parts)
            await parts.open(run.key)
            while run.state.missing or not run.state.total:
                await self._read_pages(run, self._source)
        result = write_parts_result(run.state, receipt_of_whole(plan, content, run.target, lease.epoch))
        return Outcome(JobState.DONE, result, tallies={"pages": run.state.total})

    async def _read_pages(self, run: _Run, source: DocumentSource) -> None:
        """Keeps every page as it comes."""
        asked = run.remaining
        async with aclosing(source.pages(run.content.data, asked, run.plan)) as pages:
            while (page := await self._next(run, pages)) is not None:
                if isinstance(page, PageReading):
                    await self._keep(run, page)
                elif not run.state.total:
                    await run.parts.open(run.key, len(page.pages), page_ranges(page.pages))
        if not run.state.total or (run.state.missing and run.remaining == asked):
            raise SlipstreamError("the reader says nothing of the pages that it was asked for")

    async def _next(
        self, run: _Run, pages: AsyncGenerator[DocumentFacts | PageReading, None]
    ) -> DocumentFacts | PageReading | None:
        async with self._models.captioning(run.lease, run.plan):
            try:
                async with within_limit(self._config.request_timeout_s, "a page was not read", SlipstreamError):
                    return await anext(pages, None)
            except ReaderUnavailable as error:
                raise RetryLater(str(error), counted=False) from error

    async def _keep(self, run: _Run, page: PageReading) -> None:
        await self._models.check_target(run.target)
        number = run.pages.index(page.page)
        data = self._part(run, number, page)
        await run.parts.keep(number, page.page, data, tallies(page.caption))

    def _part(self, run: _Run, number: int, page: PageReading) -> bytes:
        receipt = make_receipt(run.plan, run.content, page.caption, run.target, run.draft, run.lease.epoch)
        part = JobPart(number, page.page, page.picture.dpi, page.caption, receipt, page.draft)
        data = write_part(part)
        if len(data) > self._queue.policy.parts.max_part_bytes:
            warnings = (*page.draft.warnings, CUT_REGIONS)
            data = write_part(replace(part, draft=replace(page.draft, regions=(), warnings=warnings)))
        return data
