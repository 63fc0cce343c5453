"""The part `spill`: many jobs through feeder, queue and compactor, with a captioner that answers at once.

Redis, workers, a feeder and a compactor are processes; the feeder, the compactor and Redis are killed at random moments
of the run and started again. In the end the results are counted in the files: each job exactly once.
"""

import argparse
import asyncio
import contextlib
import gc
import gzip
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from redis.asyncio import Redis
from redis.exceptions import RedisError

from bench.common import cpu_s, say
from slipstream.archive.compactor import Compactor
from slipstream.archive.feeder import Feeder
from slipstream.archive.messages import ModelReceipt, Receipt
from slipstream.archive.queue import BatchSpec, JobSpec, JobState, Lease, Outcome, QueuePolicy, QueueUnavailable
from slipstream.archive.records import BatchPayload, JobPayload, write_batch, write_job, write_result
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.spill_queue import SpillQueue
from slipstream.archive.worker import Worker
from slipstream.errors import SlipstreamError
from slipstream.logs import configure_logs
from slipstream.messages import Caption, VideoFacts
from slipstream.stack.redis_server import EmbeddedServer

BATCH, CHUNK = "spill", 500
FRAMES, TEXT_CHARS = 32, 700
RESULTS = 997
SLOTS = 64
"""Of a worker: its jobs take no time, only round trips."""
RESTART_S, LOOK_S = 0.5, 0.25
LIMIT_MB, RATE_ASKED = 300, 2000
LOOKED_UP = 500
TIMEOUT_S = 4 * 3600.0
T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """What a role is told, on its command line."""

    redis: str
    folder: str
    queue_bytes: int
    file_bytes: int

    def queue(self) -> SpillQueue:
        """Opens it."""
        policy = QueuePolicy(lease_s=5.0, max_backlog=100_000_000, queue_bytes=self.queue_bytes)
        return SpillQueue(self.redis, ResultsFolder(self.folder), policy=policy)


# -- roles ------------------------------------------------------------------------------------------------------------


def made_up_result(seed: int) -> str:
    """As large as that of a video of 32 frames."""
    words = random.Random(seed)
    times = tuple(float(time_s) for time_s in np.linspace(0.0, words.uniform(50, 60), FRAMES))
    text = "".join(words.choice("abcdefghij klmnop qrstu ") for _ in range(TEXT_CHARS))
    video = VideoFacts(duration_s=60.0, num_frames=FRAMES, timestamps_s=times)
    caption = Caption(text, 160, None, video=video)
    model = ModelReceipt("target", "0" * 64, "bfloat16")
    receipt = Receipt("0", model, model, {"prompt": "What happens?"}, f"{seed:064x}", 1_000_000, f"{seed + 1:064x}")
    return write_result(caption, receipt)


def made_up_results() -> list[str]:
    """Some that differ."""
    return [made_up_result(seed) for seed in range(RESULTS)]


def outcome_of(lease: Lease, results: Sequence[str]) -> Outcome:
    """With one of these results."""
    result, content_key = results[_result_of(int(lease.custom_id))], _content_of(lease.custom_id)
    return Outcome(JobState.DONE, result, tallies={"tokens": 160.0}, content_key=content_key)


def made_up_jobs(numbers: Iterable[int]) -> list[JobSpec]:
    """Those of these numbers."""
    return [JobSpec(f"{number:08d}", write_job(JobPayload(_path(number), {}, ""))) for number in numbers]


def _result_of(job: int) -> int:
    return job * 37 % RESULTS


def _content_of(custom_id: str) -> str:
    return f"content of {custom_id}"


async def work(given: Given) -> None:
    """Captions that are there at once."""
    results = made_up_results()

    async def handle(lease: Lease, progress: Callable[[str], None]) -> Outcome:
        return outcome_of(lease, results)

    worker = Worker(given.queue(), handle, slots=SLOTS)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()


async def compact(given: Given) -> None:
    """Until killed."""
    queue = given.queue()
    await Compactor(queue, queue.folder, given.file_bytes, 20.0).run()


async def feed(given: Given) -> None:
    """Until killed."""
    queue = given.queue()
    await Feeder(queue, queue.folder).run()


ROLES = {"work": work, "compact": compact, "feed": feed}


