"""A queue whose results leave Redis, with its folder and who works on it."""

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from slipstream.archive.compactor import Compactor
from slipstream.archive.feeder import Feeder
from slipstream.archive.queue import (
    BatchSpec,
    BatchState,
    JobRecord,
    JobState,
    SubmitOutcome,
)
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.spill_queue import SpillQueue
from tests.archive.worlds import DONE, POLICY, specs

ROOM = 240_000
"""For some fifty jobs that are yet to be done."""
NAMES = [f"n{number}" for number in range(150)]


class Spill:
    """One queue of its own name, its folder, and who works on it."""

    def __init__(self, url: str, address: str, name: str, room: int = ROOM, file_bytes: int = 9000) -> None:
        self.url, self.name, self.file_bytes = url, name, file_bytes
        self.policy = replace(POLICY, max_backlog=10_000, queue_bytes=room)
        self.folder = ResultsFolder(address)
        self.queue = SpillQueue(url, self.folder, name, self.policy)
        self.compactor = Compactor(self.queue, self.folder, file_bytes, 0.0)
        self.feeder = Feeder(self.queue, self.folder)

    async def fill(self, *names: str, **fields: Any) -> Counter[SubmitOutcome]:
        await self.queue.open_batch(BatchSpec("batch", "me"))
        answers = Counter(await self.queue.submit("batch", specs(*names, **fields)))
        await self.queue.seal_batch("batch")
        return answers

    async def work(self, until: int = 1 << 30) -> None:
        """Until nothing is left to do, or so many are done."""
        while (await self.queue.get_batch("batch")).counts[JobState.DONE] < until:
            leases = await self.queue.take("w", 20)
            for lease in leases:
                await self.queue.finish(lease, replace(DONE, tallies={"tokens": 1.0}))
            if not [leases, await self.compactor.step(), await self.feeder.step()].count(True) and not leases:
                break

    async def list(self, limit: int = 37, states: frozenset[JobState] = frozenset()) -> list[JobRecord]:
        jobs, after = await self.queue.list_jobs("batch", states, limit=limit)
        while after:
            more, after = await self.queue.list_jobs("batch", states, after, limit)
            jobs += more
        return jobs

    async def state(self) -> BatchState:
        return (await self.queue.get_batch("batch")).state

    async def keys(self) -> set[str]:
        async with Redis.from_url(self.url) as redis:
            found: list[bytes] = await redis.keys(f"{{{self.name}}}:*")
            return {key.decode().partition(":")[2] for key in found}


def files_in(folder: Path, pattern: str) -> list[Path]:
    """Of the batch."""
    return sorted(folder.glob(f"batch/{pattern}"))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Of all result files."""
    paths = files_in(folder, "part-*.jsonl.gz")
    return [json.loads(line) for path in paths for line in gzip.decompress(path.read_bytes()).splitlines()]
