"""The part `put`: results in a store that speaks S3 and is none of ours (moto's server, a process of its own).

What the archive rests on is asked of it first: of many who put an object where there is none, one does. Then jobs go
through two compactors, each of which believes again and again that it is the only one, and which are killed. Last an
object is there already under the name of a result file, with other bytes.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from structlog.testing import capture_logs

from bench.archive_spill import MOTO, Plan, count_results, results_at, spill
from bench.common import say
from bench.spill_roles import Given, made_up_jobs, made_up_results, outcome_of
from slipstream.archive.compactor import Compactor
from slipstream.archive.queue import BatchSpec, JobState
from slipstream.archive.records import BatchPayload, write_batch
from slipstream.archive.result_files import LINES
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.spill_queue import SpillQueue
from slipstream.objects.store import ObjectStores, ObjectUrl
from slipstream.stack.redis_server import EmbeddedServer

OBJECTS, WRITERS, CONTENT_BYTES = 50, 8, 20_000
QUEUE_MB, FILE_MB = 16, 1
PLANTED, BESIDE, FEW = "planted", "beside", 40
"""Two batches, and their jobs."""


async def run_put(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part."""
    async with results_at(MOTO) as address:
        puts_wrong = await _race(f"{address}/race", given.seed)
        say(f"{OBJECTS} objects, {WRITERS} who put each: {puts_wrong} wrong")
        plan = Plan(given.put_jobs, given.put_kills, given.seed, QUEUE_MB, FILE_MB, workers=1, compactors=2)
        report = await spill(plan, f"{address}/spill")
        with tempfile.TemporaryDirectory(prefix="slipstream-put-") as folder:
            async with EmbeddedServer(Path(folder) / "redis") as server:
                there = await _other_bytes(Given(server.url, f"{address}/there", 16 << 20, 1 << 20))
    return {"server": "moto", "puts": OBJECTS * WRITERS, "puts_wrong": puts_wrong, **report, **there}


async def _race(address: str, seed: int) -> int:
    """How many objects were not written once, as the first of their writers had it."""
    folder, chance = ResultsFolder(address), random.Random(seed)
    wrong = 0
    for number in range(OBJECTS):
        name, contents = f"{number:03}", [chance.randbytes(CONTENT_BYTES) for _ in range(WRITERS)]
        answers = await asyncio.gather(*(folder.put(name, content) for content in contents))
        winners = [content for content, there in zip(contents, answers, strict=True) if there is None]
        is_right = len(winners) == 1 and await folder.read(name) == winners[0]
        told = {there for there in answers if there is not None}
        wrong += not (is_right and told == set(winners) and await folder.put(name, winners[0]) is None)
    return wrong


class _TakenFolder(ResultsFolder):
    """Somebody else puts the first file of a batch, with other bytes, just before we do."""

    def __init__(self, url: str, batch: str, content: bytes) -> None:
        super().__init__(url)
        self._batch, self._content = batch, content
        self.taken = ""
        """Its name."""

    async def put(self, name: str, data: bytes) -> bytes | None:
        """See there."""
        if not self.taken and name.startswith(f"{self._batch}/") and name.endswith(LINES):
            self.taken = name
            await super().put(name, self._content)
        return await super().put(name, data)


async def _other_bytes(given: Given) -> dict[str, int]:
    """What becomes of a result file whose name is taken by a right file of other jobs."""
    queue, results = given.queue(), made_up_results()
    try:
        await _work(queue, "other", range(FEW), results)
        await _compact(given, queue, queue.folder)
        (name,) = [name async for name in queue.folder.names() if name.endswith(LINES)]
        content = await queue.folder.read(name)
        for batch in (PLANTED, BESIDE):
            await _work(queue, batch, range(FEW, 2 * FEW), results)
        folder = _TakenFolder(given.folder, PLANTED, content)
        with capture_logs() as logs:
            await _compact(given, queue, folder)
        errors = [str(entry.get("error")) for entry in logs if entry["event"] == "results.not_written"]
        said = {
            "error_unnamed": int(not any(folder.taken in error for error in errors)),
            "overwritten": int(await folder.read(folder.taken) != content),
            "lost_meanwhile": FEW - await _listed(queue, PLANTED),
            "held_up_beside": FEW - len((await count_results(given.folder, BESIDE)).jobs),
        }
        await _move_away(given, folder.taken)
        await _compact(given, queue, queue.folder)
        lines = (await count_results(given.folder, PLANTED)).jobs
        return said | {"not_written_afterwards": abs(FEW - len(lines)) + abs(FEW - lines.total())}
    finally:
        await queue.close()


async def _work(queue: SpillQueue, batch: str, numbers: range, results: list[str]) -> None:
    """All jobs of a new batch are done."""
    await queue.open_batch(BatchSpec(batch, options=write_batch(BatchPayload("", {}))))
    await queue.submit(batch, made_up_jobs(numbers))
    await queue.seal_batch(batch)
    for lease in await queue.take("worker", len(numbers)):
        await queue.finish(lease, outcome_of(lease, results))


async def _compact(given: Given, queue: SpillQueue, folder: ResultsFolder) -> None:
    """All that can be written is, whoever was elected before."""
    async with Redis.from_url(given.redis) as redis:
        await redis.delete("{slipstream}:compactor")
    compactor = Compactor(queue, folder, given.file_bytes, age_s=0.0)
    while await compactor.step():
        pass


async def _listed(queue: SpillQueue, batch: str) -> int:
    """Jobs that a caller has results of."""
    jobs, _ = await queue.list_jobs(batch, frozenset({JobState.DONE}), 0, 10 * FEW)
    return sum(bool(job.result) for job in jobs)


async def _move_away(given: Given, name: str) -> None:
    """The object that is in the way; its batch need not wait any longer."""
    url = ObjectUrl.parse(given.folder).below(name)
    await ObjectStores().of(url).delete(url)
    async with Redis.from_url(given.redis) as redis:
        await redis.hdel(f"{{slipstream}}:b:{PLANTED}", "blocked")
