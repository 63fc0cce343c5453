"""How many jobs the queue takes in and lets through a second, every write durable before it is answered.

    python -m bench.queue_rates [--url redis://...] [--jobs 2000]

Without a URL it starts a server of its own. The last line of stdout is one JSON document.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from slipstream.archive.queue import BatchSpec, JobSpec, JobState, Lease, Outcome
from slipstream.archive.redis_queue import RedisQueue
from slipstream.archive.worker import Worker
from slipstream.logs import configure_logs
from slipstream.stack.redis_server import EmbeddedServer

CHUNK, CONNECTIONS, SLOTS = 100, 32, 8


@contextlib.asynccontextmanager
async def server_url(url: str) -> AsyncIterator[str]:
    if url:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedServer(Path(folder)) as server:
            yield server.url


async def rate(num: int, work: Callable[[], Awaitable[None]]) -> float:
    started = time.perf_counter()
    await work()
    return round(num / (time.perf_counter() - started), 1)


def jobs_of(name: str, num: int) -> list[JobSpec]:
    return [JobSpec(f"{name}{number}", json.dumps({"source": f"{name}/{number}.mp4"})) for number in range(num)]


async def submit_singly(queue: RedisQueue, jobs: list[JobSpec]) -> None:
    for job in jobs:
        await queue.submit("batch", [job])


async def submit_in_parallel(queue: RedisQueue, jobs: list[JobSpec]) -> None:
    async with asyncio.TaskGroup() as group:
        for first in range(CONNECTIONS):
            group.create_task(submit_singly(queue, jobs[first::CONNECTIONS]))


async def work_off(queue: RedisQueue, num_workers: int) -> None:
    """Until nothing waits or runs."""

    async def handle(lease: Lease, progress: Callable[[str], None]) -> Outcome:
        return Outcome(JobState.DONE, result="{}")

    workers = [Worker(queue, handle, slots=SLOTS) for _ in range(num_workers)]
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(worker.run())
        while (depth := await queue.depth()).queued + depth.running:  # noqa: ASYNC110 (the server knows)
            await asyncio.sleep(0.02)
        for worker in workers:
            worker.stop()


async def measure(url: str, num: int) -> dict[str, float]:
    async with server_url(url) as at:
        queue = RedisQueue(at, f"bench-{time.time_ns()}")
        await queue.open_batch(BatchSpec("batch"))
        singly, parallel, chunked = (jobs_of(name, num) for name in ("singly", "parallel", "chunked"))
        rates = {
            "submits_per_s_one_by_one": await rate(num, lambda: submit_singly(queue, singly)),
            f"submits_per_s_{CONNECTIONS}_at_a_time": await rate(num, lambda: submit_in_parallel(queue, parallel)),
            f"jobs_per_s_submitted_in_chunks_of_{CHUNK}": await rate(num, lambda: _submit(queue, chunked)),
            "noop_jobs_per_s_one_worker": await rate(3 * num, lambda: work_off(queue, 1)),
        }
        await queue.close()
    return rates


async def _submit(queue: RedisQueue, jobs: list[JobSpec]) -> None:
    await queue.submit("batch", jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="")
    parser.add_argument("--jobs", type=int, default=2000)
    options = parser.parse_args()
    configure_logs("bench", "error")
    rates = asyncio.run(measure(options.url, options.jobs))
    for name, value in rates.items():
        print(f"{name:45} {value:10.1f}")
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
