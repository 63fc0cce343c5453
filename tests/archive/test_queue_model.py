"""The queue in Redis does what the one in memory does, whatever is done to both: Hypothesis looks for a difference."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from slipstream.archive.parts import PartLimits, PutAnswer
from slipstream.archive.queue import BatchSpec, DamagedRecord, JobQueue, JobState, Lease, Outcome, Priority
from tests.archive.worlds import POLICY, World, memory_world, redis_world, specs

ResultT = TypeVar("ResultT")

WORKERS = st.sampled_from(["w1", "w2", "w3"])
OWNERS = {"one": "a", "two": "b", "three": "b"}
"""Of the batches."""
BATCHES = st.sampled_from(list(OWNERS))
NUM_RUNS, NUM_STEPS = 15, 30
ENDED = (JobState.DEAD, JobState.FAILED, JobState.CANCELLED)
CONTENTS = ["a film", "another", "a third"]


@dataclass(frozen=True)
class Pair:
    """The same lease of both queues."""

    model: Lease
    real: Lease


class QueueMachine(RuleBasedStateMachine):
    """Every rule does the same to both and compares what they answer; the invariants compare what they hold."""

    url = ""
    leases: Bundle[Pair] = Bundle("leases")

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        policy = replace(POLICY, max_backlog=12, parts=PartLimits(max_job_bytes=600))
        self.model, self.real = memory_world(policy), self.runner.run(_made(self.url, policy))
        self.num_retries = 0
        self.open_batches()

    def open_batches(self) -> None:
        for batch, owner in OWNERS.items():
            self.both(lambda queue, batch=batch, owner=owner: queue.open_batch(BatchSpec(batch, owner)))

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(_closed(self.real))
            self.runner.close()

    def both(self, call: Callable[[JobQueue], Awaitable[ResultT]]) -> ResultT:
        """Asserts that both answer the same."""
        model, real = (self.runner.run(_awaited(call(world.queue))) for world in (self.model, self.real))
        assert model == real
        return model

    def told(self, pair: Pair, call: Callable[[JobQueue, Lease], Awaitable[ResultT]]) -> ResultT:
        """The same, with a lease."""
        model = self.runner.run(_awaited(call(self.model.queue, pair.model)))
        real = self.runner.run(_awaited(call(self.real.queue, pair.real)))
        assert model == real
        return model

    @rule(
        batch=BATCHES,
        number=st.integers(0, 7),
        priority=st.sampled_from([Priority.HIGH, Priority.NORMAL, Priority.NORMAL, Priority.LOW]),
        cost=st.sampled_from([1, 1, 3]),
        quota=st.sampled_from([None, None, 4]),
    )
    def submit(self, batch: str, number: int, priority: Priority, cost: int, quota: int | None) -> None:
        jobs = specs(f"{batch}{number}", f"{batch}{number + 1}", priority=priority, cost=cost)
        self.both(lambda queue: queue.submit(batch, jobs, quota))

    @rule(batch=BATCHES)
    def seal(self, batch: str) -> None:
        self.both(lambda queue: queue.seal_batch(batch))

    @rule(target=leases, worker=WORKERS, limit=st.integers(1, 4), suspects=st.booleans())
    def take(self, worker: str, limit: int, suspects: bool) -> Any:
        model, real = (
            self.runner.run(world.queue.take(worker, limit, suspects=suspects)) for world in (self.model, self.real)
        )
        assert [replace(lease, entry="") for lease in model] == [replace(lease, entry="") for lease in real]
        assert sum(lease.is_suspect for lease in model) <= suspects
        return multiple(*(Pair(*pair) for pair in zip(model, real, strict=True)))

    @rule(pair=leases, progress=st.sampled_from(["", "decode", "prefill"]))
    def beat(self, pair: Pair, progress: str) -> None:
        self.told(pair, lambda queue, lease: queue.beat([lease], {lease.job_id: progress}))

    @rule(pair=consumes(leases), state=st.sampled_from([JobState.DONE, JobState.DONE, JobState.FAILED]))
    def finish(self, pair: Pair, state: JobState) -> None:
        name = pair.model.custom_id  # of both batches the same contents, as the same file may be in several
        outcome = Outcome(state, f'{{"text": "{name}"}}', "why", "CODE", CONTENTS[int(name[-1]) % 3], {"tokens": 1})
        committed = self.told(pair, lambda queue, lease: _finished(queue, lease, outcome))
        assert committed == self.told(pair, lambda queue, lease: _finished(queue, lease, outcome)), "repeated"

    @rule(pair=leases, state=st.sampled_from([JobState.DONE, JobState.FAILED]))
    def finish_and_keep_the_lease(self, pair: Pair, state: JobState) -> None:
        self.told(pair, lambda queue, lease: _finished(queue, lease, Outcome(state, "{}")))

    @rule(pair=leases, counted=st.booleans(), waits=st.booleans())
    def retry(self, pair: Pair, counted: bool, waits: bool) -> None:
        self.num_retries += 1  # no two delays are the same: the order of equals is nobody's promise
        delay_s = waits * (5.5 + self.num_retries)
        self.told(pair, lambda queue, lease: queue.retry(lease, "again", delay_s, counted=counted))

    @rule(pair=leases)
    def crash(self, pair: Pair) -> None:
        self.told(pair, lambda queue, lease: queue.crash(lease, "it died"))

    @rule(pair=leases, key=st.sampled_from(["one", "one", "one", "other"]), total=st.sampled_from([0, 3, 3, 4]))
    def open_parts(self, pair: Pair, key: str, total: int) -> None:
        state = self.told(pair, lambda queue, lease: queue.open_parts(lease, key, total, f"{total} of them"))
        assert state is None or (
            (state.total or not state.done) and len(state.missing) + len(state.done) == state.total
        )

    @rule(pair=leases, number=st.integers(0, 2), num_bytes=st.sampled_from([1, 1, 1, 100]))
    def put_part(self, pair: Pair, number: int, num_bytes: int) -> None:
        data = f"{number} by {pair.model.worker} {pair.model.epoch}".encode() * num_bytes
        state = self.told(pair, lambda queue, lease: queue.open_parts(lease, "one", 3))
        answer = self.told(pair, lambda queue, lease: queue.put_part(lease, number, data, {"tokens": number}))
        assert (answer is PutAnswer.LOST) == (state is None)
        if state is not None:
            assert (answer is PutAnswer.KNOWN) == (number in state.done)

    @rule(pair=leases, name=st.sampled_from("ab"), num_bytes=st.sampled_from([1, 2, 60]))
    def put_note(self, pair: Pair, name: str, num_bytes: int) -> None:
        state = self.told(pair, lambda queue, lease: queue.open_parts(lease, "one", 3))
        answer = self.told(pair, lambda queue, lease: queue.put_note(lease, name, b"note" * num_bytes))
        assert (answer is PutAnswer.LOST) == (state is None)

    @rule(pair=leases)
    def find_notes(self, pair: Pair) -> None:
        for name in "ab":
            self.told(pair, lambda queue, lease, name=name: queue.find_note(lease, name))  # type: ignore[misc]

    @rule(pair=leases)
    def finish_all_parts(self, pair: Pair) -> None:
        state = self.told(pair, lambda queue, lease: queue.open_parts(lease, "one", 3))
        for number in state.missing if state else ():
            self.told(pair, lambda queue, lease, n=number: queue.put_part(lease, n, b"part", {"tokens": 1}))  # type: ignore[misc]
        if state:
            self.finish_and_keep_the_lease(pair, JobState.DONE)

    @rule(batch=BATCHES)
    def cancel(self, batch: str) -> None:
        self.both(lambda queue: queue.cancel_batch(batch))

    @rule(batch=BATCHES, states=st.sets(st.sampled_from(ENDED)), max_waiting=st.sampled_from([None, 3]))
    def retry_dead(self, batch: str, states: set[JobState], max_waiting: int | None) -> None:
        self.both(lambda queue: queue.retry_dead(batch, frozenset(states), max_waiting))

    @rule(seconds=st.sampled_from([25.0, POLICY.lease_s + 1, POLICY.lease_s + 1]))
    def elapse(self, seconds: float) -> None:
        for world in (self.model, self.real):
            self.runner.run(_awaited(world.elapse(seconds)))

    @rule()
    def sweep_after_retention(self) -> None:
        self.elapse(POLICY.retention_s + 1)
        self.both(_swept)
        self.open_batches()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "runner"):
            return
        self.both(_all_but_times)


async def _made(url: str, policy: Any) -> World:
    return redis_world(url, policy)


async def _closed(world: World) -> None:
    await world.queue.close()
    redis: Any = world.redis
    if keys := await redis.keys(f"{world.prefix}*"):
        await redis.delete(*keys)
    await redis.aclose()


async def _awaited(call: Awaitable[ResultT]) -> ResultT:
    return await call


async def _finished(queue: JobQueue, lease: Lease, outcome: Outcome) -> bool | str:
    try:
        return await queue.finish(lease, outcome)
    except DamagedRecord:
        return "parts are missing"


async def _swept(queue: JobQueue) -> int:
    """How many jobs of the batches go; which batch goes first, and whether an empty one, is up to the clock."""
    return sum([await queue.sweep() for _ in range(6)])


async def _all_but_times(queue: JobQueue) -> Any:
    """What the queue holds as far as both must agree; each alone is checked for what must always hold."""
    batches = (_batch_but_times(queue, batch) for batch in OWNERS)
    return await asyncio.gather(queue.depth(), queue.num_busy(), *map(queue.find_result, CONTENTS), *batches)


async def _batch_but_times(queue: JobQueue, batch_id: str) -> Any:
    batch, (jobs, after) = await asyncio.gather(queue.get_batch(batch_id), queue.list_jobs(batch_id))
    assert after == 0
    counts = Counter(job.state for job in jobs)
    assert all(batch.counts[state] == counts[state] for state in JobState)
    assert (batch.ended_s > 0) == (batch.total > 0 and all(job.state.is_terminal for job in jobs))
    assert all((job.ended_s > 0) == job.state.is_terminal for job in jobs)
    assert batch.parts_done == sum(job.parts_done for job in jobs)
    assert batch.parts_total == sum(job.parts_total for job in jobs)
    assert all(job.parts_done == job.parts_total for job in jobs if job.state is JobState.DONE)
    parts = [await queue.list_parts(batch_id, job.job_id) for job in jobs]
    return (
        parts,
        [replace(job, created_s=0.0, started_s=0.0, ended_s=0.0) for job in jobs],
        replace(batch, created_s=0.0, ended_s=0.0, obstacle_s=0.0),
    )


def test_redis_does_as_the_model(redis_url: str) -> None:
    class Machine(QueueMachine):
        url = redis_url

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=NUM_RUNS,
            stateful_step_count=NUM_STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
