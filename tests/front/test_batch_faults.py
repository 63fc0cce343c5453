"""Batches with documents in them, and batches that this server itself fails in."""

import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import openai
import pytest

from slipstream.errors import ServiceUnavailable
from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.rpc.v1 import gateway_pb2
from slipstream.services.front import batch_output, batches
from slipstream.services.front.api_errors import not_found
from slipstream.services.front.batch_lines import BatchLine, ItemMaker
from slipstream.services.front.batch_records import HttpBatch, Stage
from tests.cli.fake_archive import NUM_PAGES, Context, FakeArchive
from tests.front.conftest import jpeg
from tests.front.test_openai_batches import CHAT_ENDPOINT, DAY, ended, lines_of, opened
from tests.support.front import PROMPT, batch_line, client_of, data_url, front_at
from tests.support.processes import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "big"


class ReadingArchive(FakeArchive):
    """One whose gateway has a reader, which may fail to cancel, whose jobs may run again for `reruns` looks, and which
    may have no more room after the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.cancel_faults: list[grpc.StatusCode] = []
        self.reruns = 0
        self.is_filled_at_once = False

    async def SubmitBatch(
        self, request_iterator: AsyncIterator[pb.SubmitBatchRequest], context: Context
    ) -> pb.SubmitBatchResponse:
        try:
            return await super().SubmitBatch(request_iterator, context)
        finally:
            if self.is_filled_at_once:
                self.room = 0

    async def CancelBatch(self, request: pb.CancelBatchRequest, context: Context) -> pb.Batch:
        if self.cancel_faults:
            await context.abort(self.cancel_faults.pop(), "broken")
        return await super().CancelBatch(request, context)

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        page = await super().ListJobs(request, context)
        if self.reruns:
            self.reruns -= 1
            page.jobs[0].state = pb.JOB_STATE_RUNNING
        return page

    async def GetGateway(self, request: gateway_pb2.GetGatewayRequest, context: Context) -> gateway_pb2.GatewayInfo:
        return gateway_pb2.GatewayInfo(target_model=MODEL, max_frames=8, max_video_bytes=10**9, reads_documents=True)


@pytest.fixture
def archive() -> Iterator[ReadingArchive]:
    with ReadingArchive() as running:
        yield running


def asked_of(part: dict[str, Any], **own: Any) -> dict[str, Any]:
    """A request about this part."""
    content = [{"type": "text", "text": PROMPT}, part]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "slipstream": own}


def picture(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, "image/jpeg")}}


def paper(url: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": url}}


def clip(url: str = "file:///videos/a.mp4") -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


async def run(archive: FakeArchive, folder: Path, *lines: str) -> tuple[Any, list[dict[str, Any]]]:
    """The batch of these lines at its end, and its output and error lines."""
    async with front_at(archive.address, data=str(folder), shared_media=True) as address, client_of(address) as client:
        batch = await ended(client, await opened(client, list(lines)))
        written = [await lines_of(client, file_id) for file_id in (batch.output_file_id, batch.error_file_id)]
        return batch, [line for file in written for line in file]


STUCK_AND_ODD = [batch_line("sound", asked_of(clip("file:///videos/stuck.mp4"))), batch_line("odd", asked_of(clip()))]
"""Requests: of one the job never ends."""


def hand_in_one_by_one(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> list[BatchLine]:
    """Items go in one by one, look after look, and the odd one fails so; the lines at which that was."""
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    monkeypatch.setattr("slipstream.client.archive_client.PIECE_ITEMS", 1)
    item, failed = ItemMaker.item, list[BatchLine]()

    def faulty(maker: ItemMaker, line: BatchLine) -> object:
        if line.custom_id != "odd":
            return item(maker, line)
        failed.append(line)
        raise failure

    monkeypatch.setattr(ItemMaker, "item", faulty)
    return failed


def two_days_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, for all batches."""
    later = SimpleNamespace(time=lambda: time.time() + 2 * 86_400, monotonic=time.monotonic)
    monkeypatch.setattr(batches, "time", later)


