"""Owners take turns within a priority, by both queues; and a queue of release 0.2 is drained by this one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from slipstream.archive.queue import BatchSpec, JobState, Lease, Priority, SubmitOutcome, sha256
from slipstream.archive.redis_queue import job_id
from tests.archive.worlds import DONE, POLICY, World, redis_world, specs

OLD_SCRIPTS = Path(__file__).parents[1] / "support" / "queue_0_2"


async def submit(world: World, owner: str, number: int, prefix: str = "", **fields: Any) -> list[SubmitOutcome]:
    """Jobs of one batch of the owner."""
    batch = f"batch-{owner}"
    await world.queue.open_batch(BatchSpec(batch, owner=owner))
    return await world.queue.submit(batch, specs(*(f"{owner}{prefix}{index}" for index in range(number)), **fields))


async def take(world: World, limit: int, worker: str = "w") -> list[str]:
    """Owners of the jobs that are taken, which are done at once."""
    leases = await world.queue.take(worker, limit)
    for lease in leases:
        assert await world.queue.finish(lease, DONE)
    return [lease.owner for lease in leases]


async def take_singly(world: World, number: int) -> list[str]:
    return [owner for _ in range(number) for owner in await take(world, 1)]


async def test_the_first_job_of_another_owner_comes_next(world: World) -> None:
    await submit(world, "a", 400)
    assert await take(world, 11) == ["a"] * 11
    await submit(world, "b", 1)
    assert "b" in await take_singly(world, 2)
    await submit(world, "b", 40, "more")
    taken = await take_singly(world, 80)
    assert Counter(taken) == {"a": 40, "b": 40} and taken[:4] in (["a", "b"] * 2, ["b", "a"] * 2)
    assert await take(world, 5) == ["a"] * 5


async def test_many_at_once_are_shared_out_too(world: World) -> None:
    for owner in ("a", "b", "c"):
        await submit(world, owner, 30)
    assert Counter(await take(world, 30)) == {"a": 10, "b": 10, "c": 10}


async def test_who_hands_in_one_by_one_gains_nothing(world: World) -> None:
    for owner in ("m", "z"):
        await submit(world, owner, 50)
    taken: Counter[str] = Counter()
    for number in range(30):
        await submit(world, "a", 1, f"-{number}-")
        taken.update(await take(world, 1))
    assert taken == {"a": 10, "m": 10, "z": 10}


async def test_priorities_come_before_turns(world: World) -> None:
    await submit(world, "a", 100, priority=Priority.HIGH)
    await submit(world, "b", 100, priority=Priority.NORMAL)
    assert Counter(await take(world, 20)) == {"a": 14, "b": 6}, "nobody has low ones, so their turns are of high ones"


async def test_what_is_given_back_takes_a_turn_of_its_owner(world: World) -> None:
    for owner in ("a", "b"):
        await submit(world, owner, 30)
    ended: Counter[str] = Counter()
    for _ in range(40):
        (lease,) = await world.queue.take("w", 1)
        ended[lease.owner] += 1
        if lease.owner == "a":
            assert await world.queue.retry(lease, "not now", 0.0, counted=False)
        else:
            assert await world.queue.finish(lease, DONE)
    assert ended == {"a": 20, "b": 20}
    assert (await world.queue.get_batch("batch-a")).counts[JobState.QUEUED] == 30


async def test_a_given_back_job_is_the_next_of_its_owner(world: World) -> None:
    await submit(world, "a", 5)
    (lease,) = await world.queue.take("w", 1)
    assert await world.queue.retry(lease, "not now", 0.0, counted=False)
    (again,) = await world.queue.take("w", 1)
    assert again.job_id == lease.job_id


async def test_a_dear_job_takes_several_turns(world: World) -> None:
    await submit(world, "dear", 30, cost=4)
    await submit(world, "cheap", 60)
    assert Counter(await take_singly(world, 50)) == {"dear": 10, "cheap": 40}


async def test_what_is_owed_to_nobody_is_forgiven(world: World) -> None:
    """An owner that had the queue for itself does not pay for it when another comes."""
    await submit(world, "dear", 30, cost=1000)
    assert await take_singly(world, 20) == ["dear"] * 20
    await submit(world, "other", 30, cost=1000)
    assert abs(Counter(await take_singly(world, 20))["dear"] - 10) <= 1


async def test_a_cancelled_batch_leaves_its_turn(world: World) -> None:
    for owner in ("a", "b"):
        await submit(world, owner, 20)
    await world.queue.cancel_batch("batch-a")
    assert await take(world, 100) == ["b"] * 20


async def test_an_owner_has_a_quota_over_all_its_batches(world: World) -> None:
    for batch, owner in (("one", "a"), ("two", "a"), ("three", "b")):
        await world.queue.open_batch(BatchSpec(batch, owner=owner))
    jobs = specs(*map(str, range(6)))
    assert Counter(await world.queue.submit("one", jobs, 8)) == {"added": 6}
    assert await world.queue.submit("two", jobs, 8) == ["added"] * 2 + ["over_quota"] * 4
    assert await world.queue.submit("two", specs("bad", rejection="no"), 8) == ["added"], "it does not wait"
    assert await world.queue.submit("two", jobs[:3], 8) == ["known", "known", "over_quota"]
    assert Counter(await world.queue.submit("three", jobs, 8)) == {"added": 6}
    running = [lease for lease in await world.queue.take("w", 4) if lease.owner == "a"]
    assert await world.queue.submit("two", jobs[2:], 8) == ["added"] * 2 + ["over_quota"] * 2
    assert await world.queue.retry(running[0], "later", 0.0), "what was accepted stays"
    assert await world.queue.cancel_batch("one")
    assert await world.queue.submit("two", jobs, 8) == ["known"] * 4 + ["added"] * 2
    assert await world.queue.submit("three", specs("more"), 0) == ["over_quota"]


async def test_the_oldest_job_that_waits_has_an_age(world: World) -> None:
    assert (await world.queue.depth()).oldest_s == 0
    await submit(world, "a", 3)
    await take(world, 1)
    assert 0 <= (await world.queue.depth()).oldest_s < 60
    await take(world, 2)
    assert (await world.queue.depth()).oldest_s == 0


async def test_turns_hold_over_several_gateways(redis_url: str) -> None:
    world = redis_world(redis_url)
    other = replace(world, queue=type(world.queue)(redis_url, world.prefix[1:-2], POLICY))
    for owner in ("a", "b", "c"):
        await submit(world, owner, 20)
    taken = [owner for _ in range(15) for one in (world, other) for owner in await take(one, 1, f"w{id(one)}")]
    assert Counter(taken) == {"a": 10, "b": 10, "c": 10}
    await _closed(world, other)


# -- the layout of 0.2 ------------------------------------------------------------------------------------------------


class OldQueue:
    """What a gateway of release 0.2 does to a queue, by that release's scripts."""

    def __init__(self, redis: Any, prefix: str) -> None:
        self._redis, self._prefix, self._takes = redis, prefix, 0
        texts = {path.stem: path.read_text() for path in OLD_SCRIPTS.glob("*.lua")}
        prelude = texts.pop("prelude")
        self._scripts = {name: redis.register_script(prelude + text) for name, text in texts.items()}

    async def run(self, script: str, *args: str | int) -> Any:
        header = (round(POLICY.lease_s * 1000), POLICY.max_attempts, POLICY.max_crashes, POLICY.max_backlog, 1_000_000)
        return await self._scripts[script](keys=[self._prefix], args=[*header, *args])

    async def submit(self, owner: str, names: Sequence[str], priority: str = "normal") -> list[bytes]:
        batch = f"batch-{owner}"
        await self.run("open", batch, owner, "{}", "", sha256(""))
        args = [(job_id(batch, name), name, priority, "{}", sha256("{}"), "") for name in names]
        answers: list[bytes] = await self.run("submit", batch, *(arg for job in args for arg in job))
        return answers

    async def take(self, limit: int) -> list[Lease]:
        self._takes += 1
        rows, _ = await self.run("take", "old", self._takes, limit, 1)
        texts = [[field.decode() if isinstance(field, bytes) else str(field) for field in row] for row in rows]
        return [
            Lease(row[0], row[1], row[2], "old", int(row[3]), row[4], row[6], 0, 0, is_suspect=False, entry=row[10])
            for row in texts
        ]

    async def retry(self, lease: Lease, delay_ms: int) -> None:
        assert await self.run("retry", lease.job_id, lease.worker, lease.epoch, "later", delay_ms, 0, 0) == 1


