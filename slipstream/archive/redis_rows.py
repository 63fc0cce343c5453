"""Rows that the scripts of the Redis queue answer, as plain records, and what is logged of them. Whatever the store
holds, it becomes a record or `DamagedRecord`."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.archive.parts import PartRecord, PartsState
from slipstream.archive.queue import (
    BatchRecord,
    BatchState,
    DamagedRecord,
    JobRecord,
    JobState,
    Lease,
    sha256,
)
from slipstream.logs import get_logger

DAMAGED = "its SHA-256 differs from when it was stored"


@contextlib.contextmanager
def _intact(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedRecord(f"the store's record of {what} is damaged: {error}") from None


def lease_from(worker: str, row: Sequence[bytes | int]) -> Lease:
    """From a row of the take script: id, batch, custom id, epoch, payload, digest, options, digest, ... Raises
    `DamagedRecord`."""
    with _intact("a job"):
        name, batch_id, custom_id, epoch, payload, _, options, _, attempts, crashes, entry, owner, trace = texts(row)
        return Lease(
            name,
            batch_id,
            custom_id,
            worker=worker,
            epoch=int(epoch),
            payload=payload,
            options=options,
            attempts=int(attempts),
            crashes=int(crashes),
            is_suspect=entry.startswith("suspects "),
            entry=entry,
            owner=owner,
            traceparent=trace,
        )


def damage_in(row: Sequence[bytes]) -> str:
    """What of a row of the take script is not what was stored; empty: nothing."""
    for what, data, digest in (("the job's payload", row[4], row[5]), ("the batch's options", row[6], row[7])):
        if sha256(data).encode() != digest:
            return f"{what} was damaged in the store: {DAMAGED}"
    return ""


def job_from(batch_id: str, row: Sequence[bytes]) -> JobRecord:
    """From a row of the page script. Raises `DamagedRecord`."""
    with _intact(f"a job of {batch_id}"):
        name, state, custom_id, payload, result, digest, error, code, worker, *rest = texts(row)
        epoch, attempts, crashes, progress, *times, total, done = rest
        if state == JobState.DONE and sha256(row[4]) != digest:
            result, error, code = "", f"the result was damaged in the store: {DAMAGED}", "DATA_LOSS"
        created_s, started_s, ended_s = map(_seconds, times)
        return JobRecord(
            name,
            batch_id,
            custom_id,
            JobState(state),
            payload=payload,
            result=result,
            error=error,
            error_code=code,
            worker=worker,
            epoch=int(epoch),
            attempts=int(attempts),
            crashes=int(crashes),
            progress=progress,
            created_s=created_s,
            started_s=started_s,
            ended_s=ended_s,
            parts_total=int(total),
            parts_done=int(done),
        )


def batch_from(batch_id: str, pairs: Sequence[bytes]) -> BatchRecord | None:
    """From the fields of a batch's hash, one after the other. Raises `DamagedRecord`."""
    words = texts(pairs)
    fields = dict(zip(words[::2], words[1::2], strict=False))
    if "owner" not in fields:
        return None
    with _intact(f"the batch {batch_id}"):
        counts = {state: int(fields.get(f"n:{state}", 0)) for state in JobState}
        counts[JobState.QUEUED] += int(fields.get("chunked", 0))
        return BatchRecord(
            batch_id=batch_id,
            owner=fields["owner"],
            state=batch_state(counts, is_sealed="sealed" in fields, is_cancelled="cancel" in fields),
            metadata={str(name): str(value) for name, value in json.loads(fields["metadata"]).items()},
            options=fields["options"],
            counts=counts,
            tallies={name[2:]: float(value) for name, value in fields.items() if name.startswith("t:")},
            created_s=_seconds(fields["created"]),
            ended_s=_seconds(fields.get("ended", "")),
            parts_total=int(fields.get("p:total", 0)),
            parts_done=int(fields.get("p:done", 0)),
            parts_bytes=int(fields.get("p:bytes", 0)),
            obstacle=fields.get("obstacle", ""),
            obstacle_s=_seconds(fields.get("obstacle_at", "")),
        )


def batch_state(counts: Mapping[JobState, int], *, is_sealed: bool, is_cancelled: bool) -> BatchState:
    """What a batch is by its counts and flags."""
    is_live = counts[JobState.QUEUED] + counts[JobState.RUNNING] > 0
    if is_cancelled:
        return BatchState.CANCELLING if is_live else BatchState.CANCELLED
    if not is_sealed:
        return BatchState.OPEN
    return BatchState.IN_PROGRESS if is_live else BatchState.COMPLETED


def _seconds(milliseconds: str) -> float:
    return int(milliseconds or 0) / 1000


DIGEST_BYTES = 32


def part_row(data: bytes) -> bytes:
    """A part as the store keeps it: behind its SHA-256."""
    return hashlib.sha256(data).digest() + data


def parts_state_from(answer: Sequence[Any]) -> PartsState:
    """From what the script that finds parts answers. Raises `DamagedRecord`."""
    with _intact("a job's parts"):
        total, layout, done = answer
        return PartsState(int(total), layout.decode(), tuple(map(int, done)))


def part_from(row: Sequence[int | bytes]) -> PartRecord:
    """From a row of the script that lists parts. Raises `DamagedRecord`."""
    with _intact("a part"):
        number, stored = row
        if not isinstance(stored, bytes):
            raise TypeError("no bytes")
        data = stored[DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != stored[:DIGEST_BYTES]:
            return PartRecord(int(number), b"", f"the part was damaged in the store: {DAMAGED}")
        return PartRecord(int(number), data)


def texts(values: Sequence[bytes | int]) -> list[str]:
    """Decodes an answer; damaged bytes become replacement characters."""
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values]


# -- what is logged of them -------------------------------------------------------------------------------------------


def log_expired(name: str, batch_id: str, lost_by: str, crashes: str, state: str) -> None:
    """A job that the take script found without a worker."""
    log = get_logger().bind(job_id=name, batch_id=batch_id, crashes=int(crashes))
    log.warning("job.expired", lost_by=lost_by, state=state)
    if state == JobState.DEAD:
        log.warning("job.dead", worker=lost_by)


def log_death(lease: Lease, answer: int) -> bool:
    """From what a script answers that gives a job back: 0 not held, 1 done, 2 the job is dead now."""
    if answer == 2:
        get_logger().warning(
            "job.dead", job_id=lease.job_id, batch_id=lease.batch_id, worker=lease.worker, epoch=lease.epoch
        )
    return answer > 0
