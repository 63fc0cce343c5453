"""Writes finished jobs into result files and removes them from the queue. Every gateway runs one; the queue lets one
write at a time, and two would do no harm.

Which jobs a file has is fixed in the queue first, then the file is written by conditional PUT, then one script makes it
the place of its jobs, then their records go. Whoever is killed in between repeats the step: the same jobs make the same
file, which is there already.
"""

import asyncio
import uuid

from slipstream.archive.queue import DamagedRecord, QueueUnavailable
from slipstream.archive.result_files import LINES, TABLE, FinishedJob, ResultFile, ResultFileWriter, survey
from slipstream.archive.result_table import SHORT, ResultTableWriter, digest_of, has_tables, row_of
from slipstream.archive.results_folder import ResultDiffers, ResultsFolder
from slipstream.archive.spill_queue import FilePlan, SpillQueue
from slipstream.errors import SlipstreamError
from slipstream.logs import get_logger

ROWS, FREED = 500, 500
"""Jobs of one call."""
IDLE_S, AWAY_S = 1.0, 2.0
PUT_OFF_S = 30.0
"""How long a batch waits whose file could not be written."""


class Compactor:
    """One gateway's."""

    def __init__(self, queue: SpillQueue, folder: ResultsFolder, file_bytes: int, age_s: float) -> None:
        """A file is written once finished jobs of a batch take `file_bytes`, or the first of them is so old."""
        self._queue = queue
        self._folder = folder
        self._file_bytes = file_bytes
        self._age_s = age_s
        self._me = uuid.uuid4().hex
        self._has_tables = has_tables()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                pause_s = 0.0 if await self.step() else IDLE_S
            except QueueUnavailable:
                pause_s = AWAY_S
            except DamagedRecord as error:
                get_logger().error("results.failed", error=str(error))
                pause_s = AWAY_S
            await asyncio.sleep(pause_s)

    async def step(self) -> bool:
        """One file, if one is due: whether it was. Raises `QueueUnavailable`, and `DamagedRecord` where the store fails
        a script."""
        plan = await self._queue.plan_file(self._me, self._file_bytes, self._age_s)
        if plan is None:
            return False
        if plan.jobs:
            try:
                file = await self._write(plan)
            except QueueUnavailable:
                raise
            except Exception as error:  # whatever is wrong with one batch, the others go on
                if await self._queue.put_off_file(plan, PUT_OFF_S):
                    known = {"error": str(error)} if isinstance(error, SlipstreamError) else {"exc_info": error}
                    get_logger().error("results.not_written", batch_id=plan.batch_id, retry_s=PUT_OFF_S, **known)
                return True
            if await self._queue.commit_file(plan, file):
                facts = {"num_jobs": file.num_jobs, "num_bytes": file.num_bytes}
                get_logger().info("results.written", batch_id=plan.batch_id, file=file.name, **facts)
        while await self._queue.free_jobs(self._me, plan.batch_id, FREED):
            pass
        return True

    async def _write(self, plan: FilePlan) -> ResultFile:
        """The file of the plan, which is there when it returns. Raises `ResultDiffers` and what the store of objects
        does."""
        lines, table = ResultFileWriter(), ResultTableWriter() if self._has_tables else None

        jobs = await self._queue.finished(self._me, plan, 0, ROWS)
        num_read = len(jobs)
        while jobs:  # the next are read while these are written
            reading = self._queue.finished(self._me, plan, num_read, ROWS)
            _, jobs = await asyncio.gather(asyncio.to_thread(_add, lines, table, jobs), reading)
            num_read += len(jobs)
        file, data = await asyncio.to_thread(lines.finish, plan.batch_id, plan.number)
        there = await self._folder.put(file.name + LINES, data)
        if there is not None:
            file = self._as_there(file, there)
        if table is not None:
            await self._put_table(file, await asyncio.to_thread(table.finish, file.digest))
        return file

    def _as_there(self, file: ResultFile, data: bytes) -> ResultFile:
        """The same jobs, where other bytes hold them: another release of zlib wrote them."""
        try:
            there = survey(file.name, data)
        except ValueError as error:
            raise self._differs(file.name + LINES, str(error)) from None
        if there.digest != file.digest:
            raise self._differs(file.name + LINES, "it holds other jobs")
        return there

    async def _put_table(self, file: ResultFile, data: bytes) -> None:
        there = await self._folder.put(file.name + TABLE, data)
        if there is not None and digest_of(there) != file.digest:
            raise self._differs(file.name + TABLE, "it is no table of these jobs")

    def _differs(self, name: str, why: str) -> ResultDiffers:
        return ResultDiffers(
            f"{self._folder.address(name)} is there already, and not as it is to be ({why}); move it away, and the file"
            " will be written: until then its jobs stay in the queue"
        )


def _add(lines: ResultFileWriter, table: ResultTableWriter | None, jobs: list[FinishedJob]) -> None:
    rows = [row_of(job) for job in jobs]
    lines.add(jobs, ({name: row[name] for name in SHORT} for row in rows))
    if table is not None:
        table.add(rows)