@pytest.fixture
async def old(redis_url: str) -> Any:
    world = redis_world(redis_url)
    yield world, OldQueue(world.redis, world.prefix)
    await _closed(world)


async def _closed(*worlds: World) -> None:
    for world in worlds:
        await world.queue.close()
    redis: Redis | None = worlds[0].redis
    assert redis is not None
    await redis.aclose()


async def states(world: World, *owners: str) -> Mapping[str, Counter[JobState]]:
    return {owner: Counter(job.state for job in (await world.jobs(f"batch-{owner}")).values()) for owner in owners}


async def test_a_queue_of_the_last_release_is_drained_and_loses_nothing(old: tuple[World, OldQueue]) -> None:
    world, release = old
    for priority in Priority:
        await release.submit("a", [f"a-{priority}-{index}" for index in range(20)], priority)
        await release.submit("b", [f"b-{priority}-{index}" for index in range(3)], priority)
    held, lost, waits, again = await release.take(4)
    await release.retry(waits, 60_000)
    await release.retry(again, 0)
    await submit(world, "c", 5)
    assert await world.queue.finish(held, DONE), "what the last release took is committed"
    assert await take(world, 1) == ["a"], "what was given back comes first"
    assert set(await take_singly(world, 20)) >= {"a", "c"}, "the new ones wait for no end of the old ones"
    await world.elapse(POLICY.lease_s + 61)
    taken = await take(world, 1000) + await take(world, 1000)
    assert lost.owner == "" and len(taken) == 60 + 9 + 5 - 1 - 1 - 20
    assert await states(world, "a", "b", "c") == {
        "a": Counter({JobState.DONE: 60}),
        "b": Counter({JobState.DONE: 9}),
        "c": Counter({JobState.DONE: 5}),
    }
    assert (await world.jobs("batch-a"))[lost.custom_id].crashes == 1
    assert world.redis is not None
    left = {key.decode().removeprefix(world.prefix) for key in await world.redis.keys(f"{world.prefix}s:*")}
    assert not left, "empty streams are gone"


async def test_gateways_of_both_releases_share_a_queue(old: tuple[World, OldQueue]) -> None:
    """While a new one is rolled out: the older one finds nothing that it does not know, the newer one finds all."""
    world, release = old
    await submit(world, "", 4)
    await submit(world, "a", 4)
    await release.submit("b", ["b0", "b1"])
    seen = [lease.custom_id for lease in await release.take(3)]
    assert len(seen) == 3 and "a" not in {name[0] for name in seen}
    assert len(await take(world, 100)) == 4 + 3
    await release.take(0)
    await world.elapse(POLICY.lease_s + 1)
    assert len(await take(world, 100)) == 3, "those of the older one, whose leases expired"
    assert sum((await states(world, "", "a", "b")).values(), Counter()) == {JobState.DONE: 10}
