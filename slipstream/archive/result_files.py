"""Files of finished jobs: a line of JSON for each, in blocks that can be read by themselves. Records in, bytes out.

A file is gzip of many members, one a block: `zcat` reads all of it, and a range of it is enough for one job. Its digest
is that of the lines, so the same jobs in the same order have it, however they were compressed.
"""

import base64
import gzip
import hashlib
import json
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from slipstream.archive.parts import PartRecord
from slipstream.archive.queue import DamagedRecord, JobRecord, JobState

BLOCK_BYTES = 1 << 20
"""Of lines, before compression. A job that has more is a block of its own."""
COMPRESS_LEVEL = 1
LINES, TABLE = ".jsonl.gz", ".parquet"
DIGEST_CHARS = 16
_GZIP_MEMBER = 31
"""`wbits` of zlib for one member with its header."""


@dataclass(frozen=True)
class FinishedJob:
    """A job that is over for good, with all that is kept of it."""

    position: int
    """In its batch, from 0, as the jobs were handed in."""
    record: JobRecord
    parts: tuple[PartRecord, ...] = ()
    content: str = ""
    """SHA-256 of the key under which its result is found from other batches; "" where there is none."""


@dataclass(frozen=True)
class Block:
    """A part of a file that is read at once."""

    offset: int
    """In bytes from the beginning of the file; it ends where the next one begins."""
    first: int
    """Positions of its first and last job; they ascend."""
    last: int


@dataclass(frozen=True)
class ResultFile:
    """What the queue knows of one file."""

    name: str
    """Below the folder of all results, without the extension."""
    digest: str
    """SHA-256 of the lines, hexadecimal."""
    num_jobs: int
    num_bytes: int
    """Compressed."""
    blocks: tuple[Block, ...]

    def blocks_of(self, positions: Sequence[int]) -> Iterator[int]:
        """Numbers of the blocks that may hold some of the ascending `positions`."""
        for number, block in enumerate(self.blocks):
            at = bisect_left(positions, block.first)
            if at < len(positions) and positions[at] <= block.last:
                yield number

    def span(self, number: int) -> tuple[int, int]:
        """First byte of a block, and the one behind its last."""
        ends = [block.offset for block in self.blocks[1:]] + [self.num_bytes]
        return self.blocks[number].offset, ends[number]

    def write(self) -> str:
        """As the queue keeps it."""
        blocks = [[block.offset, block.first, block.last] for block in self.blocks]
        return json.dumps([self.name, self.digest, self.num_jobs, self.num_bytes, blocks], separators=(",", ":"))

    @classmethod
    def read(cls, text: str | bytes) -> "ResultFile":
        """Raises `DamagedRecord`."""
        try:
            name, digest, num_jobs, num_bytes, blocks = json.loads(text)
            return cls(str(name), str(digest), int(num_jobs), int(num_bytes), tuple(Block(*block) for block in blocks))
        except (ValueError, TypeError) as error:
            raise DamagedRecord(f"what the store holds of a result file is damaged: {error}") from None


class ResultFileWriter:
    """Collects the blocks of one file. Jobs come in the order of their positions."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._blocks: list[Block] = []
        self._members: list[bytes] = []
        self._lines: list[bytes] = []
        self._positions: list[int] = []
        self._num_jobs = self._num_bytes = self._waiting = 0

    def add(self, jobs: Iterable[FinishedJob], said: Iterable[Mapping[str, Any]]) -> None:
        """More of them, and what the line of each says for people, ahead of the record."""
        for job, words in zip(jobs, said, strict=True):
            line = _line_of(job, words)
            if self._lines and self._waiting + len(line) > BLOCK_BYTES:
                self._end_block()
            self._lines.append(line)
            self._positions.append(job.position)
            self._waiting += len(line)

    def finish(self, batch_id: str, number: int) -> tuple[ResultFile, bytes]:
        """The file of this number of its batch, and its bytes."""
        self._end_block()
        digest = self._digest.hexdigest()
        name = f"{batch_id}/part-{batch_id}-{number:05d}-{digest[:DIGEST_CHARS]}"
        return ResultFile(name, digest, self._num_jobs, self._num_bytes, tuple(self._blocks)), b"".join(self._members)

    def _end_block(self) -> None:
        if not self._lines:
            return
        content = b"".join(self._lines)
        self._digest.update(content)
        member = gzip.compress(content, COMPRESS_LEVEL, mtime=0)
        self._blocks.append(Block(self._num_bytes, self._positions[0], self._positions[-1]))
        self._members.append(member)
        self._num_bytes += len(member)
        self._num_jobs += len(self._lines)
        self._lines, self._positions, self._waiting = [], [], 0


def survey(name: str, data: bytes) -> ResultFile:
    """What a file's bytes say of themselves. Raises `ValueError` for what is no such file."""
    digest, blocks, num_jobs, offset = hashlib.sha256(), [], 0, 0
    view = memoryview(data)
    while offset < len(data):
        unpacker = zlib.decompressobj(_GZIP_MEMBER)
        try:
            content = unpacker.decompress(view[offset:])
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if not unpacker.eof:
            raise ValueError("it breaks off")
        jobs = _jobs_in(content)
        if not jobs:
            raise ValueError("a block without jobs")
        blocks.append(Block(offset, jobs[0].position, jobs[-1].position))
        digest.update(content)
        num_jobs += len(jobs)
        offset = len(data) - len(unpacker.unused_data)
    return ResultFile(name, digest.hexdigest(), num_jobs, len(data), tuple(blocks))


def read_block(data: bytes) -> list[FinishedJob]:
    """The jobs of one block. Raises `DamagedRecord`."""
    try:
        return _jobs_in(gzip.decompress(data))
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise DamagedRecord(f"a block of a result file cannot be read: {error}") from None


def _jobs_in(content: bytes) -> list[FinishedJob]:
    return [_job_from(line) for line in content.splitlines() if line]


_FIELDS = [field.name for field in fields(JobRecord)]


def _line_of(job: FinishedJob, said: Mapping[str, Any]) -> bytes:
    content = dict(said) | {"position": job.position, "record": vars(job.record)}
    if job.content:
        content["content"] = job.content
    if job.parts:
        content["parts"] = [[part.number, base64.b64encode(part.data).decode(), part.damage] for part in job.parts]
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _job_from(line: bytes) -> FinishedJob:
    try:
        content = json.loads(line)
        fields = content["record"]
        values = {name: fields[name] for name in _FIELDS if name in fields}
        record = JobRecord(**values | {"state": JobState(fields["state"])})
        parts = tuple(PartRecord(number, base64.b64decode(data), why) for number, data, why in content.get("parts", ()))
        return FinishedJob(int(content["position"]), record, parts, str(content.get("content", "")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"a line is no finished job: {error}") from None
