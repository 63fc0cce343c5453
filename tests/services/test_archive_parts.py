"""What the archive's calls say of documents: how they are handed in, and their pages, a few at a time."""

from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.archive.messages import BatchItem, BatchOptions, JobKind, JobPart, ModelReceipt, Receipt
from slipstream.archive.queue import JobState, Lease, Outcome, UnknownBatch
from slipstream.archive.records import read_batch, read_job, write_part
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.connection import Connection
from slipstream.documents.messages import Box, Origin, PageDraft, Region, RegionKind
from slipstream.errors import InvalidRequest
from slipstream.messages import Caption
from slipstream.rpc.v1 import archive_pb2
from slipstream.services.gateway import archive_servicer as servicer_module
from tests.services.test_archive_servicer import NOT_FOUND, Served, refused, served

served = served
RECEIPT = Receipt("9.9", ModelReceipt("big", "ab", "float32"), None, {"prompt": "Read"}, "cd", 7, "ef")

NOT_SAID = {"method": "", "pruner": "", "alpha": 0.0, "policy": "", "max_window": 0, "lossy": "", "lossy_keep": 0.0}
SUMMARISED = NOT_SAID | {"tolerance": 0.0, "tolerance_rule": ""}
"""Options of a caption as a summary tells them."""


@pytest_asyncio.fixture
async def client(served: Served) -> ArchiveClient:
    return ArchiveClient(Connection(served.channel))


def page_of(number: int) -> JobPart:
    regions = (Region(Box(0, 0, 9, 9), RegionKind.TABLE, 0, "a\tb", 0.5, Origin.TEXT_LAYER),)
    draft = PageDraft(number + 1, 20, 30, regions, ("odd",), 0.25)
    return JobPart(number, number + 1, 150.0, Caption(f"Seite {number}", 3, None, options=SUMMARISED), RECEIPT, draft)


async def keep_pages(served: Served, num_pages: int) -> Lease:
    (lease,) = await served.queue.take("w", 1)
    await served.queue.open_parts(lease, "key", num_pages + 1, "1-")
    for number in range(num_pages):
        await served.queue.put_part(lease, number, write_part(page_of(number)), {})
    return lease


async def test_what_is_a_document_and_how_it_is_read(served: Served, client: ArchiveClient) -> None:
    items = [
        BatchItem("a", "/a.PDF", document={"pages": "2", "text_layer": False}),
        BatchItem("b", "https://host/scan.tiff?sig=x.mp4"),
        BatchItem("c", "/clip.mp4"),
        BatchItem("d", "/unnamed", kind=JobKind.DOCUMENT),
        BatchItem("e", "/e.png", kind=JobKind.VIDEO),
        BatchItem("f", "/f.pdf", document={"dpi": 9000}),
        BatchItem("g", "/g.mp4", document={"pages": "1-2"}),
    ]
    submitted = await client.submit(BatchOptions(document={"dpi": 90, "pages": "1"}), items)
    assert submitted.num_rejected == 2
    records, _ = await served.queue.list_jobs(submitted.batch_id)
    batch = read_batch((await served.queue.get_batch(submitted.batch_id)).options)
    jobs = {record.custom_id: read_job(record.payload) for record in records}
    kinds = [JobKind.DOCUMENT, JobKind.DOCUMENT, JobKind.VIDEO, JobKind.DOCUMENT, JobKind.VIDEO, JobKind.DOCUMENT]
    kinds += [JobKind.VIDEO]
    assert [job.kind for job in jobs.values()] == kinds
    request = jobs["a"].merged_document(batch).request
    assert (request.pages, request.dpi, request.text_layer) == ("2", 90, False)
    assert jobs["b"].merged_document(batch).request.pages == "1"
    assert [record.state for record in records[-2:]] == [JobState.FAILED] * 2
    assert "dpi is 9000" in records[-2].error and "pages is of documents, and this is a video" in records[-1].error
    assert {job.custom_id: job.kind async for job in client.jobs(submitted.batch_id)} == dict(
        zip("abcdefg", kinds, strict=True)
    )
    with pytest.raises(InvalidRequest, match="dpi is 9"):
        await client.submit(BatchOptions(document={"dpi": 9}), items)


