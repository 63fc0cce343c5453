"""The job queue in Redis: any number of gateways on any number of machines share one. Knows no video and no handler.

What changes a job's state is in the scripts of `lua/`, one round trip each; here are only arguments and answers.
Times are those of the server, so the clocks of its users do not matter.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import InvalidRequest
from slipstream.jobs.base import (
    Admission,
    BatchRecord,
    BatchSpec,
    BeatAnswer,
    JobRecord,
    JobSpec,
    JobState,
    Lease,
    Outcome,
    QueueDepth,
    QueuePolicy,
    UnknownBatch,
)
from slipstream.jobs.rows import batch_from, damage_in, job_from, job_id, lease_from, sha256
from slipstream.jobs.store import ScriptStore, load_scripts, texts
from slipstream.logs import get_logger

CHUNK_JOBS, CHUNK_BYTES = 100, 1 << 20
"""What one submit script takes at most."""
SCAN_JOBS = 500
"""Jobs that one script looks at, at most: it must stay short, the server does nothing else meanwhile."""


class RedisQueue:
    """A `JobQueue` at `redis://`, `rediss://` or `unix://`, with the user and password of the URL if it has them.

    `name` separates queues on one server; a user that may only touch `~{name}:*` is enough."""

    def __init__(
        self,
        url: str,
        name: str = "slipstream",
        policy: QueuePolicy | None = None,
        *,
        scripts: Mapping[str, str] | None = None,
    ) -> None:
        self.policy = policy or QueuePolicy()
        self._store = ScriptStore(url, name, scripts or load_scripts())
        self._header = (
            round(self.policy.lease_s * 1000),
            self.policy.max_attempts,
            self.policy.max_crashes,
            self.policy.max_backlog,
            round(self.policy.retention_s * 1000),
        )
        self._takes: dict[str, int] = {}

    async def open_batch(self, batch: BatchSpec) -> None:
        metadata = json.dumps(dict(batch.metadata))
        answer = await self._run("open", batch.batch_id, batch.owner, metadata, batch.options, sha256(batch.options))
        if answer == b"differs":
            raise InvalidRequest(f"the batch {batch.batch_id} has other options; give the same, or another key")
        _known(answer, batch.batch_id)

    async def submit(self, batch_id: str, jobs: Sequence[JobSpec]) -> list[Admission]:
        admissions: list[Admission] = []
        args: list[str] = []
        num_bytes = 0
        for job in jobs:
            name = job_id(batch_id, job.custom_id)
            args += (name, job.custom_id, job.priority, job.payload, sha256(job.payload), job.rejection)
            num_bytes += len(job.payload)
            if len(args) >= 6 * CHUNK_JOBS or num_bytes >= CHUNK_BYTES:
                admissions += await self._submit(batch_id, args)
                args, num_bytes = [], 0
        return admissions + await self._submit(batch_id, args)

    async def _submit(self, batch_id: str, args: Sequence[str]) -> list[Admission]:
        answer = _known(await self._run("submit", batch_id, *args), batch_id)
        return [Admission(word) for word in texts(answer)]

    async def seal_batch(self, batch_id: str) -> None:
        _known(await self._run("seal", batch_id), batch_id)

    async def take(self, worker: str, limit: int, *, suspects: bool = True) -> list[Lease]:
        # The number stays the same until a call is answered: the store repeats what an unanswered one was given.
        number = self._takes.setdefault(worker, time.time_ns() // 1_000_000)
        rows, expired = await self._run("take", worker, number, limit, int(suspects))
        if limit > 0:
            self._takes[worker] = number + 1
        for row in expired:
            _log_expired(*texts(row))
        leases = []
        for row in rows:
            lease = lease_from(worker, row)
            if damage := damage_in(row):
                _log_death(lease, await self._run("retry", *_token(lease), damage, 0, 0, 1))
            else:
                leases.append(lease)
        return leases

    async def beat(self, leases: Sequence[Lease], progress: Mapping[str, str]) -> list[BeatAnswer]:
        args = [arg for lease in leases for arg in (*_token(lease), progress.get(lease.job_id, ""))]
        return [BeatAnswer(word) for word in texts(await self._run("beat", *args))]

    async def save(self, lease: Lease, checkpoint: str) -> bool:
        return bool(await self._run("save", *_token(lease), checkpoint))

    async def finish(self, lease: Lease, outcome: Outcome) -> bool:
        assert outcome.state in (JobState.DONE, JobState.FAILED, JobState.CANCELLED), "a run ends in one of these"
        tallies = [text for name, value in outcome.tallies.items() for text in (name, repr(float(value)))]
        content = sha256(outcome.content_key) if outcome.content_key else ""
        return bool(
            await self._run(
                *("finish", *_token(lease), outcome.state, outcome.result, sha256(outcome.result)),
                *(outcome.error, outcome.error_code, content, *tallies),
            )
        )

    async def retry(self, lease: Lease, reason: str, delay_s: float, *, counted: bool = True) -> bool:
        answer = await self._run("retry", *_token(lease), reason, round(delay_s * 1000), int(counted), 0)
        return _log_death(lease, answer)

    async def crash(self, lease: Lease, reason: str) -> bool:
        return _log_death(lease, await self._run("crash", *_token(lease), reason))

    async def get_batch(self, batch_id: str, owner: str | None = None) -> BatchRecord:
        record = batch_from(batch_id, await self._run("batch", batch_id))
        if record is None or owner not in (None, record.owner):
            raise _unknown(batch_id)
        return record

    async def list_batches(self, owner: str | None = None, limit: int = 100) -> list[BatchRecord]:
        ids = texts(await self._run("batches", limit, *([] if owner is None else [owner])))
        records = [batch_from(batch_id, await self._run("batch", batch_id)) for batch_id in ids]
        return [record for record in records if record is not None]

    async def list_jobs(
        self, batch_id: str, states: frozenset[JobState] = frozenset(), after: int = 0, limit: int = 100
    ) -> tuple[list[JobRecord], int]:
        rows = _known(await self._run("page", batch_id, after, limit, SCAN_JOBS, *sorted(states)), batch_id)
        return [job_from(batch_id, row) for row in rows[1:]], rows[0]

    async def cancel_batch(self, batch_id: str) -> int:
        return await self._in_parts("cancel", batch_id)

    async def retry_dead(self, batch_id: str, states: frozenset[JobState] = frozenset({JobState.DEAD})) -> int:
        assert states <= {JobState.DEAD, JobState.FAILED, JobState.CANCELLED}, "only these can be given another chance"
        return await self._in_parts("retry_dead", batch_id, *sorted(states))

    async def find_result(self, content_key: str) -> str | None:
        found = await self._run("find", sha256(content_key))
        return found[0].decode() if found and sha256(found[0]).encode() == found[1] else None

    async def depth(self) -> QueueDepth:
        return QueueDepth(*await self._run("depth"))

    async def sweep(self) -> int:
        num_deleted: int = (await self._run("sweep", SCAN_JOBS))[0]
        return num_deleted

    async def ping(self) -> None:
        await self._run("ping")

    async def close(self) -> None:
        await self._store.close()

    async def _run(self, script: str, *args: str | int) -> Any:
        return await self._store.run(script, *self._header, *args)

    async def _in_parts(self, script: str, batch_id: str, *args: str) -> int:
        position, total = 0, 0
        while True:
            answer = _known(await self._run(script, batch_id, position, SCAN_JOBS, *args), batch_id)
            position, total = answer[0], total + answer[1]
            if position == 0:
                return int(total)


def _unknown(batch_id: str) -> UnknownBatch:
    return UnknownBatch(f"no batch {batch_id} here; `slipstream archive status` lists yours")


def _known(answer: Any, batch_id: str) -> Any:
    if answer == b"unknown":
        raise _unknown(batch_id)
    return answer


def _token(lease: Lease) -> tuple[str, str, int]:
    return lease.job_id, lease.worker, lease.epoch


def _log_expired(name: str, batch_id: str, lost_by: str, crashes: str, state: str) -> None:
    log = get_logger().bind(job_id=name, batch_id=batch_id, crashes=int(crashes))
    log.warning("job.expired", lost_by=lost_by, state=state)
    if state == JobState.DEAD:
        log.warning("job.dead", worker=lost_by)


def _log_death(lease: Lease, answer: int) -> bool:
    """From what a script answers that gives a job back: 0 not held, 1 done, 2 the job is dead now."""
    if answer == 2:
        get_logger().warning(
            "job.dead", job_id=lease.job_id, batch_id=lease.batch_id, worker=lease.worker, epoch=lease.epoch
        )
    return answer > 0
