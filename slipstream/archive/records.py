"""The forms of one record of the archive: versioned JSON in the queue, plain types for callers, and a result's receipt.

Unknown fields are ignored and unknown versions refused with `OtherVersion`: gateways of two releases may share a queue
while a new one is rolled out.
"""

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

from slipstream import __version__
from slipstream.archive.messages import (
    DOCUMENT_OPTIONS,
    Batch,
    BatchTotals,
    Job,
    JobCounts,
    JobKind,
    JobPart,
    ModelReceipt,
    OptionValues,
    Receipt,
    document_options,
    document_values,
)
from slipstream.archive.parts import PartRecord, PartsState
from slipstream.archive.quality import COUNTED_MARKS, marks_of
from slipstream.archive.queue import BatchRecord, JobRecord
from slipstream.captioning.plan import CaptionPlan
from slipstream.documents.reading import DocumentOptions
from slipstream.errors import SlipstreamError
from slipstream.messages import Caption, Speculation
from slipstream.options import OF_FILMS, OPTIONS_BY_NAME, TOLD_BESIDE, CaptionOptions
from slipstream.rpc.archive_codec import (
    part_bytes,
    read_part_bytes,
    read_receipt_bytes,
    read_result_bytes,
    receipt_bytes,
    result_bytes,
)
from slipstream.sampling.params import CAME_LATER, STRUCTURES
from slipstream.service_info import ModelInfo

# -- JSON in the queue ------------------------------------------------------------------------------------------------

VERSION = 1
DOCUMENT_VERSION = 2
"""Of jobs and results that a gateway which reads no documents must leave to others."""
FILM_VERSION = 4
"""Of jobs that a gateway which knows no segments must leave to others; 3: one that knows neither summaries nor several
prompts, which it would leave out."""
OPTIONS_VERSION = 5
"""Of batches and jobs with an option of `_CAME_LATER`, which gateways that know none would leave out."""
_CAME_LATER = {"fps", "system", "turns", "thinking", *STRUCTURES, *CAME_LATER}
VERSIONS = (VERSION, DOCUMENT_VERSION, 3, FILM_VERSION, OPTIONS_VERSION)
_JOB_VERSIONS = {JobKind.DOCUMENT: DOCUMENT_VERSION, JobKind.FILM: FILM_VERSION}
MAX_UNPACKED_BYTES = 8 * 1024**2
"""Of one part."""
MAX_DIGITS = 20
"""Of a number of 64 bits. Python converts at most 4,300."""
ReadT = TypeVar("ReadT")


class OtherVersion(SlipstreamError):
    """Written by another release, which may know what it means."""


@dataclass(frozen=True)
class BatchPayload:
    """What all jobs of a batch share."""

    key: str
    caption: OptionValues
    document: OptionValues = field(default_factory=dict)


@dataclass(frozen=True)
class JobPayload:
    """One job, as it was handed in."""

    source: str
    caption: OptionValues
    """Options that differ from the batch's."""
    sha256: str
    kind: JobKind = JobKind.VIDEO
    document: OptionValues = field(default_factory=dict)

    def merged_options(self, batch: BatchPayload) -> CaptionOptions:
        """The batch's options with the job's own in their place. Raises `InvalidRequest`."""
        return CaptionOptions.from_mapping(self.caption).over(CaptionOptions.from_mapping(batch.caption))

    def page_options(self, batch: BatchPayload) -> CaptionOptions:
        """The same of a document's pages: how a batch samples and cuts its films, what it spares of them and what was
        said about a video is nothing to them. Raises `InvalidRequest`."""
        return self.merged_options(batch).without(*OF_FILMS, "fps", "turns")

    def merged_document(self, batch: BatchPayload) -> DocumentOptions:
        """The same of how a document is read. Raises `InvalidRequest`."""
        return document_options({**batch.document, **self.document})


def write_batch(batch: BatchPayload) -> str:
    """Equal batches become equal texts."""
    document = {"document": dict(batch.document)} if batch.document else {}
    return _dumps({"key": batch.key, "caption": dict(batch.caption)} | document)


def read_batch(text: str) -> BatchPayload:
    """Raises `OtherVersion`."""
    content = _loads(text)
    return BatchPayload(str(content.get("key", "")), _read_options(content), _read_document(content))


def write_job(job: JobPayload) -> str:
    """Equal jobs become equal texts."""
    content: dict[str, Any] = {"source": job.source}
    if job.caption:
        content["caption"] = dict(job.caption)
    if job.sha256:
        content["sha256"] = job.sha256
    if job.kind.has_parts:
        content |= {"kind": job.kind, "v": _JOB_VERSIONS[job.kind]}
    if job.kind is JobKind.DOCUMENT:
        content["document"] = dict(job.document)
    return _dumps(content)


