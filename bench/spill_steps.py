"""The part `steps`: what each step of a job through feeder, queue and compactor takes of a processor.

One process and one Redis, one step after the other, so that neither the start of processes nor what waits for a disk is
in it; `spill` has all of it at once. Processor time is what is counted, for other work on the machine changes it less
than a rate.
"""

import argparse
import asyncio
import contextlib
import gc
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from bench.archive_spill import BATCH, CHUNK
from bench.spill_roles import SLOTS, made_up_jobs, made_up_results, outcome_of
from slipstream.archive.compactor import Compactor
from slipstream.archive.feeder import Feeder
from slipstream.archive.queue import BatchSpec, JobState, Lease, Outcome, QueuePolicy
from slipstream.archive.records import BatchPayload, write_batch
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.spill_queue import SpillQueue
from slipstream.archive.worker import Worker
from slipstream.logs import configure_logs
from slipstream.stack.redis_server import EmbeddedServer

LEASE_S = 600.0
"""None expires, however slow the machine is."""
FULL_BYTES, WIDE_BYTES = 1, 1 << 30
"""Room in Redis: while jobs are handed in there is none, so that they wait outside, and then there is enough."""
FILE_BYTES = 32 << 20
ROUND = 2 * SLOTS
"""Jobs that are leased, and then run, at a time: as many as two workers have."""


class _LeasedQueue(SpillQueue):
    """Gives a worker the leases that were taken before."""

    leases: Sequence[Lease] = ()

    async def take(self, worker: str, limit: int, *, suspects: bool = True) -> list[Lease]:
        given, self.leases = self.leases[:limit], self.leases[limit:]
        return list(given)


class _Meter:
    """Processor seconds of Redis and of this process, by step."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.spent_s: dict[str, Counter[str]] = {}

    @contextlib.asynccontextmanager
    async def step(self, name: str) -> AsyncIterator[None]:
        """What is done within counts for the step of this name."""
        before = await self._now()
        yield
        spent = self.spent_s.setdefault(name, Counter())
        spent.update({side: now_s - before[side] for side, now_s in (await self._now()).items()})

    async def _now(self) -> dict[str, float]:
        facts = await self._redis.info("cpu")
        return {"redis": facts["used_cpu_user"] + facts["used_cpu_sys"], "python": time.process_time()}


async def run_steps(args: argparse.Namespace) -> dict[str, Any]:
    """The part."""
    configure_logs("steps", "warning")
    gc.collect()
    gc.freeze()  # as services do once they are set up
    with tempfile.TemporaryDirectory(prefix="slipstream-steps-") as name:
        async with EmbeddedServer(Path(name) / "redis") as server, Redis.from_url(server.url) as redis:
            folder, meter = ResultsFolder(f"file://{name}/results"), _Meter(redis)
            policies = (QueuePolicy(LEASE_S, queue_bytes=room) for room in (FULL_BYTES, WIDE_BYTES))
            full, wide = (_LeasedQueue(server.url, folder, policy=policy) for policy in policies)
            await _hand_in(meter, full, args.steps_jobs)
            await _pass_through(meter, wide)
            done = (await wide.get_batch(BATCH)).counts
            await asyncio.gather(full.close(), wide.close())
    spent_s = meter.spent_s | {"all": sum(meter.spent_s.values(), Counter())}
    us = {
        step: {side: round(1e6 * s / args.steps_jobs) for side, s in sides.items()} for step, sides in spent_s.items()
    }
    return {"jobs": args.steps_jobs, "not_done": args.steps_jobs - done[JobState.DONE], "us_a_job": us}


async def _hand_in(meter: _Meter, queue: SpillQueue, num_jobs: int) -> None:
    await queue.open_batch(BatchSpec(BATCH, options=write_batch(BatchPayload("", {}))))
    for start in range(0, num_jobs, CHUNK):
        jobs = made_up_jobs(range(start, min(start + CHUNK, num_jobs)))
        async with meter.step("handed_in"):
            await queue.submit(BATCH, jobs)
    await queue.seal_batch(BATCH)


async def _pass_through(meter: _Meter, queue: _LeasedQueue) -> None:
    feeder, compactor = Feeder(queue, queue.folder), Compactor(queue, queue.folder, FILE_BYTES, age_s=0.0)
    async with meter.step("fed"):
        while await feeder.step():
            pass
    results = made_up_results()
    while True:
        async with meter.step("leased"):
            leases = await _lease(queue)
        if not leases:
            break
        async with meter.step("run_and_committed"):
            await _run_all(queue, leases, results)
    async with meter.step("written_and_freed"):
        while await compactor.step():
            pass


async def _lease(queue: SpillQueue) -> list[Lease]:
    leases: list[Lease] = []
    while len(leases) < ROUND and (more := await SpillQueue.take(queue, "worker", SLOTS)):
        leases += more
    return leases


async def _run_all(queue: _LeasedQueue, leases: Sequence[Lease], results: Sequence[str]) -> None:
    queue.leases, left = leases, len(leases)

    async def handle(lease: Lease, progress: Callable[[str], None]) -> Outcome:
        nonlocal left
        left -= 1
        if not left:
            worker.stop()
        return outcome_of(lease, results)

    worker = Worker(queue, handle, slots=SLOTS, name="worker")
    await worker.run()
