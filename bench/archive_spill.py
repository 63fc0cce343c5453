"""The part `spill`: many jobs through feeder, queue and compactor, with a captioner that answers at once.

Redis, workers, a feeder and compactors are processes; the feeder, the compactors and Redis are killed at random moments
of the run and started again. In the end the results are counted in the objects that they lie in: each job exactly once.
These are files of a local disk, or wherever `--spill-to` says.
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from bench.common import busy_s, cpu_s, say
from bench.spill_roles import Given, content_of, made_up_jobs, made_up_result, result_of
from slipstream.archive.queue import BatchSpec, JobState, QueueUnavailable
from slipstream.archive.records import BatchPayload, write_batch
from slipstream.archive.result_files import LINES, TABLE
from slipstream.archive.spill_queue import SpillQueue
from slipstream.errors import SlipstreamError
from slipstream.objects.store import ObjectStores, ObjectUrl
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.object_store import BUCKET, object_server

BATCH, CHUNK = "spill", 500
RESTART_S, LOOK_S = 0.5, 0.25
LIMIT_MB = 300
LOOKED_UP = 500
TIMEOUT_S = 4 * 3600.0
MOTO = "moto"
BUSY_CORES = 0.25
"""That other processes take: less does not explain a low rate."""
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """How much is asked."""

    jobs: int
    kills: int
    seed: int
    queue_mb: int
    file_mb: int
    workers: int = 2
    compactors: int = 1
    """Of several each believes again and again that it is the only one."""

    def queue(self, redis: str, folder: str) -> Given:
        """What roles are told."""
        return Given(redis, folder, self.queue_mb << 20, self.file_mb << 20)


@dataclass
class Run:
    """Everything of one run."""

    plan: Plan
    given: Given
    server: EmbeddedServer
    chance: random.Random
    roles: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    spent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Processor seconds by role, starts included."""
    others_cores: float = 0.0
    """That all other processes of the machine took meanwhile."""
    in_file: int = 0
    """Deaths of a compactor while a file was planned or its jobs were being freed."""
    peak_bytes: int = 0
    peak_resident: int = 0
    begin_bytes: int = 0
    end_bytes: int = 0
    """What Redis takes before the first job, and when all are in files."""
    contents_lost: int = 0
    """Of some that were looked for: those whose result, which lies in a file, is not found by its content."""
    contents_invented: int = 0
    """Results found of contents that nobody captioned."""
    submitted_s: float = 0.0
    done_s: float = 0.0
    is_over: bool = False

    @property
    def compactors(self) -> list[str]:
        """Their names."""
        return [f"compact-{number}" for number in range(self.plan.compactors)]

    async def start(self, name: str) -> None:
        """One of the roles."""
        given = self.given
        words = given.redis, given.folder, str(given.queue_bytes), str(given.file_bytes)
        role = name.partition("-")[0]
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.spill_roles", role, *words)
        self.roles[name] = process

    async def kill(self, name: str) -> None:
        """And starts it again."""
        self.measure(name)
        if name == "redis":
            await self.server.kill()
            await asyncio.sleep(RESTART_S)
            await self.server.start()
        else:
            self.roles[name].kill()
            await self.roles[name].wait()
            await asyncio.sleep(RESTART_S)
            await self.start(name)
        self.deaths[name.partition("-")[0]] += 1

    def measure(self, name: str) -> None:
        """Adds what the process has spent, which is about to end."""
        pid = self.server.pid if name == "redis" else self.roles[name].pid
        with contextlib.suppress(OSError):
            self.spent_s[name.partition("-")[0]] += cpu_s(pid, with_children=True)


async def run_spill(args: argparse.Namespace) -> dict[str, Any]:
    """The part."""
    sizes = {"queue_mb": args.spill_queue_mb, "file_mb": args.spill_file_mb}
    plan = Plan(args.spill_jobs, args.spill_kills, args.seed, workers=args.spill_workers, **sizes)
    load_before = os.getloadavg()[0]
    async with results_at(args.spill_to) as address:
        report = await spill(plan, address)
    return report | {"rate_asked": args.spill_rate, **rate_facts(report, args.spill_rate, load_before)}


def rate_facts(report: dict[str, Any], asked: float, load_before: float) -> dict[str, Any]:
    """Whether the rate was reached; and where it was not, whether the machine had other work."""
    is_reached = report["jobs_per_s"] >= asked
    others = report["others_cores"]
    facts: dict[str, Any] = {"load_before": round(load_before, 1), "reaches_rate_asked": is_reached}
    if not is_reached:
        is_busy = others >= BUSY_CORES
        facts["rate_missed"] = f"other processes took {others:.2f} cores meanwhile" if is_busy else "on an idle machine"
    return facts