# -- run --------------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """Everything of one run."""

    args: argparse.Namespace
    given: Given
    server: EmbeddedServer
    chance: random.Random
    roles: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    spent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Processor seconds by role, starts included."""
    in_file: int = 0
    """Deaths of the compactor while a file was planned or its jobs were being freed."""
    peak_bytes: int = 0
    peak_resident: int = 0
    begin_bytes: int = 0
    end_bytes: int = 0
    contents_lost: int = 0
    """Of some that were looked for: those whose result, which lies in a file, is not found by its content."""
    contents_invented: int = 0
    """Results found of contents that nobody captioned."""
    """What Redis takes before the first job, and when all are in files."""
    submitted_s: float = 0.0
    done_s: float = 0.0
    is_over: bool = False

    async def start(self, name: str) -> None:
        given = self.given
        words = given.redis, given.folder, str(given.queue_bytes), str(given.file_bytes)
        role = name.partition("-")[0]
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.archive_spill", role, *words)
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
        self.deaths[name] += 1

    def measure(self, name: str) -> None:
        """Adds what the process has spent, which is about to end."""
        pid = self.server.pid if name == "redis" else self.roles[name].pid
        with contextlib.suppress(OSError):
            self.spent_s[name.partition("-")[0]] += cpu_s(pid, with_children=True)


async def run_spill(args: argparse.Namespace) -> dict[str, Any]:
    """The part."""
    with tempfile.TemporaryDirectory(prefix="slipstream-spill-") as folder:
        async with EmbeddedServer(Path(folder) / "redis") as server:
            results = Path(folder) / "results"
            file_bytes, queue_bytes = (mb << 20 for mb in (args.spill_file_mb, args.spill_queue_mb))
            given = Given(server.url, f"file://{results}", queue_bytes, file_bytes)
            run = _Run(args, given, server, random.Random(args.seed))
            async with _roles(run):
                await _drain(run)
            return _report(run, results)


@contextlib.asynccontextmanager
async def _roles(run: _Run) -> AsyncIterator[None]:
    names = [f"work-{number}" for number in range(run.args.spill_workers)]
    try:
        for name in ("compact", "feed", *names):
            await run.start(name)
        yield
    finally:
        for name in ("redis", *run.roles):
            run.measure(name)
        for process in run.roles.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _drain(run: _Run) -> None:
    """From the first item handed in until all results are in files."""
    run.begin_bytes = await _memory(run)
    queue, began, began_cpu_s = run.given.queue(), time.monotonic(), time.process_time()
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        watching = group.create_task(_watch_memory(run))
        killing = group.create_task(_kill_now_and_then(run, queue))
        await _submit(run, queue)
        run.submitted_s = time.monotonic() - began
        say(f"{run.args.spill_jobs:,} jobs handed in after {run.submitted_s:.0f} s")
        while (num_done := await _num_done(queue)) < run.args.spill_jobs:
            say(f"{num_done:,} done after {time.monotonic() - began:.0f} s, {run.deaths.total()} deaths")
            await asyncio.sleep(min(10.0, 1 + run.args.spill_jobs / 10_000))
        run.done_s = time.monotonic() - began
        await killing
        while await _patiently(lambda: _num_here(run)):  # noqa: ASYNC110 (they go in another process)
            await asyncio.sleep(LOOK_S)
        run.is_over = True
        await watching
    run.end_bytes = await _memory(run)
    run.spent_s["hand_in"] = time.process_time() - began_cpu_s
    await _look_up(run, queue)
    await queue.close()


async def _look_up(run: _Run, queue: SpillQueue) -> None:
    """Results by their content, as a batch of the same files would."""
    total = run.args.spill_jobs
    for number in run.chance.sample(range(total), min(LOOKED_UP, total)):
        found = await queue.find_result(_content_of(f"{number:08d}"))
        run.contents_lost += found != made_up_result(_result_of(number))
        run.contents_invented += await queue.find_result(_content_of(f"{total + number:08d}")) is not None


async def _submit(run: _Run, queue: SpillQueue) -> None:
    await _patiently(lambda: queue.open_batch(BatchSpec(BATCH, options=write_batch(BatchPayload("", {})))))
    total = run.args.spill_jobs
    for start in range(0, total, CHUNK):
        jobs = made_up_jobs(range(start, min(start + CHUNK, total)))
        await _patiently(lambda jobs=jobs: queue.submit(BATCH, jobs))  # type: ignore[misc]
    await _patiently(lambda: queue.seal_batch(BATCH))


def _path(number: int) -> str:
    return f"/archive/{number // 1000:05d}/recording-{number:08d}.mp4"


async def _kill_now_and_then(run: _Run, queue: SpillQueue) -> None:
    """So many deaths, spread over what is done."""
    kills, total = run.args.spill_kills, run.args.spill_jobs
    for number in range(kills):
        due = (number + 0.5) * total / kills
        while await _num_done(queue) < due:  # noqa: ASYNC110 (it may be done in another process)
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(run.chance.uniform(0, LOOK_S))
        name = run.chance.choice(["compact", "compact", "feed", "redis"])
        if name == "compact":
            run.in_file += await _is_writing(run)
        await run.kill(name)


async def _is_writing(run: _Run) -> bool:
    async with Redis.from_url(run.given.redis) as redis:
        try:
            found: list[Any] = await redis.hmget(f"{{slipstream}}:b:{BATCH}", "plan", "freeing")
        except RedisError:
            return False
    return any(found)


async def _watch_memory(run: _Run) -> None:
    while not run.is_over:
        async with Redis.from_url(run.given.redis) as redis:
            with contextlib.suppress(RedisError, OSError):
                facts = await redis.info("memory")
                run.peak_bytes = max(run.peak_bytes, int(facts["used_memory"]))
                run.peak_resident = max(run.peak_resident, int(facts["used_memory_rss"]))
        await asyncio.sleep(LOOK_S)


async def _memory(run: _Run) -> int:
    async with Redis.from_url(run.given.redis) as redis:
        return int((await redis.info("memory"))["used_memory"])


async def _num_done(queue: SpillQueue) -> int:
    return (await _patiently(lambda: queue.get_batch(BATCH))).counts[JobState.DONE]


async def _num_here(run: _Run) -> int:
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


def _report(run: _Run, results: Path) -> dict[str, Any]:
    """Counted from the files."""
    found: Counter[str] = Counter()
    paths = sorted(results.glob(f"{BATCH}/part-*.jsonl.gz"))
    for path in paths:
        with gzip.open(path) as lines:
            found.update(json.loads(line)["custom_id"] for line in lines)
    total = run.args.spill_jobs
    missing = total - len(found)
    peak_mb = run.peak_bytes / 1e6
    return {
        "jobs": total,
        "deaths": dict(run.deaths),
        "deaths_in_a_file": run.in_file,
        "results_missing": missing,
        "results_doubled": sum(found.values()) - len(found),
        "contents_lost": run.contents_lost,
        "contents_invented": run.contents_invented,
        "files": len(paths),
        "lines_mb": round(sum(path.stat().st_size for path in paths) / 1e6, 1),
        "tables_mb": round(sum(path.stat().st_size for path in results.glob(f"{BATCH}/*.parquet")) / 1e6, 1),
        "chunks_mb": round(sum(path.stat().st_size for path in results.glob(f"{BATCH}/chunk-*")) / 1e6, 1),
        "submit_s": round(run.submitted_s, 1),
        "done_s": round(run.done_s, 1),
        "jobs_per_s": round(total / run.done_s, 1),
        "reaches_rate_asked": total / run.done_s >= RATE_ASKED,
        "processor_us_a_job": {name: round(1e6 * spent_s / total) for name, spent_s in sorted(run.spent_s.items())},
        "redis_peak_mb": round(peak_mb, 1),
        "redis_peak_resident_mb": round(run.peak_resident / 1e6, 1),
        "redis_bytes_left_a_job": round((run.end_bytes - run.begin_bytes) / total, 1),
        "over_memory": int(peak_mb >= LIMIT_MB),
        "workers": run.args.spill_workers,
    }


if __name__ == "__main__":
    configure_logs(sys.argv[1], "warning")
    gc.collect()
    gc.freeze()  # as services do once they are set up
    asyncio.run(ROLES[sys.argv[1]](Given(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))))