def read_job(text: str) -> JobPayload:
    """Raises `OtherVersion`."""
    content = _loads(text)
    options, sha256 = _read_options(content), str(content.get("sha256", ""))
    kind = next((kind for kind in _JOB_VERSIONS if kind == content.get("kind")), JobKind.VIDEO)
    return JobPayload(str(content.get("source", "")), options, sha256, kind, _read_document(content))


def write_result(caption: Caption, receipt: Receipt) -> str:
    """JSON around bytes: the caption without its single tokens, which a client of the archive does not ask for."""
    summary, made_of = result_bytes(caption, receipt)
    return _dumps({"summary": base64.b64encode(summary).decode(), "receipt": base64.b64encode(made_of).decode()})


def read_result(text: str) -> tuple[Caption, Receipt]:
    """Raises `OtherVersion`."""
    return read_bytes(text, read_result_bytes, "summary", "receipt")


def write_parts_result(state: PartsState, receipt: Receipt) -> str:
    """The result of a job of many parts says which it has, in their order; they hold the texts."""
    made_of = base64.b64encode(receipt_bytes(receipt)).decode()
    return _dumps({"v": DOCUMENT_VERSION, "parts": state.total, "layout": state.layout, "receipt": made_of})


def read_parts_result(text: str) -> Receipt:
    """Raises `OtherVersion`."""
    return read_bytes(text, read_receipt_bytes, "receipt")


def read_bytes(text: str, read: Callable[..., ReadT], *names: str) -> ReadT:
    """What `read` makes of these fields of a result; `ValueError` is how it refuses them. Raises `OtherVersion`."""
    content = _loads(text)
    try:
        return read(*(base64.b64decode(content[name], validate=True) for name in names))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise OtherVersion(f"a result cannot be read: {error}") from error


PART_FORM = b"\x01"
"""How a part is written: compressed behind this byte."""


def write_part(part: JobPart) -> bytes:
    """A part to keep: about a third of its own size."""
    return PART_FORM + zlib.compress(part_bytes(part))


def part_of(record: PartRecord) -> JobPart:
    """A part as the job's owner sees it. What was damaged or written by another release says so."""
    try:
        if record.damage or record.data[:1] != PART_FORM:
            return JobPart(record.number, error=record.damage or "another release wrote this part")
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(record.data[1:], MAX_UNPACKED_BYTES)
        return replace(read_part_bytes(data), number=record.number)
    except (zlib.error, ValueError) as error:
        return JobPart(record.number, error=f"a part cannot be read: {error}")


def _read_document(content: dict[str, Any]) -> OptionValues:
    """Those that this release knows."""
    options = content.get("document", {})
    if not isinstance(options, dict):
        raise OtherVersion("options cannot be read: they are no object")
    return {name: value for name, value in options.items() if name in DOCUMENT_OPTIONS}


def _read_options(content: dict[str, Any]) -> OptionValues:
    """Those that this release knows. A list was a tuple, and a number in quotes was one of 64 bits."""
    options = content.get("caption", {})
    if not isinstance(options, dict):
        raise OtherVersion("options cannot be read: they are no object")
    known = {name: value for name, value in options.items() if name in OPTIONS_BY_NAME}
    for name, value in known.items():
        is_number = isinstance(value, str) and value.isdecimal() and len(value) <= MAX_DIGITS
        if is_number and OPTIONS_BY_NAME[name].kind is int:
            known[name] = int(value)
        elif isinstance(value, list):
            known[name] = tuple(value)
    return known


