"""What the queue's records are made of: digests, ids, the state of a batch, and the rows that scripts answer.

Knows no connection.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

from slipstream.jobs.base import BatchRecord, BatchState, JobRecord, JobState, Lease
from slipstream.jobs.store import texts

DAMAGED = "its SHA-256 differs from when it was stored"


def sha256(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def job_id(batch_id: str, custom_id: str) -> str:
    """The same item of the same batch is the same job, whoever hands it in."""
    return sha256(f"{batch_id}\0{custom_id}")[:32]


def batch_state(counts: Mapping[JobState, int], *, is_sealed: bool, is_cancelled: bool) -> BatchState:
    is_live = counts[JobState.QUEUED] + counts[JobState.RUNNING] > 0
    if is_cancelled:
        return BatchState.CANCELLING if is_live else BatchState.CANCELLED
    if not is_sealed:
        return BatchState.OPEN
    return BatchState.IN_PROGRESS if is_live else BatchState.COMPLETED


def lease_from(worker: str, row: Sequence[bytes | int]) -> Lease:
    """From a row of the take script: id, batch, custom id, epoch, payload, digest, options, digest, ..."""
    name, batch_id, custom_id, epoch, payload, _, options, _, checkpoint, attempts, crashes, entry = texts(row)
    return Lease(
        job_id=name,
        batch_id=batch_id,
        custom_id=custom_id,
        worker=worker,
        epoch=int(epoch),
        payload=payload,
        options=options,
        checkpoint=checkpoint,
        attempts=int(attempts),
        crashes=int(crashes),
        is_suspect=entry.startswith("suspects "),
        entry=entry,
    )


def damage_in(row: Sequence[bytes]) -> str:
    """What of a row of the take script is not what was stored; empty: nothing."""
    for what, data, digest in (("the job's payload", row[4], row[5]), ("the batch's options", row[6], row[7])):
        if sha256(data).encode() != digest:
            return f"{what} was damaged in the store: {DAMAGED}"
    return ""


def job_from(batch_id: str, row: Sequence[bytes]) -> JobRecord:
    """From a row of the page script."""
    name, state, custom_id, payload, result, digest, error, code, worker, *rest = texts(row)
    epoch, attempts, crashes, progress, created, started, ended = rest
    if state == JobState.DONE and sha256(row[4]) != digest:
        result, error, code = "", f"the result was damaged in the store: {DAMAGED}", "DATA_LOSS"
    return JobRecord(
        job_id=name,
        batch_id=batch_id,
        custom_id=custom_id,
        state=JobState(state),
        payload=payload,
        result=result,
        error=error,
        error_code=code,
        worker=worker,
        epoch=int(epoch),
        attempts=int(attempts),
        crashes=int(crashes),
        progress=progress,
        created_s=_seconds(created),
        started_s=_seconds(started),
        ended_s=_seconds(ended),
    )


def batch_from(batch_id: str, pairs: Sequence[bytes]) -> BatchRecord | None:
    """From the fields of a batch's hash, one after the other."""
    words = texts(pairs)
    fields = dict(zip(words[::2], words[1::2], strict=True))
    if "owner" not in fields:
        return None
    counts = {state: int(fields.get(f"n:{state}", 0)) for state in JobState}
    return BatchRecord(
        batch_id=batch_id,
        owner=fields["owner"],
        state=batch_state(counts, is_sealed="sealed" in fields, is_cancelled="cancel" in fields),
        metadata=json.loads(fields["metadata"]),
        options=fields["options"],
        counts=counts,
        tallies={name[2:]: float(value) for name, value in fields.items() if name.startswith("t:")},
        created_s=_seconds(fields["created"]),
        ended_s=_seconds(fields.get("ended", "")),
    )


def _seconds(milliseconds: str) -> float:
    return int(milliseconds or 0) / 1000
