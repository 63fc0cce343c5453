"""The archive on the wire: every message of archive.proto to and from plain types, and results as bytes."""

from collections.abc import Collection, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from slipstream.archive.messages import (
    Batch,
    BatchItem,
    BatchOptions,
    Job,
    JobKind,
    JobPage,
    JobPart,
    ModelReceipt,
    OptionValues,
    Receipt,
    Submitted,
)
from slipstream.archive.queue import BatchState, JobState, Priority
from slipstream.documents.messages import BadDraft, PagePicture
from slipstream.errors import InvalidRequest
from slipstream.messages import Caption, Segment, SharedFrom
from slipstream.options import OPTIONS
from slipstream.rpc.codec import (
    from_message,
    option_values,
    option_values_message,
    read_summary,
    summary_message,
    to_message,
)
from slipstream.rpc.reader import draft_message, read_draft
from slipstream.rpc.v1 import archive_pb2, gateway_pb2

_JOB_STATES: dict[JobState, Any] = {state: archive_pb2.JobState.Value(f"JOB_STATE_{state.name}") for state in JobState}
_BATCH_STATES: dict[BatchState, Any] = {
    state: archive_pb2.BatchState.Value(f"BATCH_STATE_{state.name}") for state in BatchState
}
_PRIORITIES: dict[Priority, Any] = {
    priority: archive_pb2.JobPriority.Value(f"JOB_PRIORITY_{priority.name}") for priority in Priority
}
_KINDS: dict[JobKind, Any] = {kind: archive_pb2.JobKind.Value(f"JOB_KIND_{kind.name}") for kind in JobKind}
_KIND_NAMES = {number: kind for kind, number in _KINDS.items()}
_JOB_STATE_NAMES = {number: state for state, number in _JOB_STATES.items()}
_BATCH_STATE_NAMES = {number: state for state, number in _BATCH_STATES.items()}
_PRIORITY_NAMES = {number: priority for priority, number in _PRIORITIES.items()} | {
    archive_pb2.JOB_PRIORITY_UNSPECIFIED: Priority.NORMAL
}
_LISTS = tuple(spec.name for spec in OPTIONS if spec.repeated)

# -- submitting -------------------------------------------------------------------------------------------------------


def submit_messages(batch: BatchOptions, items: Sequence[BatchItem]) -> list[archive_pb2.SubmitBatchRequest]:
    """What a submit sends. Raises `InvalidRequest` for an option that does not fit the wire."""
    return [
        archive_pb2.SubmitBatchRequest(batch=batch_options_message(batch)),
        *(archive_pb2.SubmitBatchRequest(item=batch_item_message(item)) for item in items),
    ]


def batch_options_message(batch: BatchOptions) -> archive_pb2.BatchOptions:
    """A batch to submit, for the wire."""
    return archive_pb2.BatchOptions(
        key=batch.key,
        caption=_options_message(batch.caption),
        metadata=batch.metadata,
        priority=_PRIORITIES[batch.priority],
        document=_document_message(batch.document),
        more_follows=batch.more_follows,
    )


def read_batch_options(message: archive_pb2.BatchOptions) -> BatchOptions:
    """A batch to open. Raises `InvalidRequest` for a priority that there is not."""
    if message.priority not in _PRIORITY_NAMES:
        raise InvalidRequest(f"priority {message.priority} is unknown")
    return BatchOptions(
        message.key,
        option_values(message.caption),
        dict(message.metadata),
        _PRIORITY_NAMES[message.priority],
        _document_values(message.document),
        message.more_follows,
    )


def batch_item_message(item: BatchItem) -> archive_pb2.BatchItem:
    """An item to submit, for the wire. Raises `InvalidRequest` for one that does not fit it."""
    caption, document = _options_message(item.caption), _document_message(item.document)
    emptied = [name for name in _LISTS if item.caption.get(name) is not None and not getattr(caption, name)]
    try:
        kind = None if item.kind is None else _KINDS[item.kind]
        return to_message(item, archive_pb2.BatchItem, kind=kind, caption=caption, document=document, emptied=emptied)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the item {item.custom_id!r} cannot be sent: {error}") from None


