"""A job of the archive as a line of output: its text and its receipt, for JSON and for a table."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from slipstream.archive.film_results import SegmentResult, segments_of, summary_of
from slipstream.archive.messages import Job, JobKind, JobPart, ModelReceipt, Receipt, prompt_of
from slipstream.archive.quality import UNKNOWN_BATCH, BatchNorms, Mark, marks_of
from slipstream.archive.queue import JobState
from slipstream.cli.views import caption_dict
from slipstream.documents.output import region_record
from slipstream.messages import Caption

COLUMNS = (
    *("custom_id", "source", "state", "text", "error", "error_code", "num_tokens", "finish_reason", "avg_logprob"),
    *("prompt", "method", "num_frames", "seed", "duration_s"),
    *("target_model", "target_revision", "draft_model", "draft_revision"),
    *("kept_tokens", "kept_digest", "judged", "accepted", "first_token_s", "generate_s", "total_s", "tokens_per_s"),
    *("attempts", "reused", "video_sha256", "text_sha256", "slipstream_version", "job_id"),
    *("kind", "parts_done", "parts_total", "quality"),
    *("marks", "skipped", "shared_job", "shared_distance"),
)

NO_CAPTION = Caption("", 0, None)
NO_MODEL = ModelReceipt("", "", "")


def job_record(job: Job, parts: Sequence[JobPart] = (), norms: BatchNorms = UNKNOWN_BATCH) -> dict[str, Any]:
    """The line of JSON: `receipt` holds what the caption was made of and by, and is absent without a result. That of a
    document or film also has its `parts`, the pages or segments that are there; its text is theirs, where all are.
    `quality` are the marks of the text, beside what is usual in the batch; those of a job of parts are all of theirs.
    """
    record: dict[str, Any] = {
        "custom_id": job.custom_id,
        "source": job.source,
        "state": str(job.state),
        "text": None if job.caption is None else job.caption.text,
        "error": job.error or None,
        "error_code": job.error_code or None,
        "job_id": job.job_id,
        "attempts": job.attempts,
        "crashes": job.crashes,
    }
    if job.caption is not None and job.receipt is not None:
        record |= _spared_fields(job.caption)
        record["receipt"] = _receipt_dict(job, job.caption, job.receipt)
        record["quality"] = _marks(job, norms)
    if job.kind.has_parts:
        record |= {"kind": str(job.kind), "parts_done": job.parts_done, "parts_total": job.parts_total}
        record["text"] = document_text(parts) if job.state is JobState.DONE else None
        is_film = job.kind is JobKind.FILM
        record |= _film_fields(parts, norms) if is_film else {"parts": [_part_dict(part, norms) for part in parts]}
        found = {mark for part in parts for mark in _marks(part, norms)}
        record["quality"] = [mark for mark in Mark if mark in found]
        if job.receipt is not None:
            record["receipt"] = job.receipt.as_record() | _run_dict(job)
    return record


def document_text(parts: Sequence[JobPart]) -> str:
    """The texts of pages or segments, parted by empty lines; a summary is none of them."""
    summary = summary_of(parts)
    return "\n\n".join(part.caption.text for part in parts if part.caption and part.caption.text and part != summary)


def _marks(answer: Job | JobPart, norms: BatchNorms) -> list[Mark]:
    if answer.caption is None:
        return []
    return list(marks_of(answer.caption, norms.to(prompt_of(answer))))


def _part_dict(part: JobPart, norms: BatchNorms) -> dict[str, Any]:
    if part.caption is None or part.receipt is None or part.draft is None:
        return {"page": part.page or None, "error": part.error}
    draft, summary = part.draft, caption_dict(part.caption)
    for stated_before in ("text", "request_id"):
        summary.pop(stated_before)
    return {
        "page": part.page,
        "text": part.caption.text,
        "width": draft.width,
        "height": draft.height,
        "dpi": part.dpi,
        "regions": [region_record(region) for region in draft.regions],
        "warnings": list(draft.warnings),
        "receipt": part.receipt.as_record() | summary,
        "quality": _marks(part, norms),
    }


def _run_dict(job: Job) -> dict[str, Any]:
    return {"worker": job.worker, "created_s": job.created_s, "started_s": job.started_s, "ended_s": job.ended_s}


def _receipt_dict(job: Job, caption: Caption, receipt: Receipt) -> dict[str, Any]:
    summary = caption_dict(caption)
    for stated_before in ("text", "request_id"):
        summary.pop(stated_before)
    return receipt.as_record() | summary | _run_dict(job)


def job_row(job: Job, parts: Sequence[JobPart] = (), norms: BatchNorms = UNKNOWN_BATCH) -> dict[str, Any]:
    """The row of the table: the same facts where they fit a cell, under `COLUMNS`."""
    record = {"kind": str(job.kind)} | job_record(job, parts, norms)
    caption, receipt = job.caption or NO_CAPTION, job.receipt
    options = receipt.options if receipt else {}
    target, draft = (receipt.target, receipt.draft or NO_MODEL) if receipt else (NO_MODEL, NO_MODEL)
    return {
        **record,
        **record.get("receipt", {}),
        **asdict(caption.timings),
        "prompt": prompt_of(job),
        "method": caption.options.get("method", ""),
        "seed": options.get("seed", 0),
        "num_frames": caption.video.num_frames,
        "duration_s": caption.video.duration_s,
        "target_model": target.model_id,
        "target_revision": target.revision,
        "draft_model": draft.model_id,
        "draft_revision": draft.revision,
        "kept_tokens": caption.speculation.kept_tokens,
        "kept_digest": caption.speculation.kept_digest,
        "judged": caption.speculation.judged,
        "accepted": caption.speculation.accepted,
        "tokens_per_s": round(caption.decoding_rate, 3),
        "quality": " ".join(record.get("quality", ())),
        "marks": " ".join(caption.video.marks),
        "skipped": caption.skipped,
        "shared_job": caption.shared.job_id if caption.shared else "",
        "shared_distance": caption.shared.distance if caption.shared else None,
    }


# -- films -----------------------------------------------------------------------------------------------------------


def _film_fields(parts: Sequence[JobPart], norms: BatchNorms) -> dict[str, Any]:
    """What a film's line has beside what all lines have: `parts`, and `summary` where one was asked for."""
    summary = summary_of(parts)
    fields: dict[str, Any] = {"parts": [_segment_dict(result, norms) for result in segments_of(parts)]}
    return fields if summary is None else fields | {"summary": _answer_dict(summary, norms)}


