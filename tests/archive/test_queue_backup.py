"""The queue's backup as docs/scaling.md has it: its files are copied while it is written to, and another server goes on
from the copy. Nothing that was acknowledged before the copy is lost, and nothing done before it is done again."""

import asyncio
import shutil
from pathlib import Path

from redis.asyncio import Redis

from slipstream.archive.queue import BatchSpec, JobState, Lease, QueuePolicy
from slipstream.archive.redis_queue import RedisQueue
from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.worlds import DONE, age, specs, until

NAME, POLICY = "kept", QueuePolicy(lease_s=60.0)
NUM_BEFORE, NUM_DONE, NUM_RUNNING = 200, 50, 5


async def copy_files(server: EmbeddedServer, to: Path) -> None:
    """As an operator does it: no log is rewritten meanwhile. What is written meanwhile may be in the copy or not."""
    async with Redis.from_url(server.url) as client:
        await client.config_set("auto-aof-rewrite-percentage", 0)

        async def no_rewrite() -> bool:
            return not (await client.info("persistence"))["aof_rewrite_in_progress"]

        await until(no_rewrite)
        await asyncio.to_thread(shutil.copytree, server.folder / "appendonlydir", to / "appendonlydir")
        await client.config_set("auto-aof-rewrite-percentage", 100)


async def states(queue: RedisQueue) -> dict[str, JobState]:
    jobs, _ = await queue.list_jobs("batch", limit=500)
    return {job.custom_id: job.state for job in jobs}


async def work_on(queue: RedisQueue, number: int) -> list[Lease]:
    """Takes so many jobs and ends them."""
    leases = await queue.take("worker", number)
    for lease in leases:
        assert await queue.finish(lease, DONE)
    return leases


async def test_another_server_goes_on_from_a_copy_made_under_load(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "first") as first:
        queue = RedisQueue(first.url, NAME, POLICY)
        await queue.open_batch(BatchSpec("batch"))
        await queue.submit("batch", specs(*(f"before-{number}" for number in range(NUM_BEFORE))))
        done_before = {lease.custom_id for lease in await work_on(queue, NUM_DONE)}
        running = await queue.take("lost", NUM_RUNNING)
        handing_in = asyncio.create_task(queue.submit("batch", specs(*(f"while-{number}" for number in range(100)))))
        await copy_files(first, tmp_path / "second")
        await handing_in
        done_after = {lease.custom_id for lease in await work_on(queue, NUM_DONE)}
        await queue.close()

    async with EmbeddedServer(tmp_path / "second") as second:
        queue = RedisQueue(second.url, NAME, POLICY)
        restored = await states(queue)
        assert {f"before-{number}" for number in range(NUM_BEFORE)} <= set(restored)
        assert {name for name, state in restored.items() if state is JobState.DONE} == done_before
        assert not done_after & done_before, "what was done after the copy is lost with the first server"
        assert await queue.finish(running[0], DONE), "who held a lease when the copy was made may still commit, once"
        async with Redis.from_url(second.url) as client:
            await age(client, f"{{{NAME}}}:", POLICY.lease_s + 1)
        taken: list[str] = []
        while leases := await work_on(queue, 50):
            taken += [lease.custom_id for lease in leases]
        assert len(taken) == len(set(taken)) and not set(taken) & {*done_before, running[0].custom_id}
        assert not await queue.finish(running[1], DONE), "its job was taken by another meanwhile"
        assert set((await states(queue)).values()) == {JobState.DONE}
        await queue.close()