@contextlib.asynccontextmanager
async def results_at(to: str) -> AsyncIterator[str]:
    """The address of a folder: "" is one of a local disk, "moto" one in a bucket of moto's server, which is started;
    anything else is one itself, with the credentials of the environment. The first two are gone afterwards."""
    if to == MOTO:
        async with object_server() as bucket:
            os.environ.update(bucket.environment)
            yield f"s3://{BUCKET}/results"
    elif to:
        yield to
    else:
        with tempfile.TemporaryDirectory(prefix="slipstream-results-") as folder:
            yield f"file://{folder}"


async def spill(plan: Plan, address: str) -> dict[str, Any]:
    """Takes all jobs through, and says what came of them."""
    with tempfile.TemporaryDirectory(prefix="slipstream-spill-") as folder:
        async with EmbeddedServer(Path(folder) / "redis") as server:
            run = Run(plan, plan.queue(server.url, address), server, random.Random(plan.seed))
            began, began_busy_s = time.monotonic(), busy_s()
            async with _roles(run):
                await _drain(run)
            own_s = sum(run.spent_s.values())
            run.others_cores = max(busy_s() - began_busy_s - own_s, 0.0) / (time.monotonic() - began)
            return _report(run, await count_results(address))


@contextlib.asynccontextmanager
async def _roles(run: Run) -> AsyncIterator[None]:
    workers = [f"work-{number}" for number in range(run.plan.workers)]
    try:
        for name in (*run.compactors, "feed", *workers):
            await run.start(name)
        yield
    finally:
        for name in ("redis", *run.roles):
            run.measure(name)
        for process in run.roles.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _drain(run: Run) -> None:
    """From the first item handed in until all results are in files."""
    run.begin_bytes = await _memory(run)
    queue, began, began_cpu_s = run.given.queue(), time.monotonic(), time.process_time()
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        watching = group.create_task(_watch_memory(run))
        killing = group.create_task(_kill_now_and_then(run, queue))
        contending = group.create_task(_contend(run))
        await _submit(run, queue)
        run.submitted_s = time.monotonic() - began
        say(f"{run.plan.jobs:,} jobs handed in after {run.submitted_s:.0f} s")
        while (num_done := await _num_done(queue)) < run.plan.jobs:
            say(f"{num_done:,} done after {time.monotonic() - began:.0f} s, {run.deaths.total()} deaths")
            await asyncio.sleep(min(10.0, 1 + run.plan.jobs / 10_000))
        run.done_s = time.monotonic() - began
        await killing
        while await _patiently(lambda: _num_here(run)):  # noqa: ASYNC110 (they go in another process)
            await asyncio.sleep(LOOK_S)
        run.is_over = True
        await asyncio.gather(watching, contending)
    run.end_bytes = await _memory(run)
    run.spent_s["hand_in"] = time.process_time() - began_cpu_s
    await _look_up(run, queue)
    await queue.close()


async def _look_up(run: Run, queue: SpillQueue) -> None:
    """Results by their content, as a batch of the same files would."""
    total = run.plan.jobs
    for number in run.chance.sample(range(total), min(LOOKED_UP, total)):
        found = await queue.find_result(content_of(f"{number:08d}"))
        run.contents_lost += found != made_up_result(result_of(number))
        run.contents_invented += await queue.find_result(content_of(f"{total + number:08d}")) is not None


async def _submit(run: Run, queue: SpillQueue) -> None:
    await _patiently(lambda: queue.open_batch(BatchSpec(BATCH, options=write_batch(BatchPayload("", {})))))
    total = run.plan.jobs
    for start in range(0, total, CHUNK):
        jobs = made_up_jobs(range(start, min(start + CHUNK, total)))
        await _patiently(lambda jobs=jobs: queue.submit(BATCH, jobs))  # type: ignore[misc]
    await _patiently(lambda: queue.seal_batch(BATCH))


async def _kill_now_and_then(run: Run, queue: SpillQueue) -> None:
    """So many deaths, spread over what is done."""
    kills, total = run.plan.kills, run.plan.jobs
    for number in range(kills):
        due = (number + 0.5) * total / kills
        while await _num_done(queue) < due:  # noqa: ASYNC110 (it may be done in another process)
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(run.chance.uniform(0, LOOK_S))
        name = run.chance.choice([run.chance.choice(run.compactors)] * 2 + ["feed", "redis"])
        if name in run.compactors:
            run.in_file += await _is_writing(run)
        await run.kill(name)


