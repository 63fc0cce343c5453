"""Runs jobs of a queue: takes them, renews their leases, commits how they ended.

While the store is away, work goes on: a result is committed when the store is back, if the lease still stands then.
A worker that was itself frozen beats before it takes anything, and stops what it lost.
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import structlog

from slipstream.archive.queue import BeatAnswer, DamagedRecord, JobQueue, JobState, Lease, Outcome, QueueUnavailable
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    ObjectNotFound,
    Overloaded,
    PermissionDenied,
    ServiceUnavailable,
    SlipstreamError,
    VideoNotFound,
    machine_lacks,
)
from slipstream.logs import get_logger, heard

# -- one run ----------------------------------------------------------------------------------------------------------

# One run of one job inside a worker: its task, why it was stopped, and what its handler may raise.


class RetryLater(Exception):
    """Raised by a handler: run the job again, after `delay_s` or a back-off that grows with its failures."""

    def __init__(self, reason: str, *, counted: bool = True, delay_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.counted = counted
        self.delay_s = delay_s


class RunnerDied(Exception):
    """Raised by a handler: what ran the job died under it, perhaps because of it."""


class Stop(Enum):
    """Why a run is stopped before its handler ended."""

    LOST = auto()
    CANCEL = auto()
    DRAIN = auto()


class JobRun:
    """A lease and the task that runs its job."""

    def __init__(self, lease: Lease, log: structlog.typing.FilteringBoundLogger) -> None:
        self.lease = lease
        self.log = log.bind(job_id=lease.job_id, batch_id=lease.batch_id, epoch=lease.epoch, crashes=lease.crashes)
        self.progress = ""
        self.task: asyncio.Future[Outcome] | None = None
        self.driver: asyncio.Task[None] | None = None
        self.stopped: Stop | None = None
        self.over = asyncio.Event()
        self._started = time.monotonic()

    def report(self, progress: str) -> None:
        """Kept until the next beat carries it."""
        self.progress = progress

    def stop(self, why: Stop) -> None:
        """Cancels the handler, once; the first reason stands, but a lost lease outweighs the others."""
        if self.task is None or self.task.done():
            return
        if self.stopped is None or why is Stop.LOST:
            self.stopped = why
        self.task.cancel()

    def seconds(self) -> float:
        """Since it began."""
        return round(time.monotonic() - self._started, 3)


# -- worker -----------------------------------------------------------------------------------------------------------

Handler = Callable[[Lease, Callable[[str], None]], Awaitable[Outcome]]
"""Runs one job and tells its progress. What it may raise: see `Worker`."""
OnEnd = Callable[[str, bool], None]
"""Hears how a run ended (a state of `Outcome`, "retried" or "crashed"), and whether the lease was still held."""

POLL_S = (0.1, 0.3)
AWAY_S = (0.2, 1.0)
"""Pauses, drawn at random between these: between takes that found nothing, and while the store is away."""
MAX_BACK_OFF_S = 300.0
LONGEST_DELAY_S = 1.5 * MAX_BACK_OFF_S
"""Whatever a peer asks for: `take.lua` has what should wait ten minutes go at once, as by a clock that was ahead."""
UNCOUNTED_BACK_OFF_S = 2.0
SETTLE_S = 10.0
"""How long a stopping worker waits for a store that is away."""
AT_FAULT = (InvalidRequest, VideoNotFound, ObjectNotFound, PermissionDenied, LimitExceeded, InvalidConfig)
"""The job itself is at fault when its handler raises one of these."""


@dataclass(frozen=True)
class _Ending:
    """How a run ended: what is logged of it, and the call that tells the queue."""

    outcome: str
    event: str
    fields: Mapping[str, object]
    tell: Callable[[], Awaitable[bool]]


class Worker:
    """At most `slots` jobs at a time, until `stop`; then running ones get `grace_s`, and the rest go back uncounted.

    A handler returns an `Outcome` or raises: `RetryLater`; `RunnerDied` when what ran the job died under it; an
    error that is the job's own fault (`AT_FAULT`), which fails it; `ServiceUnavailable` or `Overloaded`, which are
    retried and not counted; anything else is retried and counted. It is cancelled when the job is cancelled, the
    lease lost or the grace over. `ready` says whether jobs could run now; nothing is taken while it says no.
    """

    def __init__(
        self,
        queue: JobQueue,
        handler: Handler,
        *,
        slots: int,
        name: str | None = None,
        ready: Callable[[], Awaitable[bool]] | None = None,
        grace_s: float = 30.0,
        on_end: OnEnd = lambda outcome, was_held: None,
    ) -> None:
        self.name = name or uuid.uuid4().hex[:16]
        """Must be another one in every process and after every start. It says nothing of host or process, for callers
        see it; the log tells which process has which."""
        self._queue = queue
        self._handler = handler
        self._slots = slots
        self._ready = ready
        self._grace_s = grace_s
        self._on_end = on_end
        self._runs: dict[str, JobRun] = {}
        self._stopping, self._hurried = asyncio.Event(), asyncio.Event()
        self._changed = asyncio.Event()
        self._beaten = time.monotonic()
        self._is_away = False
        self.failed_takes = 0
        """In a row."""
        self._taken = time.monotonic()
        self._log = get_logger().bind(worker=self.name)

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the jobs it has."""
        return tuple(self._runs)

    @property
    def slots(self) -> int:
        """Jobs that it may have."""
        return self._slots

    def lease_age_s(self) -> float:
        """Since its leases were renewed; without a job, since the store last heard of it."""
        return time.monotonic() - self._beaten

    def last_take_age_s(self) -> float:
        """Since the queue last answered a take, or there was no free slot to take anything for."""
        return time.monotonic() - self._taken

    def stop(self) -> None:
        """Takes no more jobs; `run` returns when those it has are settled."""
        self._stopping.set()
        self._changed.set()

    def hurry(self) -> None:
        """Those that are not done when it stops are given back at once."""
        self._hurried.set()

    async def run(self) -> None:
        """Works until `stop`. Cancelled, it drops everything at once; the leases then expire."""
        async with asyncio.TaskGroup() as group:
            beats = group.create_task(self._beat_forever())
            while not self._stopping.is_set():
                leases = await self._take()
                for lease in leases:
                    await self._begin(group, lease)
                if not leases:
                    await self._pause(POLL_S)
            await self._drain()
            beats.cancel()

    async def _take(self) -> Sequence[Lease]:
        free = self._slots - len(self._runs)
        try:
            if free <= 0:
                self._taken = time.monotonic()
                return ()
            if self._ready is not None and not await self._ready():
                return ()
            if self._runs and time.monotonic() - self._beaten > self._queue.policy.lease_s:
                await self._beat()  # this process was frozen: its own expired leases must not look like free jobs
            has_suspect = any(run.lease.is_suspect for run in self._runs.values())
            leases = await self._queue.take(self.name, free, suspects=not has_suspect)
        except Exception as error:
            self.failed_takes += 1
            await self._away(error)
            return ()
        self.failed_takes, self._taken = 0, time.monotonic()
        self._back()
        return leases

    async def _begin(self, group: asyncio.TaskGroup, lease: Lease) -> None:
        if old := self._runs.get(lease.job_id):  # lost in a stall and taken back: never two runs of one job here
            old.stop(Stop.LOST)
            await old.over.wait()
        run = self._runs[lease.job_id] = JobRun(lease, self._log)
        run.log.info("job.taken", attempts=lease.attempts, crashes=lease.crashes, suspect=lease.is_suspect)
        run.task = heard(asyncio.ensure_future(self._handler(lease, run.report)))
        run.driver = group.create_task(self._drive(run))

    async def _drive(self, run: JobRun) -> None:
        assert run.task is not None
        try:
            await asyncio.wait({run.task})
            await self._settle(run)
        finally:
            if not run.task.done():
                run.task.cancel()
                await asyncio.wait({run.task})
            del self._runs[run.lease.job_id]
            run.over.set()
            self._changed.set()

    async def _settle(self, run: JobRun) -> None:
        """Tells the queue how the run ended, as often as it takes to be answered."""
        if run.stopped is Stop.LOST:
            run.log.warning("job.lost")
            return
        ending = self._ending(run)
        while True:
            try:
                was_held = await ending.tell()
                break
            except QueueUnavailable as error:
                await self._away(error)
            except Exception:
                run.log.exception("job.not_settled")  # nothing that trying again would mend: the lease expires
                return
        self._back()
        self._on_end(ending.outcome, was_held)
        if was_held:
            run.log.info(ending.event, seconds=run.seconds(), **ending.fields)
        else:
            run.log.warning("job.stale_commit_refused" if ending.event == "job.committed" else "job.lost")

    def _ending(self, run: JobRun) -> _Ending:
        assert run.task is not None
        lease, queue = run.lease, self._queue
        error = asyncio.CancelledError() if run.task.cancelled() else run.task.exception()

        def commit(outcome: Outcome) -> _Ending:
            fields = {"state": outcome.state.value, "code": outcome.error_code}
            return _Ending(outcome.state.value, "job.committed", fields, lambda: queue.finish(lease, outcome))

        if error is None:
            return commit(run.task.result())
        if run.stopped is Stop.CANCEL:
            return commit(Outcome(JobState.CANCELLED))
        if isinstance(error, AT_FAULT) and run.stopped is None:
            return commit(Outcome(JobState.FAILED, error=str(error), error_code=error.status))
        if isinstance(error, RunnerDied) and run.stopped is None:
            return _Ending("crashed", "job.crashed", {"reason": str(error)}, lambda: queue.crash(lease, str(error)))
        later = RetryLater("the worker stopped", counted=False) if run.stopped else self._retry_of(run, error)
        delay_s = later.delay_s or 0.0
        fields = {"counted": later.counted, "delay_s": round(delay_s, 3), "cause": type(error).__name__}
        return _Ending(
            "retried",
            "job.retried",
            fields,
            lambda: queue.retry(lease, later.reason, delay_s, counted=later.counted),
        )

    def _retry_of(self, run: JobRun, error: BaseException) -> RetryLater:
        """With the delay filled in."""
        jitter, error = random.uniform(0.5, 1.5), machine_lacks(error) or error
        if isinstance(error, RetryLater):
            later = error
        elif isinstance(error, ServiceUnavailable | Overloaded):
            retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
            later = RetryLater(str(error), counted=False, delay_s=retry_after_s)
        else:
            if not isinstance(error, SlipstreamError):
                run.log.error("job.raised", exc_info=error)
            later = RetryLater(f"{type(error).__name__}: {error}"[:500])
        back_off_s = min(MAX_BACK_OFF_S, 2.0**run.lease.attempts) if later.counted else UNCOUNTED_BACK_OFF_S
        delay_s = back_off_s * jitter if later.delay_s is None else later.delay_s
        return RetryLater(later.reason, counted=later.counted, delay_s=min(delay_s, LONGEST_DELAY_S))

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._queue.policy.lease_s / 5)
            while True:
                try:
                    await self._beat()
                    break
                except Exception as error:
                    await self._away(error)

    async def _beat(self) -> None:
        runs = list(self._runs.values())
        if runs:
            progress = {run.lease.job_id: run.progress for run in runs}
            for run, answer in zip(runs, await self._queue.beat([run.lease for run in runs], progress), strict=True):
                if answer is not BeatAnswer.KEEP:
                    run.stop(Stop.LOST if answer is BeatAnswer.LOST else Stop.CANCEL)
        else:
            await self._queue.take(self.name, 0)  # a store that hears of nobody takes itself for the one that was away
        self._back()
        if runs and (late_s := self.lease_age_s()) > self._queue.policy.lease_s:
            self._log.warning("leases.late", seconds=round(late_s, 1))  # others may have had the jobs since
        self._beaten = time.monotonic()

    async def _drain(self) -> None:
        drivers = [run.driver for run in self._runs.values() if run.driver is not None]
        if not drivers:
            return
        hurried = asyncio.create_task(self._hurried.wait())
        ends: set[asyncio.Future[Any]] = {asyncio.gather(*drivers, return_exceptions=True), hurried}
        await asyncio.wait(ends, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for run in list(self._runs.values()):
            run.stop(Stop.DRAIN)
        if late := [driver for driver in drivers if not driver.done()]:
            _, stuck = await asyncio.wait(late, timeout=SETTLE_S)
            for driver in stuck:
                driver.cancel()

    async def _pause(self, between: tuple[float, float]) -> None:
        """Until something changes here: a run ended, or `stop`."""
        self._changed.clear()
        if self._stopping.is_set():
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), random.uniform(*between))

    async def _away(self, error: Exception) -> None:
        if isinstance(error, DamagedRecord):
            self._log.error("queue.failed", error=str(error))
        elif not isinstance(error, QueueUnavailable):
            self._log.error("queue.failed", exc_info=error)
        elif not self._is_away:
            self._is_away = True
            self._log.warning("queue.away", error=str(error))
        await asyncio.sleep(random.uniform(*AWAY_S))

    def _back(self) -> None:
        if self._is_away:
            self._is_away = False
            self._log.info("queue.back")
