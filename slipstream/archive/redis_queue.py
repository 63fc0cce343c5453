"""The job queue in Redis: any number of gateways on any number of machines share one.

What changes a job's state is in the scripts of `lua/`, one round trip each; here are only arguments and answers.
Times are those of the server, so the clocks of its users do not matter.
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, NoScriptError, RedisError, ResponseError

from slipstream.archive.queue import (
    ONLY_DEAD,
    BatchRecord,
    BatchSpec,
    BeatAnswer,
    DamagedRecord,
    JobRecord,
    JobSpec,
    JobState,
    Lease,
    Outcome,
    QueueDepth,
    QueuePolicy,
    QueueUnavailable,
    Retried,
    SubmitOutcome,
    UnknownBatch,
    batch_state,
    job_id,
    sha256,
)
from slipstream.errors import InvalidConfig, InvalidRequest
from slipstream.logs import get_logger

# -- rows that scripts answer ----------------------------------------------------------------------------------------

DAMAGED = "its SHA-256 differs from when it was stored"


@contextlib.contextmanager
def _intact(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedRecord(f"the store's record of {what} is damaged: {error}") from None


def lease_from(worker: str, row: Sequence[bytes | int]) -> Lease:
    """From a row of the take script: id, batch, custom id, epoch, payload, digest, options, digest, ... Raises
    `DamagedRecord`."""
    with _intact("a job"):
        name, batch_id, custom_id, epoch, payload, _, options, _, attempts, crashes, entry, owner = texts(row)
        is_suspect = entry.startswith("suspects ")
        counts = int(attempts), int(crashes)
        return Lease(name, batch_id, custom_id, worker, int(epoch), payload, options, *counts, is_suspect, entry, owner)


def damage_in(row: Sequence[bytes]) -> str:
    """What of a row of the take script is not what was stored; empty: nothing."""
    for what, data, digest in (("the job's payload", row[4], row[5]), ("the batch's options", row[6], row[7])):
        if sha256(data).encode() != digest:
            return f"{what} was damaged in the store: {DAMAGED}"
    return ""


def job_from(batch_id: str, row: Sequence[bytes]) -> JobRecord:
    """From a row of the page script. Raises `DamagedRecord`."""
    with _intact(f"a job of {batch_id}"):
        name, state, custom_id, payload, result, digest, error, code, worker, *rest = texts(row)
        epoch, attempts, crashes, progress, *times = rest
        if state == JobState.DONE and sha256(row[4]) != digest:
            result, error, code = "", f"the result was damaged in the store: {DAMAGED}", "DATA_LOSS"
        counts = int(epoch), int(attempts), int(crashes)
        created_s, started_s, ended_s = map(_seconds, times)
        said = payload, result, error, code, worker
        return JobRecord(
            name, batch_id, custom_id, JobState(state), *said, *counts, progress, created_s, started_s, ended_s
        )


def batch_from(batch_id: str, pairs: Sequence[bytes]) -> BatchRecord | None:
    """From the fields of a batch's hash, one after the other. Raises `DamagedRecord`."""
    words = texts(pairs)
    fields = dict(zip(words[::2], words[1::2], strict=False))
    if "owner" not in fields:
        return None
    with _intact(f"the batch {batch_id}"):
        counts = {state: int(fields.get(f"n:{state}", 0)) for state in JobState}
        return BatchRecord(
            batch_id=batch_id,
            owner=fields["owner"],
            state=batch_state(counts, is_sealed="sealed" in fields, is_cancelled="cancel" in fields),
            metadata={str(name): str(value) for name, value in json.loads(fields["metadata"]).items()},
            options=fields["options"],
            counts=counts,
            tallies={name[2:]: float(value) for name, value in fields.items() if name.startswith("t:")},
            created_s=_seconds(fields["created"]),
            ended_s=_seconds(fields.get("ended", "")),
        )


def _seconds(milliseconds: str) -> float:
    return int(milliseconds or 0) / 1000


# -- store ------------------------------------------------------------------------------------------------------------

