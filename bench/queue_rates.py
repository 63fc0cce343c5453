"""The part `queues` of scale-check: jobs a second of one gateway's worker on one queue, and of four on four.

Twice: with captions that take a fixed time, as on a GPU elsewhere, so that slots are the limit; and with captions that
are there at once, so that workers and Redis are busy all the time and processor cores are the limit. Four queues are
four servers, or four names on one.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import say
from bench.spill_roles import made_up_result
from slipstream.archive.queue import BatchSpec, JobSpec, JobState, Lease, Outcome, QueuePolicy
from slipstream.archive.redis_queue import RedisQueue
from slipstream.archive.worker import Worker
from slipstream.logs import configure_logs
from slipstream.stack.redis_server import EmbeddedServer

QUEUES = 4
BATCH, CHUNK, LOOK_S = "rates", 500, 0.05
LEAST_RATIO = 3.5
MEASURED = (0.1, 0.9)
"""Between these shares of all jobs: neither the first nor the last worker is alone then."""
POLICY = QueuePolicy(max_backlog=10_000_000)


@dataclass(frozen=True)
class Load:
    """What a caption takes, how many run at once in a worker, and jobs of a queue."""

    caption_s: float
    slots: int
    jobs: int


LOADS = {"captions_of_a_fixed_time": Load(2.0, 8, 80), "captions_at_once": Load(0.0, 64, 6000)}


async def work(url: str, name: str, caption_s: float, slots: int) -> None:
    """A gateway's worker, until SIGTERM."""
    result = made_up_result(1)

    async def handle(lease: Lease, progress: Callable[[str], None]) -> Outcome:
        await asyncio.sleep(caption_s)
        return Outcome(JobState.DONE, result, tallies={"tokens": 160.0})

    worker = Worker(RedisQueue(url, name, POLICY), handle, slots=slots)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()


async def run_queues(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part."""
    report: dict[str, Any] = {"least_ratio": LEAST_RATIO}
    for name, load in LOADS.items():
        one = await _rate(load, servers=1, queues=1)
        found = {"one": one, "four_servers": await _rate(load, QUEUES, 1), "four_names": await _rate(load, 1, QUEUES)}
        found = {key: round(rate, 1) for key, rate in found.items()}
        report[name] = found | {"ratio": round(found["four_servers"] / found["one"], 2)}
        say(f"queues: {name}: {report[name]}")
    report["passed"] = report["captions_of_a_fixed_time"]["ratio"] >= LEAST_RATIO
    return report


async def _rate(load: Load, servers: int, queues: int) -> float:
    """Jobs a second over all queues: so many on each server, each with one worker."""
    with tempfile.TemporaryDirectory(prefix="slipstream-queues-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            names = [f"queue-{number}" for number in range(queues)]
            places = []
            for number in range(servers):
                server = await stack.enter_async_context(EmbeddedServer(Path(folder) / str(number)))
                places += [(server.url, name) for name in names]
            opened = [RedisQueue(*place, POLICY) for place in places]
            for queue in opened:
                stack.push_async_callback(queue.close)
                await _fill(queue, load.jobs)
            await stack.enter_async_context(_workers(places, load))
            return await _measured_rate(opened, load.jobs * len(opened))


async def _fill(queue: RedisQueue, num_jobs: int) -> None:
    await queue.open_batch(BatchSpec(BATCH))
    for start in range(0, num_jobs, CHUNK):
        names = map(str, range(start, min(start + CHUNK, num_jobs)))
        await queue.submit(BATCH, [JobSpec(name, "{}") for name in names])


@contextlib.asynccontextmanager
async def _workers(places: Sequence[tuple[str, str]], load: Load) -> AsyncIterator[None]:
    started = []
    try:
        for place in places:
            words = (*place, str(load.caption_s), str(load.slots))
            started.append(await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.queue_rates", *words))
        yield
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _measured_rate(queues: Sequence[RedisQueue], total: int) -> float:
    """From when a tenth is done until nine tenths are."""
    moments: list[tuple[float, int]] = []
    for share in MEASURED:
        while (done := await _num_done(queues)) < share * total:  # noqa: ASYNC110 (it is done in other processes)
            await asyncio.sleep(LOOK_S)
        moments.append((time.monotonic(), done))
    (began, first), (ended, last) = moments
    return (last - first) / (ended - began)


async def _num_done(queues: Sequence[RedisQueue]) -> int:
    records = await asyncio.gather(*(queue.get_batch(BATCH) for queue in queues))
    return sum(record.counts[JobState.DONE] for record in records)


if __name__ == "__main__":
    configure_logs("queue-rates", "warning")
    asyncio.run(work(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
