"""Brings jobs that wait outside into the queue while there is room. Every gateway runs one; the queue lets one feed at
a time, and its cursor moves with the jobs, so each comes in once whoever feeds or dies."""

import asyncio
import uuid

from slipstream.archive.chunks import Chunk
from slipstream.archive.queue import DamagedRecord, JobSpec, QueueUnavailable
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.spill_queue import ChunkDue, SpillQueue
from slipstream.errors import ObjectNotFound, SlipstreamError
from slipstream.logs import get_logger

FED_JOBS = 250
"""Of one call."""
JOB_BYTES = 4500
"""That a job counts besides its payload, its result to come included."""
IDLE_S, AWAY_S = 0.5, 2.0


class Feeder:
    """One gateway's."""

    def __init__(self, queue: SpillQueue, folder: ResultsFolder) -> None:
        self._queue = queue
        self._folder = folder
        self._me = uuid.uuid4().hex
        self._read: tuple[Chunk | None, list[JobSpec]] = (None, [])
        """The latest chunk, which may not have gone in as a whole. Others may be of the same object."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                pause_s = 0.0 if await self.step() else IDLE_S
            except QueueUnavailable:
                pause_s = AWAY_S
            except DamagedRecord as error:
                get_logger().error("feed.failed", error=str(error))
                pause_s = AWAY_S
            await asyncio.sleep(pause_s)

    async def step(self) -> bool:
        """A chunk, or as much of it as there is room for: whether anything was due and could be read. Raises
        `QueueUnavailable`, and `DamagedRecord` where the store fails a script."""
        due = await self._queue.next_chunk(self._me)
        if due is None:
            return False
        try:
            jobs = await self._jobs_of(due)
        except SlipstreamError as error:
            return await self._do_without(due, error)
        at, room = due.fed, due.room
        while at < len(jobs) and room > 0:
            some = jobs[at : at + FED_JOBS]
            if not await self._queue.feed(due, at, some):
                break
            at += len(some)
            room -= sum(len(job.payload) + JOB_BYTES for job in some)
        return True

    async def _do_without(self, due: ChunkDue, error: SlipstreamError) -> bool:
        """A chunk that cannot be read now, or never again, which a cancelled batch does not wait for."""
        about = {"batch_id": due.batch_id, "chunk": self._folder.address(due.chunk.name), "error": str(error)}
        if isinstance(error, ObjectNotFound | DamagedRecord) and await self._queue.give_up(due):
            get_logger().error("feed.given_up", num_jobs=due.chunk.num_jobs - due.fed, **about)
            return True
        get_logger().error("feed.unreadable", **about)
        await self._queue.pass_turn(due.batch_id)
        return False

    async def _jobs_of(self, due: ChunkDue) -> list[JobSpec]:
        chunk, jobs = self._read
        if chunk != due.chunk:
            data = await self._folder.read(due.chunk.name)
            jobs = await asyncio.to_thread(due.chunk.jobs_in, data)
            self._read = due.chunk, jobs
        return jobs