# All scripts may be repeated, so one that met a connection from before a restart is sent again at once.

CONNECT_S, SOCKET_S, CALL_S = 2.0, 2.5, 3.0

NOT_NOW = re.compile(
    r"\b(MISCONF|OOM|READONLY|LOADING|BUSY|MASTERDOWN|NOREPLICAS|CLUSTERDOWN|TRYAGAIN|UNKILLABLE|NOPERM|NOAUTH|"
    r"WRONGPASS)\b|out of memory|command not allowed when used memory|read only replica|loading the dataset",
    re.IGNORECASE,
)
"""In an error answer: the server is there but would not do it now, or not for this user."""


def load_scripts() -> dict[str, str]:
    """The Lua scripts by name, each with the prelude ahead of it."""
    texts = {path.name.removesuffix(".lua"): path.read_text() for path in files(__package__).joinpath("lua").iterdir()}
    prelude = texts.pop("prelude")
    return {name: prelude + text for name, text in texts.items()}


CONNECTIONS = 32
WORKER_CONNECTIONS = {"beat": 1, "take": 4}
"""Beats have a connection of their own, so that nothing that callers ask for can make a lease expire."""
WORKER_SCRIPTS = {"beat": "beat", **dict.fromkeys(("take", "finish", "retry", "crash", "find", "ping"), "take")}
"""Which connections a script uses; the others share those of the callers."""
OnCall = Callable[[str, float], None]
"""Hears of a call of the store: the script, and how many seconds it took."""


class ScriptStore:
    """Scripts over the keys of one name. Every failure of the server or the way to it is `QueueUnavailable`, within
    `CALL_S`. At most `connections` calls for callers are under way; more wait."""

    def __init__(
        self, url: str, name: str, scripts: Mapping[str, str], connections: int, on_call: OnCall | None = None
    ) -> None:
        self.prefix = f"{{{name}}}:"
        sizes = {**WORKER_CONNECTIONS, "": connections}
        self._clients = {use: _connect(url, size) for use, size in sizes.items()}
        self._scripts = {name: self._clients[""].register_script(text) for name, text in scripts.items()}
        self._on_call = on_call or (lambda script, seconds: None)

    async def run(self, script: str, *args: str | int | float | bytes) -> Any:
        """The script's answer: bytes, integers and lists of them. Raises `QueueUnavailable`."""
        task, began = asyncio.current_task(), time.monotonic()
        asked = task.cancelling() if task else 0
        try:
            answer = await self._answer(script, args)
        finally:
            self._on_call(script, time.monotonic() - began)
        if task and task.cancelling() > asked:  # `wait_for` of Python 3.11, used by redis-py, may swallow it
            raise asyncio.CancelledError
        return answer

    async def _answer(self, script: str, args: Sequence[str | int | float | bytes]) -> Any:
        client = self._clients[WORKER_SCRIPTS.get(script, "")]
        try:
            async with asyncio.timeout(CALL_S):
                return await self._scripts[script](keys=[self.prefix], args=args, client=client)
        except ResponseError as error:
            if not isinstance(error, NoScriptError) and not NOT_NOW.search(str(error)):
                raise DamagedRecord(f"the queue's Redis cannot carry out {script}: {_first_sentence(error)}") from error
            raise QueueUnavailable(f"the queue's Redis refuses: {_first_sentence(error)}") from None
        except DataError:
            raise
        except (RedisError, OSError, TimeoutError) as error:
            raise QueueUnavailable(f"the queue's Redis is not reachable: {_first_sentence(error)}") from None

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


def _connect(url: str, size: int) -> Redis:
    """At most `size` connections, made when first used. Raises `InvalidConfig`."""
    try:
        limits = {"timeout": CALL_S, "socket_timeout": SOCKET_S, "socket_connect_timeout": CONNECT_S}
        retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
        pool = BlockingConnectionPool.from_url(url, max_connections=size, protocol=2, retry=retry, **limits)
    except (ValueError, TypeError) as error:
        raise InvalidConfig(f"--redis: no URL of a Redis server: {error}; use redis://, rediss:// or unix://") from None
    return Redis.from_pool(pool)


