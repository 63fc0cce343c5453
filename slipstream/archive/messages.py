"""What the archive and its callers exchange, as plain frozen types. `slipstream.rpc` puts them on the wire.

The *archive* captions videos and reads documents in the background. A *batch* is one submission, its *items* become
*jobs*, and the jobs wait in a *queue* that gateways share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from slipstream.archive.queue import BatchState, JobState, Priority
from slipstream.documents.messages import DocumentRequest, PageDraft
from slipstream.documents.pages import MAX_RANGE_CHARS
from slipstream.documents.reading import DocumentOptions
from slipstream.errors import InvalidRequest
from slipstream.messages import Caption, Segment, SharedFrom
from slipstream.objects.store import scheme_of

MAX_ITEM_HINT_BYTES = 64 * 1024
"""Of the hints of one job, which wait in the queue with it. An interactive caption may have more."""
OptionValues = Mapping[str, Any]
"""Options of `CaptionOptions` by name, as somebody gave them: not checked yet."""


class JobKind(StrEnum):
    """What an item is."""

    VIDEO = "video"
    DOCUMENT = "document"
    FILM = "film"
    """A video whose options ask for segments. Gateways make it out: an item is a video."""

    @property
    def has_parts(self) -> bool:
        """It is done part by part: pages, or segments."""
        return self is not JobKind.VIDEO


DOCUMENT_EXTENSIONS = (".pdf", ".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff")
_OF_READING: Mapping[str, type] = {"stage": str, "ocr": str, "surface": str}
DOCUMENT_OPTIONS: Mapping[str, type] = {"pages": str, "dpi": int, "text_layer": bool, **_OF_READING}
"""Names and types of what can be said of how a document is read: fields of `DocumentRequest`, and, those of reading, of
`DocumentOptions`."""


def kind_of(source: str) -> JobKind:
    """What a path or an address is by its extension; that an address is none is said when it is fetched. A key of an
    object may have any characters: its `?` and `#` end no path."""
    try:
        path = urlsplit(source).path if scheme_of(source) == "https" else source
    except ValueError:
        return JobKind.VIDEO
    return JobKind.DOCUMENT if path.lower().endswith(DOCUMENT_EXTENSIONS) else JobKind.VIDEO


def document_options(values: OptionValues) -> DocumentOptions:
    """How a document is to be read. Raises `InvalidRequest` for options that there are not, or out of range."""
    for name, value in values.items():
        if name not in DOCUMENT_OPTIONS:
            raise InvalidRequest(f"{name!r} is no option of documents; known: {', '.join(DOCUMENT_OPTIONS)}")
        if type(value) is not DOCUMENT_OPTIONS[name]:
            raise InvalidRequest(f"{name} of a document must be of type {DOCUMENT_OPTIONS[name].__name__}")
    request = DocumentRequest(**{name: value for name, value in values.items() if name not in _OF_READING})
    if len(request.pages) > MAX_RANGE_CHARS:
        raise InvalidRequest(f"pages: at most {MAX_RANGE_CHARS} characters are read")
    return DocumentOptions(request, **{name: values[name] for name in _OF_READING if name in values}).check()


def document_values(asked: DocumentOptions) -> OptionValues:
    """What `document_options` makes this way of reading of, without what is the default."""
    usual = DocumentOptions()
    values = {name: _value(asked, name) for name in DOCUMENT_OPTIONS}
    return {name: value for name, value in values.items() if value != _value(usual, name)}


def _value(asked: DocumentOptions, name: str) -> Any:
    return getattr(asked if name in _OF_READING else asked.request, name)


@dataclass(frozen=True)
class BatchOptions:
    """A batch to submit: what its items share."""

    key: str = ""
    """Names the batch for this caller: the same key is the same batch. Empty: a new one each time."""
    caption: OptionValues = field(default_factory=dict)
    """What to ask of every video, and of every page of a document."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Free text for the caller's own use."""
    priority: Priority = Priority.NORMAL
    document: OptionValues = field(default_factory=dict)
    """How to read the documents among the items: `DOCUMENT_OPTIONS`."""
    more_follows: bool = False
    """More calls for this batch follow, so it is not completed before one of them has ended that says otherwise."""


