"""What the page is told of the archive: batches, jobs, errors by message, and only the caller's own."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from slipstream.archive.messages import BatchItem, BatchOptions, JobPart
from slipstream.archive.quality import LEAST_RESULTS, UNKNOWN_BATCH
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.connection import GatewayAddress
from slipstream.messages import Segment
from slipstream.rpc.security import new_token
from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.services.front.archive_calls import shown_part
from slipstream.services.front.batch_records import HttpBatch
from slipstream.services.front.norms import KnownNorms
from tests.cli.fake_archive import Context, FakeArchive
from tests.cli.fake_gateway import FakeGateway
from tests.front.conftest import Served
from tests.support.front import error_of, front_at, post, raw, status_of

NAMES = ("good", "bad", "dead", "good-2", "bad-2", "stuck")
HTTP_KEY = HttpBatch(f"batch_{'a' * 32}", "", "", 0, 0).key
ITEMS = [BatchItem(custom_id=f"<b>{name}", source=f"/v/{name.partition('-')[0]}.mp4") for name in NAMES]


class HeardArchive(FakeArchive):
    """Remembers who asked."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: list[Any] = []

    async def ListBatches(self, request: pb.ListBatchesRequest, context: Context) -> pb.ListBatchesResponse:
        self.callers.append(dict(context.invocation_metadata() or ()).get("authorization"))
        return await super().ListBatches(request, context)


@pytest.fixture
def archive() -> Iterator[HeardArchive]:
    with HeardArchive() as running:
        yield running


async def submit(archive: FakeArchive, items: Sequence[BatchItem] = ITEMS, key: str = "films") -> str:
    async with GatewayAddress(archive.address).open() as connection:
        return (await ArchiveClient(connection).submit(BatchOptions(key), items)).batch_id


async def get(address: str, path: str, more: str = "") -> Any:
    answer = await raw(address, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}\r\n".encode())
    return status_of(answer), json.loads(answer.partition(b"\r\n\r\n")[2])


async def test_batches_and_their_jobs(archive: HeardArchive) -> None:
    batch_id = await submit(archive)
    async with front_at(archive.address) as address:
        _, listed = await get(address, "/archive/batches")
        (batch,) = listed["batches"]
        assert batch["key"] == "films" and batch["counts"]["total"] == len(ITEMS) and not batch["is_ended"]
        assert (await get(address, f"/archive/batches/{batch_id}"))[1] == batch
        jobs, page = [], ""
        while page is not None:
            _, told = await get(address, f"/archive/batches/{batch_id}/jobs?page={page}")
            jobs += told["jobs"]
            page = told["next_page"]
        assert [job["custom_id"] for job in jobs] == [item.custom_id for item in ITEMS]
        done = jobs[0]
        assert done["state"] == "done" and done["text"] and done["figures"]["slipstream"]["passes"] > 0
        assert " ".join(cue["text"] for cue in done["cues"]) == done["text"] and done["cues"][-1]["end_ms"] == 10_000
        _, told = await get(address, f"/archive/batches/{batch_id}/jobs?states=dead,failed")
        assert all(job["state"] in ("dead", "failed") for job in told["jobs"])


async def test_texts_have_marks(archive: HeardArchive) -> None:
    """Those that a text has by itself, those that it has beside its batch, and none where it is another video's."""
    names = [f"good-{number}" for number in range(LEAST_RESULTS + 4)]
    batch_id = await submit(archive, [BatchItem(name, "/v/good.mp4") for name in names])
    jobs = archive.batches["films"].jobs
    for job in jobs.values():
        job.summary.speculation.judged, job.summary.speculation.accepted = 100, 80
    jobs["good-0"].summary.text = "a b c d " * 12
    jobs["good-1"].summary.speculation.accepted = 20
    jobs["good-2"].summary.ClearField("text")
    jobs["good-2"].summary.skipped = "black"
    jobs["good-2"].summary.video.marks.append("black")
    jobs["good-3"].summary.shared.job_id = "job-9"
    told, page = dict[str, Any](), ""
    async with front_at(archive.address) as address:
        while page is not None:
            _, found = await get(address, f"/archive/batches/{batch_id}/jobs?page={page}")
            told |= {job["custom_id"]: job for job in found["jobs"]}
            page = found["next_page"]
    marked = {name: job["quality"] for name, job in told.items() if job["quality"]}
    assert marked == {"good-0": ["looped"], "good-1": ["acceptance"]}
    assert told["good-2"]["skipped"] == "black" and told["good-2"]["marks"] == ["black"]
    assert told["good-3"]["shared"]["job_id"] == "job-9" and told["good-4"]["shared"] is None


