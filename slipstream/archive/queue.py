"""What a job queue promises, and the plain records that pass through it. It imports no wire, no video and no model.

Execution is at least once; the committed effect is exactly once: a result is accepted from the current holder of the
job's lease only, and only once. A job reaches exactly one terminal state.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from slipstream.archive.parts import PartLimits, PartStore
from slipstream.errors import Overloaded, ServiceUnavailable, SlipstreamError


class JobState(StrEnum):
    """Where a job stands. QUEUED covers jobs that wait for a back-off to pass."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    """It has a result."""
    FAILED = "failed"
    """The job itself is at fault, and running it again would not help: no such file, no video, a bad option."""
    DEAD = "dead"
    """Given up: its attempts are spent, or whatever ran it died too often. `retry_dead` gives it new ones."""
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


ONLY_DEAD = frozenset({JobState.DEAD})


class BatchState(StrEnum):
    """Derived from the batch's counts and flags."""

    OPEN = "open"
    """Items are still being handed in; those that are may run already."""
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    """Every job is in a terminal state."""
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class Priority(StrEnum):
    """Higher ones are taken more often; lower ones are never starved."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class QueueUnavailable(ServiceUnavailable):
    """The queue's store cannot be reached or cannot make anything durable now. Nothing was promised."""


class BacklogFull(Overloaded):
    """As many jobs wait as the policy allows; what was accepted before stays accepted."""


class DamagedRecord(SlipstreamError):
    """What the store holds of a batch or a job is not what was put there."""

    status = "DATA_LOSS"


class UnknownBatch(SlipstreamError):
    """No batch of that id here, or no such job in it, or it belongs to somebody else."""

    status = "NOT_FOUND"
    exit_code = 3

    @classmethod
    def named(cls, batch: str) -> "UnknownBatch":
        """By the id or the key that was asked for."""
        return cls(f"no batch {batch} here; `slipstream archive status` lists yours")

    @classmethod
    def without_job(cls, batch: str, job_id: str) -> "UnknownBatch":
        """The batch that was asked for is here."""
        return cls(f"no job {job_id} in batch {batch}")


class BatchAbandoned(SlipstreamError):
    """The batch was never sealed, and nothing of it waits or runs any more: it does not end by itself."""

    status = "FAILED_PRECONDITION"


@dataclass(frozen=True)
class QueuePolicy:
    """How patient a queue is. All workers and submitters of one queue are told the same."""

    lease_s: float = 15.0
    """A worker that is silent for so long has lost its jobs. It renews five times in that time."""
    max_attempts: int = 4
    """Counted failures after which a job is dead."""
    max_crashes: int = 3
    """Deaths of whatever ran it after which a job is dead. From the second one on it is a suspect: a worker runs at
    most one suspect at a time, and when that worker dies only the suspect is blamed."""
    max_backlog: int = 1_000_000
    """Jobs that may wait."""
    retention_s: float = 30 * 86_400.0
    """How long a batch is kept after its last job ended."""
    parts: PartLimits = field(default_factory=PartLimits)
    queue_bytes: int = 0
    """That jobs may take in the store, where results leave it and later jobs wait outside; 0: nothing leaves it."""


@dataclass(frozen=True)
class BatchSpec:
    """A batch to open. Opening it again is no error and changes nothing but adds what comes."""

    batch_id: str
    owner: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    options: str = ""
    """What all its jobs share, JSON. Opening it again with other options raises `InvalidRequest`."""


REJECTED = "INVALID_ARGUMENT"
"""Of most that cannot run."""


@dataclass(frozen=True)
class JobSpec:
    """A job to hand in. `custom_id` names it within its batch; the same name and payload again is the same job."""

    custom_id: str
    payload: str
    """JSON."""
    priority: Priority = Priority.NORMAL
    rejection: str = ""
    """Why it cannot run: the job is recorded as FAILED with this error and never queued."""
    cost: int = 1
    """Turns of its owner that a run takes, at least 1."""
    traceparent: str = ""
    """Where its trace begins (W3C), if it is traced. That of the first hand-in stands."""
    rejection_code: str = REJECTED
    """Name of the gRPC status of the rejection."""


