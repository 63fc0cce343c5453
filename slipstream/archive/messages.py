"""What the archive and its callers exchange, as plain frozen types. `slipstream.rpc` puts them on the wire.

The *archive* captions in the background. A *batch* is one submission, its *items* become *jobs*, and the jobs wait in a
*queue* that gateways share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.archive.queue import BatchState, JobState, Priority
from slipstream.messages import Caption

MAX_ITEM_HINT_BYTES = 64 * 1024
"""Of the hints of one job, which wait in the queue with it. An interactive caption may have more."""
OptionValues = Mapping[str, Any]
"""Options of `CaptionOptions` by name, as somebody gave them: not checked yet."""


@dataclass(frozen=True)
class BatchOptions:
    """A batch to submit: what its items share."""

    key: str = ""
    """Names the batch for this caller: the same key is the same batch. Empty: a new one each time."""
    caption: OptionValues = field(default_factory=dict)
    """What to ask of every video."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Free text for the caller's own use."""
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True)
class BatchItem:
    """One video of a batch to submit."""

    custom_id: str
    """Names the item within its batch, for joining results to inputs."""
    source: str
    """A file below one of the gateways' roots, or an https address where the gateways take those."""
    caption: OptionValues = field(default_factory=dict)
    """Options that differ from the batch's."""
    sha256: str = ""
    """Of the file, hexadecimal. When given, other content is refused."""


@dataclass(frozen=True)
class Submitted:
    """What became of the items of one or several calls."""

    batch_id: str = ""
    num_added: int = 0
    num_known: int = 0
    """Items that the batch had already."""
    num_conflicts: int = 0
    """Items whose custom_id the batch has with another source or other options; those stay as they were."""
    conflicts: tuple[str, ...] = ()
    """Custom ids of at most 100 of them a call."""
    num_rejected: int = 0
    """Of the added ones, those that cannot run; they are failed jobs with their reason."""

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
    """Without its single tokens."""
    receipt: Receipt | None = None


@dataclass(frozen=True)
class JobPage:
    """Some jobs of a batch in the order they were handed in."""

    jobs: Sequence[Job]
    next_page_token: str
    """Empty: that was the last page. A page may be empty before the end."""