@dataclass(frozen=True)
class BatchItem:
    """One video or document of a batch to submit."""

    custom_id: str
    """Names the item within its batch, for joining results to inputs."""
    source: str
    """A file below one of the gateways' roots, or an https address where the gateways take those."""
    caption: OptionValues = field(default_factory=dict)
    """Options that differ from the batch's."""
    sha256: str = ""
    """Of the file, hexadecimal. When given, other content is refused."""
    kind: JobKind | None = None
    """None: what `kind_of` says of the source."""
    document: OptionValues = field(default_factory=dict)
    """Options of documents that differ from the batch's."""
    num_bytes: int | None = None
    """Of the source, where a listing or a manifest says so. For estimates: a gateway is not told."""

    @property
    def is_document(self) -> bool:
        """Said to be one, or by the source's extension."""
        return (self.kind or kind_of(self.source)) is JobKind.DOCUMENT

    def check_reading(self) -> None:
        """Raises `InvalidRequest` where it is said of a video how it is read."""
        if self.document and not self.is_document:
            name = next(iter(self.document))
            raise InvalidRequest(f"{name} is of documents, and this is a video: leave it out, or say kind document")


@dataclass(frozen=True)
class Submitted:
    """What became of the items of one or several calls."""

    batch_id: str = ""
    num_added: int = 0
    num_known: int = 0
    """Items that the batch had already, also of a call before that came to a full backlog."""
    num_conflicts: int = 0
    """Items whose custom_id the batch has with another source or other options; those stay as they were."""
    conflicts: tuple[str, ...] = ()
    """Custom ids of at most 100 of them a call."""
    num_rejected: int = 0
    """Of the added and known ones, those that cannot run; they are failed jobs with their reason."""

    @property
    def num_handed_in(self) -> int:
        """Items that the queue has."""
        return self.num_added + self.num_known

    def __add__(self, later: "Submitted") -> "Submitted":
        return Submitted(
            later.batch_id,
            self.num_added + later.num_added,
            self.num_known + later.num_known,
            self.num_conflicts + later.num_conflicts,
            (*self.conflicts, *later.conflicts),
            self.num_rejected + later.num_rejected,
        )


@dataclass(frozen=True)
class JobCounts:
    """Jobs of a batch by state."""

    total: int = 0
    queued: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    dead: int = 0
    cancelled: int = 0

    @property
    def num_ended(self) -> int:
        """Jobs in a terminal state."""
        return self.done + self.failed + self.dead + self.cancelled


@dataclass(frozen=True)
class BatchTotals:
    """Sums over the jobs that are done. Where a result was taken from an earlier batch only `reused` counts it."""

    tokens: int = 0
    video_s: float = 0.0
    """Seconds of video; the others are seconds of work."""
    decode_s: float = 0.0
    first_token_s: float = 0.0
    generate_s: float = 0.0
    plain_generate_s: float = 0.0
    """What `generate_s` would have been at the cost of plain passes, as measured in the same captions."""
    judged: int = 0
    accepted: int = 0
    reused: int = 0
    pages: int = 0
    """Of documents."""
    segments: int = 0
    """Of films, those without a caption included."""
    empty: int = 0
    cut: int = 0
    looped: int = 0
    """Texts of videos, pages and segments with such a mark, see `slipstream.archive.quality`."""
    shared: int = 0
    """Videos and segments whose caption is a near-duplicate's; and those that were not captioned for a mark."""
    skipped: int = 0