async def test_pages_and_segments_are_told(archive: HeardArchive) -> None:
    batch_id = await submit(archive, [BatchItem("scan", "/v/scan.pdf")])
    async with front_at(archive.address) as address:
        told, page = [], ""
        while page is not None:
            _, found = await get(address, f"/archive/batches/{batch_id}/jobs/job-0/parts?page={page}")
            told += found["parts"]
            page = found["next_page"]
    assert [(part["page"], part["quality"], part["error"]) for part in told] == [(n, ["short"], "") for n in (1, 2, 3)]
    assert told[0]["text"].startswith("Page 1") and told[0]["segment"] is None
    error, segment = JobPart(1, error="damaged"), JobPart(2, segment=Segment(2, 4.0, 6.0, "no frame"))
    assert shown_part(error, UNKNOWN_BATCH) == {"number": 1, "page": 0, "error": "damaged", "segment": None}
    assert (
        shown_part(segment, UNKNOWN_BATCH)["error"] == "no frame"
        and shown_part(segment, UNKNOWN_BATCH)["segment"]["end_s"] == 6
    )


async def test_what_is_usual_is_asked_once_in_a_while(archive: HeardArchive) -> None:
    """And anew for another owner, as each has batches of its own."""
    batch_id = await submit(archive)
    norms = KnownNorms()
    async with GatewayAddress(archive.address).open() as connection:
        client = ArchiveClient(connection)
        for owner in ("ann", "ann", "bob", "ann"):
            before = len(archive.page_states)
            assert await norms.of(client, owner, batch_id) == UNKNOWN_BATCH
            assert (len(archive.page_states) > before) is (owner == "bob" or before == 0)


async def test_errors_are_told_by_message(archive: HeardArchive) -> None:
    batch_id = await submit(archive)
    async with front_at(archive.address) as address:
        _, told = await get(address, f"/archive/batches/{batch_id}/errors")
    assert [(group["state"], group["count"]) for group in told["errors"]] == [("failed", 2), ("dead", 1)]
    assert told["errors"][0]["such_as"] == ["<b>bad", "<b>bad-2"] and told["is_whole"]


async def test_a_batch_is_cancelled_and_retried(archive: HeardArchive) -> None:
    batch_id = await submit(archive)
    async with front_at(archive.address) as address:
        answer = await raw(address, post(f"/archive/batches/{batch_id}/retry?failed=true", b""))
        assert status_of(answer) == 200 and json.loads(answer.partition(b"\r\n\r\n")[2])["retried"] > 0
        answer = await raw(address, post(f"/archive/batches/{batch_id}/cancel", b""))
        assert status_of(answer) == 200 and archive.batches["films"].cancelled


@pytest.mark.parametrize("key", ["films/1998", "/", "a/jobs", "%2F", "100%", "..", "x?y#z", "ü €", "a+b"])
async def test_a_batch_is_found_by_whatever_key_it_has(archive: HeardArchive, key: str) -> None:
    batch_id = await submit(archive, key=key)
    async with front_at(archive.address) as address:
        for path in ("", "/jobs", "/errors"):
            status, told = await get(address, f"/archive/batches/{quote(key, safe='')}{path}")
            assert status == 200 and (path or told["batch_id"] == batch_id)
        answer = await raw(address, post(f"/archive/batches/{quote(key, safe='')}/cancel", b""))
        assert status_of(answer) == 200 and archive.batches[key].cancelled
        assert (await get(address, "/archive/batche%73"))[0] == 200
        assert (await get(address, "/archive%2Fbatches"))[0] == 404


