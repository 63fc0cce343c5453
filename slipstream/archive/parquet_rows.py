"""Results as rows of a Parquet file: of a film one for each segment and prompt, with its times, and one for the whole.

The rows are plain; `schema` alone knows Arrow, which the extra `parquet` brings.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, get_type_hints

from slipstream.archive.film_results import segments_of, summary_of
from slipstream.archive.messages import Job, JobKind, JobPart, ModelReceipt, Receipt
from slipstream.messages import Caption, SharedFrom

NO_MODEL = ModelReceipt("", "", "")


class Unit(StrEnum):
    """What a row is about."""

    WHOLE = "whole"
    SEGMENT = "segment"
    PAGE = "page"


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One row; its fields are the columns. None: there is no such thing, or no result."""

    custom_id: str
    job_id: str
    source: str
    kind: str
    """Video, film or document."""
    state: str
    """Of the job, as `error_code`, `attempts` and `ended_s` (Unix time) are."""
    error_code: str | None = None
    attempts: int
    ended_s: float
    unit: str
    number: int | None = None
    """Of a segment, from 0; of a page, from 1."""
    prompt: str | None = None
    start_s: float | None = None
    end_s: float | None = None
    """Of segments by the container's clock; of a film from the first to the last; of a whole video from its start."""
    text: str | None = None
    """Of a film as a whole its summary."""
    error: str | None = None
    marks: list[str] | None = None
    """Such as black or frozen; where they were looked for."""
    skipped: str | None = None
    """The mark for which there is no text."""
    shared_job: str | None = None
    """Whose text was taken, as of a near-duplicate; empty: of the same film."""
    shared_segment: int | None = None
    shared_distance: float | None = None
    warnings: list[str] | None = None
    num_tokens: int | None = None
    finish_reason: str | None = None
    avg_logprob: float | None = None
    """Mean of the tokens' logprobs."""
    method: str | None = None
    num_frames: int | None = None
    first_token_s: float | None = None
    generate_s: float | None = None
    total_s: float | None = None
    judged: int | None = None
    accepted: int | None = None
    target_model: str | None = None
    target_revision: str | None = None
    draft_model: str | None = None
    draft_revision: str | None = None
    options: str | None = None
    """All of them, as JSON."""
    text_sha256: str | None = None
    video_sha256: str | None = None
    video_bytes: int | None = None
    slipstream_version: str | None = None


def schema() -> Any:
    """The columns as Arrow's `Schema`. Raises `ImportError` without the extra `parquet`."""
    import pyarrow

    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    types: dict[Any, Any] = {list[str] | None: pyarrow.list_(pyarrow.string())}
    types |= kinds | {kind | None: arrow for kind, arrow in kinds.items()}
    hints = get_type_hints(ResultRow)
    return pyarrow.schema([pyarrow.field(each.name, types[hints[each.name]]) for each in fields(ResultRow)])


def rows_of(job: Job, parts: Sequence[JobPart] = ()) -> Iterator[ResultRow]:
    """The row of the whole, and those of the parts that there are."""
    whole = _row(job, Unit.WHOLE, job.caption, job.receipt, error=job.error)
    if job.kind is JobKind.FILM:
        yield _whole_film(whole, job, parts)
        for result in segments_of(parts):
            for part in result.answers:
                times = {"start_s": result.segment.start_s, "end_s": result.segment.end_s}
                more = times | {"number": result.segment.number}
                yield _row(job, Unit.SEGMENT, part.caption, part.receipt, error=part.error, **more)
        return
    if job.caption is not None and job.caption.video.num_frames:
        whole = replace(whole, start_s=0.0, end_s=job.caption.video.duration_s)
    yield whole
    for part in parts:
        yield _row(job, Unit.PAGE, part.caption, part.receipt, error=part.error, number=part.page)


def _whole_film(whole: ResultRow, job: Job, parts: Sequence[JobPart]) -> ResultRow:
    """With its summary, if there is one, and the times of its segments."""
    summary = summary_of(parts)
    if summary is not None:
        error = summary.error or job.error
        whole = _row(job, Unit.WHOLE, summary.caption, summary.receipt or job.receipt, error=error)
    times = [part.segment for part in parts if part.segment is not None]
    if times:
        start_s, end_s = min(one.start_s for one in times), max(one.end_s for one in times)
        whole = replace(whole, start_s=start_s, end_s=end_s)
    return whole


def _row(
    job: Job, unit: Unit, caption: Caption | None, receipt: Receipt | None, *, error: str, **more: Any
) -> ResultRow:
    said = _of_caption(caption) if caption is not None else {}
    made_of = _of_receipt(receipt) if receipt is not None else {}
    if caption is None:
        made_of.pop("text_sha256", None)
    return ResultRow(
        custom_id=job.custom_id,
        job_id=job.job_id,
        source=job.source,
        kind=job.kind.value,
        state=job.state.value,
        error_code=job.error_code or None,
        attempts=job.attempts,
        ended_s=job.ended_s,
        unit=unit.value,
        error=error or None,
        **said,
        **made_of,
        **more,
    )


def _of_caption(caption: Caption) -> Mapping[str, Any]:
    timings, speculation = caption.timings, caption.speculation
    return {
        "text": caption.text,
        "marks": list(caption.video.marks),
        "skipped": caption.skipped or None,
        **_of_shared(caption.shared),
        "warnings": list(caption.video.warnings),
        "num_tokens": caption.num_tokens,
        "finish_reason": caption.finish_reason.name.lower() if caption.finish_reason else None,
        "avg_logprob": caption.avg_logprob,
        "num_frames": caption.video.num_frames,
        "first_token_s": timings.first_token_s,
        "generate_s": timings.generate_s,
        "total_s": timings.total_s,
        "judged": speculation.judged,
        "accepted": speculation.accepted,
    }


def _of_shared(shared: SharedFrom | None) -> dict[str, Any]:
    if shared is None:
        return {}
    return {"shared_job": shared.job_id, "shared_segment": shared.segment, "shared_distance": shared.distance}


def _of_receipt(receipt: Receipt) -> dict[str, Any]:
    draft = receipt.draft or NO_MODEL
    return {
        "prompt": None if receipt.options.get("prompts") else receipt.options.get("prompt"),
        "method": receipt.options.get("method"),
        "target_model": receipt.target.model_id,
        "target_revision": receipt.target.revision,
        "draft_model": draft.model_id or None,
        "draft_revision": draft.revision or None,
        "options": json.dumps(dict(receipt.options), ensure_ascii=False, sort_keys=True),
        "text_sha256": receipt.text_sha256 or None,
        "video_sha256": receipt.video_sha256,
        "video_bytes": receipt.video_bytes,
        "slipstream_version": receipt.slipstream_version,
    }
