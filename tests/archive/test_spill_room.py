"""Who has room in a queue whose results leave Redis: what is over keeps nobody out, and a full store can be emptied."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from slipstream.archive.queue import BatchSpec, BatchState, JobState, Outcome, SubmitOutcome
from slipstream.archive.redis_queue import RedisQueue
from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.spilled import NAMES, Spill
from tests.archive.worlds import DONE, POLICY, World, specs

FAILED = Outcome(JobState.FAILED, error="segment 1 cannot be decoded")
PART = b"x" * 100_000
"""Two of them are more than half of a queue's room."""


@pytest_asyncio.fixture
async def totals(spill: Spill) -> AsyncIterator[Any]:
    """What the queue counts."""
    redis: Any = Redis.from_url(spill.url, decode_responses=True)
    yield lambda: redis.hgetall(f"{{{spill.name}}}:totals")
    await redis.aclose()


async def fail_with_parts(spill: Spill) -> None:
    """Two films of another batch, which keep what there is of them."""
    await spill.queue.open_batch(BatchSpec("films", "other"))
    await spill.queue.submit("films", specs("a", "b"))
    for lease in await spill.queue.take("w", 2):
        await spill.queue.open_parts(lease, "key", 9)
        await spill.queue.put_part(lease, 0, PART, {})
        await spill.queue.finish(lease, FAILED)


async def test_parts_of_films_that_failed_keep_nobody_out(spill: Spill, totals: Any) -> None:
    await fail_with_parts(spill)
    assert int((await totals())["part_bytes"]) > spill.policy.queue_bytes / 2
    await spill.fill(*NAMES)
    await spill.work()
    assert await spill.state() is BatchState.COMPLETED
    await spill.queue.retry_dead("films", frozenset({JobState.FAILED}))
    assert int((await totals())["idle_part_bytes"]) == 0, "they take room again"
    for lease in await spill.queue.take("w", 2):
        await spill.queue.finish(lease, FAILED)
    async with Redis.from_url(spill.url) as redis:
        await redis.zadd(f"{{{spill.name}}}:expiry", {"films": 1})
    while await spill.queue.sweep():
        pass
    assert {name: int((await totals())[name]) for name in ("part_bytes", "idle_part_bytes")} == {
        "part_bytes": 0,
        "idle_part_bytes": 0,
    }


async def test_a_batch_whose_failed_films_fill_the_queue_waits_alone(spill: Spill) -> None:
    await spill.queue.open_batch(BatchSpec("batch", "me"))
    await spill.fill("a", "b", "c")
    for lease in await spill.queue.take("w", 3):
        await spill.queue.open_parts(lease, "key", 9)
        await spill.queue.put_part(lease, 0, PART, {})
        await spill.queue.finish(lease, FAILED)
    await spill.queue.open_batch(BatchSpec("neighbour", "other"))
    for batch in ("batch", "neighbour"):
        await spill.queue.submit(batch, specs(*(f"more {number}" for number in range(200))))
    while leases := await spill.queue.take("w", 100):
        for lease in leases:
            await spill.queue.finish(lease, DONE)
        while await spill.compactor.step() or await spill.feeder.step():
            pass
    assert (await spill.queue.get_batch("neighbour")).counts[JobState.DONE] == 200
    assert (await spill.queue.get_batch("batch")).counts[JobState.QUEUED] > 0


async def test_what_was_handed_in_before_results_left_is_not_counted(spill: Spill, totals: Any) -> None:
    old = RedisQueue(spill.url, spill.name, POLICY)
    for batch in ("done", "later"):
        await old.open_batch(BatchSpec(batch, "me"))
        await old.submit(batch, specs(*NAMES))
        await old.seal_batch(batch)
    for lease in await old.take("w", len(NAMES)):
        await old.finish(lease, DONE)
    await old.close()
    for lease in await spill.queue.take("w", len(NAMES)):
        await spill.queue.finish(lease, DONE)
    async with Redis.from_url(spill.url) as redis:
        await redis.zadd(f"{{{spill.name}}}:expiry", {"done": 1, "later": 1})
    while await spill.queue.sweep():
        pass
    assert int((await totals()).get("bytes", 0)) == 0
    assert (await spill.fill(*NAMES)) == {SubmitOutcome.ADDED: 150}
    assert len([key for key in await spill.keys() if key.startswith("j:")]) == 100, "the rest waits outside"


