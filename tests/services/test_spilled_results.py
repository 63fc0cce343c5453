"""Results in a bucket, behind real gateways: one is killed when its file is written and not yet known of."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from slipstream.archive.messages import BatchItem, Job, JobPart
from slipstream.archive.queue import BatchState, JobState
from slipstream.client.batch_handles import AsyncArchive, AsyncBatchHandle
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.worlds import until
from tests.support.archive_client import archive_at
from tests.support.object_store import ObjectServer, object_server
from tests.support.processes import failed_start, logged, running
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 4, "max_new_tokens": 8}
NEVER, NOW = ("--result-file-age-s", "86400"), ("--result-file-age-s", "0")


@pytest_asyncio.fixture(loop_scope="session")
async def bucket() -> AsyncIterator[ObjectServer]:
    async with object_server() as served:
        yield served


@pytest.fixture
def videos(world: World, tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for index, clip in enumerate(world.clips):
        (folder / f"{index}.mp4").write_bytes(clip)
    return folder


async def all_of(batch: AsyncBatchHandle) -> tuple[dict[str, Job], list[JobPart]]:
    """Its jobs, and the segments of the film among them."""
    jobs = {job.custom_id: job async for job in batch.jobs()}
    return jobs, [part async for part in batch.parts(jobs["film"])]


@pytest.mark.long
async def test_a_gateway_killed_at_a_file_harms_nothing(
    stack: Stack, videos: Path, tmp_path: Path, bucket: ObjectServer
) -> None:
    items = [BatchItem(name, str(videos / f"{name}.mp4")) for name in ("0", "1", "2", "missing")]
    items.append(BatchItem("film", str(videos / "0.mp4"), {"segments": "fixed:1s"}))
    models = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    async with EmbeddedServer(tmp_path / "redis") as redis, Redis.from_url(redis.url) as store:
        flags = (*models, "--redis", redis.url, "--video-roots", str(videos), "--results-to", "s3://films/a")
        async with (
            running("gateway", tmp_path / "one", *flags, *NEVER, **bucket.environment) as gateway,
            open_channel(gateway.address) as channel,
        ):
            batch = await archive_at(channel).submit(items, key="all", **SMALL)
            ended = await batch.wait()
            before = await all_of(batch)
        assert [job.state for job in before[0].values()] == [JobState.DONE] * 3 + [JobState.FAILED, JobState.DONE]
        assert len(before[1]) > 1

        bucket.keeps_back = b".jsonl.gz"
        async with running("gateway", tmp_path / "two", *flags, *NOW, **bucket.environment) as gateway:
            await bucket.kept_back.wait()
            gateway.kill()
            await gateway.wait_exit()
        key = f"{{slipstream}}:b:{ended.batch_id}"
        assert await store.hget(key, "plan") == b"0 4" and await store.llen(f"{key}:files") == 0
        await store.delete("{slipstream}:compactor")  # as its lease would end

        async with running("gateway", tmp_path / "three", *flags, *NOW, **bucket.environment) as gateway:

            async def is_written() -> bool:
                return bool(await store.llen(f"{key}:files")) and not await store.exists(f"{key}:ended")

            await until(is_written)
            assert await store.llen(f"{key}:files") == 1 and len(await store.keys("{slipstream}:j:*")) == 1
            async with open_channel(gateway.address) as channel:
                batch = archive_at(channel).batch("all")
                assert await all_of(batch) == before
                assert [job.custom_id async for job in batch.results()] == list(before[0])
                again = await archive_at(channel).submit(items, key="all", **SMALL)
                assert again.submitted is not None and again.submitted.num_known == 5
                await _nothing_is_made_again(archive_at(channel), items[:3], before[0])
                (videos / "missing.mp4").write_bytes((videos / "1.mp4").read_bytes())
                assert await batch.retry(include_failed=True) == 1
                assert (await batch.wait()).state is BatchState.COMPLETED
                jobs, _ = await all_of(batch)
                assert jobs["missing"].caption is not None and list(jobs) == list(before[0])
            assert len(logged(gateway.log_path, "results.written")) >= 1
            assert not [entry for entry in logged(gateway.log_path, "results.not_written")]


async def _nothing_is_made_again(archive: AsyncArchive, items: list[BatchItem], before: dict[str, Job]) -> None:
    """The same files in another batch have the results that lie in files, which another gateway made."""
    batch = await archive.submit(items, key="the same again", **SMALL)
    assert (await batch.wait()).totals.reused == len(items)
    async for job in batch.jobs():
        earlier = before[job.custom_id]
        assert job.receipt is not None and job.receipt.reused and job.caption is not None
        assert earlier.caption is not None and job.caption.text == earlier.caption.text


async def test_a_folder_that_cannot_be_used_is_a_start_up_error(stack: Stack, tmp_path: Path) -> None:
    flags = ("--target", stack.processes["target"].address, "--redis", "redis://localhost:1")
    (tmp_path / "slipstream-results.json").write_text("another program's")
    status, log = await failed_start("gateway", tmp_path / "run", *flags, "--results-to", f"file://{tmp_path}")
    assert status == 2 and "another folder" in str(log)
