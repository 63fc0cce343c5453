"""Who looks at a batch, and when: two at once, one who has left, one who comes back to another front."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.archive.messages import Batch
from slipstream.rpc.security import new_token
from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.services.front import batches
from slipstream.services.front.batch_records import BatchRecords, HttpBatch, Stage
from slipstream.services.front.batches import Batches
from slipstream.services.front.file_store import NewFile
from tests.front.test_batch_faults import ReadingArchive, asked_of, clip, two_days_later
from tests.front.test_openai_batches import CHAT_ENDPOINT, DAY, ended, lines_of, opened
from tests.support.front import batch_line, client_of, front_at
from tests.support.processes import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

STUCK = batch_line("stuck", asked_of(clip("file:///videos/stuck.mp4")))


@pytest.fixture
def archive() -> Iterator[ReadingArchive]:
    with ReadingArchive() as running:
        yield running


async def handed_in_at(data: Path, batch_id: str) -> None:
    """Returns when the front of that folder has handed all of the batch in, and knows it."""
    records = BatchRecords(str(data))
    await eventually(lambda: records.get("", batch_id).stage is Stage.HANDED_IN)


async def test_what_was_looked_at_before_its_end_is_written_once(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who hears first that all is done goes on when another has written it out already."""
    monkeypatch.setattr(batches, "LOOK_S", 3600.0)  # whoever looks is a client
    is_late, may_go_on, written = asyncio.Event(), asyncio.Event(), list[str]()
    jobs_of, keep = Batches._jobs, NewFile.keep

    async def late(front: Batches, owner: str, token: str, batch: HttpBatch) -> Batch | None:
        jobs = await jobs_of(front, owner, token, batch)
        if jobs is not None and jobs.is_ended and not is_late.is_set():
            is_late.set()
            await may_go_on.wait()
        return jobs

    def counted(file: NewFile, file_id: str, filename: str, purpose: str, expires_s: int | None) -> object:
        written.append(purpose)
        return keep(file, file_id, filename, purpose, expires_s)

    monkeypatch.setattr(Batches, "_jobs", late)
    monkeypatch.setattr(NewFile, "keep", counted)
    async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
        batch = await opened(client, [STUCK])
        await handed_in_at(tmp_path, batch.id)
        (handed_in,) = archive.batches.values()
        handed_in.jobs["stuck"].state = pb.JOB_STATE_DONE
        first = asyncio.create_task(client.batches.retrieve(batch.id))
        await is_late.wait()
        batch = await ended(client, batch)
        may_go_on.set()
        assert (await first).status == "completed"
        assert len(await lines_of(client, batch.output_file_id)) == 1
    assert written == ["batch", "batch_output"]


@pytest.mark.parametrize("is_over", [False, True])
async def test_what_is_cancelled_in_the_archive_is_cancelled(
    archive: ReadingArchive, tmp_path: Path, is_over: bool
) -> None:
    """On the page or by the command line: it was told as completed."""
    async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
        batch = await opened(client, [STUCK, batch_line("a", asked_of(clip()))])
        await handed_in_at(tmp_path, batch.id)
        (handed_in,) = archive.batches.values()
        handed_in.cancelled = True
        if not is_over:
            async with asyncio.timeout(60):
                while batch.status != "cancelling":
                    batch = await client.batches.retrieve(batch.id)
            assert batch.cancelling_at and not batch.cancelled_at
        handed_in.jobs["stuck"].state = pb.JOB_STATE_CANCELLED
        batch = await ended(client, batch)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("cancelled", 1, 1)
        assert batch.cancelling_at and batch.cancelled_at and not batch.completed_at
        (line,) = await lines_of(client, batch.error_file_id)
        assert line["error"]["code"] == "batch_cancelled"


async def test_a_batch_whose_caller_has_left_is_run(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection closes while the record is on its way to the disk."""
    records, is_put, may_go_on, put = BatchRecords(str(tmp_path)), asyncio.Event(), threading.Event(), BatchRecords.put
    loop = asyncio.get_running_loop()

    def slow(self: BatchRecords, owner: str, batch: HttpBatch) -> None:
        put(self, owner, batch)
        loop.call_soon_threadsafe(is_put.set)
        may_go_on.wait(60)

    async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
        file = await client.files.create(file=("a.jsonl", batch_line("a", asked_of(clip())).encode()), purpose="batch")
        left = asyncio.Event()
        open_batch = Batches.open

        async def noted(front: Batches, owner: str, token: str, batch: HttpBatch) -> HttpBatch:
            try:
                return await open_batch(front, owner, token, batch)
            finally:
                left.set()

        monkeypatch.setattr(Batches, "open", noted)
        monkeypatch.setattr(BatchRecords, "put", slow)
        asked = asyncio.create_task(
            client.batches.create(input_file_id=file.id, completion_window=DAY, endpoint=CHAT_ENDPOINT)
        )
        await is_put.wait()
        asked.cancel()
        await left.wait()
        may_go_on.set()
        await eventually(lambda: archive.batches and records.list("")[0].stage is Stage.HANDED_IN)


async def test_what_its_owner_looked_at_once_goes_on_by_itself(
    archive: ReadingArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another front of the same folder than the one that it was opened at, whose time passes after that look."""
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    token, line = new_token("ann")
    (tmp_path / "tokens").write_text(line)
    given = {"data": str(tmp_path / "data"), "tokens": str(tmp_path / "tokens")}
    records = BatchRecords(str(tmp_path / "data"))
    async with front_at(archive.address, **given) as address, client_of(address, token) as client:
        batch = await opened(client, [STUCK])
        await eventually(lambda: records.get("ann", batch.id).stage is Stage.HANDED_IN)
    async with front_at(archive.address, **given) as address, client_of(address, token) as client:
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        two_days_later(monkeypatch)
        await eventually(lambda: records.get("ann", batch.id).stage is Stage.ENDED)
        assert (await client.batches.retrieve(batch.id)).status == "expired"
