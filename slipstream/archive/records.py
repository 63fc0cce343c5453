"""The forms of one record of the archive: versioned JSON in the queue, plain types for callers, and a result's receipt.

Unknown fields are ignored and unknown versions refused with `OtherVersion`: gateways of two releases may share a queue
while a new one is rolled out.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from slipstream import __version__
from slipstream.archive.messages import Batch, BatchTotals, Job, JobCounts, ModelReceipt, OptionValues, Receipt
from slipstream.archive.queue import BatchRecord, JobRecord
from slipstream.captioning.plan import CaptionPlan
from slipstream.errors import SlipstreamError
from slipstream.messages import Caption, ModelInfo, Speculation
from slipstream.options import OPTIONS_BY_NAME, CaptionOptions
from slipstream.rpc.archive_codec import read_result_bytes, result_bytes
from slipstream.video.messages import SampledVideo

# -- JSON in the queue ------------------------------------------------------------------------------------------------

VERSION = 1
MAX_DIGITS = 20
"""Of a number of 64 bits. Python converts at most 4,300."""


class OtherVersion(SlipstreamError):
    """Written by another release, which may know what it means."""


@dataclass(frozen=True)
class BatchPayload:
    """What all jobs of a batch share."""

    key: str
    caption: OptionValues


@dataclass(frozen=True)
class JobPayload:
    """One job, as it was handed in."""

    source: str
    caption: OptionValues
    """Options that differ from the batch's."""
    sha256: str

    def merged_options(self, batch: BatchPayload) -> CaptionOptions:
        """The batch's options with the job's own in their place. Raises `InvalidRequest`."""
        return CaptionOptions.from_mapping({**batch.caption, **self.caption})


def write_batch(batch: BatchPayload) -> str:
    """Equal batches become equal texts."""
    return _dumps({"key": batch.key, "caption": dict(batch.caption)})


def read_batch(text: str) -> BatchPayload:
    """Raises `OtherVersion`."""
    content = _loads(text)
    return BatchPayload(str(content.get("key", "")), _read_options(content))


def write_job(job: JobPayload) -> str:
    """Equal jobs become equal texts."""
    content: dict[str, Any] = {"source": job.source}
    if job.caption:
        content["caption"] = dict(job.caption)
    if job.sha256:
        content["sha256"] = job.sha256
    return _dumps(content)


def read_job(text: str) -> JobPayload:
    """Raises `OtherVersion`."""
    content = _loads(text)
    return JobPayload(str(content.get("source", "")), _read_options(content), str(content.get("sha256", "")))


def write_result(caption: Caption, receipt: Receipt) -> str:
    """JSON around bytes: the caption without its single tokens, which a client of the archive does not ask for."""
    summary, made_of = result_bytes(caption, receipt)
    return _dumps({"summary": base64.b64encode(summary).decode(), "receipt": base64.b64encode(made_of).decode()})


def read_result(text: str) -> tuple[Caption, Receipt]:
    """Raises `OtherVersion`."""
    content = _loads(text)
    try:
        parts = [base64.b64decode(content[name], validate=True) for name in ("summary", "receipt")]
        return read_result_bytes(*parts)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise OtherVersion(f"a result cannot be read: {error}") from error


def _read_options(content: dict[str, Any]) -> OptionValues:
    """Those that this release knows. A list was a tuple, and a number in quotes was one of 64 bits."""
    options = content.get("caption", {})
    if not isinstance(options, dict):
        raise OtherVersion("options cannot be read: they are no object")
    known = {name: value for name, value in options.items() if name in OPTIONS_BY_NAME}
    for name, value in known.items():
        if (
            OPTIONS_BY_NAME[name].kind is int
            and isinstance(value, str)
            and value.isdecimal()
            and len(value) <= MAX_DIGITS
        ):
            known[name] = int(value)
        elif isinstance(value, list):
            known[name] = tuple(value)
    return known


