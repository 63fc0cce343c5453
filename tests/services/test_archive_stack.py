"""A small archive through real services and a real queue: what becomes of every item, and what its receipt says."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.channels import open_channel
from slipstream.rpc.v1 import archive_pb2, common_pb2, target_pb2_grpc
from slipstream.stack.local import Stack
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.archive_client import ArchiveClient
from tests.support.gateway_client import caption
from tests.support.processes import logged, read_log, running
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 6, "max_new_tokens": 24}
DONE, FAILED, CANCELLED = archive_pb2.JOB_STATE_DONE, archive_pb2.JOB_STATE_FAILED, archive_pb2.JOB_STATE_CANCELLED


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def videos(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clips, one of them twice, and a file that is none."""
    folder = tmp_path_factory.mktemp("videos")
    for index, clip in enumerate(world.clips):
        (folder / f"{index}.mp4").write_bytes(clip)
    (folder / "same.mp4").write_bytes(world.clips[0])
    (folder / "hostile.mp4").write_bytes(b"\0\0\0\x20ftypisom" + b"\xff" * 5000)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def door(stack: Stack, videos: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[grpc.aio.Channel]:
    """A gateway with an archive before the shared models."""
    folder = tmp_path_factory.mktemp("archive")
    models = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    async with EmbeddedServer(folder / "redis") as redis:
        flags = (*models, "--redis", redis.url, "--video-roots", str(videos), "--draft-timeout-s", "30")
        async with running("gateway", folder, *flags) as process, open_channel(process.address) as channel:
            yield channel
        log = read_log(process.log_path)
        assert not [entry for entry in log if entry["level"] == "error"]
        assert len(logged(process.log_path, "archive.started")) == 1
        assert not any(secret in str(log) for secret in (PROMPT, str(videos), "hostile.mp4"))


async def test_every_item_has_its_end(door: grpc.aio.Channel, stack: Stack, videos: Path, world: World) -> None:
    archive = ArchiveClient(door)
    names = ["0", "1", "2", "same", "missing", "hostile"]
    items = [(name, str(videos / f"{name}.mp4")) for name in names]
    first = await archive.submit(items, key="all", **SMALL)
    assert (first.num_added, first.num_known, first.num_rejected) == (6, 0, 0)
    *_, ended = await archive.watch("all")
    assert ended.state == archive_pb2.BATCH_STATE_COMPLETED and ended.batch_id == first.batch_id
    assert (ended.counts.total, ended.counts.done, ended.counts.failed) == (6, 4, 2)

    jobs = await archive.jobs("all", page_size=4)
    assert list(jobs) == names
    assert [jobs[name].state for name in names] == [DONE] * 4 + [FAILED] * 2
    assert jobs["missing"].error_code == "NOT_FOUND" and jobs["hostile"].error_code == "INVALID_ARGUMENT"
    for name, clip in zip(names[:4], (*world.clips, world.clips[0]), strict=True):
        alone = await caption(door, clip, **SMALL)
        assert jobs[name].summary.text == alone.text and jobs[name].summary.num_tokens == len(alone.tokens)
        _check_receipt(jobs[name], clip)
    assert sorted(jobs[name].receipt.reused for name in ("0", "same")) == [False, True]
    assert any(jobs[name].summary.speculation.kept_digest for name in names[:4])
    assert ended.totals.tokens == sum(jobs[name].summary.num_tokens for name in names[:3]) and ended.totals.reused == 1
    assert ended.totals.video_s == pytest.approx(9.0) and ended.totals.plain_generate_s > 0
    async with open_channel(stack.processes["target"].address) as channel:
        target = await target_pb2_grpc.TargetStub(channel).GetModel(common_pb2.GetModelRequest())
    assert target.revision and jobs["0"].receipt.target.revision == target.revision

    again = await archive.submit(items, key="all", **SMALL)
    assert (again.batch_id, again.num_added, again.num_known) == (first.batch_id, 0, 6)
    assert (await archive.get("all")).counts == ended.counts

    (videos / "missing.mp4").write_bytes(world.clips[1])
    retried = await archive.stub.RetryDead(archive_pb2.RetryDeadRequest(batch="all", include_failed=True))
    assert retried.num_retried == 2
    *_, ended = await archive.watch("all")
    assert (ended.counts.done, ended.counts.failed) == (5, 1)
    jobs = await archive.jobs("all")
    assert jobs["missing"].summary.text == jobs["1"].summary.text and jobs["missing"].receipt.reused


async def test_a_cancelled_batch_keeps_what_it_has(door: grpc.aio.Channel, videos: Path) -> None:
    archive = ArchiveClient(door)
    path = str(videos / "0.mp4")
    options = {"num_frames": 6, "max_new_tokens": 1500, "method": "autoregressive"}
    items = [
        archive_pb2.BatchItem(custom_id=str(seed), source=path, caption={"prompt": f"{PROMPT} {seed}"})
        for seed in range(12)
    ]
    submitted = await archive.submit(items, **options)
    async for batch in archive.stub.WatchBatch(archive_pb2.WatchBatchRequest(batch=submitted.batch_id)):
        if batch.counts.running:
            break
    await archive.stub.CancelBatch(archive_pb2.CancelBatchRequest(batch=submitted.batch_id))
    *_, ended = await archive.watch(submitted.batch_id)
    assert ended.state == archive_pb2.BATCH_STATE_CANCELLED
    assert ended.counts.cancelled and ended.counts.cancelled + ended.counts.done == 12
    assert len(await archive.jobs(submitted.batch_id, states=[CANCELLED])) == ended.counts.cancelled


async def test_without_a_queue_there_is_no_archive(gateway: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ArchiveClient(gateway).get("any")
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "start it with --redis" in (refused.value.details() or "")


def _check_receipt(job: archive_pb2.Job, clip: bytes) -> None:
    receipt, summary = job.receipt, job.summary
    assert (receipt.video_sha256, receipt.video_bytes) == (hashlib.sha256(clip).hexdigest(), len(clip))
    assert receipt.text_sha256 == hashlib.sha256(summary.text.encode()).hexdigest()
    assert receipt.runs >= 1 and receipt.slipstream_version and receipt.target.dtype == "float32"
    options = receipt.options
    assert (options.prompt, options.num_frames, options.method) == (PROMPT, 6, "slipstream")
    assert not options.path and not options.request_id
    assert len(summary.video.timestamps_s) == 6
    if summary.speculation.kept_digest:
        assert receipt.draft.revision and receipt.draft.revision != receipt.target.revision
