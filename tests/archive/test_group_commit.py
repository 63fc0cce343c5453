"""Calls that come at once go together, and each has its own answer, whatever becomes of the others."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.group_commit import GROUP_BYTES, GROUP_CALLS, GroupCommit
from slipstream.archive.queue import DamagedRecord, JobState, QueueUnavailable
from slipstream.archive.redis_queue import RedisQueue
from tests.archive.worlds import DONE, fill, redis_world


class Store:
    """Answers each number with its double, when it may."""

    def __init__(self, damaged: frozenset[int] = frozenset()) -> None:
        self.groups: list[list[int]] = []
        self.may_answer = asyncio.Event()
        self.is_away = False
        self._damaged = damaged

    async def send(self, asked: Sequence[int]) -> Sequence[int]:
        self.groups.append(list(asked))
        await self.may_answer.wait()
        if self.is_away:
            raise QueueUnavailable("away")
        if self._damaged & set(asked):
            raise DamagedRecord("damaged")
        return [2 * number for number in asked]


async def called(commit: GroupCommit[int, int], numbers: Sequence[int], num_bytes: int = 1) -> list[Any]:
    """Tasks that have made their calls."""
    tasks = [asyncio.ensure_future(commit.call(number, num_bytes)) for number in numbers]
    for _ in range(2):
        await asyncio.sleep(0)
    return tasks


async def answers_of(tasks: Sequence[Any]) -> list[Any]:
    """Answers, and the names of errors."""
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [type(each).__name__ if isinstance(each, BaseException) else each for each in found]


async def test_what_comes_while_one_is_under_way_goes_together() -> None:
    store = Store()
    commit = GroupCommit(store.send)
    tasks = await called(commit, [0])
    tasks += await called(commit, range(1, 150))
    store.may_answer.set()
    assert await answers_of(tasks) == [2 * number for number in range(150)]
    assert [len(group) for group in store.groups] == [1, GROUP_CALLS, 149 - GROUP_CALLS]


async def test_a_group_is_bounded_in_bytes() -> None:
    store = Store()
    commit = GroupCommit(store.send)
    tasks = await called(commit, range(6), GROUP_BYTES // 2)
    store.may_answer.set()
    assert await answers_of(tasks) == [0, 2, 4, 6, 8, 10]
    assert [len(group) for group in store.groups] == [2, 2, 2]


@given(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=12), damaged=st.frozensets(st.integers(0, 9)))
def test_what_is_damaged_fails_alone(numbers: list[int], damaged: frozenset[int]) -> None:
    async def run() -> None:
        store = Store(damaged)
        store.may_answer.set()
        commit = GroupCommit(store.send)
        expected = ["DamagedRecord" if number in damaged else 2 * number for number in numbers]
        assert await answers_of(await called(commit, numbers)) == expected

    asyncio.run(run())


async def test_while_the_store_is_away_nobody_waits_for_a_second_call() -> None:
    store = Store()
    commit = GroupCommit(store.send)
    tasks = await called(commit, [1])
    tasks += await called(commit, [2, 3])
    store.is_away = True
    store.may_answer.set()
    assert await answers_of(tasks) == ["QueueUnavailable"] * 3
    assert store.groups == [[1]]
    store.is_away = False
    assert await commit.call(4, 1) == 8, "and it is asked again"


async def test_who_is_cancelled_takes_nobody_along() -> None:
    store = Store()
    commit = GroupCommit(store.send)
    tasks = await called(commit, [1, 2])
    tasks += await called(commit, [3, 4])
    tasks[0].cancel(), tasks[2].cancel()
    store.may_answer.set()
    assert await answers_of(tasks) == ["CancelledError", 4, "CancelledError", 8]


async def test_who_waits_at_the_end_is_cancelled() -> None:
    commit = GroupCommit(Store().send)
    tasks = await called(commit, [1])
    tasks += await called(commit, [2])
    await commit.close()
    assert await answers_of(tasks) == ["CancelledError"] * 2


async def test_results_that_come_at_once_are_committed_together(redis_url: str) -> None:
    """Of a job that cannot be committed, nobody else hears."""
    calls: list[str] = []
    world = redis_world(redis_url)
    queue = RedisQueue(
        redis_url, world.prefix[1:-2], world.queue.policy, on_call=lambda script, seconds: calls.append(script)
    )
    assert world.redis is not None
    try:
        names = [f"n{number}" for number in range(40)]
        await fill(world, *names)
        leases = await queue.take("w", 40)
        await world.redis.set(f"{world.prefix}m:{leases[7].job_id}", "no hash")
        found = await asyncio.gather(*(queue.finish(lease, DONE) for lease in leases[:30]), return_exceptions=True)
        assert isinstance(found.pop(7), DamagedRecord) and found == [True] * 29
        calls.clear()
        assert await asyncio.gather(*(queue.finish(lease, DONE) for lease in leases[30:])) == [True] * 10
        assert calls == ["finish"]
        counts = (await queue.get_batch("batch")).counts
        assert (counts[JobState.DONE], counts[JobState.RUNNING]) == (39, 1)
        assert await asyncio.gather(*(queue.finish(lease, DONE) for lease in leases[8:])) == [True] * 32
        assert (await queue.get_batch("batch")).counts[JobState.DONE] == 39, "each is counted once"
    finally:
        await world.redis.aclose()
        await queue.close()
        await world.queue.close()


async def test_a_group_has_answers_and_tallies_of_each(redis_url: str) -> None:
    world = redis_world(redis_url)
    assert world.redis is not None
    try:
        await fill(world, "a", "b", "c")
        first, second, third = [(await world.queue.take(worker, 1))[0] for worker in ("u", "v", "w")]
        await world.lose(second)
        (again,) = await world.queue.take("other", 1)
        tallied = [
            world.queue.finish(lease, replace(DONE, result=lease.custom_id, tallies={"t": 1.5, lease.custom_id: 1}))
            for lease in (first, second, third, again)
        ]
        assert again.job_id == second.job_id
        assert await asyncio.gather(*tallied) == [True, False, True, True]
        batch = await world.queue.get_batch("batch")
        assert batch.tallies == {"t": 4.5, "a": 1.0, "b": 1.0, "c": 1.0}
        assert {name: job.result for name, job in (await world.jobs()).items()} == {"a": "a", "b": "b", "c": "c"}
    finally:
        await world.redis.aclose()
        await world.queue.close()
