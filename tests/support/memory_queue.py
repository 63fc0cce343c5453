"""A `JobQueue` in memory: what the scripts of the Redis queue are compared with, and what unit tests run on.

The same state machine as in `lua/prelude.lua` and `lua/take.lua`, rule by rule.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.archive.queue import (
    BatchRecord,
    BatchSpec,
    BeatAnswer,
    JobRecord,
    JobSpec,
    JobState,
    Lease,
    Outcome,
    Priority,
    QueueDepth,
    QueuePolicy,
    SubmitOutcome,
    UnknownBatch,
)
from slipstream.archive.redis_queue import batch_state, job_id
from slipstream.errors import InvalidRequest

# -- memory table -----------------------------------------------------------------------------------------------------

SUSPECT_AFTER = 2
TURNS = tuple({"h": Priority.HIGH, "n": Priority.NORMAL, "l": Priority.LOW}[letter] for letter in "hnhhnhlhnh")
STREAMS = ("suspects", "again", *Priority)


@dataclass
class Batch:
    spec: BatchSpec
    created_s: float
    jobs: list[str] = field(default_factory=list)
    tallies: dict[str, float] = field(default_factory=dict)
    ended_s: float = 0.0
    expires_s: float | None = None
    is_sealed: bool = False
    is_cancelled: bool = False


@dataclass
class Job:
    record: JobRecord
    priority: Priority
    content_key: str = ""
    excused: int = 0
    place: tuple[str, int] = ("", 0)
    """Stream and number of the entry that stands for it."""
    due_s: float | None = None
    """When its back-off is over."""
    lease_ends_s: float = 0.0

    def set(self, **changes: object) -> None:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]


class JobTable:
    """Base of `MemoryQueue`."""

    def __init__(self, policy: QueuePolicy | None = None, clock: Callable[[], float] = time.time) -> None:
        self.policy = policy or QueuePolicy()
        self._clock = clock
        self._batches: dict[str, Batch] = {}
        self._jobs: dict[str, Job] = {}
        self._waiting: dict[str, deque[tuple[int, str]]] = {name: deque() for name in STREAMS}
        self._results: dict[str, str] = {}
        self._suspects: dict[str, tuple[str, float]] = {}
        """By worker, and under "" of all: the suspect it runs, and until when that is remembered."""
        self._num_entries = 0
        self._turn = 0

    def _batch(self, batch_id: str) -> Batch:
        if batch_id not in self._batches:
            raise UnknownBatch(f"no batch {batch_id} here")
        return self._batches[batch_id]

    def _running(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.record.state is JobState.RUNNING]

    def _held(self, lease: Lease) -> Job | None:
        """The job, if the lease's token is its current one."""
        job = self._jobs.get(lease.job_id)
        return job if job and (job.record.worker, job.record.epoch) == (lease.worker, lease.epoch) else None

    def _admit(self, batch: Batch, spec: JobSpec) -> SubmitOutcome:
        name = job_id(batch.spec.batch_id, spec.custom_id)
        if known := self._jobs.get(name):
            return SubmitOutcome.KNOWN if known.record.payload == spec.payload else SubmitOutcome.CONFLICT
        num_queued = sum(job.record.state is JobState.QUEUED for job in self._jobs.values())
        if not spec.rejection and num_queued >= self.policy.max_backlog:
            return SubmitOutcome.FULL
        job = self._jobs[name] = Job(_new_record(name, batch.spec.batch_id, spec, self._clock()), spec.priority)
        batch.jobs.append(name)
        batch.is_sealed = False
        if spec.rejection:
            job.set(error=spec.rejection, error_code="INVALID_ARGUMENT")
            self._move(job, JobState.FAILED)
        elif batch.is_cancelled:
            self._move(job, JobState.CANCELLED)
        else:
            self._move(job, JobState.QUEUED)
            self._enqueue(job, spec.priority)
        return SubmitOutcome.ADDED

    def _move(self, job: Job, state: JobState) -> None:
        """The one place where a job's state changes."""
        batch = self._batches[job.record.batch_id]
        now = self._clock()
        job.due_s = None
        job.set(state=state, ended_s=now if state.is_terminal else 0.0)
        if not state.is_terminal:
            batch.ended_s, batch.expires_s = 0.0, None
        elif all(self._jobs[name].record.state.is_terminal for name in batch.jobs):
            batch.ended_s, batch.expires_s = now, now + self.policy.retention_s

    def _enqueue(self, job: Job, stream: str) -> None:
        job.due_s = None
        self._num_entries += 1
        job.place = ("suspects" if job.record.crashes >= SUSPECT_AFTER else stream, self._num_entries)
        self._waiting[job.place[0]].append((self._num_entries, job.record.job_id))

    def _give_back(self, job: Job, delay_s: float) -> None:
        if self._batches[job.record.batch_id].is_cancelled:
            self._move(job, JobState.CANCELLED)
            return
        self._move(job, JobState.QUEUED)
        if delay_s > 0:
            job.place = ("", 0)
            job.due_s = self._clock() + delay_s
        else:
            self._enqueue(job, "again")

    def _bury(self, job: Job, why: str) -> None:
        job.set(error=why, error_code="ABORTED")
        self._move(job, JobState.DEAD)

    def _begin(self, job: Job, worker: str) -> Lease:
        now = self._clock()
        job.set(worker=worker, epoch=job.record.epoch + 1, started_s=now, progress="")
        self._move(job, JobState.RUNNING)
        job.lease_ends_s = now + self.policy.lease_s
        is_suspect = job.place[0] == "suspects"
        if is_suspect:
            self._suspects[worker] = self._suspects[""] = (job.record.job_id, float("inf"))
        return Lease(
            job_id=job.record.job_id,
            batch_id=job.record.batch_id,
            custom_id=job.record.custom_id,
            worker=worker,
            epoch=job.record.epoch,
            payload=job.record.payload,
            options=self._batches[job.record.batch_id].spec.options,
            attempts=job.record.attempts,
            crashes=job.record.crashes,
            is_suspect=is_suspect,
            entry=" ".join(map(str, job.place)),
        )

    def _beat(self, lease: Lease, progress: str) -> BeatAnswer:
        job = self._held(lease)
        if job is None or job.record.state is not JobState.RUNNING:
            if self._suspect(lease.worker) == lease.job_id:
                del self._suspects[lease.worker]
            return BeatAnswer.LOST
        job.lease_ends_s = self._clock() + self.policy.lease_s
        if progress:
            job.set(progress=progress)
        return BeatAnswer.CANCEL if self._batches[lease.batch_id].is_cancelled else BeatAnswer.KEEP

    def _expire(self, job: Job) -> bool:
        """Whether the job runs again at once: suspects wait for their turn."""
        if self._batches[job.record.batch_id].is_cancelled:
            self._move(job, JobState.CANCELLED)
            return False
        crashes = self._blame(job, self._suspect(job.record.worker))
        if self._suspect("") == job.record.job_id:
            self._suspects[""] = (job.record.job_id, self._clock() + self.policy.lease_s)
        if crashes < SUSPECT_AFTER:
            return True
        if crashes >= self.policy.max_crashes:
            self._bury(job, f"whatever ran it died {crashes} times")
        else:
            self._give_back(job, 0.0)
        return False

    def _suspect(self, worker: str) -> str | None:
        name, until_s = self._suspects.get(worker, (None, 0.0))
        return name if self._clock() < until_s else None

    def _forget_suspect(self, lease: Lease) -> None:
        for key in (lease.worker, ""):
            if self._suspect(key) == lease.job_id:
                del self._suspects[key]

    def _blame(self, job: Job, suspect: str | None) -> int:
        """Crashes of the job after one more, unless a suspect ran beside it; that excuse wears out."""
        if suspect not in (None, job.record.job_id):
            job.excused += 1
            if job.excused <= 2 * self.policy.max_crashes:
                return job.record.crashes
        job.set(crashes=job.record.crashes + 1)
        return job.record.crashes

    def _deliver(self, stream: str) -> list[Job]:
        """The next job of the stream, if any."""
        waiting = self._waiting[stream]
        while waiting:
            number, name = waiting.popleft()
            job = self._jobs.get(name)
            if job and job.record.state is JobState.QUEUED and job.place == (stream, number):
                return [job]
        return []

    def _deliver_in_turn(self) -> list[Job]:
        if again := self._deliver("again"):
            return again
        for stream in (TURNS[self._turn], *Priority):
            if found := self._deliver(stream):
                self._turn = (self._turn + 1) % len(TURNS)
                return found
        return []


