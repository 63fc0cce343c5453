"""A job of the archive as a line of output: its text and its receipt, for JSON and for a table. Knows no file."""

from typing import Any

from slipstream.cli.summary import decoding_rate, message_dict, summary_dict
from slipstream.rpc.v1 import archive_pb2 as pb

STATES = {
    "queued": pb.JOB_STATE_QUEUED,
    "running": pb.JOB_STATE_RUNNING,
    "done": pb.JOB_STATE_DONE,
    "failed": pb.JOB_STATE_FAILED,
    "dead": pb.JOB_STATE_DEAD,
    "cancelled": pb.JOB_STATE_CANCELLED,
}
"""The contract's number of every state, by the name that users know it by."""
NAMES = {number: name for name, number in STATES.items()}

COLUMNS = (
    *("custom_id", "source", "state", "text", "error", "error_code", "num_tokens", "finish_reason"),
    *("prompt", "method", "num_frames", "seed", "duration_s"),
    *("target_model", "target_revision", "draft_model", "draft_revision"),
    *("kept_tokens", "kept_digest", "judged", "accepted", "first_token_s", "generate_s", "total_s", "tokens_per_s"),
    *("attempts", "reused", "video_sha256", "text_sha256", "slipstream_version", "job_id"),
)


def job_record(job: pb.Job) -> dict[str, Any]:
    """The line of JSON: `receipt` holds what the caption was made of and by, and is absent without a result."""
    record: dict[str, Any] = {
        "custom_id": job.custom_id,
        "source": job.source,
        "state": NAMES.get(job.state, "unspecified"),
        "text": job.summary.text if job.HasField("summary") else None,
        "error": job.error or None,
        "error_code": job.error_code or None,
        "job_id": job.job_id,
        "attempts": job.attempts,
        "crashes": job.crashes,
    }
    if job.HasField("receipt") or job.HasField("summary"):
        record["receipt"] = _receipt(job)
    return record


def _receipt(job: pb.Job) -> dict[str, Any]:
    summary = summary_dict(job.summary)
    for stated_before in ("text", "request_id"):
        summary.pop(stated_before)
    run = {"worker": job.worker, "created_s": job.created_s, "started_s": job.started_s, "ended_s": job.ended_s}
    return message_dict(job.receipt) | summary | run


def job_row(job: pb.Job) -> dict[str, Any]:
    """The row of the table: the same facts where they fit a cell, under `COLUMNS`."""
    record = job_record(job)
    receipt, summary = job.receipt, job.summary
    return {
        **record,
        **record.get("receipt", {}),
        **message_dict(summary.timings),
        "prompt": receipt.options.prompt,
        "method": summary.method,
        "seed": receipt.options.seed,
        "num_frames": summary.video.num_frames,
        "duration_s": summary.video.duration_s,
        "target_model": receipt.target.model_id,
        "target_revision": receipt.target.revision,
        "draft_model": receipt.draft.model_id,
        "draft_revision": receipt.draft.revision,
        "kept_tokens": summary.speculation.kept_tokens,
        "kept_digest": summary.speculation.kept_digest,
        "judged": summary.speculation.judged,
        "accepted": summary.speculation.accepted,
        "tokens_per_s": round(decoding_rate(summary), 3),
    }
