"""How one document is run, with pages, models and a reader that are made up: what is kept, and who is to blame."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from slipstream.archive.document_runner import PAGE_OPTIONS
from slipstream.archive.job_runner import ArchiveRunner
from slipstream.archive.messages import JobKind, JobPart
from slipstream.archive.parts import PartLimits
from slipstream.archive.queue import BatchSpec, JobSpec, JobState, Lease, Outcome, QueuePolicy, QueueUnavailable
from slipstream.archive.records import (
    BatchPayload,
    JobPayload,
    job_of,
    part_of,
    read_parts_result,
    write_batch,
    write_job,
)
from slipstream.archive.worker import RetryLater, RunnerDied
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.plan import CaptionPlan
from slipstream.documents.messages import Box, DocumentFacts, Origin, PageDraft, PagePicture, Region, RegionKind
from slipstream.documents.pages import parse_pages
from slipstream.documents.reading import DocumentOptions, PageReading
from slipstream.errors import (
    DeadlineExceeded,
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    ReaderFault,
    ReaderUnavailable,
    ServiceUnavailable,
    SlipstreamError,
    UnreadableDocument,
)
from slipstream.messages import Caption
from slipstream.metrics import GatewayMetrics
from slipstream.service_info import ModelInfo
from slipstream.video.files import FileThreads, VideoFile
from tests.support.memory_queue import MemoryQueue
from tests.support.processes import eventually

CONFIG = GatewayConfig(listen="", target="t:1", archive_slots=1)
DATA = b"%PDF of seven pages"
NUM_PAGES = 7


@dataclass
class FakeTarget:
    is_up: bool = True
    model: ModelInfo = field(default_factory=lambda: ModelInfo(model_id="big", revision="r1", max_frames=64))

    async def ask(self, timeout_s: float = 2.0, *, wait_for_ready: bool = False) -> ModelInfo:
        if not self.is_up:
            raise ServiceUnavailable("the target is not reachable")
        return self.model


class FakeCaptioner:
    """Stands in for `GatewayCaptioner`, as far as a document needs it."""

    def __init__(self) -> None:
        self.target = FakeTarget()
        self.draft = None
        self.peers = self.media = self
        self.metrics = GatewayMetrics()

    async def check(self, plan: CaptionPlan) -> ModelInfo:
        return await self.target.ask()

    def settled(self, plan: CaptionPlan, target: ModelInfo) -> CaptionPlan:
        return plan

    async def look_for_draft(self, plan: CaptionPlan) -> None:
        pass

    @contextlib.asynccontextmanager
    async def open_source(self, source: str, owner: str, **wanted: Any) -> AsyncIterator[VideoFile]:
        with os.fdopen(os.memfd_create("document"), "w+b") as file:
            file.write(DATA)
            file.flush()
            yield VideoFile(file, len(DATA), FileThreads())


@dataclass
class FakeSource:
    """Reads pages whose text says which they are; before `fails_at` it raises `error`."""

    fails_at: int = 0
    error: Exception = field(default_factory=lambda: UnreadableDocument("page 7 cannot be opened"))
    text: str = "text"
    at_failure: Callable[[], None] = lambda: None
    asked: list[str] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    lasts: asyncio.Event | None = None
    """Pages wait for it, if there is one."""

    async def pages(
        self, data: bytes, asked: DocumentOptions, plan: CaptionPlan
    ) -> AsyncGenerator[DocumentFacts | PageReading, None]:
        assert data == DATA and not asked.request.pictures
        self.asked.append(asked.request.pages)
        numbers = parse_pages(asked.request.pages, NUM_PAGES, NUM_PAGES)
        yield DocumentFacts(NUM_PAGES, numbers)
        for page in numbers:
            if page == self.fails_at:
                self.at_failure()
                raise self.error
            if self.lasts is not None:
                await self.lasts.wait()
            self.read.append(page)
            caption = Caption(f"{self.text} {page}", 3, None)
            region = Region(Box(0, 0, 9, 9), RegionKind.TEXT, 0, f"ocr {page}", 0.5, Origin.OCR)
            yield PageReading(PagePicture(page, 10, 10, 150.0), PageDraft(page, 10, 10, (region,)), caption)


class World:
    """A runner among fakes, and a queue with one document."""

    def __init__(self, source: FakeSource, policy: QueuePolicy | None = None) -> None:
        self.models = FakeCaptioner()
        self.queue = MemoryQueue(policy)
        self.source = source
        self.progress: list[str] = []
        self.runner = ArchiveRunner(CONFIG, cast(GatewayCaptioner, self.models), self.queue, documents=source)

    async def submit(self, **document: Any) -> Lease:
        await self.queue.open_batch(BatchSpec("batch", options=write_batch(BatchPayload("", {}, document))))
        payload = write_job(JobPayload("/a.pdf", {}, "", JobKind.DOCUMENT))
        await self.queue.submit("batch", [JobSpec("a", payload)])
        return await self.take()

    async def take(self) -> Lease:
        (lease,) = await self.queue.take("w", 1)
        return lease

    async def run(self, lease: Lease) -> Outcome:
        return await self.runner.run(lease, self.progress.append)

    async def ended(self, lease: Lease) -> Outcome:
        """Its outcome, committed; an error of its own as a worker commits it."""
        try:
            outcome = await self.run(lease)
        except (InvalidRequest, LimitExceeded) as error:
            outcome = Outcome(JobState.FAILED, error=str(error), error_code=error.status)
        assert await self.queue.finish(lease, outcome)
        return outcome

    async def parts(self) -> list[JobPart]:
        (record,), _ = await self.queue.list_jobs("batch")
        return [part_of(part) for part in (await self.queue.list_parts("batch", record.job_id))[0]]

    async def texts(self) -> list[str]:
        return [part.caption.text for part in await self.parts() if part.caption]


async def test_every_page_is_a_part_with_text_receipt_and_regions() -> None:
    world = World(FakeSource())
    lease = await world.submit(pages="2-3,1")
    outcome = await world.ended(lease)
    parts = await world.parts()
    assert [(part.number, part.page, part.dpi) for part in parts] == [(0, 2, 150.0), (1, 3, 150.0), (2, 1, 150.0)]
    assert await world.texts() == ["text 2", "text 3", "text 1"]
    digest = hashlib.sha256(DATA).hexdigest()
    for part in parts:
        assert part.receipt is not None and part.draft is not None
        assert (part.receipt.video_sha256, part.receipt.video_bytes, part.receipt.runs) == (digest, len(DATA), 1)
        assert part.receipt.options["prompt"] == PAGE_OPTIONS.prompt and part.receipt.target.revision == "r1"
        assert part.draft.regions[0].text == f"ocr {part.page}"
    assert world.progress == ["page 1/3", "page 2/3", "page 3/3"]
    assert read_parts_result(outcome.result).video_sha256 == digest
    (record,), _ = await world.queue.list_jobs("batch")
    job = job_of(record)
    assert (job.kind, job.parts_done, job.parts_total, job.caption) == (JobKind.DOCUMENT, 3, 3, None)
    assert job.receipt is not None and job.error == ""
    assert (await world.queue.get_batch("batch")).tallies["tokens"] == 9
    assert (await world.queue.get_batch("batch")).tallies["pages"] == 3


async def test_an_unreadable_page_fails_the_document_and_keeps_the_others() -> None:
    world = World(FakeSource(fails_at=7))
    outcome = await world.ended(await world.submit())
    assert (outcome.state, outcome.error) == (JobState.FAILED, "page 7 cannot be opened")
    assert await world.texts() == [f"text {page}" for page in range(1, 7)]
    await world.queue.retry_dead("batch", frozenset({JobState.FAILED}))
    world.source.fails_at = 0
    assert (await world.ended(await world.take())).state is JobState.DONE
    assert world.source.asked == ["", "7"] and world.source.read == list(range(1, 8)), "no page was read twice"
    assert await world.texts() == [f"text {page}" for page in range(1, 8)]
    assert [part.receipt.runs for part in await world.parts() if part.receipt] == [1] * 6 + [2]


@pytest.mark.parametrize(
    ("error", "is_up", "ends_as", "counted"),
    [
        (ReaderUnavailable("no reader"), True, RetryLater, False),
        (InvalidConfig("no --reader"), True, RetryLater, False),
        (ServiceUnavailable("the session broke"), True, RetryLater, True),
        (ServiceUnavailable("the target is gone"), False, RunnerDied, None),
        (ReaderFault("it fell silent"), True, ReaderFault, None),
        (DeadlineExceeded("page 4 took too long"), True, DeadlineExceeded, None),
    ],
)
async def test_what_passes_is_tried_again_behind_the_pages_that_are_there(
    error: Exception, is_up: bool, ends_as: type[Exception], counted: bool | None
) -> None:
    world = World(FakeSource(fails_at=4, error=error))
    lease = await world.submit()

    def lose_target() -> None:
        world.models.target.is_up = is_up

    world.source.at_failure = lose_target
    with pytest.raises(ends_as) as raised:
        await world.run(lease)
    if isinstance(raised.value, RetryLater):
        assert raised.value.counted == counted
    assert await world.queue.retry(lease, "again", 0.0, counted=False)
    world.models.target.is_up, world.source.fails_at = True, 0
    assert (await world.ended(await world.take())).state is JobState.DONE
    assert world.source.asked == ["", "4-7"] and world.source.read == list(range(1, 8))


async def test_pages_of_another_model_are_read_again() -> None:
    """The rule for what changed meanwhile: a document is one model's reading, in one way."""
    world = World(FakeSource(fails_at=5))
    await world.ended(await world.submit())
    await world.queue.retry_dead("batch", frozenset({JobState.FAILED}))
    world.models.target.model = replace(world.models.target.model, revision="r2")
    world.source.fails_at, world.source.text = 0, "better"
    assert (await world.ended(await world.take())).state is JobState.DONE
    assert world.source.asked == ["", ""] and await world.texts() == [f"better {page}" for page in range(1, 8)]