def read_batch_item(message: archive_pb2.BatchItem) -> BatchItem:
    """An item as it came; its options are not checked."""
    return from_message(
        message,
        BatchItem,
        caption={**dict.fromkeys(message.emptied, ()), **option_values(message.caption)},
        kind=_KIND_NAMES.get(message.kind),
        document=_document_values(message.document),
    )


def _document_message(values: OptionValues) -> archive_pb2.DocumentReading | None:
    """None for no options. Raises `InvalidRequest` for one that does not fit the wire."""
    try:
        return archive_pb2.DocumentReading(**values) if values else None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"an option of documents cannot be sent: {error}") from None


def _document_values(message: archive_pb2.DocumentReading) -> OptionValues:
    return {field.name: content for field, content in message.ListFields()}


def _options_message(values: OptionValues) -> gateway_pb2.CaptionOptions | None:
    """None for no options, which leaves the field out."""
    return option_values_message(values) if values else None


def submitted_message(submitted: Submitted) -> archive_pb2.SubmitBatchResponse:
    """What became of the items, for the wire."""
    return to_message(submitted, archive_pb2.SubmitBatchResponse)


def read_submitted(message: archive_pb2.SubmitBatchResponse) -> Submitted:
    """What became of the items."""
    return from_message(message, Submitted)


# -- asking -----------------------------------------------------------------------------------------------------------


def batch_message(batch: Batch) -> archive_pb2.Batch:
    """A batch, for the wire."""
    return to_message(batch, archive_pb2.Batch, state=_BATCH_STATES[batch.state], metadata=dict(batch.metadata))


def read_batch(message: archive_pb2.Batch) -> Batch:
    """A batch; a state that a later release may have counts as one that goes on."""
    return from_message(
        message,
        Batch,
        state=_BATCH_STATE_NAMES.get(message.state, BatchState.IN_PROGRESS),
        metadata=dict(message.metadata),
    )


def job_message(job: Job) -> archive_pb2.Job:
    """A job with its result, for the wire."""
    message = to_message(job, archive_pb2.Job, state=_JOB_STATES[job.state], kind=_KINDS[job.kind], receipt=None)
    if job.caption is not None:
        message.summary.CopyFrom(summary_message(job.caption))
    if job.receipt is not None:
        message.receipt.CopyFrom(_receipt_message(job.receipt))
    return message


def read_job(message: archive_pb2.Job) -> Job:
    """A job, with its result where it is done."""
    return from_message(
        message,
        Job,
        state=_JOB_STATE_NAMES.get(message.state, JobState.QUEUED),
        kind=_KIND_NAMES.get(message.kind, JobKind.VIDEO),
        caption=read_summary(message.summary) if message.HasField("summary") else None,
        receipt=_read_receipt(message.receipt) if message.HasField("receipt") else None,
    )


def read_job_page(message: archive_pb2.ListJobsResponse) -> JobPage:
    """A page of jobs."""
    return JobPage([read_job(job) for job in message.jobs], message.next_page_token)


def job_state_numbers(states: Collection[JobState]) -> list[Any]:
    """The wire's numbers of states. Raises `InvalidRequest` for one that there is not, and for a word of its own."""
    if isinstance(states, str):
        raise InvalidRequest(f"there may be several states: give a list, such as [{str(states)!r}]")
    if unknown := [state for state in states if state not in list(JobState)]:
        raise InvalidRequest(f"job state {unknown[0]!r} is unknown; choose among {', '.join(JobState)}")
    return sorted(_JOB_STATES[state] for state in states)


def read_job_states(numbers: list[Any]) -> frozenset[JobState]:
    """Raises `InvalidRequest` for a state that there is not."""
    if unknown := [number for number in numbers if number not in _JOB_STATE_NAMES]:
        raise InvalidRequest(f"job state {unknown[0]} is unknown")
    return frozenset(_JOB_STATE_NAMES[number] for number in numbers)


# -- parts ------------------------------------------------------------------------------------------------------------


def part_message(part: JobPart) -> archive_pb2.JobPart:
    """A part, for the wire."""
    draft, receipt = part.draft, part.receipt
    return to_message(
        part,
        archive_pb2.JobPart,
        summary=None if part.caption is None else summary_message(part.caption),
        receipt=None if receipt is None else _receipt_message(receipt),
        draft=None if draft is None else draft_message(draft),
        width=None if draft is None else draft.width,
        height=None if draft is None else draft.height,
    )


