"""One run of one job inside a worker: its task, why it was stopped, and what its handler may raise."""

import asyncio
import time
from enum import Enum, auto

import structlog

from slipstream.jobs.base import Lease, Outcome


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


class Run:
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
