"""Between the queue's records and the archive's wire messages. Knows no store."""

from services.gateway.archive.payload import OtherVersion, read_batch, read_job, read_result
from slipstream.errors import InvalidRequest
from slipstream.jobs.base import BatchRecord, BatchState, JobRecord, JobState
from slipstream.rpc.v1 import archive_pb2

_JOB_STATES = {
    JobState.QUEUED: archive_pb2.JOB_STATE_QUEUED,
    JobState.RUNNING: archive_pb2.JOB_STATE_RUNNING,
    JobState.DONE: archive_pb2.JOB_STATE_DONE,
    JobState.FAILED: archive_pb2.JOB_STATE_FAILED,
    JobState.DEAD: archive_pb2.JOB_STATE_DEAD,
    JobState.CANCELLED: archive_pb2.JOB_STATE_CANCELLED,
}
_BATCH_STATES = {
    BatchState.OPEN: archive_pb2.BATCH_STATE_OPEN,
    BatchState.IN_PROGRESS: archive_pb2.BATCH_STATE_IN_PROGRESS,
    BatchState.COMPLETED: archive_pb2.BATCH_STATE_COMPLETED,
    BatchState.CANCELLING: archive_pb2.BATCH_STATE_CANCELLING,
    BatchState.CANCELLED: archive_pb2.BATCH_STATE_CANCELLED,
}
_WANTED = {number: state for state, number in _JOB_STATES.items()}
_TOTALS = {field.name for field in archive_pb2.BatchTotals.DESCRIPTOR.fields}
_WHOLE_TOTALS = {"tokens", "judged", "accepted", "reused"}


def batch_message(record: BatchRecord) -> archive_pb2.Batch:
    """A batch, for the wire."""
    totals = archive_pb2.BatchTotals()
    for name in _TOTALS & record.tallies.keys():
        value = record.tallies[name]
        setattr(totals, name, round(value) if name in _WHOLE_TOTALS else value)
    return archive_pb2.Batch(
        batch_id=record.batch_id,
        key=_key(record.options),
        state=_BATCH_STATES[record.state],
        metadata=record.metadata,
        counts=archive_pb2.JobCounts(
            total=record.total, **{state.value: count for state, count in record.counts.items()}
        ),
        created_s=record.created_s,
        ended_s=record.ended_s,
        totals=totals,
    )


def job_message(record: JobRecord) -> archive_pb2.Job:
    """A job with its result, for the wire. What another release wrote is left out."""
    message = archive_pb2.Job(
        job_id=record.job_id,
        custom_id=record.custom_id,
        state=_JOB_STATES[record.state],
        progress=record.progress,
        error=record.error,
        error_code=record.error_code,
        attempts=record.attempts,
        crashes=record.crashes,
        worker=record.worker,
        created_s=record.created_s,
        started_s=record.started_s,
        ended_s=record.ended_s,
    )
    try:
        message.source = read_job(record.payload).source
        if record.result:
            summary, receipt = read_result(record.result)
            message.summary.CopyFrom(summary)
            message.receipt.CopyFrom(receipt)
    except OtherVersion as error:
        message.error = message.error or str(error)
    return message


def wanted_states(states: "list[archive_pb2.JobState]") -> frozenset[JobState]:
    """Raises `InvalidRequest` for a state that there is not."""
    if unknown := [state for state in states if state not in _WANTED]:
        raise InvalidRequest(f"job state {unknown[0]} is unknown")
    return frozenset(_WANTED[state] for state in states)


def is_ended(batch: archive_pb2.Batch) -> bool:
    """Nothing will change by itself any more."""
    return batch.state in (archive_pb2.BATCH_STATE_COMPLETED, archive_pb2.BATCH_STATE_CANCELLED)


def is_idle(batch: archive_pb2.Batch) -> bool:
    """It is open, and nothing that was handed in waits or runs."""
    is_open = batch.state == archive_pb2.BATCH_STATE_OPEN
    return is_open and not batch.counts.queued + batch.counts.running


def _key(options: str) -> str:
    try:
        return read_batch(options).key
    except OtherVersion:
        return ""