async def test_what_a_gateway_without_the_folder_ends_takes_no_room(spill: Spill, totals: Any) -> None:
    """As where gateways are told of it one after the other."""
    await spill.fill(*NAMES[:40])
    plain = RedisQueue(spill.url, spill.name, POLICY)
    for lease in await plain.take("w", 40):
        await plain.finish(lease, DONE)
    while await spill.compactor.step():
        pass
    assert [job.custom_id for job in await spill.list(states=frozenset({JobState.DONE}))] == NAMES[:40]
    assert {name: int(count) for name, count in (await totals()).items() if int(count)} == {}
    await spill.fill(*NAMES[40:])
    async with Redis.from_url(spill.url) as redis:
        await redis.zadd(f"{{{spill.name}}}:expiry", {"batch": 1})
    while await plain.sweep():
        pass
    assert int((await totals())["bytes"]) == 0
    await plain.close()


async def test_a_count_that_an_older_release_took_below_nothing_is_mended(spill: Spill, totals: Any) -> None:
    async with Redis.from_url(spill.url) as redis:
        await redis.hset(f"{{{spill.name}}}:totals", "bytes", -(10**9))
    await spill.fill(*NAMES)
    assert 0 < int((await totals())["bytes"]) < 2 * spill.policy.queue_bytes


@pytest.mark.parametrize("num_done", [0, 100])
async def test_a_listing_has_what_is_fed_while_it_is_made(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    await spill.fill(*NAMES)
    run = spill.queue._run

    async def fed_before_chunks(script: str, *args: Any) -> Any:
        if script == "chunks":
            monkeypatch.setattr(spill.queue, "_run", run)
            for lease in await spill.queue.take("w", num_done):
                await spill.queue.finish(lease, DONE)
            while await spill.compactor.step():
                pass
            assert bool(await spill.feeder.step()) == bool(num_done)
        return await run(script, *args)

    monkeypatch.setattr(spill.queue, "_run", fed_before_chunks)
    assert [job.custom_id for job in await spill.list()] == NAMES


async def test_a_store_that_is_full_is_emptied_into_files(server: EmbeddedServer, tmp_path: Path) -> None:
    spill = Spill(server.url, f"file://{tmp_path}/results", "full")
    await spill.fill(*NAMES[:20])
    for lease in await spill.queue.take("w", 20):
        await spill.queue.finish(lease, DONE)
    async with Redis.from_url(server.url) as redis:
        await redis.config_set("maxmemory", 1)
        while await spill.compactor.step():
            pass
        await redis.config_set("maxmemory", 0)
    assert not [key for key in await spill.keys() if key.startswith("j:")]
    assert [job.state for job in await spill.list()] == [JobState.DONE] * 20
    await spill.queue.close()


async def test_a_file_that_a_faster_gateway_wrote_is_no_fault_of_the_batch(
    spill: Spill, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await spill.fill(*NAMES[:20])
    for lease in await spill.queue.take("w", 20):
        await spill.queue.finish(lease, DONE)
    other, finished = Spill(spill.url, spill.folder.address(""), spill.name), spill.queue.finished

    async def after_the_other(*args: Any) -> Any:
        monkeypatch.setattr(spill.queue, "finished", finished)
        async with Redis.from_url(spill.url) as redis:
            await redis.delete(f"{{{spill.name}}}:compactor")
        assert await other.compactor.step()
        return await finished(*args)

    monkeypatch.setattr(spill.queue, "finished", after_the_other)
    assert await spill.compactor.step()
    assert "results.not_written" not in capsys.readouterr().out
    await other.queue.close()
    assert [job.state for job in await spill.list()] == [JobState.DONE] * 20


async def test_a_result_that_comes_when_its_job_is_dead_is_refused(world: World) -> None:
    await world.queue.open_batch(BatchSpec("batch", "me"))
    await world.queue.submit("batch", specs("poison"))
    for _ in range(POLICY.max_crashes):
        (lease,) = await world.queue.take("w", 1)
        await world.lose(lease)
    assert not await world.queue.take("w", 1)
    assert (await world.jobs())["poison"].state is JobState.DEAD
    assert not await world.queue.finish(lease, DONE)
    assert (await world.jobs())["poison"].state is JobState.DEAD
