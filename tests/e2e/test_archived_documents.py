"""Documents in the archive: gateways are killed and frozen in the middle, and every page is read once all the same."""

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

import slipstream
from slipstream.archive.messages import BatchItem, BatchOptions, Job, JobKind, JobPart
from slipstream.archive.queue import JobState, QueuePolicy
from slipstream.archive.redis_queue import RedisQueue
from slipstream.documents.messages import DocumentLimits, DocumentRequest, PagePicture
from slipstream.documents.pool import ReaderPool
from slipstream.errors import InvalidRequest
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.archive_gateways import ArchiveGateways
from tests.support.documents import needs_documents, page_video, pdf_of, words_at
from tests.support.processes import START_S, STOP_S, eventually, logged, new_process

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_documents]

NUM_PAGES, DPI = 6, 40
CAPTION = {"max_new_tokens": 60}
DOCUMENT = {"dpi": DPI}


def pages_pdf(num_pages: int) -> bytes:
    """Pages that look different, each with a word."""
    pages = [
        b"%d %d 0 rg 0 0 %d 150 re f\n" % (number % 2, number % 3 == 0, 30 * number)
        + words_at(20, 200, f"page {number + 1}", 24)
        for number in range(num_pages)
    ]
    return pdf_of(pages, size=(200, 260))


@dataclass
class Archive(ArchiveGateways):
    """The same with a reader."""

    reader: ServiceProcess = field(kw_only=True)

    async def start(self) -> ServiceProcess:
        return await self.start_gateway("--reader", self.reader.address, "--archive-slots", "1", "--archive-ahead", "0")

    async def submit(self, process: ServiceProcess, name: str, **document: Any) -> str:
        async with self.client(process) as client:
            item = BatchItem(name, str(self.folder / name))
            options = BatchOptions(caption=CAPTION, document=DOCUMENT | document)
            return (await client.submit(options, [item])).batch_id

    async def wait_for_page(self, process: ServiceProcess, job_id: str, *, is_whole: bool) -> None:
        """Returns when this gateway has written a page, or when the target has begun one more."""
        before = len(self.opened(job_id))
        await eventually(lambda: self.kept(process) if is_whole else len(self.opened(job_id)) > before, START_S)

    def kept(self, process: ServiceProcess) -> list[int]:
        """Pages that this gateway says it has written."""
        return [entry["page"] for entry in logged(process.log_path, "part.kept", answer="kept")]

    def opened(self, job_id: str) -> list[tuple[int, int]]:
        """Run and page of every reading that the target has begun for the job."""
        words = self.names_of(job_id)
        return [(int(run), int(page.removeprefix("p"))) for run, page, *region in words if not region]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def archive(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Archive]:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "six.pdf").write_bytes(pages_pdf(NUM_PAGES))
    reader = new_process("reader", folder / "reader")
    reader.argv = tuple(
        word.replace("slipstream.services.reader", "tests.support.quick_reader") for word in reader.argv
    )
    async with EmbeddedServer(folder / "redis") as redis:
        made = Archive(folder, redis.url, stack.processes["target"], reader=reader)
        await reader.start()
        try:
            await reader.wait_serving(START_S)
            yield made
        finally:
            for process in (*made.processes, reader):
                await process.stop(STOP_S)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(stack: Stack, archive: Archive) -> list[str]:
    """What the target reads on each page, asked for by plain decoding and by way of a video file."""
    pool, texts = ReaderPool(DocumentLimits(), module="tests.support.bad_reader"), []
    try:
        async with slipstream.connect_async(stack.gateway_address) as captioner:
            request = DocumentRequest(dpi=DPI, pictures=True)
            async with aclosing(pool.read((archive.folder / "six.pdf").read_bytes(), request)) as events:
                async for event in events:
                    if isinstance(event, PagePicture):
                        options = {"prompt": "Read this page.", "num_frames": 1, "method": "autoregressive"}
                        caption = await captioner.caption(page_video(event), **options, **CAPTION)
                        texts.append(caption.text)
    finally:
        pool.close()
    assert len(set(texts)) == NUM_PAGES, "every page has a text of its own"
    return texts


def check_document(job: Job, parts: Sequence[JobPart], texts: Sequence[str]) -> None:
    assert (job.state, job.kind, job.error) == (JobState.DONE, JobKind.DOCUMENT, "")
    assert (job.parts_done, job.parts_total) == (NUM_PAGES, NUM_PAGES)
    assert [(part.number, part.page, part.error) for part in parts] == [(n, n + 1, "") for n in range(NUM_PAGES)]
    assert [part.caption and part.caption.text for part in parts] == list(texts)
    for part in parts:
        assert part.receipt is not None and part.receipt.text_sha256 and part.receipt.target.revision
        assert part.draft is not None and part.draft.text and part.dpi == DPI


