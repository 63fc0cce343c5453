"""A script that fails midway leaves jobs, leases and sums that agree."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.archive.queue import DamagedRecord, JobQueue, JobState, Lease, QueueUnavailable
from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.worlds import DONE, World, fill, redis_world

GIVING_UP: dict[str, Callable[[JobQueue, Lease], Awaitable[bool]]] = {
    "finish": lambda queue, lease: queue.finish(lease, DONE),
    "retry": lambda queue, lease: queue.retry(lease, "why", 0.0),
    "crash": lambda queue, lease: queue.crash(lease, "why"),
}


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[World]:
    async with EmbeddedServer(tmp_path / "data") as server:
        world = redis_world(server.url)
        yield world
        await world.queue.close()
        assert world.redis is not None
        await world.redis.aclose()


async def test_beside_a_commit_that_fails_the_others_count_once(own: World) -> None:
    redis: Any = own.redis
    await fill(own, "a", "b", "c")
    leases = await own.queue.take("w", 3)
    parts_of_b = f"{own.prefix}m:{leases[1].job_id}"
    await redis.set(parts_of_b, "nothing of the kind")
    said = await asyncio.gather(*(own.queue.finish(lease, DONE) for lease in leases), return_exceptions=True)
    assert said[0] is said[2] is True and isinstance(said[1], DamagedRecord)
    batch = await own.queue.get_batch("batch")
    assert (batch.counts[JobState.DONE], batch.counts[JobState.RUNNING], batch.ended_s) == (2, 1, 0.0)
    await redis.delete(parts_of_b)
    assert await own.queue.finish(leases[1], DONE)
    batch = await own.queue.get_batch("batch")
    assert (batch.counts[JobState.DONE], batch.counts[JobState.RUNNING]) == (3, 0) and batch.ended_s


async def test_beside_a_sum_that_is_damaged_the_others_are_written(own: World) -> None:
    redis: Any = own.redis
    await fill(own, "a")
    (lease,) = await own.queue.take("w", 1)
    await redis.hset(f"{own.prefix}b:batch", "n:done", "much")
    with pytest.raises(DamagedRecord):
        await own.queue.finish(lease, DONE)
    await redis.hset(f"{own.prefix}b:batch", "n:done", 1)
    assert await own.queue.finish(lease, DONE), "it was done"
    assert (await own.queue.get_batch("batch")).counts[JobState.RUNNING] == 0
    assert (await own.queue.depth()).running == 0


@pytest.mark.parametrize("call", GIVING_UP)
async def test_a_full_store_takes_no_lease_away(own: World, call: str) -> None:
    redis: Any = own.redis
    await fill(own, "a")
    (lease,) = await own.queue.take("w", 1)
    await redis.config_set("maxmemory", 1000)
    with pytest.raises(QueueUnavailable):
        await GIVING_UP[call](own.queue, lease)
    await redis.config_set("maxmemory", 0)
    await own.lose(lease)
    (again,) = await own.queue.take("other", 1)
    assert (again.job_id, again.epoch) == (lease.job_id, 2)