async def test_a_target_that_comes_back_as_another_one_ends_the_run() -> None:
    """The caption waits for a target that is away, and goes on at whichever is there then."""
    world = World(FakeSource())
    lease = await world.submit()

    class Restarted(FakeSource):
        async def pages(self, *args: Any) -> AsyncGenerator[DocumentFacts | PageReading, None]:
            async for page in super().pages(*args):
                if isinstance(page, PageReading) and page.page == 4:
                    world.models.target.model = replace(world.models.target.model, revision="r2")
                yield page

    world.runner._documents._source = Restarted()
    with pytest.raises(RetryLater, match="another one") as later:
        await world.run(lease)
    assert not later.value.counted and await world.texts() == ["text 1", "text 2", "text 3"]
    assert await world.queue.retry(lease, "again", 0.0, counted=False)
    world.runner._documents._source = FakeSource(text="better")
    assert (await world.ended(await world.take())).state is JobState.DONE
    assert await world.texts() == [f"better {page}" for page in range(1, 8)]


async def test_a_late_part_of_who_lost_the_lease_is_refused() -> None:
    """The holder is stopped in the middle of a page, and wakes when another has read the document to its end."""
    slow = FakeSource(lasts=asyncio.Event(), text="late")
    world = World(slow)
    stale = await world.submit()
    late = asyncio.create_task(world.run(stale))
    await eventually(lambda: slow.asked)
    world.queue.policy = replace(world.queue.policy, lease_s=-1.0)
    for job in world.queue._jobs.values():
        job.lease_ends_s = 0.0
    (lease,) = await world.queue.take("other", 1)
    other = World(FakeSource())
    other.runner._documents._queue = world.queue
    assert await world.queue.finish(lease, await other.run(lease))
    assert slow.lasts is not None
    slow.lasts.set()
    with pytest.raises(RetryLater, match="lease is lost"):
        await late
    assert slow.read == [1] and await world.texts() == [f"text {page}" for page in range(1, 8)]


