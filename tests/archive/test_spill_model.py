"""The queue whose finished jobs lie in files does as the one in memory, though the compactor is killed anywhere."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from slipstream.archive.compactor import Compactor
from slipstream.archive.parts import PartLimits
from slipstream.archive.queue import JobQueue, JobState, Lease
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.spill_queue import SpillQueue
from tests.archive.test_queue_model import (
    BATCHES,
    CONTENTS,
    ENDED,
    OWNERS,
    Pair,
    QueueMachine,
    ResultT,
    _awaited,
    _batch_but_times,
)
from tests.archive.worlds import POLICY, World, memory_world, redis_world
from tests.support.mortal import Killed, Life, MortalFolder, MortalQueue

NUM_RUNS, NUM_STEPS = 5, 22


class SpillMachine(QueueMachine):
    """The same rules, and one more: some compactor writes a file, and may be killed at it."""

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        policy = replace(POLICY, max_backlog=12, parts=PartLimits(max_job_bytes=600), queue_bytes=1 << 30)
        self._start(policy)

    def _start(self, policy: Any) -> None:
        self.runner = asyncio.Runner()
        self.model = memory_world(policy)
        self.life = Life()
        self.real, self.mortal = self.runner.run(self._made(policy))
        self.num_retries = 0
        self.open_batches()

    async def _made(self, policy: Any) -> tuple[World, MortalQueue]:
        world = redis_world(self.url, policy)
        await world.queue.close()
        name = world.prefix[1:-2]
        address = f"file://{self.folder}"
        queue = SpillQueue(self.url, ResultsFolder(address), name, policy)
        mortal = MortalQueue(self.url, MortalFolder(address, self.life), name, policy, self.life)
        return replace(world, queue=queue), mortal

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.mortal.close())
            shutil.rmtree(self.folder)
        super().teardown()

    def told(self, pair: Pair, call: Callable[[JobQueue, Lease], Awaitable[ResultT]]) -> ResultT:
        """Who comes with the lease of a job that is in a file is refused, and in memory nothing changes by it."""
        model = self.runner.run(_awaited(call(self.model.queue, pair.model)))
        real = self.runner.run(_awaited(call(self.real.queue, pair.real)))
        if self.runner.run(self._is_outside(pair.real)):
            assert not real or real in ("lost", ["lost"])
            return real
        assert model == real
        return model

    async def _is_outside(self, lease: Lease) -> bool:
        redis: Any = self.real.redis
        return not await redis.exists(f"{self.real.prefix}j:{lease.job_id}")

    @rule(steps=st.integers(0, 12), is_after=st.booleans(), file_bytes=st.sampled_from([1, 1500, 1 << 20]))
    def compact(self, steps: int, is_after: bool, file_bytes: int) -> None:
        self.life.left, self.life.is_after = steps, is_after
        compactor = Compactor(self.mortal, self.mortal.folder, file_bytes, 0.0)
        with contextlib.suppress(Killed):
            while self.runner.run(compactor.step()):
                pass
        self.life.left = float("inf")
        self.runner.run(self._end_its_term())

    async def _end_its_term(self) -> None:
        """A lease later another is elected."""
        redis: Any = self.real.redis
        await redis.delete(f"{self.real.prefix}compactor")

    @rule(batch=BATCHES, states=st.sets(st.sampled_from(ENDED[:2])), max_waiting=st.sampled_from([None, 3]))
    def retry_dead(self, batch: str, states: set[JobState], max_waiting: int | None) -> None:
        """A cancelled job is cancelled for good."""
        self.both(lambda queue: queue.retry_dead(batch, frozenset(states), max_waiting))

    @rule()
    def sweep_after_retention(self) -> None:
        """Once all that is to be written is."""
        self.compact(1 << 30, False, 1 << 20)
        super().sweep_after_retention()

    @invariant()
    def same(self) -> None:
        if hasattr(self, "mortal"):
            self.both(_all_but_times_and_bytes)


async def _all_but_times_and_bytes(queue: JobQueue) -> Any:
    """What parts take in the store is less once they are in files."""
    found: list[Any] = [await queue.depth(), [await queue.find_result(content) for content in CONTENTS]]
    for batch_id in OWNERS:
        parts, jobs, batch = await _batch_but_times(queue, batch_id)
        found.append((parts, jobs, replace(batch, parts_bytes=0)))
    return found


def run_machine(url_of_redis: str) -> None:
    """Looks for a difference."""

    class Machine(SpillMachine):
        url = url_of_redis

    how = settings(
        max_examples=NUM_RUNS,
        stateful_step_count=NUM_STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Machine, settings=how)


def test_files_and_a_compactor_that_dies_change_nothing(redis_url: str) -> None:
    run_machine(redis_url)
