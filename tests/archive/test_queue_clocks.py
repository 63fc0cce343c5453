"""The queue while the clock of its server goes wrong: by a failover, or as one that was ahead is put right."""

from typing import cast

import pytest

from slipstream.archive.queue import BatchSpec, QueuePolicy
from slipstream.archive.redis_queue import RedisQueue
from slipstream.archive.redis_store import load_scripts
from slipstream.archive.spill_queue import SpillQueue
from tests.archive.spilled import Spill
from tests.archive.worlds import DONE, fill, redis_world, specs


def _scripts_of_a_clock(ahead_s: int) -> dict[str, str]:
    """Those of a server whose clock goes wrong by so much."""
    asked = "local T = redis.call('TIME')"
    wrong = f"{asked}\nT[1] = T[1] + {ahead_s}"
    scripts = load_scripts()
    assert all(asked in text for text in scripts.values())
    return {name: text.replace(asked, wrong) for name, text in scripts.items()}


@pytest.mark.parametrize("ahead_s", [60, -60])
async def test_leaders_whose_clocks_are_a_minute_apart_take_no_lease_away(redis_url: str, ahead_s: int) -> None:
    """As after a failover to another machine, and back."""
    policy = QueuePolicy(lease_s=15.0)
    world = redis_world(redis_url, policy)
    right, redis, name = world.queue, world.redis, world.prefix.strip("{}:")
    assert redis is not None
    wrong = RedisQueue(redis_url, name, policy, scripts=_scripts_of_a_clock(ahead_s))
    await right.open_batch(BatchSpec("batch"))
    await right.submit("batch", specs("running"))
    (lease,) = await right.take("w", 1)
    for queue in (wrong, right):
        if ahead_s > 0 and queue is wrong:  # by its clock the lease is so old, and streams know but the server's own
            for key in await redis.keys(f"{world.prefix}s:*"):
                (entry,) = await redis.xpending_range(key, "workers", "-", "+", 10)
                await redis.xclaim(key, "workers", "any", 0, [entry["message_id"]], idle=ahead_s * 1000, justid=True)
        assert await queue.take("other", 1) == []
        assert await queue.beat([lease], {}) == ["keep"]
    assert await right.finish(lease, DONE)
    assert (await world.jobs())["running"].crashes == 0
    for each in (wrong, cast(RedisQueue, right)):
        await each.close()
    await redis.aclose()


async def test_a_clock_that_was_ahead_keeps_no_job_waiting(redis_url: str) -> None:
    """As where the store starts with its machine, before that has asked for the time."""
    world = redis_world(redis_url)
    right, redis, name = cast(RedisQueue, world.queue), world.redis, world.prefix.strip("{}:")
    wrong = RedisQueue(redis_url, name, right.policy, scripts=_scripts_of_a_clock(3 * 3600))
    await fill(world, "a")
    (lease,) = await wrong.take("w", 1)
    await wrong.retry(lease, "no target yet", 2.0, counted=False)
    assert [lease.custom_id for lease in await right.take("w", 1)] == ["a"]
    for each in (wrong, right):
        await each.close()
    await redis.aclose()


async def test_a_clock_that_was_ahead_keeps_no_office_taken(spill: Spill) -> None:
    """Of a gateway that has ended since."""
    wrong = SpillQueue(spill.url, spill.folder, spill.name, spill.policy, scripts=_scripts_of_a_clock(3 * 3600))
    await spill.fill("a")
    for lease in await spill.queue.take("w", 1):
        await spill.queue.finish(lease, DONE)
    assert await wrong.plan_file("gone", 1, 0.0)
    assert await spill.queue.plan_file("here", 1, 0.0)
    await wrong.close()