def _dumps(content: dict[str, Any]) -> str:
    least = OPTIONS_VERSION if content.get("caption", {}).keys() & _CAME_LATER else VERSION
    content = content | {"v": max(least, content.get("v", VERSION))}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _loads(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # the latter for what is nested too deep
        content = None
    if not isinstance(content, dict) or content.get("v") not in VERSIONS:
        raise OtherVersion(f"this gateway reads versions up to {OPTIONS_VERSION} of what is kept; this is another")
    return content


# -- for callers ------------------------------------------------------------------------------------------------------

_WHOLE_TOTALS = {field.name for field in fields(BatchTotals) if field.type in (int, "int")}
_SAME_OF_BATCH = {field.name for field in fields(Batch)} & {field.name for field in fields(BatchRecord)}


def batch_of(record: BatchRecord) -> Batch:
    """A batch as its owner sees it."""
    known = {field.name for field in fields(BatchTotals)} & record.tallies.keys()
    totals: dict[str, Any] = {
        name: round(record.tallies[name]) if name in _WHOLE_TOTALS else record.tallies[name] for name in known
    }
    said: dict[str, Any] = {name: getattr(record, name) for name in _SAME_OF_BATCH}
    counts = JobCounts(total=record.total, **{state.value: count for state, count in record.counts.items()})
    return Batch(**said | {"key": _key(record.options), "counts": counts, "totals": BatchTotals(**totals)})


_SAME = {field.name for field in fields(Job)} & {field.name for field in fields(JobRecord)}


def job_of(record: JobRecord) -> Job:
    """A job with its result, as its owner sees it. What another release wrote is left out."""
    said: dict[str, Any] = {"source": ""} | {name: getattr(record, name) for name in _SAME}
    try:
        payload = read_job(record.payload)
        said |= {"source": payload.source, "kind": payload.kind}
        if record.result and payload.kind.has_parts:
            said["receipt"] = read_parts_result(record.result)
        elif record.result:
            said["caption"], said["receipt"] = read_result(record.result)
    except OtherVersion as error:
        said["error"] = record.error or str(error)
    return Job(**said)


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


class Content(Protocol):
    """What was captioned or read, such as a sampled video."""

    @property
    def sha256(self) -> str:
        """Of the file, hexadecimal."""

    @property
    def num_bytes(self) -> int:
        """Of the file."""


def make_receipt(
    plan: CaptionPlan, video: Content, caption: Caption, target: ModelInfo, draft: ModelInfo | None, runs: int
) -> Receipt:
    """Of a caption that has just been made, in the job's run number `runs`."""
    return Receipt(
        slipstream_version=__version__,
        target=_model_receipt(target),
        draft=_model_receipt(draft) if draft is not None and caption.had_draft else None,
        options=options_used(plan),
        video_sha256=video.sha256,
        video_bytes=video.num_bytes,
        text_sha256=hashlib.sha256(caption.text.encode()).hexdigest(),
        runs=runs,
        accepted_prediction_tokens=caption.speculation.accepted_prediction_tokens,
        rejected_prediction_tokens=caption.speculation.rejected_prediction_tokens,
        shared=caption.shared,
        skipped=caption.skipped,
    )


def receipt_of_whole(plan: CaptionPlan, content: Content, target: ModelInfo, runs: int) -> Receipt:
    """Of a job of many parts; each part has its own. `runs`: the number of the run that ended it."""
    return Receipt(
        slipstream_version=__version__,
        target=_model_receipt(target),
        draft=None,
        options=options_used(plan),
        video_sha256=content.sha256,
        video_bytes=content.num_bytes,
        text_sha256="",
        runs=runs,
    )


def parts_key(
    document_sha256: str, asked: DocumentOptions, plan: CaptionPlan, target: ModelInfo, draft: ModelInfo | None
) -> str:
    """Equal keys: parts that were made of the same file, in the same way, by the same release and models."""
    way = json.dumps(asdict(asked.request) | {"stage": asked.stage}, sort_keys=True)
    # Parts of older releases know nothing of these.
    later = {name: value for name, value in document_values(asked).items() if name in ("ocr", "surface")}
    return f"{content_key(document_sha256, plan, target, draft)} {way}{json.dumps(later) if later else ''}"


def options_used(plan: CaptionPlan) -> OptionValues:
    """All options after defaults that say something of the result. Hints are left out, which may be long and do not
    change the text; below a tolerance of 1 they do."""
    left_out = {*TOLD_BESIDE} | (set() if plan.is_tolerant else {"prediction"})
    return {name: value for name, value in plan.options.given().items() if name not in left_out}


def tallies(caption: Caption) -> Mapping[str, float]:
    """What a caption adds to its batch's totals; the names are fields of `BatchTotals`."""
    if caption.shared or caption.skipped:
        return {"shared" if caption.shared else "skipped": 1}
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
        **{mark.value: 1 for mark in marks_of(caption) if mark in COUNTED_MARKS},
    }


def _plain_round_s(speculation: Speculation) -> float:
    """Seconds of a token by plain decoding. A pass without a window that waits for its turn between others has a round
    trip that plain decoding has not, and a draft beside it: it counts where nothing else is known."""
    own_s = next((cost.round_s for cost in speculation.pass_costs if cost.window == 0), 0.0)
    known_s = speculation.plain_token_s if speculation.windows else own_s
    return known_s or own_s or speculation.plain_pass_s or speculation.speed_ratio * speculation.draft_pass_s


def _model_receipt(model: ModelInfo) -> ModelReceipt:
    return ModelReceipt(model.model_id, model.revision, model.dtype)