@dataclass(frozen=True)
class Batch:
    """How a batch stands."""

    batch_id: str
    key: str
    state: BatchState
    metadata: Mapping[str, str]
    counts: JobCounts
    created_s: float
    """Unix times, seconds; 0 where it has not happened."""
    ended_s: float
    totals: BatchTotals
    parts_total: int = 0
    """Pages and segments of all documents and films that were begun."""
    parts_done: int = 0
    parts_bytes: int = 0
    """That they take in the queue."""
    obstacle: str = ""
    """Why a job of it was given back to wait, the last time that one was, if it was in the last ten minutes and none is
    done since; or why the gateway that was asked takes none. And when, or since when."""
    obstacle_s: float = 0.0

    @property
    def is_ended(self) -> bool:
        """Nothing will change by itself any more."""
        return self.state in (BatchState.COMPLETED, BatchState.CANCELLED)

    @property
    def is_idle(self) -> bool:
        """It is open, and nothing that was handed in waits or runs."""
        return self.state is BatchState.OPEN and not self.counts.queued + self.counts.running


@dataclass(frozen=True)
class ModelReceipt:
    """Which model it was."""

    model_id: str
    revision: str
    """SHA-256 over the digests of the checkpoint's files."""
    dtype: str


@dataclass(frozen=True)
class Receipt:
    """What a caption was made of and by: enough to make it again."""

    slipstream_version: str
    target: ModelReceipt
    draft: ModelReceipt | None
    """None where no draft took part. The text does not depend on it, except with the sampling rule "rejection"."""
    options: OptionValues
    """All of them, after defaults."""
    video_sha256: str
    video_bytes: int
    text_sha256: str
    runs: int = 0
    """Runs of the job that were begun, the last one included."""
    reused: bool = False
    """Another batch had asked the same of the same content, and its result was taken."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    """Tokens of hints that became text, and those that were judged in vain; the hints themselves are not kept."""
    shared: SharedFrom | None = None
    """The text was made of the frames of another video or segment, not of these."""
    skipped: str = ""
    """The mark for which the video or segment has no text."""

    def as_record(self) -> dict[str, Any]:
        """For JSON, without what there is not."""
        said = {name: content for name, content in asdict(self).items() if content is not None}
        if not self.skipped:
            del said["skipped"]
        return said | {"options": {"stop": (), **self.options}}


@dataclass(frozen=True)
class Job:
    """One item of a batch, and its result when it is done."""

    job_id: str
    custom_id: str
    source: str
    state: JobState
    progress: str
    """What it does now, such as "prefill 3/8"."""
    error: str
    """Why it failed or was given up; `error_code` is the name of the gRPC status of that."""
    error_code: str
    attempts: int
    crashes: int
    worker: str
    created_s: float
    """Unix times, seconds; 0 where it has not happened."""
    started_s: float
    ended_s: float
    caption: Caption | None = None
    """Without its single tokens. A document or film has parts instead."""
    receipt: Receipt | None = None
    kind: JobKind = JobKind.VIDEO
    parts_total: int = 0
    """Pages or segments; 0: they are not counted yet, or it has none."""
    parts_done: int = 0
    """Those that are there, also where the job has failed or goes on."""


@dataclass(frozen=True)
class JobPart:
    """One page of a document, read by the target, or one segment of a film."""

    number: int
    """From 0, in the order in which the pages were asked for, or of the film."""
    page: int = 0
    """From 1; 0: it is a segment."""
    dpi: float = 0.0
    """Of the picture; 0 for an image, which has none of its own."""
    caption: Caption | None = None
    """The target's reading."""
    receipt: Receipt | None = None
    draft: PageDraft | None = None
    """What the OCR or the document's own text layer says, in regions of the picture."""
    error: str = ""
    """Why the rest is missing: it was damaged in the store, or another release wrote it; or the segment's own error."""
    segment: Segment | None = None
    """Of a film."""


def prompt_of(answer: Job | JobPart) -> str:
    """What its text answers; empty without a receipt."""
    return str(answer.receipt.options.get("prompt", "")) if answer.receipt else ""


@dataclass(frozen=True)
class JobPage:
    """Some jobs of a batch in the order they were handed in."""

    jobs: Sequence[Job]
    next_page_token: str
    """Empty: that was the last page. A page may be empty before the end."""


@dataclass(frozen=True)
class PartPage:
    """Some parts of a job in their order."""

    parts: Sequence[JobPart]
    next_page_token: str
    """Empty: that was the last page."""