async def _is_writing(run: Run) -> bool:
    async with Redis.from_url(run.given.redis) as redis:
        try:
            found: list[Any] = await redis.hmget(f"{{slipstream}}:b:{BATCH}", "plan", "freeing")
        except RedisError:
            return False
    return any(found)


async def _contend(run: Run) -> None:
    """Of several compactors the one that is elected is forgotten, so that another begins what it is at."""
    while not run.is_over and run.plan.compactors > 1:
        async with Redis.from_url(run.given.redis) as redis:
            with contextlib.suppress(RedisError, OSError):
                await redis.delete("{slipstream}:compactor")
        await asyncio.sleep(LOOK_S)


async def _watch_memory(run: Run) -> None:
    while not run.is_over:
        async with Redis.from_url(run.given.redis) as redis:
            with contextlib.suppress(RedisError, OSError):
                facts = await redis.info("memory")
                run.peak_bytes = max(run.peak_bytes, int(facts["used_memory"]))
                run.peak_resident = max(run.peak_resident, int(facts["used_memory_rss"]))
        await asyncio.sleep(LOOK_S)


async def _memory(run: Run) -> int:
    async with Redis.from_url(run.given.redis) as redis:
        return int((await redis.info("memory"))["used_memory"])


async def _num_done(queue: SpillQueue) -> int:
    return (await _patiently(lambda: queue.get_batch(BATCH))).counts[JobState.DONE]


async def _num_here(run: Run) -> int:
    """Jobs that are not in files yet."""
    async with Redis.from_url(run.given.redis) as redis:
        try:
            return int(await redis.llen(f"{{slipstream}}:b:{BATCH}:ended"))
        except (RedisError, OSError) as error:
            raise QueueUnavailable(str(error)) from None


async def _patiently(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Redis dies now and then; what is not there yet will be."""
    while True:
        try:
            return await ask()
        except SlipstreamError:
            await asyncio.sleep(LOOK_S)


@dataclass
class Counted:
    """What lies in a folder of results."""

    jobs: Counter[str] = field(default_factory=Counter)
    """By name, in how many lines."""
    num_bytes: dict[str, list[int]] = field(default_factory=lambda: {LINES: [], TABLE: [], "chunk": []})
    """Of each object, by kind."""

    def mb(self, kind: str) -> float:
        """All of a kind together."""
        return round(sum(self.num_bytes[kind]) / 1e6, 1)


async def count_results(address: str, batch: str = BATCH) -> Counted:
    """Of one batch, from the objects themselves."""
    url, found = ObjectUrl.parse(address), Counted()
    store = ObjectStores().of(url)
    async for facts in store.listed(url.below(batch)):
        name = facts.url.key.rpartition("/")[2]
        kind = "chunk" if name.startswith("chunk-") else LINES if name.endswith(LINES) else TABLE
        found.num_bytes[kind].append(facts.num_bytes)
        if kind == LINES:
            lines = gzip.decompress(await store.read(facts)).splitlines()
            found.jobs.update(json.loads(line)["custom_id"] for line in lines)
    return found


def _report(run: Run, counted: Counted) -> dict[str, Any]:
    total, parts = run.plan.jobs, counted.num_bytes[LINES]
    peak_mb = run.peak_bytes / 1e6
    return {
        "jobs": total,
        "deaths": dict(run.deaths),
        "deaths_in_a_file": run.in_file,
        "results_missing": total - len(counted.jobs),
        "results_doubled": counted.jobs.total() - len(counted.jobs),
        "contents_lost": run.contents_lost,
        "contents_invented": run.contents_invented,
        "files": len(parts),
        "jobs_a_file": round(total / max(len(parts), 1)),
        "largest_file_mb": round(max(parts, default=0) / 1e6, 2),
        "lines_mb": counted.mb(LINES),
        "tables_mb": counted.mb(TABLE),
        "chunks_mb": counted.mb("chunk"),
        "submit_s": round(run.submitted_s, 1),
        "done_s": round(run.done_s, 1),
        "jobs_per_s": round(total / run.done_s, 1),
        "processor_us_a_job": {name: round(1e6 * spent_s / total) for name, spent_s in sorted(run.spent_s.items())},
        "others_cores": round(run.others_cores, 2),
        "redis_peak_mb": round(peak_mb, 1),
        "redis_peak_resident_mb": round(run.peak_resident / 1e6, 1),
        "redis_bytes_left_a_job": round((run.end_bytes - run.begin_bytes) / total, 1),
        "over_memory": int(peak_mb >= LIMIT_MB),
        "workers": run.plan.workers,
    }
