"""What is damaged in a real server is told and harms nothing else."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from slipstream.archive.queue import (
    BatchSpec,
    BeatAnswer,
    DamagedRecord,
    JobState,
    QueuePolicy,
    QueueUnavailable,
    UnknownBatch,
)
from slipstream.archive.redis_queue import RedisQueue
from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.worlds import DONE, World, queue_at, redis_world, specs


@pytest.fixture
async def damaged(redis_url: str) -> AsyncIterator[World]:
    world = redis_world(redis_url)
    await world.queue.open_batch(BatchSpec("batch"))
    await world.queue.submit("batch", specs("a", "b"))
    yield world
    assert world.redis is not None
    await world.redis.aclose()
    await world.queue.close()


async def damage(world: World, custom_id: str, field: str) -> None:
    redis: Any = world.redis
    key = f"{world.prefix}j:{(await world.jobs())[custom_id].job_id}"
    await redis.hset(key, field, b"\xff\xfe" + (await redis.hget(key, field))[2:])


async def test_a_damaged_payload_is_never_run(damaged: World) -> None:
    await damage(damaged, "a", "payload")
    (lease,) = await damaged.queue.take("w", 5)
    assert lease.custom_id == "b"
    job = (await damaged.jobs())["a"]
    assert (job.state, job.error_code) == (JobState.DEAD, "DATA_LOSS")
    assert "payload was damaged" in job.error


async def test_a_store_that_goes_away_before_a_damaged_job_is_buried_keeps_its_neighbours(
    damaged: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are leased, and whoever asked would not hear of them again before their leases expire."""
    await damage(damaged, "a", "payload")
    run = RedisQueue._run

    async def away_for_retries(queue: RedisQueue, script: str, *args: str | int | bytes) -> Any:
        if script == "retry":
            raise QueueUnavailable("the queue's Redis is not reachable")
        return await run(queue, script, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RedisQueue, "_run", away_for_retries)
        (lease,) = await damaged.queue.take("w", 5)
    assert lease.custom_id == "b"
    await damaged.elapse(damaged.queue.policy.lease_s + 1)
    assert await damaged.queue.beat([lease], {}) == [BeatAnswer.KEEP]
    assert await damaged.queue.take("v", 5) == []
    assert (await damaged.jobs())["a"].state is JobState.DEAD


async def test_a_damaged_result_is_told_and_never_reused(damaged: World) -> None:
    for lease in await damaged.queue.take("w", 5):
        await damaged.queue.finish(lease, replace(DONE, content_key=lease.custom_id))
    await damage(damaged, "a", "result")
    job = (await damaged.jobs())["a"]
    assert (job.state, job.result, job.error_code) == (JobState.DONE, "", "DATA_LOSS")
    assert await damaged.queue.find_result("a") is None
    assert await damaged.queue.find_result("b") == DONE.result


async def test_what_is_damaged_is_an_error_of_ours(redis_url: str) -> None:
    """A key of the wrong type fails calls, and mending it mends them."""
    world = redis_world(redis_url)
    assert world.redis is not None
    queue = world.queue
    try:
        await queue.open_batch(BatchSpec("batch"))
        await queue.submit("batch", specs("a"))
        await world.redis.set(f"{world.prefix}delayed", "x")
        for call in (queue.take("w", 1), queue.depth()):
            with pytest.raises(DamagedRecord, match="WRONGTYPE"):
                await call
        await world.redis.delete(f"{world.prefix}delayed")
        await world.redis.zadd(f"{world.prefix}delayed", {"ghost": 1})
        assert len(await queue.take("w", 1)) == 1
        await world.redis.hset(f"{world.prefix}b:batch", "created", "yesterday")
        with pytest.raises(DamagedRecord, match="the batch batch is damaged"):
            await queue.get_batch("batch")
    finally:
        await queue.close()
        await world.redis.aclose()


@pytest.mark.parametrize("damage", ["a field", "the type"])
async def test_a_damaged_batch_hides_no_other(damaged: World, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    redis: Any = damaged.redis
    await damaged.queue.open_batch(BatchSpec("sound"))
    if damage == "a field":
        await redis.hset(f"{damaged.prefix}b:batch", "created", "yesterday")
    else:
        await redis.set(f"{damaged.prefix}b:batch", "nothing of the kind")
    for _ in range(3):
        assert [batch.batch_id for batch in await damaged.queue.list_batches("")] == ["sound"]
    assert capsys.readouterr().out.count("batch.damaged") == 1
    with pytest.raises(DamagedRecord):
        await damaged.queue.get_batch("batch")


@pytest.mark.parametrize("damage", ["counts", "jobs", "a job", "parts"])
async def test_a_damaged_batch_keeps_no_other_past_its_retention(server: EmbeddedServer, damage: str) -> None:
    policy = QueuePolicy(retention_s=0.001)
    async with queue_at(server.url, policy) as queue, Redis.from_url(server.url) as redis:
        for batch_id in ("damaged", "sound"):
            await queue.open_batch(BatchSpec(batch_id, owner="me"))
            await queue.submit(batch_id, specs("a"))
            (lease,) = await queue.take("w", 1)
            assert await queue.open_parts(lease, "key", 1) and await queue.put_part(lease, 0, b"x", {})
            await queue.finish(lease, DONE)
        (job,), _ = await queue.list_jobs("damaged")
        fields = {"counts": ("b:damaged", "n:done"), "parts": (f"m:{job.job_id}", "total")}
        keys = {"jobs": "b:damaged:jobs", "a job": f"j:{job.job_id}"}
        if damage in fields:
            key, field = fields[damage]
            await redis.hset(f"{{slipstream}}:{key}", field, "much")  # type: ignore[misc]
        else:
            await redis.set(f"{{slipstream}}:{keys[damage]}", "nothing of the kind")
        await eventually_swept(queue)
        with pytest.raises(UnknownBatch):
            await queue.get_batch("sound")


async def test_of_a_batch_whose_record_is_gone_nothing_stays(server: EmbeddedServer) -> None:
    async with queue_at(server.url, QueuePolicy(retention_s=0.001)) as queue, Redis.from_url(server.url) as redis:
        await queue.open_batch(BatchSpec("batch"))
        await queue.submit("batch", specs("a"))
        await queue.cancel_batch("batch")
        await redis.delete("{slipstream}:b:batch")
        await eventually_swept(queue)
        assert not [key async for key in redis.scan_iter("*b:batch*")]


async def eventually_swept(queue: RedisQueue) -> None:
    """Until one job was deleted."""
    async with asyncio.timeout(30):
        while not await queue.sweep():  # noqa: ASYNC110  # the clock is the server's
            await asyncio.sleep(0.002)
