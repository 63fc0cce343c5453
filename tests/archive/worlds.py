"""Both queues behind one handle, with time that passes when a test says so."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from slipstream.archive.queue import (
    BatchSpec,
    JobQueue,
    JobRecord,
    JobSpec,
    JobState,
    Lease,
    Outcome,
    QueuePolicy,
    QueueUnavailable,
)
from slipstream.archive.redis_queue import RedisQueue
from tests.support.memory_queue import MemoryQueue

POLICY = QueuePolicy(lease_s=60.0, max_attempts=3, max_crashes=3, max_backlog=1000, retention_s=1000.0)
"""Long leases: none expires unless a test lets time pass."""
DONE = Outcome(JobState.DONE, result='{"text": "a cat"}')

_names = map("queue-{}".format, itertools.count())


@dataclass
class World:
    """A queue that is empty at first."""

    queue: JobQueue
    elapse: Callable[[float], Awaitable[None]]
    """Lets so many seconds pass, in which some other worker was heard of."""
    redis: "Redis | None" = None
    prefix: str = ""

    async def jobs(self, batch_id: str = "batch") -> dict[str, JobRecord]:
        """By custom id."""
        return {job.custom_id: job for job in (await self.queue.list_jobs(batch_id, limit=1000))[0]}

    async def lose(self, lease: Lease) -> None:
        """Its worker is silent for longer than a lease; every other one beats."""
        await self.elapse(self.queue.policy.lease_s + 1)
        running = await self._running()
        await self.queue.beat([_token_of(name, job) for name, job in running.items() if job.worker != lease.worker], {})

    async def _running(self) -> Mapping[str, JobRecord]:
        found = {}
        for batch in await self.queue.list_batches():
            jobs, _ = await self.queue.list_jobs(batch.batch_id, frozenset({JobState.RUNNING}), limit=1000)
            found |= {job.job_id: job for job in jobs}
        return found


def _token_of(name: str, job: JobRecord) -> Lease:
    return Lease(name, job.batch_id, job.custom_id, job.worker, job.epoch, "", "", 0, 0, False, "")


def memory_world(policy: QueuePolicy = POLICY) -> World:
    now = [1_000_000.0]

    async def elapse(seconds: float) -> None:
        now[0] += seconds

    return World(MemoryQueue(policy, lambda: now[0]), elapse)


def redis_world(url: str, policy: QueuePolicy = POLICY, scripts: Mapping[str, str] | None = None) -> World:
    name = next(_names)
    redis: Any = Redis.from_url(url)

    async def elapse(seconds: float) -> None:
        await age(redis, f"{{{name}}}:", seconds)

    return World(RedisQueue(url, name, policy, scripts=scripts), elapse, redis, f"{{{name}}}:")


async def age(redis: Any, prefix: str, seconds: float) -> None:
    """Makes everything in the store that has a time so much older, but for the last sign of life of the workers."""
    milliseconds = round(seconds * 1000)
    for key in await redis.keys(f"{prefix}s:*"):
        for entry in await redis.xpending_range(key, "workers", "-", "+", 10_000):
            idle = entry["time_since_delivered"] + milliseconds
            await redis.xclaim(key, "workers", "any", 0, [entry["message_id"]], idle=idle, justid=True)
    for key in ("delayed", "expiry"):
        for member, _ in await redis.zrange(prefix + key, 0, -1, withscores=True):
            await redis.zincrby(prefix + key, -milliseconds, member)
    for key in await redis.keys(f"{prefix}[aw]:*"):
        await _shorten(redis, key, milliseconds)
    await _shorten(redis, f"{prefix}suspect", milliseconds)
    await redis.hdel(f"{prefix}clock", "amnesty")
    now_s, now_us = await redis.time()
    await redis.hset(f"{prefix}clock", "heard", now_s * 1000 + now_us // 1000)


async def _shorten(redis: Any, key: str | bytes, milliseconds: int) -> None:
    left = await redis.pttl(key)
    if left > 0:
        await redis.pexpire(key, max(1, left - milliseconds)) if left > milliseconds else await redis.delete(key)


def specs(*custom_ids: str, **fields: Any) -> list[JobSpec]:
    return [JobSpec(custom_id, f'{{"source": "{custom_id}"}}', **fields) for custom_id in custom_ids]


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Returns when the condition holds; fails the test when it does not for long. A queue that does not answer in time,
    as on a machine that stood still, is asked again."""

    async def holds() -> object:
        with contextlib.suppress(QueueUnavailable):
            return await condition()
        return False

    async with asyncio.timeout(120):
        while not await holds():  # noqa: ASYNC110 (it may hold in a server or in another process)
            await asyncio.sleep(0.01)


async def fill(world: World, *custom_ids: str) -> None:
    """One batch with these jobs."""
    await world.queue.open_batch(BatchSpec("batch", owner="me", options='{"prompt": "?"}'))
    await world.queue.submit("batch", specs(*custom_ids))
    await world.queue.seal_batch("batch")


async def take_one(world: World, worker: str = "w") -> Lease:
    """The one job that can be taken."""
    (lease,) = await world.queue.take(worker, 1)
    return lease


@contextlib.asynccontextmanager
async def queue_at(url: str, policy: QueuePolicy | None = None) -> AsyncIterator[RedisQueue]:
    queue = RedisQueue(url, policy=policy)
    try:
        yield queue
    finally:
        await queue.close()