class SubmitOutcome(StrEnum):
    """What became of one `JobSpec`."""

    ADDED = "added"
    KNOWN = "known"
    """Handed in before with the same payload, whatever its state is now."""
    CONFLICT = "conflict"
    """The batch has a job of this name with another payload, which stays."""
    FULL = "full"
    """Not accepted: the backlog is at its limit."""
    OVER_QUOTA = "over_quota"
    """Not accepted: as many jobs of its owner wait as may."""
    OUTSIDE = "outside"
    """Not accepted by the store, whose room is taken: it is to wait outside. Callers never see it."""


@dataclass(frozen=True)
class Retried:
    """How many ended jobs wait again, and what kept the rest from it, where anything did: FULL, OVER_QUOTA, or OUTSIDE
    while jobs of a cancelled batch are yet to be brought in, each of which is cancelled then."""

    num_jobs: int
    stopped_by: SubmitOutcome | None = None


@dataclass(frozen=True)
class Lease:
    """The right to run one job, until it is not renewed for `QueuePolicy.lease_s`."""

    job_id: str
    batch_id: str
    custom_id: str
    worker: str
    epoch: int
    """Together with `worker` the fencing token: every run of the job has another one."""
    payload: str
    options: str
    """The batch's."""
    attempts: int
    """Counted failures so far: since its last part, where it has parts."""
    crashes: int
    is_suspect: bool
    entry: str
    """Where the store keeps the lease; of no interest to others."""
    owner: str = ""
    """The batch's."""
    traceparent: str = ""
    """The job's."""

    @property
    def request_id(self) -> str:
        """Names this run at the models: an earlier one may still linger there."""
        return f"{self.job_id}-{self.epoch}"


class BeatAnswer(StrEnum):
    """What a worker learns when it renews a lease."""

    KEEP = "keep"
    LOST = "lost"
    """Another worker has the job, or may have it: stop, do not commit."""
    CANCEL = "cancel"
    """Stop and finish as CANCELLED."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, to be committed."""

    state: JobState
    """DONE, FAILED or CANCELLED."""
    result: str = ""
    """JSON; kept with its SHA-256."""
    error: str = ""
    error_code: str = ""
    """Name of the `grpc.StatusCode`."""
    content_key: str = ""
    """Names what the result depends on; `find_result` finds it under this key from any batch."""
    tallies: Mapping[str, float] = field(default_factory=dict)
    """Added to the batch's sums, exactly once: tokens, seconds."""


@dataclass(frozen=True)
class JobRecord:
    """One job as the queue knows it."""

    job_id: str
    batch_id: str
    custom_id: str
    state: JobState
    payload: str
    result: str
    error: str
    error_code: str
    worker: str
    """Who has or had it last."""
    epoch: int
    attempts: int
    crashes: int
    progress: str
    """What its worker said last, free text such as "prefill 3/8"."""
    created_s: float
    """Unix times of the store's clock; 0 where it has not happened."""
    started_s: float
    ended_s: float
    parts_total: int = 0
    """0: it has none, or nobody has found out how many."""
    parts_done: int = 0


