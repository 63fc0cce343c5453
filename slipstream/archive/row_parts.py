"""Captions of rows that no queue gives out, kept as parts of some rows each, in the form of the archive's result files.

A part's name is the digest of the names of its rows, and it is put only where there is none: the same rows make the
same part, however often whoever captions them dies and begins again.
"""

import asyncio
import hashlib
from collections.abc import Iterable

from slipstream.archive.queue import DamagedRecord, JobRecord
from slipstream.archive.result_files import LINES, TABLE, FinishedJob, ResultFileWriter, read_block
from slipstream.archive.result_table import SHORT, ResultTableWriter, has_tables, row_of
from slipstream.archive.results_folder import ResultsFolder
from slipstream.errors import InvalidConfig, ObjectNotFound

BATCH = "rows"
"""Stands in the records where the archive has the id of a batch."""
PREFIX = "part-"
ID_CHARS = 32
READS = 16
"""Parts that are read at a time to find out what there is."""
Records = dict[str, JobRecord]
"""By the row's id, which is the record's `job_id`."""


def part_name(ids: Iterable[str]) -> str:
    """Of the part with these rows."""
    return f"{PREFIX}{hashlib.sha256(' '.join(sorted(ids)).encode()).hexdigest()[:ID_CHARS]}"


class RowParts:
    """The parts of one folder. Calls raise `PermissionDenied` and `ServiceUnavailable` where the store does."""

    def __init__(self, url: str) -> None:
        """Raises `InvalidConfig` for what is no address of a folder, or without what the extra `ray` brings."""
        if not has_tables():
            raise InvalidConfig("parts need pyarrow: pip install 'slipstream[ray]'")
        self._folder = ResultsFolder(url, "parts")

    async def known(self) -> dict[str, str]:
        """The part of each row that is in one, by the rows' ids. A table that somebody died before is written. Raises
        `InvalidConfig` where nothing can be written, and `DamagedRecord`."""
        await self._folder.check()
        there = {name async for name in self._folder.names()}
        turns = asyncio.Semaphore(READS)

        async def ids_of(name: str) -> list[tuple[str, str]]:
            async with turns:
                records = await self.read(name) or {}
                if name + TABLE not in there:
                    await self.write(name, records.values())
                return [(row_id, name) for row_id in records]

        names = [name.removesuffix(LINES) for name in there if name.startswith(PREFIX) and name.endswith(LINES)]
        return dict(pair for pairs in await asyncio.gather(*map(ids_of, names)) for pair in pairs)

    async def read(self, name: str) -> Records | None:
        """The rows of a part; None: there is none. Raises `DamagedRecord`."""
        try:
            data = await self._folder.read(name + LINES)
        except ObjectNotFound:
            return None
        return {job.record.job_id: job.record for job in self._jobs_in(name, data)}

    async def write(self, name: str, records: Iterable[JobRecord]) -> Records:
        """Writes a part and its table, each unless it is there already: the rows that the part has.

        The lines come first: they are what counts, and the table is made of those that are there.
        """
        jobs = [FinishedJob(at, record) for at, record in enumerate(records)]
        lines, table = await asyncio.to_thread(_written, jobs)
        there = await self._folder.put(name + LINES, lines)
        if there is not None:
            jobs = self._jobs_in(name, there)
            _, table = await asyncio.to_thread(_written, jobs)
        await self._folder.put(name + TABLE, table)
        return {job.record.job_id: job.record for job in jobs}

    def _jobs_in(self, name: str, data: bytes) -> list[FinishedJob]:
        try:
            return read_block(data)
        except DamagedRecord as error:
            raise DamagedRecord(f"{self._folder.address(name + LINES)} is no part: {error}; move it away") from None


def _written(jobs: list[FinishedJob]) -> tuple[bytes, bytes]:
    """Lines and table."""
    rows = [row_of(job) for job in jobs]
    lines, table = ResultFileWriter(), ResultTableWriter()
    lines.add(jobs, ({name: row[name] for name in SHORT} for row in rows))
    table.add(rows)
    file, data = lines.finish(BATCH, 0)
    return data, table.finish(file.digest)
