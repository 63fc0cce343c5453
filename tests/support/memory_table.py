"""The state machine of the queue in memory: the same as in `lua/prelude.lua` and `lua/take.lua`, rule by rule."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from slipstream.archive.queue import (
    BatchSpec,
    BeatAnswer,
    JobRecord,
    JobSpec,
    JobState,
    KnownEntry,
    Lease,
    Priority,
    QueuePolicy,
    SubmitOutcome,
    UnknownBatch,
    job_id,
)

SUSPECT_AFTER = 2
TURNS = tuple({"h": Priority.HIGH, "n": Priority.NORMAL, "l": Priority.LOW}[letter] for letter in "hnhhnhlhnh")
CAME_BACK = "; a worker that was taken for dead has come back since, so the job may not be at fault: retry it"
FIRST = ("suspects", "again", *Priority)
"""Streams whose expired leases come before those of the others, which follow in alphabetical order."""


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
    obstacle: str = ""
    obstacle_s: float = 0.0


@dataclass
class Job:
    record: JobRecord
    priority: Priority
    cost: int = 1
    traceparent: str = ""
    content_key: str = ""
    excused: int = 0
    absolved: int = 0
    blamed: dict[int, str] = field(default_factory=dict)
    """Workers that were taken for dead, by the epoch of the run that they lost."""
    place: tuple[str, int] = ("", 0)
    """Stream and number of the entry that stands for it."""
    due_s: float | None = None
    """When its back-off is over."""
    lease_ends_s: float = 0.0
    parts: dict[int, bytes] = field(default_factory=dict)
    notes: dict[str, bytes] = field(default_factory=dict)
    parts_key: str = ""
    layout: str = ""
    part_tallies: Counter[str] = field(default_factory=Counter)

    def set(self, **changes: object) -> None:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]

    def count_anew(self) -> None:
        """What is counted against it."""
        self.excused = self.absolved = 0
        self.blamed.clear()
        self.set(attempts=0, crashes=0)


class JobTable:
    """Base of `MemoryQueue`."""

    def __init__(self, policy: QueuePolicy | None = None, clock: Callable[[], float] = time.time) -> None:
        self.policy = policy or QueuePolicy()
        self._clock = clock
        self._batches: dict[str, Batch] = {}
        self._jobs: dict[str, Job] = {}
        self._waiting: dict[str, deque[tuple[int, str]]] = {}
        """Numbers and jobs of entries by stream, named as in Redis."""
        self._owners: dict[Priority, list[str]] = {priority: [] for priority in Priority}
        """Those with work, by turn."""
        self._debts: Counter[tuple[Priority, str]] = Counter()
        self._results: dict[str, str] = {}
        self._known: dict[str, list[KnownEntry]] = {}
        self._num_known = 0
        self._suspects: dict[str, tuple[str, float]] = {}
        self._alive: dict[str, float] = {}
        """Until when who was heard of counts as living."""
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

    def _owner(self, job: Job) -> str:
        return self._batches[job.record.batch_id].spec.owner

    def _num_waiting(self, stream: str) -> int:
        """Entries of jobs that wait there."""
        waiting = self._waiting.get(stream, deque())
        return sum(self._stands_for(stream, number, name) is not None for number, name in waiting)

    def _stands_for(self, stream: str, number: int, name: str) -> Job | None:
        job = self._jobs.get(name)
        return job if job and job.record.state is JobState.QUEUED and job.place == (stream, number) else None

    def _num_waiting_of(self, owner: str) -> int:
        return sum(self._num_waiting(stream) for priority in Priority for stream in _streams(priority, owner))

    def _no_room(self, owner: str, max_waiting: int | None) -> SubmitOutcome | None:
        """What keeps one more job of the owner from waiting."""
        if sum(job.record.state is JobState.QUEUED for job in self._jobs.values()) >= self.policy.max_backlog:
            return SubmitOutcome.FULL
        is_over = max_waiting is not None and self._num_waiting_of(owner) >= max_waiting
        return SubmitOutcome.OVER_QUOTA if is_over else None

    def _admit(self, batch: Batch, spec: JobSpec, max_waiting: int | None) -> SubmitOutcome:
        name = job_id(batch.spec.batch_id, spec.custom_id)
        if known := self._jobs.get(name):
            return SubmitOutcome.KNOWN if known.record.payload == spec.payload else SubmitOutcome.CONFLICT
        stop = None if spec.rejection else self._no_room(batch.spec.owner, None if batch.is_cancelled else max_waiting)
        if stop:
            return stop
        job = self._jobs[name] = Job(
            _new_record(name, batch.spec.batch_id, spec, self._clock()), spec.priority, spec.cost, spec.traceparent
        )
        batch.jobs.append(name)
        batch.is_sealed = False
        if spec.rejection:
            job.set(error=spec.rejection, error_code=spec.rejection_code)
            self._move(job, JobState.FAILED)
        elif batch.is_cancelled:
            self._move(job, JobState.CANCELLED)
        else:
            self._move(job, JobState.QUEUED)
            self._enqueue(job)
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

    def _enqueue(self, job: Job, *, is_again: bool = False) -> None:
        job.due_s = None
        self._num_entries += 1
        stream = "suspects"
        if job.record.crashes < SUSPECT_AFTER:
            owner = self._owner(job)
            stream = _streams(job.priority, owner)[0 if is_again else 1]
            if owner not in self._owners[job.priority]:
                self._owners[job.priority].append(owner)
        job.place = (stream, self._num_entries)
        self._waiting.setdefault(stream, deque()).append((self._num_entries, job.record.job_id))

    def _give_back(self, job: Job, delay_s: float, why: str = "", *, is_obstacle: bool = False) -> None:
        job.set(error=why or job.record.error)
        batch = self._batches[job.record.batch_id]
        if batch.is_cancelled:
            self._move(job, JobState.CANCELLED)
            return
        if is_obstacle:
            batch.obstacle, batch.obstacle_s = why, self._clock()
        self._move(job, JobState.QUEUED)
        if delay_s > 0:
            job.place = ("", 0)
            job.due_s = self._clock() + delay_s
        else:
            self._enqueue(job, is_again=True)

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
            owner=self._owner(job),
            traceparent=job.traceparent,
        )

    def _beat(self, lease: Lease, progress: str) -> BeatAnswer:
        job = self._held(lease)
        if job is None or job.record.state is not JobState.RUNNING:
            self._absolve(lease)
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
        before = job.record.crashes
        crashes = before
        if not (self._alive.get(job.record.worker, 0.0) > self._clock() and self._is_absolved(job)):
            crashes = self._blame(job, self._suspect(job.record.worker))
        if crashes > before:
            job.blamed[job.record.epoch] = job.record.worker
        if self._suspect("") == job.record.job_id:
            self._suspects[""] = (job.record.job_id, self._clock() + self.policy.lease_s)
        if crashes < SUSPECT_AFTER and job.place[0] != "suspects":
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

    def _is_absolved(self, job: Job) -> bool:
        """Of a death that was none; that excuse wears out, too."""
        job.absolved += 1
        return job.absolved <= 2 * self.policy.max_crashes

    def _show_alive(self, worker: str) -> None:
        self._alive[worker] = self._clock() + self.policy.lease_s / 2

    def _absolve(self, lease: Lease) -> None:
        """A worker that was taken for dead speaks of a run that it has lost. A job that is dead of such deaths stays
        so, and its reason says what to do."""
        job = self._jobs.get(lease.job_id)
        if job is None or job.blamed.get(lease.epoch) != lease.worker:
            return
        del job.blamed[lease.epoch]
        if not self._is_absolved(job) or not job.record.crashes:
            return
        job.set(crashes=job.record.crashes - 1)
        if job.record.state is JobState.DEAD and job.record.crashes == self.policy.max_crashes - 1:
            job.set(error=job.record.error + CAME_BACK)

    def _deliver(self, stream: str) -> list[Job]:
        """The next job of the stream, if any."""
        waiting = self._waiting.get(stream, deque())
        while waiting:
            if job := self._stands_for(stream, *waiting.popleft()):
                return [job]
        return []

    def _deliver_in_turn(self) -> list[Job]:
        for priority in (TURNS[self._turn], *Priority):
            if found := self._deliver_from(priority):
                self._turn = (self._turn + 1) % len(TURNS)
                return found
        return []

    def _deliver_from(self, priority: Priority) -> list[Job]:
        owners = self._owners[priority]
        while owners:
            owner = self._next_owner(priority)
            again, waiting = _streams(priority, owner)
            found = self._deliver(again) or self._deliver(waiting)
            owners.remove(owner)
            if self._num_waiting(again) + self._num_waiting(waiting):
                owners.append(owner)
            if found:
                self._debts[priority, owner] += found[0].cost - 1
                return found
        return []

    def _next_owner(self, priority: Priority) -> str:
        """Deficit round robin: who owes turns is passed over, but when all do, the least debt is forgiven to all."""
        owners = self._owners[priority]
        least = min(self._debts[priority, owner] for owner in owners)
        for owner in owners:
            self._debts[priority, owner] -= least
        while self._debts[priority, owners[0]]:
            self._debts[priority, owners[0]] -= 1
            owners.append(owners.pop(0))
        return owners[0]


def _streams(priority: Priority, owner: str) -> tuple[str, str]:
    """Where its jobs of the priority wait: those that were given back, and the others."""
    return f"again:{priority}:{owner}", f"{priority}:{owner}" if owner else str(priority)


def place_in_take(job: Job) -> tuple[int, str, int]:
    """Sorts expired leases."""
    stream, number = job.place
    return FIRST.index(stream) if stream in FIRST else len(FIRST), stream, number


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
