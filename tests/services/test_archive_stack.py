"""A small archive through real services and a real queue: what becomes of every item, and what its receipt says."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from statistics import fmean
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.archive.messages import BatchItem, Job, Receipt, Submitted
from slipstream.archive.queue import BatchState, JobState
from slipstream.client import archive_client
from slipstream.client.batch_handles import AsyncBatchHandle
from slipstream.errors import InvalidConfig
from slipstream.messages import Caption
from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import common_pb2, target_pb2_grpc
from slipstream.stack.local import Stack
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.archive_client import WireClient, archive_at, jobs_of
from tests.support.gateway_client import caption
from tests.support.processes import logged, read_log, running
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 6, "max_new_tokens": 24}


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


async def test_every_item_has_its_end(
    door: grpc.aio.Channel, stack: Stack, videos: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_client, "PAGE_JOBS", 4)
    archive = archive_at(door)
    names = ["0", "1", "2", "same", "missing", "hostile"]
    items = [BatchItem(name, str(videos / f"{name}.mp4")) for name in names]
    batch = await archive.submit(items, key="all", **SMALL)
    first = _submitted(batch)
    assert (first.num_added, first.num_known, first.num_rejected) == (6, 0, 0)
    ended = await batch.wait()
    assert ended.state is BatchState.COMPLETED and ended.batch_id == first.batch_id
    assert (ended.counts.total, ended.counts.done, ended.counts.failed) == (6, 4, 2)

    jobs = await jobs_of(archive.batch("all"))
    assert list(jobs) == names
    assert [jobs[name].state for name in names] == [JobState.DONE] * 4 + [JobState.FAILED] * 2
    assert jobs["missing"].error_code == "NOT_FOUND" and jobs["hostile"].error_code == "INVALID_ARGUMENT"
    captions = {name: _caption(jobs[name]) for name in names[:4]}
    for name, clip in zip(captions, (*world.clips, world.clips[0]), strict=True):
        alone = await caption(door, clip, logprobs=True, **SMALL)
        assert captions[name].text == alone.text and captions[name].num_tokens == len(alone.tokens)
        told = [token.logprob for token in alone.tokens if token.logprob is not None]
        assert captions[name].avg_logprob == pytest.approx(fmean(told), abs=1e-4)
        assert alone.summary.avg_logprob == pytest.approx(fmean(told))
        _check_receipt(jobs[name], clip)
    assert sorted(_receipt(jobs[name]).reused for name in ("0", "same")) == [False, True]
    assert any(made.speculation.kept_digest for made in captions.values())
    assert ended.totals.tokens == sum(captions[name].num_tokens for name in names[:3]) and ended.totals.reused == 1
    assert ended.totals.video_s == pytest.approx(9.0) and ended.totals.plain_generate_s > 0
    async with open_channel(stack.processes["target"].address) as channel:
        target = await target_pb2_grpc.TargetStub(channel).GetModel(common_pb2.GetModelRequest())
    assert target.revision and _receipt(jobs["0"]).target.revision == target.revision

    again = _submitted(await archive.submit(items, key="all", **SMALL))
    assert (again.batch_id, again.num_added, again.num_known) == (first.batch_id, 0, 6)
    assert (await batch.status()).counts == ended.counts

    (videos / "missing.mp4").write_bytes(world.clips[1])
    assert await batch.retry(include_failed=True) == 2
    ended = await batch.wait()
    assert (ended.counts.done, ended.counts.failed) == (5, 1)
    jobs = await jobs_of(batch)
    assert _caption(jobs["missing"]).text == captions["1"].text and _receipt(jobs["missing"]).reused


async def test_a_cancelled_batch_keeps_what_it_has(door: grpc.aio.Channel, videos: Path) -> None:
    path = str(videos / "0.mp4")
    items = [BatchItem(str(seed), path, {"prompt": f"{PROMPT} {seed}"}) for seed in range(60)]
    archive = archive_at(door)
    batch = await archive.submit(items, num_frames=6, max_new_tokens=1500, method="autoregressive")
    async with aclosing(batch.watch()) as snapshots:
        async for snapshot in snapshots:
            if snapshot.counts.running:
                break
    await batch.cancel()
    ended = await batch.wait()
    assert ended.state is BatchState.CANCELLED
    assert ended.counts.cancelled and ended.counts.cancelled + ended.counts.done == 60
    assert len(await jobs_of(batch, [JobState.CANCELLED])) == ended.counts.cancelled


async def test_without_a_queue_there_is_no_archive(gateway: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await WireClient(gateway).get("any")
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "start it with --redis" in (refused.value.details() or "")
    with pytest.raises(InvalidConfig, match="start it with --redis"):
        await archive_at(gateway).batches()


def _submitted(batch: AsyncBatchHandle) -> Submitted:
    assert batch.submitted is not None
    return batch.submitted


def _caption(job: Job) -> Caption:
    assert job.caption is not None
    return job.caption


def _receipt(job: Job) -> Receipt:
    assert job.receipt is not None
    return job.receipt


def _check_receipt(job: Job, clip: bytes) -> None:
    receipt, made = _receipt(job), _caption(job)
    assert (receipt.video_sha256, receipt.video_bytes) == (hashlib.sha256(clip).hexdigest(), len(clip))
    assert receipt.text_sha256 == hashlib.sha256(made.text.encode()).hexdigest()
    assert receipt.runs >= 1 and receipt.slipstream_version and receipt.target.dtype == "float32"
    options = receipt.options
    assert (options["prompt"], options["num_frames"], options["method"]) == (PROMPT, 6, "slipstream")
    assert "path" not in options and "request_id" not in options
    assert len(made.video.timestamps_s) == 6
    if made.speculation.kept_digest:
        assert receipt.draft is not None
        assert receipt.draft.revision and receipt.draft.revision != receipt.target.revision
