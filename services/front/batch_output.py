"""What is written of a batch that has ended: a line of the output or of the errors for each request."""

import asyncio
import json
from collections.abc import Container, Iterable
from contextlib import aclosing
from pathlib import Path

from slipstream.archive.messages import Job
from slipstream.archive.queue import JobState
from slipstream.client.archive_client import ArchiveClient
from slipstream.errors import ServiceUnavailable
from slipstream.messages import Caption
from slipstream.services.front.batch_forms import KeptReader
from slipstream.services.front.batch_lines import BadLine, BatchLine, answer_line, job_error_line, never_run_line
from slipstream.services.front.batch_records import Ending, HttpBatch
from slipstream.services.front.file_store import NewFile


async def write_jobs(
    archive: ArchiveClient, batch: HttpBatch, model: str, said: Path, output: NewFile, errors: NewFile, ending: str
) -> tuple[int, set[str]]:
    """How many were done, and the names of all. `said`: what is kept of their requests. Raises `ServiceUnavailable` for
    one that has not ended."""
    num_done, names = 0, set[str]()
    with await asyncio.to_thread(KeptReader, said) as kept:
        async with aclosing(archive.jobs(batch.key)) as jobs:
            async for job in jobs:
                if not job.state.is_terminal:
                    raise ServiceUnavailable(f"the archive still has {job.custom_id!r} as {job.state}")
                names.add(job.custom_id)
                if job.state is JobState.DONE:
                    num_done += 1
                    captions = await _captions(archive, batch, job)
                    of_request = await asyncio.to_thread(kept.get, job.custom_id)
                    line = answer_line(batch, job, captions, model, of_request)
                    await asyncio.to_thread(output.write, line)
                else:
                    line = job_error_line(batch.batch_id, job, f"batch_{ending or Ending.CANCELLED}")
                    await asyncio.to_thread(errors.write, line)
    return num_done, names


def write_left(
    lines: Iterable[BatchLine | BadLine], batch: HttpBatch, names: Container[str], errors: NewFile, ending: str
) -> None:
    """An error for each request of these whose name is not among `names`: it was never run."""
    for line in lines:
        if isinstance(line, BatchLine) and line.custom_id not in names:
            name = f"{batch.batch_id}-{line.number}"
            errors.write(never_run_line(name, line.custom_id, f"batch_{ending}"))


async def _captions(archive: ArchiveClient, batch: HttpBatch, job: Job) -> list[Caption]:
    if job.kind.has_parts:
        return [part.caption async for part in archive.parts(batch.key, job) if part.caption is not None]
    return [] if job.caption is None else [job.caption]


def copy_refusals(source: Path, names: Container[str], errors: NewFile) -> int:
    """The lines of requests that were refused, and how many. Not those of `names`: they were handed in before, and the
    archive has done them."""
    num_copied = 0
    with source.open("rb") as file:
        for line in file:
            if json.loads(line)["custom_id"] not in names:
                errors.write(line)
                num_copied += 1
    return num_copied