async def test_while_the_store_is_away_a_page_that_was_read_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.archive.part_keeper.STORE_AWAY_S", 0.0)
    world, failures = World(FakeSource()), [4]
    lease = await world.submit()
    put, opened = world.queue.put_part, world.queue.open_parts

    async def away(call: Any, *args: Any) -> Any:
        failures[0] = (failures[0] + 1) % 3
        if failures[0]:
            raise QueueUnavailable("the store is away")
        return await call(*args)

    world.queue.put_part = lambda *args: away(put, *args)  # type: ignore[method-assign]
    world.queue.open_parts = lambda *args: away(opened, *args)  # type: ignore[method-assign]
    assert (await world.ended(lease)).state is JobState.DONE
    assert world.source.read == list(range(1, 8))


async def test_what_a_document_keeps_is_bounded() -> None:
    world = World(FakeSource(), QueuePolicy(parts=PartLimits(max_job_bytes=1500)))
    outcome = await world.ended(await world.submit())
    assert outcome.state is JobState.FAILED and "more than the 1500 bytes" in outcome.error
    assert await world.texts()
    world = World(FakeSource(), QueuePolicy(parts=PartLimits(max_parts=6)))
    outcome = await world.ended(await world.submit())
    assert outcome.state is JobState.FAILED and await world.texts() == []