async def ended_early(client: Any, batch: Any, status: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The batch, once it was made to end so."""
    if status == "cancelled":
        await client.batches.cancel(batch.id)
    else:
        two_days_later(monkeypatch)
    return await ended(client, batch)


async def test_documents_are_handed_in_as_such(archive: ReadingArchive, tmp_path: Path) -> None:
    """A PDF by path with options of documents, one by value, a picture alone, and a video beside them."""
    way: dict[str, Any] = {"pages": "1-3", "dpi": 72, "stage": "region+page", "ocr": "never", "surface": "lines"}
    batch, lines = await run(
        archive,
        tmp_path,
        batch_line("path", asked_of(paper("file:///papers/a?.pdf"), **way)),
        batch_line("value", asked_of(paper(data_url(b"%PDF-1.7 and more", "application/pdf")))),
        batch_line("picture", asked_of(picture(jpeg(90)))),
        batch_line("video", asked_of(clip())),
        batch_line("refused", asked_of(clip(), pages="1")),
        batch_line("refused, too", asked_of(picture(jpeg(90)), ocr_dpi=60)),
    )
    assert (batch.status, batch.errors) == ("completed", None)
    (handed_in,) = archive.batches.values()
    kinds = {name: item.kind for name, item in handed_in.items.items()}
    documents = dict.fromkeys(("path", "value", "picture"), pb.JOB_KIND_DOCUMENT)
    assert kinds == {**documents, "video": pb.JOB_KIND_VIDEO}
    assert handed_in.items["path"].document == pb.DocumentReading(**way)
    assert not handed_in.items["picture"].HasField("document")
    by_id = {line["custom_id"]: line["response"] for line in lines}
    assert by_id["path"]["body"]["choices"][0]["message"]["content"].count("Page ") == NUM_PAGES
    assert by_id["refused"]["body"]["error"]["param"] == "slipstream.pages" and len(by_id) == 6
    assert by_id["refused, too"]["body"]["error"]["param"] == "slipstream.ocr_dpi"


@pytest.mark.parametrize("part", [clip("file://[")])
async def test_a_request_that_is_nonsense_fails_alone(
    archive: ReadingArchive, tmp_path: Path, part: dict[str, Any]
) -> None:
    batch, lines = await run(archive, tmp_path, batch_line("odd", asked_of(part)), batch_line("a", asked_of(clip())))
    assert (batch.status, batch.errors, batch.request_counts.failed) == ("completed", None, 1)
    assert {line["custom_id"]: line["response"]["status_code"] for line in lines} == {"odd": 400, "a": 200}


async def test_the_size_that_a_picture_claims_is_the_gateways_to_judge(archive: ReadingArchive, tmp_path: Path) -> None:
    part = {"type": "video", "video": [data_url(jpeg(9).replace(b"\0\x30\0\x40", b"\xff\xff\xff\xff"), "image/jpeg")]}
    batch, lines = await run(archive, tmp_path, batch_line("vast", asked_of(part)), batch_line("a", asked_of(clip())))
    assert (batch.status, batch.errors) == ("completed", None) and len(lines) == 2


async def test_another_front_that_hands_in_the_same_leaves_its_refusals_alone(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the record before all was handed in, and waits for room when the first one writes out."""
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    check, write_out, has_begun = batches.Batches._check, batches.Batches._write_out, threading.Event()
    fronts = list[batches.Batches]()

    def checked_in_turn(self: batches.Batches, owner: str, batch: HttpBatch) -> Any:
        fronts.append(self)
        if self is fronts[0]:
            assert has_begun.wait(60)
        else:
            has_begun.set()
            while self.records.get(owner, batch.batch_id).stage is Stage.VALIDATING:
                time.sleep(0.01)
        return check(self, owner, batch)

    async def written_late(self: batches.Batches, *about: Any) -> None:
        await eventually(lambda: full.submits > 0)
        await write_out(self, *about)

    monkeypatch.setattr(batches.Batches, "_check", checked_in_turn)
    monkeypatch.setattr(batches.Batches, "_write_out", written_late)
    lines = [batch_line("refused", asked_of(clip(), pages="1")), batch_line("a", asked_of(clip()))]
    with ReadingArchive() as full:
        full.refusals, full.room = [grpc.StatusCode.RESOURCE_EXHAUSTED] * 10**5, 0
        async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
            batch = await opened(client, lines)
            async with front_at(full.address, data=str(tmp_path)):
                batch = await ended(client, batch)
            refused = await lines_of(client, batch.error_file_id)
    assert batch.request_counts.failed == 1 and [line["custom_id"] for line in refused] == ["refused"]


async def test_a_fault_of_this_server_ends_the_batch(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says which request, what was handed in already does not run on, and what was read of the line is gone."""
    looks = hand_in_one_by_one(monkeypatch, KeyError("nobody foresaw this"))
    batch, _ = await run(archive, tmp_path, *STUCK_AND_ODD)
    assert (batch.status, [line.number for line in looks]) == ("failed", [2] * batches.MAX_FAULTS) and batch.failed_at
    assert all(line.json.spool.closed for line in looks)
    ((error,), (handed_in,)) = batch.errors.data, archive.batches.values()
    assert (error.code, error.line) == ("server_error", 2) and "request 2" in error.message
    assert "nobody" not in error.message and batch.id in error.message
    assert handed_in.cancelled and handed_in.jobs["sound"].state == pb.JOB_STATE_CANCELLED


async def test_what_cannot_be_cancelled_yet_has_not_failed(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that is broken, too: the batch goes on failing until its jobs are cancelled."""
    hand_in_one_by_one(monkeypatch, KeyError("nobody foresaw this"))
    archive.cancel_faults = [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED]
    batch, _ = await run(archive, tmp_path, *STUCK_AND_ODD)
    (handed_in,) = archive.batches.values()
    assert batch.status == "failed" and handed_in.cancelled and not archive.cancel_faults


async def test_a_batch_cancelled_in_the_middle_of_its_way_in_leaves_nothing_running(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_in_one_by_one(monkeypatch, ServiceUnavailable("away"))
    async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
        batch = await opened(client, STUCK_AND_ODD)
        await eventually(lambda: archive.batches)
        await client.batches.cancel(batch.id)
        assert (await ended(client, batch)).status == "cancelled"
    (handed_in,) = archive.batches.values()
    assert handed_in.cancelled and handed_in.jobs["sound"].state == pb.JOB_STATE_CANCELLED


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_batch_that_waits_for_room_ends_when_it_is_to(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Room that never comes; its media go with it."""
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    archive.refusals, archive.room = [grpc.StatusCode.RESOURCE_EXHAUSTED] * 10**5, 0
    lines = [batch_line(name, asked_of(clip(data_url(b"a video")))) for name in ("a", "b")]
    folder = str(tmp_path)
    async with front_at(archive.address, data=folder, shared_media=True) as address, client_of(address) as client:
        batch = await opened(client, lines)
        await eventually(lambda: archive.submits > 1)
        batch = await ended_early(client, batch, status, monkeypatch)
    assert batch.status == status and batch.request_counts.failed == len(lines)
    assert all(handed_in.cancelled for handed_in in archive.batches.values())
    assert not list((tmp_path / "media").iterdir())


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_what_was_done_before_all_was_handed_in_is_written_out(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """There is room for one request and, while the batch waits for more, that one is done. The token, which is not
    accepted at first, may be again."""
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    archive.cancel_faults = [grpc.StatusCode.UNAUTHENTICATED]
    archive.refusals, archive.is_filled_at_once = [grpc.StatusCode.RESOURCE_EXHAUSTED] * 10**5, True
    names = ("done", "never run", "nor this")
    async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
        batch = await opened(client, [batch_line(name, asked_of(clip())) for name in names])
        await eventually(lambda: archive.submits > 1)
        batch = await ended_early(client, batch, status, monkeypatch)
        output, left = [await lines_of(client, file_id) for file_id in (batch.output_file_id, batch.error_file_id)]
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == (status, 3, 1, 2)
    assert [line["custom_id"] for line in output] == ["done"]
    assert [(line["custom_id"], line["error"]["code"]) for line in left] == [
        (name, f"batch_{status}") for name in names[1:]
    ]


async def test_a_request_that_is_refused_after_it_was_handed_in_has_one_line(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stored file has expired when the batch is handed in again from its beginning."""
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    monkeypatch.setattr("slipstream.client.archive_client.PIECE_ITEMS", 1)
    item, looks = ItemMaker.item, Counter[str]()

    def expiring(maker: ItemMaker, line: BatchLine) -> Any:
        looks[line.custom_id] += 1
        if line.custom_id == "a" and looks["a"] > 1:
            raise not_found("there is no such file")
        if line.custom_id == "b" and looks["b"] == 1:
            raise ServiceUnavailable("away")
        return item(maker, line)

    monkeypatch.setattr(ItemMaker, "item", expiring)
    batch, lines = await run(archive, tmp_path, *(batch_line(name, asked_of(clip())) for name in ("a", "b")))
    assert looks == {"a": 2, "b": 2} and [line["custom_id"] for line in lines] == ["a", "b"]
    assert (batch.status, batch.request_counts.completed, batch.error_file_id) == ("completed", 2, None)


async def test_a_batch_whose_jobs_ended_in_time_has_not_expired(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looked before its time was over; of its requests one has failed."""
    lines = [batch_line("a", asked_of(clip())), batch_line("bad", asked_of(clip("file:///videos/bad.mp4")))]
    async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
        batch = await opened(client, lines)
        records = batches.BatchRecords(str(tmp_path))
        await eventually(lambda: records.get("", batch.id).stage is not Stage.VALIDATING)
        two_days_later(monkeypatch)
        batch = await ended(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 1, 1)


async def test_the_same_request_again_leaves_running_jobs_alone(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    async def write_out(self: batches.Batches, owner: str, token: str, batch: HttpBatch) -> None:
        written.append(batch.batch_id)

    monkeypatch.setattr(batches.Batches, "_write_out", write_out)
    async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
        file = await client.files.create(file=("a.jsonl", STUCK_AND_ODD[0].encode()), purpose="batch")
        asked: Any = {"input_file_id": file.id, "completion_window": DAY, "endpoint": CHAT_ENDPOINT}
        asked |= {"extra_headers": {"idempotency-key": "once"}}
        batch = await client.batches.create(**asked)
        while batch.status == "validating":
            batch = await client.batches.retrieve(batch.id)
        again = await client.batches.create(**asked)
        assert (again.id, again.status, written) == (batch.id, "in_progress", [])


async def test_a_job_that_runs_again_has_not_failed(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has dead ones tried again just when the batch is written out."""
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    archive.reruns = 1
    batch, lines = await run(archive, tmp_path, batch_line("a", asked_of(clip())))
    assert batch.request_counts.completed == len(lines) == 1 and not archive.reruns


async def test_requests_that_the_archive_has_lost_end_with_their_time(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its store may come back."""
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
        batch = await opened(client, STUCK_AND_ODD[:1])
        while batch.status == "validating":
            batch = await client.batches.retrieve(batch.id)
        archive.batches.clear()
        with pytest.raises(openai.InternalServerError, match="has its store changed"):
            await client.with_options(max_retries=0).batches.retrieve(batch.id)
        sound = await opened(client, STUCK_AND_ODD[1:])
        assert {one.id async for one in client.batches.list()} == {sound.id, batch.id}
        two_days_later(monkeypatch)
        batch = await client.batches.retrieve(batch.id)
    assert batch.status == "failed" and "has lost this batch's requests" in batch.errors.data[0].message


async def test_a_fault_at_the_end_ends_the_batch_too(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    monkeypatch.setattr(batch_output, "answer_line", lambda *answer: 1 // 0)
    batch, _ = await run(archive, tmp_path, batch_line("a", asked_of(clip())))
    assert batch.status == "failed" and batch.errors.data[0].code == "server_error"


async def test_a_fault_that_passes_ends_nothing(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look fails, and the next does not; a gateway that is away or a full disk may take any number of looks."""
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    away, full = ServiceUnavailable("away"), OSError("disk full")
    item, faults = ItemMaker.item, [*[away, full] * batches.MAX_FAULTS, KeyError("odd")]

    def faulty(*asked: Any) -> Any:
        if faults:
            raise faults.pop()
        return item(*asked)

    monkeypatch.setattr(ItemMaker, "item", faulty)
    batch, lines = await run(archive, tmp_path, batch_line("a", asked_of(clip())))
    assert batch.status == "completed" and [line["custom_id"] for line in lines] == ["a"] and not faults


async def test_a_gateway_that_refuses_all_ends_the_batch_at_once(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.client.archive_client.PIECE_ITEMS", 1)
    archive.room, archive.refusals = 0, [grpc.StatusCode.PERMISSION_DENIED]
    lines = [batch_line(name, asked_of(clip())) for name in ("a", "b")]
    batch, _ = await run(archive, tmp_path, *lines)
    assert batch.status == "failed" and batch.errors.data[0].code == "not_served"
    assert isinstance(batch, openai.types.Batch) and archive.submits == 1