async def test_pages_come_as_they_were_kept_and_a_few_at_a_time(
    served: Served, client: ArchiveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer_module, "AT_ONCE", 4)
    monkeypatch.setattr(servicer_module, "PAGE_BYTES", 1)
    batch_id = (await client.submit(BatchOptions(), [BatchItem("a", "/a.pdf")])).batch_id
    lease = await keep_pages(served, 5)
    (job,) = [job async for job in client.jobs(batch_id)]
    assert (job.parts_done, job.parts_total) == (5, 6)
    assert [part async for part in client.parts(batch_id, job)] == [page_of(number) for number in range(5)]
    batch = await client.get(batch_id)
    assert (batch.parts_done, batch.parts_total) == (5, 6) and batch.parts_bytes
    answer = await served.stub.ListParts(archive_pb2.ListPartsRequest(batch=batch_id, job_id=job.job_id))
    assert (len(answer.parts), answer.next_page_token) == (1, "1"), "each is larger than a page"
    monkeypatch.setattr(servicer_module, "PAGE_BYTES", 2 * answer.ByteSize())
    answer = await served.stub.ListParts(archive_pb2.ListPartsRequest(batch=batch_id, job_id=job.job_id))
    assert (len(answer.parts), answer.next_page_token) == (2, "2")
    jobs = await served.stub.ListJobs(archive_pb2.ListJobsRequest(batch=batch_id))
    assert (len(jobs.jobs), jobs.next_page_token) == (1, "")
    await served.queue.finish(lease, Outcome(JobState.FAILED, error="page 6 cannot be opened"))
    assert len([part async for part in client.parts(batch_id, job)]) == 5


async def test_a_job_that_does_not_exist_is_the_one_that_is_named(served: Served, client: ArchiveClient) -> None:
    await client.submit(BatchOptions("mine"), [BatchItem("a", "/a.pdf")])
    with pytest.raises(UnknownBatch, match=r"^no job nowhere in batch mine$"):
        await client.part_page("mine", "nowhere")
    with pytest.raises(UnknownBatch, match=r"^no batch other here"):
        await client.part_page("other", "nowhere")


async def test_a_part_of_another_release_hides_no_other(served: Served, client: ArchiveClient) -> None:
    batch_id = (await client.submit(BatchOptions(), [BatchItem("a", "/a.pdf")])).batch_id
    (lease,) = await served.queue.take("w", 1)
    await served.queue.open_parts(lease, "key", 3, "1-3")
    for number, data in enumerate((b"\x07 of another form", b"\x01 not compressed", write_part(page_of(2)))):
        await served.queue.put_part(lease, number, data, {})
    (job,) = [job async for job in client.jobs(batch_id)]
    other, damaged, sound = [part async for part in client.parts(batch_id, job)]
    assert "another release" in other.error and "cannot be read" in damaged.error and sound == page_of(2)
    assert [part.number for part in (other, damaged)] == [0, 1]


async def test_pages_are_their_owners_alone(
    served: Served, client: ArchiveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = "ann"
    monkeypatch.setattr(servicer_module, "current_owner", lambda: owner)
    batch_id = (await client.submit(BatchOptions(), [BatchItem("a", "/a.pdf")])).batch_id
    lease = await keep_pages(served, 1)
    request: Any = archive_pb2.ListPartsRequest(batch=batch_id, job_id=lease.job_id)
    assert len((await served.stub.ListParts(request)).parts) == 1
    owner = "bob"
    assert (await refused(served.stub.ListParts(request)))[0] == NOT_FOUND
    own = (await client.submit(BatchOptions(), [BatchItem("b", "/b.pdf")])).batch_id
    other_batch: Any = archive_pb2.ListPartsRequest(batch=own, job_id=lease.job_id)
    code, _ = await refused(served.stub.ListParts(other_batch))
    assert code == NOT_FOUND, "a job is asked for in its own batch only"
    bad_token: Any = archive_pb2.ListPartsRequest(batch=own, page_token="x")
    assert (await refused(served.stub.ListParts(bad_token)))[0] == grpc.StatusCode.INVALID_ARGUMENT
