"""The queue in Redis whose finished jobs lie in result files and whose later jobs wait in chunks outside.

For callers it is the same queue: a job has one position in its batch for good, and is found there wherever it is. What
the compactor and the feeder ask of it is here, too; each script says what it fixes.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.archive.chunks import Chunk, write_chunk
from slipstream.archive.parts import PartRecord
from slipstream.archive.queue import (
    DamagedRecord,
    JobRecord,
    JobSpec,
    JobState,
    QueuePolicy,
    QueueUnavailable,
    SubmitOutcome,
    UnknownBatch,
    job_id,
    sha256,
)
from slipstream.archive.redis_queue import CHUNK_JOBS, PAGE_PARTS, RedisQueue
from slipstream.archive.redis_rows import job_from, texts
from slipstream.archive.redis_store import CONNECTIONS, OnCall
from slipstream.archive.result_files import FinishedJob, ResultFile
from slipstream.archive.result_reader import ResultReader
from slipstream.archive.results_folder import ResultDiffers, ResultsFolder
from slipstream.errors import InvalidConfig, SlipstreamError
from slipstream.logs import get_logger

OUTSIDE_JOBS = 500
"""Of one chunk at most."""
KNOWN_BATCHES = 64
"""Of which the files are remembered."""
ROWS_BYTES = 4 * 1024**2
LOOK_S = 5.0
"""A result that is not read by then is made again."""


@dataclass(frozen=True)
class FilePlan:
    """Which jobs the next file of a batch has, fixed in the queue."""

    batch_id: str
    number: int
    jobs: tuple[tuple[int, str], ...]
    """Position and id, ascending; none: they are written already, and what is left of them is to be freed."""


@dataclass(frozen=True)
class ChunkDue:
    """A chunk to be fed, from the job `fed` on, while there is room for so many bytes."""

    batch_id: str
    number: int
    fed: int
    chunk: Chunk
    room: int


@dataclass
class _KnownFiles:
    created: str
    """When the batch was made: another batch of the same id has other files."""
    files: list[ResultFile] = field(default_factory=list)


class SpillQueue(RedisQueue):
    """A `JobQueue`; `policy.queue_bytes` says how much it keeps in Redis."""

    def __init__(
        self,
        url: str,
        folder: ResultsFolder,
        name: str = "slipstream",
        policy: QueuePolicy | None = None,
        *,
        scripts: Mapping[str, str] | None = None,
        connections: int = CONNECTIONS,
        on_call: OnCall | None = None,
        replicas: int = 0,
    ) -> None:
        super().__init__(
            url, name, policy, scripts=scripts, connections=connections, on_call=on_call, replicas=replicas
        )
        if self.policy.queue_bytes <= 0:
            raise InvalidConfig("--results-to needs --queue-bytes, the bytes that jobs may take in Redis")
        self.folder = folder
        self._reader = ResultReader(folder)
        self._known: OrderedDict[str, _KnownFiles] = OrderedDict()

    async def check_folder(self) -> None:
        """See `ResultsFolder.check`. A store that is away does not say that anything lies there."""
        is_used = False
        with contextlib.suppress(QueueUnavailable, DamagedRecord):
            is_used = bool(await self._run("lies_outside"))
        await self.folder.check(is_used)

    # -- for callers --------------------------------------------------------------------------------------------------

    async def submit(
        self, batch_id: str, jobs: Sequence[JobSpec], max_waiting: int | None = None
    ) -> list[SubmitOutcome]:
        """Durable when it returns: in Redis, or in a chunk that Redis knows of. Raises what writing one does, too."""
        answers: list[SubmitOutcome] = []
        for start in range(0, len(jobs), CHUNK_JOBS):
            answers += await super().submit(batch_id, jobs[start : start + CHUNK_JOBS], max_waiting)
            if SubmitOutcome.OUTSIDE in answers:
                break
        outside = [number for number, said in enumerate(answers) if said is SubmitOutcome.OUTSIDE]
        outside += range(len(answers), len(jobs))
        answers += [SubmitOutcome.OUTSIDE] * (len(jobs) - len(answers))
        for start in range(0, len(outside), OUTSIDE_JOBS):
            numbers = outside[start : start + OUTSIDE_JOBS]
            said = await self._keep_chunk(
                batch_id, [replace(jobs[number], traceparent="") for number in numbers], max_waiting
            )
            for number, outcome in zip(numbers, said, strict=True):
                answers[number] = outcome
        return answers

    async def _keep_chunk(self, batch_id: str, jobs: Sequence[JobSpec], max_waiting: int | None) -> list[SubmitOutcome]:
        name, data = write_chunk(batch_id, jobs)
        there = await self.folder.put(name, data)
        if there is not None:  # of another release's compressor, or not ours
            self.check_chunk(Chunk(name, len(jobs), ""), there, jobs)
        named = [text for job in jobs for text in (job_id(batch_id, job.custom_id), sha256(job.payload))]
        answer = await self._ask("add_chunk", batch_id, self._quota(max_waiting), name, *named)
        return [SubmitOutcome(word) for word in texts(answer)]

    def check_chunk(self, chunk: Chunk, data: bytes, jobs: Sequence[JobSpec]) -> None:
        """Raises `ResultDiffers` when the object holds other jobs."""
        if chunk.jobs_in(data) != list(jobs):
            raise ResultDiffers(f"{self.folder.address(chunk.name)} holds other jobs; remove it, and submit again")

    async def list_jobs(
        self, batch_id: str, states: frozenset[JobState] = frozenset(), after: int = 0, limit: int = 100
    ) -> tuple[list[JobRecord], int]:
        records, position, end = await self._page(batch_id, states, after, limit)
        if position or (states and JobState.QUEUED not in states):
            return records, position
        here, fed, entries = await self._run("chunks", batch_id)
        if end < here:  # some were fed since
            return (records, end) if records else await self.list_jobs(batch_id, states, end, limit)
        chunks = [Chunk.read(entry) for entry in texts(entries)]
        if not chunks or records:
            return records, here if chunks else 0
        return await self._list_outside(batch_id, chunks, max(after, here) - here + fed, here - fed, limit)

    async def _list_outside(
        self, batch_id: str, chunks: Sequence[Chunk], index: int, base: int, limit: int
    ) -> tuple[list[JobRecord], int]:
        """Jobs that wait in chunks from number `index` of them all on; `base` is the position of the first."""
        begin = 0
        for chunk in chunks:
            if index < begin + chunk.num_jobs:
                jobs = chunk.jobs_in(await self.folder.read(chunk.name))
                some = jobs[index - begin : index - begin + limit]
                end = index + len(some)
                records = [_waiting(batch_id, job) for job in some]
                return records, base + end if end < sum(each.num_jobs for each in chunks) else 0
            begin += chunk.num_jobs
        return [], 0

    async def _records(
        self, batch_id: str, rows: Sequence[Sequence[Any]], states: frozenset[JobState]
    ) -> list[JobRecord]:
        positions = sorted(row[0] for row in rows if len(row) == 1)
        finished = await self._reader.find(await self._files(batch_id), positions) if positions else {}
        records = [finished[row[0]].record if len(row) == 1 else job_from(batch_id, row) for row in rows]
        return [record for record in records if not states or record.state in states]

    async def list_parts(
        self, batch_id: str, job_id: str, after: int = 0, limit: int = PAGE_PARTS
    ) -> tuple[list[PartRecord], int]:
        try:
            return await super().list_parts(batch_id, job_id, after, limit)
        except UnknownBatch:
            where = await self._ask("where", batch_id, job_id)
        if not where:
            return [], 0
        finished = await self._reader.find(await self._files(batch_id), [int(where)])
        left = [part for part in finished[int(where)].parts if part.number >= after]
        return left[:limit], left[limit].number if len(left) > limit else 0

    async def find_result(self, content_key: str) -> str | None:
        """Also one that lies in a file. A store of objects that does not give it is no reason to wait: it is made
        again."""
        found = await super().find_result(content_key)
        if found is not None:
            return found
        content = sha256(content_key)
        where = texts(await self._run("find_filed", content))
        if not where:
            return None
        batch_id, position = where[0], int(where[1])
        try:
            async with asyncio.timeout(LOOK_S):
                job = (await self._reader.find(await self._files(batch_id), [position]))[position]
        except QueueUnavailable:
            raise
        except (SlipstreamError, TimeoutError) as error:
            get_logger().warning("results.unread", batch_id=batch_id, error=str(error) or f"no answer in {LOOK_S:g} s")
            return None
        is_it = job.content == content and job.record.state is JobState.DONE
        return (job.record.result or None) if is_it else None

    async def _files(self, batch_id: str) -> list[ResultFile]:
        """Of a batch. Only the last one that is known and those behind it are asked for: where the store came back
        without its latest writes, others are in their place."""
        known = self._known.setdefault(batch_id, _KnownFiles(""))
        self._known.move_to_end(batch_id)
        while len(self._known) > KNOWN_BATCHES:
            self._known.popitem(last=False)
        while True:
            files = known.files
            start = max(len(files) - 1, 0)
            created, *infos = await self._ask("files", batch_id, start)
            found = [ResultFile.read(info) for info in infos]
            if created.decode() != known.created or found[:1] != files[start:]:
                known.created, known.files = created.decode(), []
                if start:
                    continue
            known.files = files[:start] + found
            if len(found) <= len(files) - start:
                return known.files

    # -- for the compactor --------------------------------------------------------------------------------------------

    async def plan_file(self, me: str, file_bytes: int, age_s: float) -> FilePlan | None:
        """What is to be written next, if anything, and if `me` is the one that writes now."""
        answer = await self._run("plan_file", me, file_bytes, round(age_s * 1000))
        if not answer:
            return None
        batch_id, number, entries = answer
        return FilePlan(batch_id.decode(), number, tuple(sorted(map(_placed, texts(entries)))))

    async def finished(self, me: str, plan: FilePlan, start: int, limit: int) -> list[FinishedJob]:
        """Jobs of the plan from the number `start` on, at least one if there is any, and at most `limit`."""
        asked = plan.jobs[start : start + limit]
        if not asked:
            return []
        rows = await self._run("rows", me, ROWS_BYTES, *(name for _, name in asked))
        jobs = []
        for (position, _), row in zip(asked, rows, strict=False):
            record, content = job_from(plan.batch_id, row[:-1]), row[-1].decode(errors="replace")
            parts = await self._all_parts(record) if record.parts_done else ()
            jobs.append(FinishedJob(position, record, parts, content))
        return jobs

    async def _all_parts(self, record: JobRecord) -> tuple[PartRecord, ...]:
        parts, after = await super().list_parts(record.batch_id, record.job_id)
        while after:
            more, after = await super().list_parts(record.batch_id, record.job_id, after)
            parts += more
        return tuple(parts)

    async def commit_file(self, plan: FilePlan, file: ResultFile) -> bool:
        """From now on the file is where its jobs are. False: somebody else did it."""
        return bool(await self._run("commit_file", plan.batch_id, plan.number, len(plan.jobs), file.write()))

    async def free_jobs(self, me: str, batch_id: str, limit: int) -> int:
        """Removes what is left of jobs that are in a file, so many of them. How many there are more."""
        return int(await self._run("free_jobs", me, batch_id, limit))

    async def put_off_file(self, plan: FilePlan, seconds: float) -> bool:
        """This file cannot be written now; those of other batches can. False: somebody else has written it."""
        answer = await self._run("block_file", plan.batch_id, plan.number, len(plan.jobs), round(seconds * 1000))
        return bool(answer)

    # -- for the feeder -----------------------------------------------------------------------------------------------

    async def next_chunk(self, me: str) -> ChunkDue | None:
        """What is to be fed next, if anything, if there is room, and if `me` is the one that feeds now. Raises
        `DamagedRecord`, and others have their turn."""
        answer = await self._run("next_chunk", me)
        if not answer:
            return None
        batch_id, *told = texts(answer)
        try:
            number, fed, entry, room = told
            return ChunkDue(batch_id, int(number), int(fed), Chunk.read(entry), int(room))
        except (ValueError, DamagedRecord) as error:
            await self.pass_turn(batch_id)
            raise DamagedRecord(f"what the store holds of the chunks of {batch_id} is damaged: {error}") from None

    async def feed(self, due: ChunkDue, start: int, jobs: Sequence[JobSpec]) -> bool:
        """Puts jobs of the chunk, which are its number `start` and the following, where they wait. False: others were
        faster."""
        is_last = start + len(jobs) == due.chunk.num_jobs
        args = [arg for job in jobs for arg in self._job_args(due.batch_id, job)]
        return bool(await self._run("feed", due.batch_id, due.number, start, int(is_last), 0, *args))

    async def give_up(self, due: ChunkDue) -> bool:
        """What is left of a chunk that is gone is cancelled with its batch, and has no record. False: the batch goes
        on, or others were faster."""
        left = due.chunk.num_jobs - due.fed
        return bool(await self._run("feed", due.batch_id, due.number, due.fed, 1, left))

    async def pass_turn(self, batch_id: str) -> None:
        """The batch's first chunk cannot be fed now; others can."""
        await self._run("pass_turn", batch_id)


def _placed(entry: str) -> tuple[int, str]:
    """Position and id. One that was damaged names no job, which is told when that is read."""
    at, _, name = entry.partition(" ")
    return (int(at), name) if at.isdecimal() else (-1, entry)


def _waiting(batch_id: str, job: JobSpec) -> JobRecord:
    return JobRecord(
        job_id(batch_id, job.custom_id),
        batch_id,
        job.custom_id,
        JobState.QUEUED,
        payload=job.payload,
        result="",
        error="",
        error_code="",
        worker="",
        epoch=0,
        attempts=0,
        crashes=0,
        progress="",
        created_s=0.0,
        started_s=0.0,
        ended_s=0.0,
    )
