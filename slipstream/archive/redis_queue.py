"""The job queue in Redis: any number of gateways on any number of machines share one.

What changes a job's state is in the scripts of `lua/`, one round trip each; here are only arguments and answers.
Times are those of the server, so the clocks of its users do not matter.
"""

import json
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from slipstream.archive.group_commit import GroupCommit
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
    QueuePolicy,
    QueueUnavailable,
    Retried,
    SubmitOutcome,
    UnknownBatch,
    job_id,
    sha256,
)
from slipstream.archive.redis_rows import (
    batch_from,
    damage_in,
    job_from,
    lease_from,
    log_death,
    log_expired,
    part_from,
    part_row,
    parts_state_from,
    texts,
)
from slipstream.archive.redis_store import CONNECTIONS, OnCall, ScriptStore, load_scripts
from slipstream.errors import InvalidConfig, InvalidRequest, LimitExceeded
from slipstream.logs import get_logger

CHUNK_JOBS, CHUNK_BYTES = 100, 1 << 20
"""What one submit script takes at most."""
SCAN_JOBS = 500
"""Jobs that one script looks at, at most: it must stay short, the server does nothing else meanwhile."""
SWEPT_BATCHES = 100
"""That have no job to delete, in one call."""
PAGE_PARTS, PAGE_BYTES = 100, 1 << 20
"""Parts that one script answers; it ends after the one that makes it so many bytes."""