def _dumps(content: dict[str, Any]) -> str:
    return json.dumps({"v": VERSION} | content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _loads(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # the latter for what is nested too deep
        content = None
    if not isinstance(content, dict) or content.get("v") != VERSION:
        raise OtherVersion(f"this gateway reads version {VERSION} of what the archive keeps, and this is another")
    return content


# -- for callers ------------------------------------------------------------------------------------------------------

_WHOLE_TOTALS = {field.name for field in fields(BatchTotals) if field.type in (int, "int")}


def batch_of(record: BatchRecord) -> Batch:
    """A batch as its owner sees it."""
    known = {field.name for field in fields(BatchTotals)} & record.tallies.keys()
    totals: dict[str, Any] = {
        name: round(record.tallies[name]) if name in _WHOLE_TOTALS else record.tallies[name] for name in known
    }
    return Batch(
        batch_id=record.batch_id,
        key=_key(record.options),
        state=record.state,
        metadata=record.metadata,
        counts=JobCounts(total=record.total, **{state.value: count for state, count in record.counts.items()}),
        created_s=record.created_s,
        ended_s=record.ended_s,
        totals=BatchTotals(**totals),
    )


def job_of(record: JobRecord) -> Job:
    """A job with its result, as its owner sees it. What another release wrote is left out."""
    same = {field.name: getattr(record, field.name) for field in fields(Job) if hasattr(record, field.name)}
    job = Job(source="", **same)
    try:
        job = replace(job, source=read_job(record.payload).source)
        if record.result:
            caption, receipt = read_result(record.result)
            job = replace(job, caption=caption, receipt=receipt)
    except OtherVersion as error:
        job = replace(job, error=job.error or str(error))
    return job


def _key(options: str) -> str:
    try:
        return read_batch(options).key
    except OtherVersion:
        return ""


# -- receipt ----------------------------------------------------------------------------------------------------------

# What a caption was made of and by, and the name of all that its text depends on.

REJECTION = "rejection"
"""The one sampling rule with which the text depends on the draft."""


def content_key(
    video_sha256: str, plan: CaptionPlan, target: ModelInfo, draft: ModelInfo | None, *, owner: str = ""
) -> str:
    """Equal keys: the same was asked of the same file, models and release, so the text can be taken over. `owner`:
    whose results they are, where not everybody's.

    All options but hints count, also those that change the speed only: a result tells how it was made.
    """
    parts = [__version__, video_sha256, target.revision, target.dtype]
    if plan.speculative and plan.sampling.rule == REJECTION:
        parts += [draft.revision, draft.dtype] if draft else ["", ""]
    parts.append(json.dumps(options_used(plan), sort_keys=True))
    if owner:
        parts.append(owner)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def make_receipt(
    plan: CaptionPlan, video: SampledVideo, caption: Caption, target: ModelInfo, draft: ModelInfo | None, runs: int
) -> Receipt:
    """Of a caption that has just been made, in the job's run number `runs`."""
    took_part = draft is not None and bool(caption.speculation.kept_digest or caption.timings.draft_ready_s)
    return Receipt(
        slipstream_version=__version__,
        target=_model_receipt(target),
        draft=_model_receipt(draft) if draft is not None and took_part else None,
        options=options_used(plan),
        video_sha256=video.sha256,
        video_bytes=video.num_bytes,
        text_sha256=hashlib.sha256(caption.text.encode()).hexdigest(),
        runs=runs,
        accepted_prediction_tokens=caption.speculation.accepted_prediction_tokens,
        rejected_prediction_tokens=caption.speculation.rejected_prediction_tokens,
    )


def options_used(plan: CaptionPlan) -> OptionValues:
    """All options after defaults that say something of the result. Hints are left out, which may be long and do not
    change the text; below a tolerance of 1 they do."""
    left_out = {"trace"} if plan.is_tolerant else {"trace", "prediction"}
    return {name: value for name, value in plan.options.given().items() if name not in left_out}


def tallies(caption: Caption) -> Mapping[str, float]:
    """What a caption adds to its batch's totals; the names are fields of `BatchTotals`."""
    timings, speculation = caption.timings, caption.speculation
    return {
        "tokens": caption.num_tokens,
        "video_s": caption.video.duration_s,
        "decode_s": timings.decode_s,
        "first_token_s": timings.first_token_s,
        "generate_s": timings.generate_s,
        "plain_generate_s": max(caption.num_tokens - 1, 0) * _plain_round_s(speculation),
        "judged": speculation.judged,
        "accepted": speculation.accepted,
    }


def _plain_round_s(speculation: Speculation) -> float:
    """Seconds of a plain pass as this caption measured it, or else as earlier ones did."""
    plain = next((cost.round_s for cost in speculation.pass_costs if cost.window == 0), 0.0)
    return plain or speculation.plain_pass_s or speculation.speed_ratio * speculation.draft_pass_s


def _model_receipt(model: ModelInfo) -> ModelReceipt:
    return ModelReceipt(model.model_id, model.revision, model.dtype)