def _spared_fields(caption: Caption) -> dict[str, Any]:
    """What is to see, where that is little, and why the text is not of the video's own frames; empty for most."""
    told = {"marks": list(caption.video.marks), "skipped": caption.skipped}
    shared = {} if caption.shared is None else {"shared": asdict(caption.shared)}
    return {name: content for name, content in told.items() if content} | shared


def _segment_dict(result: SegmentResult, norms: BatchNorms) -> dict[str, Any]:
    segment, first = result.segment, result.answers[0]
    times = {"segment": segment.number, "start_s": segment.start_s, "end_s": segment.end_s}
    record = times | _answer_dict(first, norms)
    if len(result.answers) == 1:
        return record
    prompts = [prompt_of(answer) for answer in result.answers]
    answers = [
        {"prompt": prompt} | _answer_dict(answer, norms) for prompt, answer in zip(prompts, result.answers, strict=True)
    ]
    return record | {"answers": answers}


def _answer_dict(part: JobPart, norms: BatchNorms) -> dict[str, Any]:
    if part.caption is None or part.receipt is None:
        return {"error": part.error}
    summary = caption_dict(part.caption)
    for stated_before in ("text", "request_id"):
        summary.pop(stated_before)
    said = {"text": part.caption.text} | _spared_fields(part.caption)
    return said | {"receipt": part.receipt.as_record() | summary, "quality": _marks(part, norms)}
