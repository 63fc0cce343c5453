"""A `JobQueue` in memory: what the scripts of the Redis queue are compared with, and what unit tests run on."""

from collections.abc import Iterable, Mapping, Sequence

from slipstream.archive.parts import PartRecord, PartsState, PutAnswer
from slipstream.archive.queue import (
    ONLY_DEAD,
    BatchRecord,
    BatchSpec,
    BeatAnswer,
    DamagedRecord,
    JobRecord,
    JobSpec,
    JobState,
    KnownEntry,
    Lease,
    Outcome,
    QueueDepth,
    Retried,
    SubmitOutcome,
    UnknownBatch,
)
from slipstream.archive.redis_rows import DIGEST_BYTES, batch_state
from slipstream.errors import InvalidRequest, LimitExceeded
from tests.support.memory_table import Batch, JobTable, place_in_take

SWEEP_JOBS = 500


def stored_bytes(parts: Iterable[bytes]) -> int:
    """Each lies behind its digest."""
    return sum(DIGEST_BYTES + len(part) for part in parts)


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

    async def submit(
        self, batch_id: str, jobs: Sequence[JobSpec], max_waiting: int | None = None
    ) -> list[SubmitOutcome]:
        batch = self._batch(batch_id)
        return [self._admit(batch, job, max_waiting) for job in jobs]

    async def seal_batch(self, batch_id: str) -> None:
        self._batch(batch_id).is_sealed = True

    async def take(self, worker: str, limit: int, *, suspects: bool = True) -> list[Lease]:
        leases: list[Lease] = []
        if limit <= 0:
            self._show_alive(worker)
            return leases
        now = self._clock()
        due = sorted(
            (job.due_s, name) for name, job in self._jobs.items() if job.due_s is not None and job.due_s <= now
        )
        for _, name in due:
            self._enqueue(self._jobs[name], is_again=True)
        for job in sorted(self._running(), key=place_in_take):
            if job.lease_ends_s <= now and len(leases) < limit and self._expire(job):
                leases.append(self._begin(job, worker))
        self._show_alive(worker)
        if suspects and len(leases) < limit and not any(job.place[0] == "suspects" for job in self._running()):
            leases += [self._begin(job, worker) for job in self._deliver("suspects")]
        while len(leases) < limit and (found := self._deliver_in_turn()):
            leases += [self._begin(job, worker) for job in found]
        return leases

    async def beat(self, leases: Sequence[Lease], progress: Mapping[str, str]) -> list[BeatAnswer]:
        if leases:
            self._show_alive(leases[0].worker)
        return [self._beat(lease, progress.get(lease.job_id, "")) for lease in leases]

    async def finish(self, lease: Lease, outcome: Outcome) -> bool:
        job = self._held(lease)
        if job is None or job.record.state is not JobState.RUNNING:
            self._absolve(lease)
            return job is not None and job.record.state is outcome.state
        tallies = self._batch(lease.batch_id).tallies
        if outcome.state is JobState.DONE:
            if len(job.parts) < job.record.parts_total:
                raise DamagedRecord("parts are missing")
            job.set(result=outcome.result)
            batch = self._batches[job.record.batch_id]
            batch.obstacle, batch.obstacle_s = "", 0.0
            job.content_key = outcome.content_key
            if outcome.content_key:
                self._results[outcome.content_key] = lease.job_id
            for name, value in job.part_tallies.items():
                tallies[name] = tallies.get(name, 0.0) + value
        for name, value in outcome.tallies.items():
            tallies[name] = tallies.get(name, 0.0) + value
        job.set(error=outcome.error, error_code=outcome.error_code, progress="")
        self._forget_suspect(lease)
        self._move(job, outcome.state)
        return True

    async def retry(self, lease: Lease, reason: str, delay_s: float, *, counted: bool = True) -> bool:
        job = self._held(lease)
        if job is None or job.record.state is not JobState.RUNNING:
            self._absolve(lease)
            return job is not None
        self._forget_suspect(lease)
        job.set(attempts=job.record.attempts + counted)
        if counted and job.record.attempts >= self.policy.max_attempts:
            self._bury(job, reason)
        else:
            self._give_back(job, delay_s, reason, is_obstacle=counted or delay_s > 0)
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
            self._give_back(job, 0.0, reason, is_obstacle=True)
        return True

    async def open_parts(self, lease: Lease, key: str, total: int = 0, layout: str = "") -> PartsState | None:
        if total > self.policy.parts.max_parts:
            raise LimitExceeded("too many parts")
        job = self._held(lease)
        if job is None or job.record.state is not JobState.RUNNING:
            return None
        if job.parts_key != key:
            job.parts_key, job.layout = key, ""
            job.parts.clear()
            job.notes.clear()
            job.part_tallies.clear()
            job.set(parts_total=0, parts_done=0)
        if total and not job.record.parts_total:
            job.layout = layout
            job.set(parts_total=total)
        return PartsState(job.record.parts_total, job.layout, tuple(sorted(job.parts)))

    async def put_part(self, lease: Lease, number: int, data: bytes, tallies: Mapping[str, float]) -> PutAnswer:
        limits = self.policy.parts
        if len(data) > limits.max_part_bytes:
            raise LimitExceeded("too large a part")
        job = self._held(lease)
        if job is None or job.record.state is not JobState.RUNNING:
            return PutAnswer.LOST
        assert number < job.record.parts_total, "a part has a number below the total that was told"
        if number in job.parts:
            return PutAnswer.KNOWN
        notes = {} if len(job.parts) + 1 == job.record.parts_total else job.notes
        if stored_bytes([*job.parts.values(), *notes.values(), data]) > limits.max_job_bytes:
            return PutAnswer.FULL
        job.parts[number], job.notes = data, notes
        job.part_tallies.update(tallies)
        job.set(parts_done=len(job.parts))
        job.count_anew()
        return PutAnswer.KEPT

    async def put_note(self, lease: Lease, name: str, data: bytes) -> PutAnswer:
        job = self._held(lease)
        if job is None or job.record.state is not JobState.RUNNING:
            return PutAnswer.LOST
        assert job.parts_key, "parts were opened"
        if job.notes.get(name) == data:
            return PutAnswer.KNOWN
        kept = job.notes | {name: data}
        if stored_bytes([*job.parts.values(), *kept.values()]) > self.policy.parts.max_job_bytes:
            return PutAnswer.FULL
        job.notes = kept
        job.count_anew()
        return PutAnswer.KEPT

    async def find_note(self, lease: Lease, name: str) -> bytes | None:
        job = self._jobs.get(lease.job_id)
        return None if job is None else job.notes.get(name)

    async def list_parts(
        self, batch_id: str, job_id: str, after: int = 0, limit: int = 100
    ) -> tuple[list[PartRecord], int]:
        job = self._jobs.get(job_id)
        if job is None or job.record.batch_id != batch_id:
            raise UnknownBatch(f"no job {job_id} here")
        left = sorted(number for number in job.parts if number >= after)
        parts = [PartRecord(number, job.parts[number]) for number in left[:limit]]
        return parts, left[limit] if len(left) > limit else 0

    async def get_batch(self, batch_id: str, owner: str | None = None) -> BatchRecord:
        batch = self._batch(batch_id)
        if owner not in (None, batch.spec.owner):
            raise UnknownBatch(f"no batch {batch_id} here")
        counts = dict.fromkeys(JobState, 0)
        jobs = [self._jobs[name] for name in batch.jobs]
        for job in jobs:
            counts[job.record.state] += 1
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
            parts_total=sum(job.record.parts_total for job in jobs),
            parts_done=sum(len(job.parts) for job in jobs),
            parts_bytes=sum(stored_bytes([*job.parts.values(), *job.notes.values()]) for job in jobs),
            obstacle=batch.obstacle,
            obstacle_s=batch.obstacle_s,
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
        live = [self._jobs[name] for name in batch.jobs if not self._jobs[name].record.state.is_terminal]
        batch.is_cancelled = batch.is_cancelled or bool(live) or not batch.is_sealed
        for job in live:
            if job.record.state is JobState.QUEUED:
                self._move(job, JobState.CANCELLED)
        return len(live)

    async def retry_dead(
        self, batch_id: str, states: frozenset[JobState] = ONLY_DEAD, max_waiting: int | None = None
    ) -> Retried:
        assert states <= {JobState.DEAD, JobState.FAILED, JobState.CANCELLED}, "only these can be given another chance"
        batch = self._batch(batch_id)
        chosen = [self._jobs[name] for name in batch.jobs if self._jobs[name].record.state in states]
        for number, job in enumerate(chosen):
            if stop := self._no_room(batch.spec.owner, max_waiting):
                return Retried(number, stop)
            batch.is_cancelled, batch.obstacle, batch.obstacle_s = False, "", 0.0
            job.set(error="", error_code="")
            job.count_anew()
            self._move(job, JobState.QUEUED)
            self._enqueue(job)
        return Retried(len(chosen))

    async def find_result(self, content_key: str) -> str | None:
        name = self._results.get(content_key)
        return None if name is None else self._jobs[name].record.result

    async def add_known(self, key: str, data: bytes, most: int) -> None:
        entries = self._known.setdefault(key, [])
        self._num_known += 1
        entries.append(KnownEntry(str(self._num_known), data))
        del entries[:-most]

    async def list_known(self, key: str, after: str, limit: int) -> list[KnownEntry]:
        return [entry for entry in self._known.get(key, []) if int(entry.place) > int(after or 0)][:limit]

    async def depth(self) -> QueueDepth:
        states = [job.record.state for job in self._jobs.values()]
        created = [
            job.record.created_s
            for job in self._jobs.values()
            if job.record.state is JobState.QUEUED and job.due_s is None
        ]
        return QueueDepth(
            oldest_s=self._clock() - min(created, default=self._clock()),
            queued=states.count(JobState.QUEUED),
            delayed=sum(job.due_s is not None for job in self._jobs.values()),
            suspects=self._num_waiting("suspects"),
            running=states.count(JobState.RUNNING),
            dead=states.count(JobState.DEAD),
        )

    async def num_busy(self) -> int:
        return len({job.record.worker for job in self._running()})

    async def sweep(self) -> int:
        now = self._clock()
        times = [(batch.expires_s, name) for name, batch in self._batches.items() if batch.expires_s is not None]
        for _, batch_id in sorted(each for each in times if each[0] <= now):
            batch = self._batches[batch_id]
            swept, batch.jobs = batch.jobs[:SWEEP_JOBS], batch.jobs[SWEEP_JOBS:]
            for name in swept:
                job = self._jobs.pop(name)
                if self._results.get(job.content_key) == name:
                    del self._results[job.content_key]
            if not batch.jobs:
                del self._batches[batch_id]
            if swept:
                return len(swept)
        return 0

    async def ping(self) -> None:
        """Never away."""

    async def close(self) -> None:
        """Keeps what it has."""