async def test_a_document_is_read_page_by_page(archive: Archive, undisturbed: list[str]) -> None:
    gateway = await archive.start()
    job, parts = await archive.ended(gateway, await archive.submit(gateway, "six.pdf"))
    check_document(job, parts, undisturbed)
    assert archive.kept(gateway) == list(range(1, NUM_PAGES + 1))
    assert job.receipt is not None and job.receipt.video_sha256 == (parts[0].receipt and parts[0].receipt.video_sha256)
    chosen, parts = await archive.ended(gateway, await archive.submit(gateway, "six.pdf", pages="5-,2"))
    assert [part.page for part in parts] == [5, 6, 2] and chosen.parts_total == 3
    assert [part.caption and part.caption.text for part in parts] == [undisturbed[page - 1] for page in (5, 6, 2)]
    await archive.kill(gateway)


@pytest.mark.long
async def test_a_killed_gateway_repeats_no_page(archive: Archive, undisturbed: list[str]) -> None:
    """One dies between a part's writing and the next page, the next in the middle of a page, and so on to the end: more
    deaths than a job may have without getting on."""
    gateway = await archive.start()
    batch_id = await archive.submit(gateway, "six.pdf")
    queue = RedisQueue(archive.redis_url)
    at_kill: list[tuple[int, set[int]]] = []
    try:
        (job,), _ = await queue.list_jobs(batch_id)
        for number in range(NUM_PAGES - 1):
            await archive.wait_for_page(gateway, job.job_id, is_whole=number % 2 == 0)
            await archive.kill(gateway)
            done, _ = await queue.list_parts(batch_id, job.job_id)
            (job,), _ = await queue.list_jobs(batch_id)
            at_kill.append((job.epoch, {part.number + 1 for part in done}))
            gateway = await archive.start()
    finally:
        await queue.close()
    ended, parts = await archive.ended(gateway, batch_id)
    check_document(ended, parts, undisturbed)
    assert len(at_kill) > QueuePolicy().max_crashes and at_kill[-1][1], "pages were done before the last death"
    for epoch, done_pages in at_kill:
        assert not [page for run, page in archive.opened(job.job_id) if run > epoch and page in done_pages]
    written = Counter(page for process in archive.processes[1:] for page in archive.kept(process))
    assert set(written.values()) == {1}, "no part was written twice"
    runs = [part.receipt.runs for part in parts if part.receipt]
    assert runs == sorted(runs) and len(set(runs)) > 1, "each page says which run has read it"
    await archive.kill(gateway)


async def test_a_killed_gateway_repeats_no_page_whose_regions_were_read_first(
    archive: Archive, undisturbed: list[str]
) -> None:
    gateway = await archive.start()
    batch_id = await archive.submit(gateway, "six.pdf", stage="region+page")
    await eventually(lambda: archive.kept(gateway), START_S)
    await archive.kill(gateway)
    kept, gateway = archive.kept(gateway), await archive.start()
    job, parts = await archive.ended(gateway, batch_id)
    check_document(job, parts, undisturbed)
    done = {part.page for part in parts if part.receipt and part.receipt.runs == 1}
    assert set(kept) <= done <= set(range(1, NUM_PAGES + 1)), "all, where the kill was late"
    assert not done & {page for run, page in archive.opened(job.job_id) if run > 1}
    for part in parts:
        assert part.caption is not None and part.caption.regions is not None
        assert part.draft is not None and part.caption.regions.num_read <= len(part.draft.regions)
    await archive.kill(gateway)


async def test_a_stage_that_there_is_not_is_refused(archive: Archive) -> None:
    gateway = await archive.start()
    with pytest.raises(InvalidRequest, match="stage 'line' is unknown; choose one of page"):
        await archive.submit(gateway, "six.pdf", stage="line")
    await archive.kill(gateway)


async def test_a_gateway_that_wakes_too_late_writes_no_part(archive: Archive, undisturbed: list[str]) -> None:
    frozen = await archive.start()
    batch_id = await archive.submit(frozen, "six.pdf")
    await eventually(lambda: archive.kept(frozen), START_S)
    os.killpg(frozen.pid, signal.SIGSTOP)
    try:
        other = await archive.start()
        job, parts = await archive.ended(other, batch_id)
    finally:
        os.killpg(frozen.pid, signal.SIGCONT)
    check_document(job, parts, undisturbed)
    await eventually(lambda: logged(frozen.log_path, "job.lost", epoch=1), START_S)
    kept = archive.kept(frozen) + archive.kept(other)
    assert len(kept) == len(set(kept)) >= NUM_PAGES - 1, "one may have been frozen before it said so"
    assert await archive.ended(other, batch_id) == (job, parts), "nothing has changed since"
    for process in (frozen, other):
        await archive.kill(process)