def read_part(message: archive_pb2.JobPart) -> JobPart:
    """A part. Raises `BadDraft` for regions that no sound reader would make."""
    has_draft = message.HasField("draft")
    picture = PagePicture(message.page, message.width, message.height, message.dpi)
    return from_message(
        message,
        JobPart,
        caption=read_summary(message.summary) if message.HasField("summary") else None,
        receipt=_read_receipt(message.receipt) if message.HasField("receipt") else None,
        draft=read_draft(message.draft, picture) if has_draft else None,
        segment=from_message(message.segment, Segment) if message.HasField("segment") else None,
    )


def read_parts(message: archive_pb2.ListPartsResponse) -> list[JobPart]:
    """Some parts; one that says what cannot be has its error."""
    parts = []
    for part in message.parts:
        try:
            parts.append(read_part(part))
        except BadDraft as error:
            parts.append(JobPart(part.number, part.page, error=str(error)))
    return parts


def part_bytes(part: JobPart) -> bytes:
    """A part to keep."""
    return part_message(part).SerializeToString()


def read_part_bytes(data: bytes) -> JobPart:
    """The part that was kept. Raises `ValueError` for bytes that are none."""
    try:
        return read_part(archive_pb2.JobPart.FromString(data))
    except (DecodeError, BadDraft) as error:
        raise ValueError(str(error)) from error


# -- results as bytes -------------------------------------------------------------------------------------------------


def result_bytes(caption: Caption, receipt: Receipt) -> tuple[bytes, bytes]:
    """A result to keep: a third less space than JSON, and a twentieth of the time."""
    return summary_message(caption).SerializeToString(), _receipt_message(receipt).SerializeToString()


def read_result_bytes(caption: bytes, receipt: bytes) -> tuple[Caption, Receipt]:
    """The result that was kept. Raises `ValueError` for bytes that are no messages."""
    try:
        summary = gateway_pb2.Summary.FromString(caption)
        made_of = archive_pb2.Receipt.FromString(receipt)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    return read_summary(summary), _read_receipt(made_of)


def receipt_bytes(receipt: Receipt) -> bytes:
    """A receipt to keep."""
    return _receipt_message(receipt).SerializeToString()


def read_receipt_bytes(data: bytes) -> Receipt:
    """The receipt that was kept. Raises `ValueError` for bytes that are none."""
    try:
        return _read_receipt(archive_pb2.Receipt.FromString(data))
    except DecodeError as error:
        raise ValueError(str(error)) from error


def result_facts(caption: bytes, receipt: bytes) -> dict[str, Any]:
    """The text of a result that was kept, and what can be said of it in few words. Raises `ValueError` for bytes that
    are no messages."""
    try:
        summary = gateway_pb2.Summary.FromString(caption)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    video = summary.video
    facts = {"text": summary.text, "num_tokens": summary.num_tokens, "method": summary.method}
    return facts | {"num_frames": video.num_frames, "duration_s": video.duration_s} | receipt_facts(receipt)


def receipt_facts(receipt: bytes) -> dict[str, Any]:
    """What a result that was kept is of and by. Raises `ValueError` for bytes that are no message."""
    try:
        made_of = archive_pb2.Receipt.FromString(receipt)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    facts = {name: getattr(made_of, name) for name in ("video_sha256", "text_sha256", "slipstream_version")}
    return facts | {"target_model": made_of.target.model_id, "target_revision": made_of.target.revision}


def _receipt_message(receipt: Receipt) -> archive_pb2.Receipt:
    return to_message(receipt, archive_pb2.Receipt, options=option_values_message(receipt.options))


def _read_receipt(message: archive_pb2.Receipt) -> Receipt:
    return from_message(
        message,
        Receipt,
        target=from_message(message.target, ModelReceipt),
        draft=from_message(message.draft, ModelReceipt) if message.HasField("draft") else None,
        options=option_values(message.options),
        shared=from_message(message.shared, SharedFrom) if message.HasField("shared") else None,
    )
