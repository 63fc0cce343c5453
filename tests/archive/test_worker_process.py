"""Workers as processes: one is frozen and wakes too late, one job outlasts many leases, one kills whoever runs it."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from slipstream.archive.queue import BatchSpec, JobSpec, JobState
from slipstream.archive.redis_queue import RedisQueue
from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.worker_process import POLICY
from tests.archive.worlds import until


class Workers:
    """Worker processes, killed at the end, that log to one folder."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> asyncio.subprocess.Process:
        with self.log_path(len(self.processes)).open("w") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.archive.worker_process", self.url), stderr=log
            )
        self.processes.append(process)
        return process

    def log_path(self, number: int) -> Path:
        return self.folder / f"worker-{number}.log"

    def events(self, name: str) -> list[tuple[int, str]]:
        """The number of the worker and the job, of every such event."""
        found = []
        for number in range(len(self.processes)):
            for line in self.log_path(number).read_text().splitlines():
                entry = json.loads(line)
                if entry["event"] == name:
                    found.append((number, entry["job_id"]))
        return found


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with EmbeddedServer(tmp_path / "redis") as server:
        yield server.url


@pytest.fixture
async def queue(url: str) -> AsyncIterator[RedisQueue]:
    queue = RedisQueue(url, policy=POLICY)
    await queue.open_batch(BatchSpec("batch"))
    yield queue
    await queue.close()


@pytest.fixture
async def workers(url: str, tmp_path: Path) -> AsyncIterator[Workers]:
    made = Workers(url, tmp_path)
    yield made
    for process in made.processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
    for process in made.processes:
        try:
            await asyncio.wait_for(process.wait(), 60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def submit(queue: RedisQueue, **tasks: object) -> None:
    await queue.submit("batch", [JobSpec(name, json.dumps(task)) for name, task in tasks.items()])


@pytest.mark.long
async def test_a_worker_that_wakes_too_late_cannot_commit(queue: RedisQueue, workers: Workers) -> None:
    await submit(queue, short={"sleep_s": POLICY.lease_s}, long={"sleep_s": 2.5 * POLICY.lease_s})
    frozen = await workers.start()

    async def has_taken() -> bool:
        return len(workers.events("job.taken")) == 2

    async def is_retaken() -> bool:
        return len(workers.events("job.taken")) >= 4

    async def has_noticed() -> bool:
        return len(workers.events("job.stale_commit_refused") + workers.events("job.lost")) == 2

    async def is_done() -> bool:
        """And it was said, which follows the commit."""
        counts = (await queue.get_batch("batch")).counts
        return counts[JobState.DONE] == 2 and len(workers.events("job.committed")) >= 2

    await until(has_taken)
    frozen.send_signal(signal.SIGSTOP)
    await workers.start()
    await until(is_retaken)
    frozen.send_signal(signal.SIGCONT)
    await until(has_noticed)
    await until(is_done)
    jobs, _ = await queue.list_jobs("batch")
    assert [job.epoch for job in jobs] == [2, 2], "the long one outlasted its lease, unharmed"
    assert [job.crashes for job in jobs] == [0, 0], "the worker that had them was alive"
    committed = workers.events("job.committed")
    assert sorted(committed) == sorted((1, job.job_id) for job in jobs)


@pytest.mark.long
async def test_a_job_that_kills_its_worker_ends_dead_and_its_neighbours_done(
    queue: RedisQueue, workers: Workers
) -> None:
    await submit(queue, poison={"dies": True}, **{f"good{i}": {"sleep_s": 0.3} for i in range(8)})

    async def is_over() -> bool:
        for process in workers.processes[-1:] or [await workers.start()]:
            if process.returncode is not None:
                await workers.start()
        return (await queue.depth()).queued + (await queue.depth()).running == 0

    async def is_said() -> bool:
        return len(workers.events("job.committed")) >= 8

    await until(is_over)
    await until(is_said)
    counts = (await queue.get_batch("batch")).counts
    assert (counts[JobState.DONE], counts[JobState.DEAD]) == (8, 1)
    jobs, _ = await queue.list_jobs("batch", frozenset({JobState.DEAD}))
    assert jobs[0].error == f"whatever ran it died {POLICY.max_crashes} times"
    assert len(workers.events("job.committed")) == 8