def _new_record(name: str, batch_id: str, spec: JobSpec, now: float) -> JobRecord:
    return JobRecord(
        job_id=name,
        batch_id=batch_id,
        custom_id=spec.custom_id,
        state=JobState.QUEUED,
        payload=spec.payload,
        result="",
        error="",
        error_code="",
        worker="",
        epoch=0,
        attempts=0,
        crashes=0,
        progress="",
        created_s=now,
        started_s=0.0,
        ended_s=0.0,
    )


# -- memory -----------------------------------------------------------------------------------------------------------

# The job queue in one process, forgotten at its end: for unit tests, and as the model that the one in Redis is
# checked against.

SWEEP_JOBS = 500


class MemoryQueue(JobTable):
    """A `JobQueue`. `clock` gives seconds."""

    async def open_batch(self, batch: BatchSpec) -> None:
        known = self._batches.get(batch.batch_id)
        if known is None:
            now = self._clock()
            self._batches[batch.batch_id] = Batch(batch, now, expires_s=now + self.policy.retention_s)
        elif known.spec.owner != batch.owner:
            raise UnknownBatch(f"no batch {batch.batch_id} here")
        elif known.spec.options != batch.options:
            raise InvalidRequest(f"the batch {batch.batch_id} has other options; give the same, or another key")

    async def submit(self, batch_id: str, jobs: Sequence[JobSpec]) -> list[SubmitOutcome]:
        batch = self._batch(batch_id)
        return [self._admit(batch, job) for job in jobs]

    async def seal_batch(self, batch_id: str) -> None:
        self._batch(batch_id).is_sealed = True

    async def take(self, worker: str, limit: int, *, suspects: bool = True) -> list[Lease]:
        leases: list[Lease] = []
        if limit <= 0:
            return leases
        now = self._clock()
        due = sorted(
            (job.due_s, name) for name, job in self._jobs.items() if job.due_s is not None and job.due_s <= now
        )
        for _, name in due:
            self._enqueue(self._jobs[name], "again")
        for job in sorted(self._running(), key=lambda job: (STREAMS.index(job.place[0]), job.place[1])):
            if job.lease_ends_s <= now and len(leases) < limit and self._expire(job):
                leases.append(self._begin(job, worker))
        if suspects and len(leases) < limit and not any(job.place[0] == "suspects" for job in self._running()):
            leases += [self._begin(job, worker) for job in self._deliver("suspects")]
        while len(leases) < limit and (found := self._deliver_in_turn()):
            leases += [self._begin(job, worker) for job in found]
        return leases

    async def beat(self, leases: Sequence[Lease], progress: Mapping[str, str]) -> list[BeatAnswer]:
        return [self._beat(lease, progress.get(lease.job_id, "")) for lease in leases]

    async def finish(self, lease: Lease, outcome: Outcome) -> bool:
        job = self._held(lease)
        if job is None or job.record.state is not JobState.RUNNING:
            return job is not None and job.record.state.is_terminal
        if outcome.state is JobState.DONE:
            job.set(result=outcome.result)
            job.content_key = outcome.content_key
            if outcome.content_key:
                self._results[outcome.content_key] = lease.job_id
        tallies = self._batch(lease.batch_id).tallies
        for name, value in outcome.tallies.items():
            tallies[name] = tallies.get(name, 0.0) + value
        job.set(error=outcome.error, error_code=outcome.error_code, progress="")
        self._forget_suspect(lease)
        self._move(job, outcome.state)
        return True

    async def retry(self, lease: Lease, reason: str, delay_s: float, *, counted: bool = True) -> bool:
        job = self._held(lease)
        if job is None or job.record.state is not JobState.RUNNING:
            return job is not None
        self._forget_suspect(lease)
        job.set(attempts=job.record.attempts + counted, error=reason)
        if counted and job.record.attempts >= self.policy.max_attempts:
            self._bury(job, reason)
        else:
            self._give_back(job, delay_s)
        return True

    async def crash(self, lease: Lease, reason: str) -> bool:
        job = self._held(lease)
        if job is None or job.record.state is not JobState.RUNNING:
            return job is not None
        crashes = self._blame(job, self._suspect(lease.worker) or self._suspect(""))
        for key in (lease.worker, ""):
            if self._suspect(key) == lease.job_id:
                self._suspects[key] = (lease.job_id, self._clock() + self.policy.lease_s)
        if crashes >= self.policy.max_crashes:
            self._bury(job, f"whatever ran it died {crashes} times: {reason}")
        else:
            job.set(error=reason)
            self._give_back(job, 0.0)
        return True

    async def get_batch(self, batch_id: str, owner: str | None = None) -> BatchRecord:
        batch = self._batch(batch_id)
        if owner not in (None, batch.spec.owner):
            raise UnknownBatch(f"no batch {batch_id} here")
        counts = dict.fromkeys(JobState, 0)
        for name in batch.jobs:
            counts[self._jobs[name].record.state] += 1
        return BatchRecord(
            batch_id=batch_id,
            owner=batch.spec.owner,
            state=batch_state(counts, is_sealed=batch.is_sealed, is_cancelled=batch.is_cancelled),
            metadata=dict(batch.spec.metadata),
            options=batch.spec.options,
            counts=counts,
            tallies=dict(batch.tallies),
            created_s=batch.created_s,
            ended_s=batch.ended_s,
        )

    async def list_batches(self, owner: str | None = None, limit: int = 100) -> list[BatchRecord]:
        mine = [name for name, batch in self._batches.items() if owner in (None, batch.spec.owner)]
        latest = sorted(mine, key=lambda name: (self._batches[name].created_s, name), reverse=True)
        return [await self.get_batch(name) for name in latest[:limit]]

    async def list_jobs(
        self, batch_id: str, states: frozenset[JobState] = frozenset(), after: int = 0, limit: int = 100
    ) -> tuple[list[JobRecord], int]:
        names = self._batch(batch_id).jobs
        found: list[JobRecord] = []
        for position in range(after, len(names)):
            if len(found) == limit:
                return found, position
            record = self._jobs[names[position]].record
            if not states or record.state in states:
                found.append(record)
        return found, 0

    async def cancel_batch(self, batch_id: str) -> int:
        batch = self._batch(batch_id)
        batch.is_cancelled = True
        live = [self._jobs[name] for name in batch.jobs if not self._jobs[name].record.state.is_terminal]
        for job in live:
            if job.record.state is JobState.QUEUED:
                self._move(job, JobState.CANCELLED)
        return len(live)

    async def retry_dead(self, batch_id: str, states: frozenset[JobState] = frozenset({JobState.DEAD})) -> int:
        assert states <= {JobState.DEAD, JobState.FAILED, JobState.CANCELLED}, "only these can be given another chance"
        batch = self._batch(batch_id)
        chosen = [self._jobs[name] for name in batch.jobs if self._jobs[name].record.state in states]
        for job in chosen:
            batch.is_cancelled = False
            job.excused = 0
            job.set(attempts=0, crashes=0, error="", error_code="")
            self._move(job, JobState.QUEUED)
            self._enqueue(job, job.priority)
        return len(chosen)

    async def find_result(self, content_key: str) -> str | None:
        name = self._results.get(content_key)
        return None if name is None else self._jobs[name].record.result

    async def depth(self) -> QueueDepth:
        states = [job.record.state for job in self._jobs.values()]
        return QueueDepth(
            queued=states.count(JobState.QUEUED),
            delayed=sum(job.due_s is not None for job in self._jobs.values()),
            suspects=len(self._waiting["suspects"]),
            running=states.count(JobState.RUNNING),
            dead=states.count(JobState.DEAD),
        )

    async def sweep(self) -> int:
        now = self._clock()
        expired = [(batch.expires_s, name) for name, batch in self._batches.items() if batch.expires_s is not None]
        if not expired or min(expired)[0] > now:
            return 0
        batch_id = min(expired)[1]
        batch = self._batches[batch_id]
        swept, batch.jobs = batch.jobs[:SWEEP_JOBS], batch.jobs[SWEEP_JOBS:]
        for name in swept:
            job = self._jobs.pop(name)
            if self._results.get(job.content_key) == name:
                del self._results[job.content_key]
        if not batch.jobs:
            del self._batches[batch_id]
        return len(swept)

    async def ping(self) -> None:
        """Never away."""

    async def close(self) -> None:
        """Keeps what it has."""