async def test_regions_that_take_too_much_room_are_left_out() -> None:
    world = World(FakeSource(), QueuePolicy(parts=PartLimits(max_part_bytes=700)))

    class Wordy(FakeSource):
        async def pages(self, *args: Any) -> AsyncGenerator[DocumentFacts | PageReading, None]:
            async for page in super().pages(*args):
                if isinstance(page, PageReading):
                    words = hashlib.sha512(b"%d" % page.page).hexdigest() * 9
                    regions = tuple(
                        replace(page.draft.regions[0], text=hashlib.sha512(f"{words}{n}".encode()).hexdigest(), order=n)
                        for n in range(20)
                    )
                    page = replace(page, draft=replace(page.draft, regions=regions))
                yield page

    world.source = Wordy()
    world.runner._documents._source = world.source
    assert (await world.ended(await world.submit())).state is JobState.DONE
    assert await world.texts() == [f"text {page}" for page in range(1, 8)]
    for part in await world.parts():
        assert part.draft is not None and not part.draft.regions and "left out" in part.draft.warnings[-1]


async def test_the_document_must_be_the_one_that_was_meant() -> None:
    world = World(FakeSource())
    lease = await world.submit()
    lease = replace(lease, payload=write_job(JobPayload("/a.pdf", {}, "0" * 64, JobKind.DOCUMENT)))
    with pytest.raises(InvalidRequest, match="has the SHA-256"):
        await world.run(lease)


async def test_a_gateway_that_reads_no_documents_leaves_them_to_others() -> None:
    world = World(FakeSource())
    runner = ArchiveRunner(CONFIG, cast(GatewayCaptioner, world.models), world.queue)
    with pytest.raises(RetryLater) as later:
        await runner.run(await world.submit(), world.progress.append)
    assert not later.value.counted


async def test_a_reader_that_leaves_pages_out_is_not_asked_for_ever() -> None:
    class Forgetful(FakeSource):
        async def pages(self, *args: Any) -> AsyncGenerator[DocumentFacts | PageReading, None]:
            async for page in super().pages(*args):
                if not isinstance(page, PageReading) or page.page != 3:
                    yield page

    world = World(Forgetful())
    with pytest.raises(SlipstreamError, match="says nothing"):
        await world.run(await world.submit())
    assert world.source.asked == ["", "3"]


async def test_more_ranges_than_a_request_can_name_are_asked_for_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(FakeSource(fails_at=7))
    await world.ended(await world.submit(pages="7,5,3,1"))
    await world.queue.retry_dead("batch", frozenset({JobState.FAILED}))
    world.source.fails_at = 0
    monkeypatch.setattr("slipstream.documents.pages.MAX_RANGE_CHARS", 3)
    assert (await world.ended(await world.take())).state is JobState.DONE
    assert world.source.asked == ["7,5,3,1", "7,5", "3,1"]
    assert await world.texts() == ["text 7", "text 5", "text 3", "text 1"]