@pytest.mark.parametrize(
    ("key", "names", "may_retry"),
    [("films", "bad", True), (HTTP_KEY, "bad", False), (f"{HTTP_KEY}0", "bad", True), (HTTP_KEY, "bad stuck", True)],
)
async def test_of_an_http_batch_that_has_ended_nothing_runs_again(
    archive: HeardArchive, key: str, names: str, may_retry: bool
) -> None:
    """Its files are written, and would not have it."""
    batch_id = await submit(archive, [BatchItem(name, f"/v/{name}.mp4") for name in names.split()], key)
    async with front_at(archive.address) as address:
        _, told = await get(address, f"/archive/batches/{batch_id}")
        answer = await raw(address, post(f"/archive/batches/{batch_id}/retry?failed=true", b""))
    assert told["may_retry"] is may_retry and status_of(answer) == (200 if may_retry else 409)
    assert may_retry or error_of(answer)["code"] == "batch_ended"


async def test_what_is_asked_wrongly_is_named(archive: HeardArchive) -> None:
    batch_id = await submit(archive)
    async with front_at(archive.address) as address:
        for path, status, param in (
            (f"/archive/batches/{batch_id}/jobs?states=lost", 400, "states"),
            (f"/archive/batches/{batch_id}/jobs?magic=1", 400, "magic"),
            ("/archive/batches/batch-none", 404, None),
            ("/archive/batches/batch-none/errors", 404, None),
        ):
            told_status, told = await get(address, path)
            assert (told_status, told["error"]["param"]) == (status, param), path
        answer = await raw(address, post(f"/archive/batches/{batch_id}/retry?failed=perhaps", b""))
        assert status_of(answer) == 400 and error_of(answer)["param"] == "failed"


async def test_who_asks_is_sent_on(archive: HeardArchive, tmp_path: Path) -> None:
    pairs = [new_token(owner) for owner in ("ann", "bob")]
    path = tmp_path / "tokens"
    path.write_text("\n".join(line for _, line in pairs))
    async with front_at(archive.address, tokens=str(path)) as address:
        assert (await get(address, "/archive/batches"))[0] == 401
        for token, _ in pairs:
            await get(address, "/archive/batches", f"Authorization: Bearer {token}\r\n")
    assert archive.callers == [f"Bearer {token}" for token, _ in pairs]


@pytest.mark.asyncio(loop_scope="session")
async def test_each_gateway_tells_how_it_stands(served: Served, gateway: FakeGateway) -> None:
    """One with a worker at rest, one that runs no archive, and one that is away."""
    async with front_at(f"{served.stack.gateway_address},{gateway.address},127.0.0.1:9") as address:
        status, told = await get(address, "/archive/gateways")
    assert status == 200
    real, plain, away = told["gateways"]
    worker = real["archive"]
    assert worker["takes_writes"] and worker["worker"] and worker["jobs"] <= worker["max_jobs"] > 0
    assert worker["lease_age_s"] < worker["lease_s"] and real["has_draft"]
    assert set(real["gates"]) == {"open", "closed"}
    assert plain["answers"] and plain["archive"] is None and away == {"answers": False}


async def test_who_is_no_caller_is_not_told_how_gateways_stand(gateway: FakeGateway, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch()
    async with front_at(gateway.address, tokens=str(path)) as address:
        assert (await get(address, "/archive/gateways"))[0] == 401


async def test_without_an_archive_it_is_told(gateway: FakeGateway) -> None:
    async with front_at(gateway.address) as address:
        status, told = await get(address, "/archive/batches")
    assert status >= 400 and told["error"]["message"]
