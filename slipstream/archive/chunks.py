"""Jobs that wait outside the queue, some hundred in an object. Pure: jobs in, bytes out."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.archive.queue import REJECTED, DamagedRecord, JobSpec, Priority

COMPRESS_LEVEL = 6


@dataclass(frozen=True)
class Chunk:
    """What the queue knows of one such object."""

    name: str
    """Below the folder of all results. It holds the digest of the content, so the same jobs have the same name."""
    num_jobs: int
    """That the batch took from it."""
    mask: str
    """For each job of the object "1", or "0" if the batch had it already; "": all are the batch's."""

    @classmethod
    def read(cls, entry: str) -> "Chunk":
        """Raises `DamagedRecord`."""
        try:
            name, num_jobs, mask = entry.split(" ")
            return cls(name, int(num_jobs), mask)
        except ValueError as error:
            raise DamagedRecord(f"what the store holds of a chunk is damaged: {error}") from None

    def jobs_in(self, data: bytes) -> list[JobSpec]:
        """Those that the batch took from the object. Raises `DamagedRecord` when it is not the one that was written."""
        try:
            content = gzip.decompress(data)
            if chunk_name(self.name.partition("/")[0], content) != self.name:
                raise ValueError("its content is not the one that was written")
            jobs = [_job_from(line) for line in content.splitlines()]
        except (ValueError, OSError, EOFError, zlib.error) as error:
            raise DamagedRecord(f"the chunk {self.name} cannot be read: {error}") from None
        taken = self.mask or "1" * len(jobs)
        return [job for job, is_taken in zip(jobs, taken, strict=True) if is_taken == "1"]


def write_chunk(batch_id: str, jobs: Sequence[JobSpec]) -> tuple[str, bytes]:
    """Name and bytes of an object with these jobs."""
    content = b"".join(_line_of(job) for job in jobs)
    return chunk_name(batch_id, content), gzip.compress(content, COMPRESS_LEVEL, mtime=0)


def chunk_name(batch_id: str, content: bytes) -> str:
    """Of a chunk with this content, not compressed."""
    return f"{batch_id}/chunk-{hashlib.sha256(content).hexdigest()[:32]}.jsonl.gz"


def _line_of(job: JobSpec) -> bytes:
    fields = [job.custom_id, job.payload, job.priority, job.rejection, job.cost]
    if job.rejection_code != REJECTED:  # earlier releases know no other, and cannot read such a chunk
        fields.append(job.rejection_code)
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _job_from(line: bytes) -> JobSpec:
    custom_id, payload, priority, rejection, cost, *code = json.loads(line)
    return JobSpec(
        custom_id, payload, Priority(priority), rejection, int(cost), rejection_code=code[0] if code else REJECTED
    )