class RedisQueue:
    """A `JobQueue` at `redis://`, `rediss://`, `unix://` or `sentinel://`, with the user and password of the URL if it
    has them. What is promised is on `replicas` replicas beside the server that leads.

    `name` separates queues on one server; a user that may only touch `~{name}:*` is enough."""

    def __init__(
        self,
        url: str,
        name: str = "slipstream",
        policy: QueuePolicy | None = None,
        *,
        scripts: Mapping[str, str] | None = None,
        connections: int = CONNECTIONS,
        on_call: OnCall | None = None,
        replicas: int = 0,
    ) -> None:
        self.policy = policy or QueuePolicy()
        self._store = ScriptStore(url, name, scripts or load_scripts(), connections, on_call, replicas)
        policy = self.policy
        limits = policy.max_attempts, policy.max_crashes, policy.max_backlog
        self._header = round(policy.lease_s * 1000), *limits, round(policy.retention_s * 1000), policy.queue_bytes
        self._takes: dict[str, int] = {}
        self._told: set[str] = set()
        """Damaged batches that the log has."""
        self._commits = GroupCommit[Sequence[str | int], int](self._finish)

    async def open_batch(self, batch: BatchSpec) -> None:
        metadata = json.dumps(dict(batch.metadata))
        answer = await self._run("open", batch.batch_id, batch.owner, metadata, batch.options, sha256(batch.options))
        if answer == b"differs":
            raise InvalidRequest(f"the batch {batch.batch_id} has other options; give the same, or another key")
        _known(answer, batch.batch_id)

    async def submit(
        self, batch_id: str, jobs: Sequence[JobSpec], max_waiting: int | None = None
    ) -> list[SubmitOutcome]:
        quota = self._quota(max_waiting)
        admissions: list[SubmitOutcome] = []
        args: list[str | int] = []
        num_bytes = 0
        for job in jobs:
            args += self._job_args(batch_id, job)
            num_bytes += len(job.payload)
            if len(args) >= 9 * CHUNK_JOBS or num_bytes >= CHUNK_BYTES:
                admissions += await self._submit(batch_id, quota, args)
                args, num_bytes = [], 0
        return admissions + await self._submit(batch_id, quota, args)

    def _job_args(self, batch_id: str, job: JobSpec) -> tuple[str | int, ...]:
        name = job_id(batch_id, job.custom_id)
        said = job.priority, job.payload, sha256(job.payload), job.cost, job.rejection, job.rejection_code
        return name, job.custom_id, *said, job.traceparent

    async def _submit(self, batch_id: str, quota: int, args: Sequence[str | int]) -> list[SubmitOutcome]:
        answer = await self._ask("submit", batch_id, quota, *args)
        return [SubmitOutcome(word) for word in texts(answer)]

    async def seal_batch(self, batch_id: str) -> None:
        await self._ask("seal", batch_id)

    async def take(self, worker: str, limit: int, *, suspects: bool = True) -> list[Lease]:
        # The number stays the same until a call is answered: the store repeats what an unanswered one was given.
        number = self._takes.setdefault(worker, time.time_ns() // 1_000_000)
        rows, expired = await self._run("take", worker, number, limit, int(suspects))
        if limit > 0:
            self._takes[worker] = number + 1
        for row in expired:
            log_expired(*texts(row))
        leases = []
        for row in rows:
            try:
                lease = lease_from(worker, row)
            except DamagedRecord as error:  # its lease expires, so that it is dead after a few
                get_logger().error("job.damaged", error=str(error))
                continue
            if damage := damage_in(row):
                await self._bury(lease, damage)
            else:
                leases.append(lease)
        return leases

    async def _bury(self, lease: Lease, damage: str) -> None:
        """Where the store is away the lease expires, and whoever has it next buries the job."""
        try:
            log_death(lease, await self._run("retry", *_token(lease), damage, 0, 0, 1))
        except (QueueUnavailable, DamagedRecord) as error:
            get_logger().error("job.damaged", job_id=lease.job_id, error=f"{damage}; not told: {error}")

    async def beat(self, leases: Sequence[Lease], progress: Mapping[str, str]) -> list[BeatAnswer]:
        args = [arg for lease in leases for arg in (*_token(lease), progress.get(lease.job_id, ""))]
        return [BeatAnswer(word) for word in texts(await self._run("beat", *args))]

    async def finish(self, lease: Lease, outcome: Outcome) -> bool:
        assert outcome.state in (JobState.DONE, JobState.FAILED, JobState.CANCELLED), "a run ends in one of these"
        content = sha256(outcome.content_key) if outcome.content_key else ""
        said = outcome.state, outcome.result, sha256(outcome.result), outcome.error, outcome.error_code, content
        asked: list[str | int] = [*_token(lease), *said, len(outcome.tallies), *_pairs(outcome.tallies)]
        answer = await self._commits.call(asked, len(outcome.result))
        if answer == 2:
            raise DamagedRecord(f"parts of the job {lease.job_id} are missing in the store; it cannot be done yet")
        return bool(answer)

    async def _finish(self, commits: Sequence[Sequence[str | int]]) -> Sequence[int]:
        answers: list[int] = await self._run("finish", *chain.from_iterable(commits))
        return answers

    async def open_parts(self, lease: Lease, key: str, total: int = 0, layout: str = "") -> PartsState | None:
        if total > self.policy.parts.max_parts:
            raise LimitExceeded(
                f"a job has at most {self.policy.parts.max_parts} parts, and this one would have {total}"
            )
        answer = await self._run("open_parts", *_token(lease), sha256(key), total, layout)
        return None if answer is None else parts_state_from(answer)

    async def put_part(self, lease: Lease, number: int, data: bytes, tallies: Mapping[str, float]) -> PutAnswer:
        return await self._put("put_part", lease, number, data, *_pairs(tallies))

    async def put_note(self, lease: Lease, name: str, data: bytes) -> PutAnswer:
        return await self._put("put_note", lease, sha256(name), data)

    async def _put(self, script: str, lease: Lease, name: str | int, data: bytes, *tallies: str) -> PutAnswer:
        limits = self.policy.parts
        if len(data) > limits.max_part_bytes:
            raise LimitExceeded(
                f"{script.removeprefix('put_')} {name} has {len(data)} bytes; at most {limits.max_part_bytes} are kept"
            )
        answer = await self._run(script, *_token(lease), name, part_row(data), limits.max_job_bytes, *tallies)
        if answer == b"outside":  # how many there are to be was lost with a server
            return PutAnswer.LOST
        return PutAnswer(answer.decode())

    async def find_note(self, lease: Lease, name: str) -> bytes | None:
        stored = await self._run("find_note", lease.job_id, sha256(name))
        return None if stored is None else part_from((0, stored)).data

    async def list_parts(
        self, batch_id: str, job_id: str, after: int = 0, limit: int = PAGE_PARTS
    ) -> tuple[list[PartRecord], int]:
        answer = await self._ask("list_parts", batch_id, job_id, after, limit, PAGE_BYTES)
        return [part_from(row) for row in answer[1:]], answer[0]

    async def retry(self, lease: Lease, reason: str, delay_s: float, *, counted: bool = True) -> bool:
        answer = await self._run("retry", *_token(lease), reason, round(delay_s * 1000), int(counted), 0)
        return log_death(lease, answer)

    async def crash(self, lease: Lease, reason: str) -> bool:
        return log_death(lease, await self._run("crash", *_token(lease), reason))

    async def get_batch(self, batch_id: str, owner: str | None = None) -> BatchRecord:
        record = batch_from(batch_id, await self._run("batch", batch_id))
        if record is None or owner not in (None, record.owner):
            raise UnknownBatch.named(batch_id)
        return record

    async def list_batches(self, owner: str | None = None, limit: int = 100) -> list[BatchRecord]:
        ids = texts(await self._run("batches", limit, *([] if owner is None else [owner])))
        records = [await self._listed(batch_id) for batch_id in ids]
        return [record for record in records if record is not None]

    async def _listed(self, batch_id: str) -> BatchRecord | None:
        """None also for one that is damaged, which is logged once: it hides no other, and who asks for it hears why."""
        try:
            return batch_from(batch_id, await self._run("batch", batch_id))
        except DamagedRecord as error:
            if batch_id not in self._told:
                get_logger().error("batch.damaged", batch_id=batch_id, error=str(error))
            self._told.add(batch_id)
            return None

    async def list_jobs(
        self, batch_id: str, states: frozenset[JobState] = frozenset(), after: int = 0, limit: int = 100
    ) -> tuple[list[JobRecord], int]:
        records, position, _ = await self._page(batch_id, states, after, limit)
        return records, position

    async def _page(
        self, batch_id: str, states: frozenset[JobState], after: int, limit: int
    ) -> tuple[list[JobRecord], int, int]:
        """Jobs, the position to go on from, 0 at the end, and that at which the page ends in any case."""
        position, end, *rows = await self._ask("page", batch_id, after, limit, SCAN_JOBS, *sorted(states))
        return await self._records(batch_id, rows, states), position, end

    async def _records(
        self, batch_id: str, rows: Sequence[Sequence[Any]], states: frozenset[JobState]
    ) -> list[JobRecord]:
        if any(len(row) == 1 for row in rows):
            raise InvalidConfig(f"results of {batch_id} lie in files; start this gateway with their --results-to")
        return [job_from(batch_id, row) for row in rows]

    async def cancel_batch(self, batch_id: str) -> int:
        return (await self._page_through("cancel", batch_id)).num_jobs

    async def retry_dead(
        self, batch_id: str, states: frozenset[JobState] = ONLY_DEAD, max_waiting: int | None = None
    ) -> Retried:
        assert states <= {JobState.DEAD, JobState.FAILED, JobState.CANCELLED}, "only these can be given another chance"
        return await self._page_through("retry_dead", batch_id, self._quota(max_waiting), *sorted(states))

    async def find_result(self, content_key: str) -> str | None:
        found = await self._run("find", sha256(content_key))
        return found[0].decode() if found and sha256(found[0]).encode() == found[1] else None

    async def add_known(self, key: str, data: bytes, most: int) -> None:
        await self._run("add_known", sha256(key), part_row(data), most)

    async def list_known(self, key: str, after: str, limit: int) -> list[KnownEntry]:
        rows = await self._run("list_known", sha256(key), after, limit)
        return [KnownEntry(place.decode(), part_from((0, stored)).data) for place, stored in rows]

    async def depth(self) -> QueueDepth:
        queued, delayed, suspects, running, dead, oldest_ms = await self._run("depth")
        return QueueDepth(queued, delayed, suspects, running, dead, oldest_ms / 1000)

    async def num_busy(self) -> int:
        return int(await self._run("busy"))

    async def sweep(self) -> int:
        for _ in range(SWEPT_BATCHES):
            num_jobs, is_more, *failed = await self._run("sweep", SCAN_JOBS)
            if failed:
                batch_id, reason = texts(failed)
                get_logger().error("batch.not_deleted", batch_id=batch_id, reason=reason[:500])
            if num_jobs or not is_more:
                return int(num_jobs)
        return 0

    async def ping(self) -> None:
        await self._run("ping")

    async def close(self) -> None:
        await self._commits.close()
        await self._store.close()

    async def _run(self, script: str, *args: str | int | bytes) -> Any:
        return await self._store.run(script, *self._header, *args)

    async def _ask(self, script: str, batch_id: str, *args: str | int) -> Any:
        """The same of a script that knows no batch but this. Raises `UnknownBatch`."""
        return _known(await self._run(script, batch_id, *args), batch_id)

    def _quota(self, max_waiting: int | None) -> int:
        return self.policy.max_backlog if max_waiting is None else max_waiting

    async def _page_through(self, script: str, batch_id: str, *args: str | int) -> Retried:
        position, total = 0, 0
        while True:
            answer = await self._run(script, batch_id, position, SCAN_JOBS, *args)
            position, num_jobs, *stop = _known(answer, batch_id)
            total += num_jobs
            if position == 0:
                return Retried(total, SubmitOutcome(stop[0].decode()) if stop else None)


def _known(answer: Any, batch_id: str) -> Any:
    if answer == b"unknown":
        raise UnknownBatch.named(batch_id)
    return answer


def _token(lease: Lease) -> tuple[str, str, int]:
    return lease.job_id, lease.worker, lease.epoch


def _pairs(tallies: Mapping[str, float]) -> list[str]:
    return [text for name, value in tallies.items() for text in (name, repr(float(value)))]