def _first_sentence(error: Exception) -> str:
    return (str(error) or type(error).__name__).split(". ")[0][:200]


def texts(values: Sequence[bytes | int]) -> list[str]:
    """Decodes an answer; damaged bytes become replacement characters."""
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values]


# -- redis queue ------------------------------------------------------------------------------------------------------

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
        connections: int = CONNECTIONS,
        on_call: OnCall | None = None,
    ) -> None:
        self.policy = policy or QueuePolicy()
        self._store = ScriptStore(url, name, scripts or load_scripts(), connections, on_call)
        told = self.policy
        times_ms = round(told.lease_s * 1000), round(told.retention_s * 1000)
        self._header = times_ms[0], told.max_attempts, told.max_crashes, told.max_backlog, times_ms[1]
        self._takes: dict[str, int] = {}

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
            name = job_id(batch_id, job.custom_id)
            args += (name, job.custom_id, job.priority, job.payload, sha256(job.payload), job.cost, job.rejection)
            num_bytes += len(job.payload)
            if len(args) >= 7 * CHUNK_JOBS or num_bytes >= CHUNK_BYTES:
                admissions += await self._submit(batch_id, quota, args)
                args, num_bytes = [], 0
        return admissions + await self._submit(batch_id, quota, args)

    async def _submit(self, batch_id: str, quota: int, args: Sequence[str | int]) -> list[SubmitOutcome]:
        answer = _known(await self._run("submit", batch_id, quota, *args), batch_id)
        return [SubmitOutcome(word) for word in texts(answer)]

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
            try:
                lease = lease_from(worker, row)
            except DamagedRecord as error:  # its lease expires, so that it is dead after a few
                get_logger().error("job.damaged", error=str(error))
                continue
            if damage := damage_in(row):
                _log_death(lease, await self._run("retry", *_token(lease), damage, 0, 0, 1))
            else:
                leases.append(lease)
        return leases

    async def beat(self, leases: Sequence[Lease], progress: Mapping[str, str]) -> list[BeatAnswer]:
        args = [arg for lease in leases for arg in (*_token(lease), progress.get(lease.job_id, ""))]
        return [BeatAnswer(word) for word in texts(await self._run("beat", *args))]

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
        return (await self._in_parts("cancel", batch_id)).num_jobs

    async def retry_dead(
        self, batch_id: str, states: frozenset[JobState] = ONLY_DEAD, max_waiting: int | None = None
    ) -> Retried:
        assert states <= {JobState.DEAD, JobState.FAILED, JobState.CANCELLED}, "only these can be given another chance"
        return await self._in_parts("retry_dead", batch_id, self._quota(max_waiting), *sorted(states))

    async def find_result(self, content_key: str) -> str | None:
        found = await self._run("find", sha256(content_key))
        return found[0].decode() if found and sha256(found[0]).encode() == found[1] else None

    async def depth(self) -> QueueDepth:
        queued, delayed, suspects, running, dead, oldest_ms = await self._run("depth")
        return QueueDepth(queued, delayed, suspects, running, dead, oldest_ms / 1000)

    async def sweep(self) -> int:
        return int((await self._run("sweep", SCAN_JOBS))[0])

    async def ping(self) -> None:
        await self._run("ping")

    async def close(self) -> None:
        await self._store.close()

    async def _run(self, script: str, *args: str | int) -> Any:
        return await self._store.run(script, *self._header, *args)

    def _quota(self, max_waiting: int | None) -> int:
        return self.policy.max_backlog if max_waiting is None else max_waiting

    async def _in_parts(self, script: str, batch_id: str, *args: str | int) -> Retried:
        position, total = 0, 0
        while True:
            answer = await self._run(script, batch_id, position, SCAN_JOBS, *args)
            position, num_jobs, *stop = _known(answer, batch_id)
            total += num_jobs
            if position == 0:
                return Retried(total, SubmitOutcome(stop[0].decode()) if stop else None)


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