@dataclass(frozen=True)
class BatchRecord:
    """One batch as the queue knows it."""

    batch_id: str
    owner: str
    state: BatchState
    metadata: Mapping[str, str]
    options: str
    counts: Mapping[JobState, int]
    """Every state has an entry; their sum is the number of jobs."""
    tallies: Mapping[str, float]
    created_s: float
    ended_s: float
    """When its last job ended; 0 while any has not."""
    parts_total: int = 0
    """Of all jobs, as far as they were begun."""
    parts_done: int = 0
    parts_bytes: int = 0
    obstacle: str = ""
    """Why a job of it was given back, the last time that one was, if none was done since; and when."""
    obstacle_s: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def sha256(data: str | bytes) -> str:
    """Hexadecimal."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def job_id(batch_id: str, custom_id: str) -> str:
    """The same item of the same batch is the same job, whoever hands it in."""
    return sha256(f"{batch_id}\0{custom_id}")[:32]


@dataclass(frozen=True)
class KnownEntry:
    """A caption that is kept for its near-duplicates."""

    place: str
    data: bytes


@dataclass(frozen=True)
class QueueDepth:
    """How much waits and runs, over all batches."""

    queued: int
    delayed: int
    """Those of `queued` that wait for a back-off to pass."""
    suspects: int
    running: int
    dead: int
    oldest_s: float = field(default=0.0, compare=False)
    """Seconds since the oldest job that waits for its turn was handed in; 0 while none does."""


class JobQueue(PartStore, Protocol):
    """The queue. Any method may raise `DamagedRecord`, or `QueueUnavailable`: then those that take a lease may be
    repeated."""

    policy: QueuePolicy

    async def open_batch(self, batch: BatchSpec) -> None:
        """Creates the batch or finds it. Raises `UnknownBatch` when it belongs to another owner."""

    async def submit(
        self, batch_id: str, jobs: Sequence[JobSpec], max_waiting: int | None = None
    ) -> list[SubmitOutcome]:
        """Hands in jobs: one answer each, in order. Durable when it returns. `max_waiting`: how many jobs of the
        batch's owner may wait for their turn, over all batches; those in a back-off are not counted."""

    async def seal_batch(self, batch_id: str) -> None:
        """No more items for now: the batch is complete once its jobs are. `submit` opens it again."""

    async def take(self, worker: str, limit: int, *, suspects: bool = True) -> list[Lease]:
        """At most `limit` jobs, never waiting for one: expired leases first, then by priority; within a priority the
        owners that have work take turns. 0 is a sign of life. `suspects`: whether one suspect may be among them; a
        worker that runs one says False. Only one suspect runs at a time over all workers, for what it kills they may
        share."""

    async def beat(self, leases: Sequence[Lease], progress: Mapping[str, str]) -> list[BeatAnswer]:
        """Renews leases; one answer each. `progress` by job id."""

    async def finish(self, lease: Lease, outcome: Outcome) -> bool:
        """Commits, with the tallies of its parts when it is DONE. False: the lease is lost and nothing was changed.
        True again when repeated by the same holder. Raises `DamagedRecord` for one that is to be DONE without all of
        its parts."""

    async def retry(self, lease: Lease, reason: str, delay_s: float, *, counted: bool = True) -> bool:
        """Gives the job back, to run again after `delay_s`; `counted` failures are limited, then the job is DEAD.
        Not counted: the world was at fault, or the worker stops. False: the lease is lost."""

    async def crash(self, lease: Lease, reason: str) -> bool:
        """What ran the job died (not the worker): the job is given back and blamed as for a dead worker."""

    async def get_batch(self, batch_id: str, owner: str | None = None) -> BatchRecord:
        """Raises `UnknownBatch`, also when `owner` is given and another's."""

    async def list_batches(self, owner: str | None = None, limit: int = 100) -> list[BatchRecord]:
        """The latest first; without those whose record is damaged."""

    async def list_jobs(
        self, batch_id: str, states: frozenset[JobState] = frozenset(), after: int = 0, limit: int = 100
    ) -> tuple[list[JobRecord], int]:
        """Jobs in the order they were handed in, from position `after`; and the position to go on from, 0 at the end.
        May return fewer than `limit`, even none, before the end. No `states`: all."""

    async def cancel_batch(self, batch_id: str) -> int:
        """Queued jobs become CANCELLED, running ones learn of it at their next beat. Returns how many that are. A batch
        that is COMPLETED stays so."""

    async def retry_dead(
        self, batch_id: str, states: frozenset[JobState] = ONLY_DEAD, max_waiting: int | None = None
    ) -> Retried:
        """Queues DEAD (and, if asked, FAILED or CANCELLED) jobs again with fresh counters, as far as the backlog and
        `max_waiting`, the number of jobs of the batch's owner that may wait, have room for them."""

    async def find_result(self, content_key: str) -> str | None:
        """A committed result of the same content, if one is still kept."""

    async def add_known(self, key: str, data: bytes, most: int) -> None:
        """Keeps a caption for its near-duplicates, in the set of this key; of a set the latest `most` are kept."""

    async def list_known(self, key: str, after: str, limit: int) -> list[KnownEntry]:
        """Entries of a set in the order they were added, behind the place `after`; "" for the first. Empty: that is
        all. Those that were damaged in the store have no data."""

    async def depth(self) -> QueueDepth: ...

    async def num_busy(self) -> int:
        """Workers that have jobs, also those that are ending and finish them. It looks at every job that runs."""

    async def sweep(self) -> int:
        """Deletes some of what is past its retention. Returns how many jobs; call it now and then."""

    async def ping(self) -> None:
        """Raises `QueueUnavailable` when the store would not take a write."""

    async def close(self) -> None: ...
