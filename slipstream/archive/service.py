"""Puts one gateway's part of the archive together: queue, worker, health, and their end."""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from slipstream.archive.compactor import Compactor
from slipstream.archive.document_source import GatewayDocuments
from slipstream.archive.feeder import Feeder
from slipstream.archive.job_runner import ArchiveRunner, Progress
from slipstream.archive.queue import DamagedRecord, JobQueue, Lease, Outcome, QueuePolicy, QueueUnavailable
from slipstream.archive.redis_failover import INFO, Keeping, ask_keeping
from slipstream.archive.redis_queue import RedisQueue
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.spill_queue import SpillQueue
from slipstream.archive.worker import Handler, Worker
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_captioner import DocumentCaptioner
from slipstream.errors import InvalidConfig, ServiceUnavailable, SlipstreamError
from slipstream.logs import get_logger
from slipstream.metrics import GatewayMetrics
from slipstream.rpc.server import HealthWatch, Lifecycle
from slipstream.rpc.tracing import Tracing
from slipstream.service_info import ArchiveInfo

HEALTH_NAME = "slipstream.rpc.v1.Archive"
SWEEP_S, SWEEP_PAUSE_S = 60.0, 0.1
MAX_FAILED_TAKES = 3
"""In a row, after which the archive is not serving."""
SETTLE_S = 10.0
CHECK_S = 1.0
"""Between two attempts to ask the store how it keeps jobs, until it answers."""
LEADER_S = 5.0
"""Between two such questions from then on: another server may lead."""
DEPTH_S = 5.0
"""Between two looks at the queue's depth, for the metrics."""


class ArchiveService:
    """One gateway's part in the archive. Without a queue it does nothing."""

    def __init__(
        self,
        config: GatewayConfig,
        captioner: GatewayCaptioner,
        documents: DocumentCaptioner,
        target: HealthWatch,
        lifecycle: Lifecycle,
        queue: JobQueue | None,
        tracing: Tracing | None = None,
    ) -> None:
        self._config = config
        self._captioner = captioner
        self._documents = documents
        self._target = target
        self._lifecycle = lifecycle
        self.queue = queue
        self.watch = HealthWatch("redis", HEALTH_NAME, self._ask, lifecycle)
        """Of a store that takes writes and gives out jobs."""
        self._tracing = tracing
        self._takes_writes = False
        self._worker: Worker | None = None
        self._working: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to take jobs. A store that is not there is waited for; one that may lose jobs ends the process."""
        if self.queue is None:
            return
        config, queue = self._config, self.queue
        self._begin(self.watch.run())
        if config.redis:
            self._begin(self._check_keeping(config.redis_url))
        self._begin(_sweep(queue))
        if isinstance(queue, SpillQueue):
            folder = queue.folder
            self._begin(Compactor(queue, folder, config.result_file_bytes, config.result_file_age_s).run())
            self._begin(Feeder(queue, folder).run())
        if config.metrics:
            self._begin(watch_depth(queue, self._captioner.metrics))
        name = ""
        if config.archive_slots:
            documents = GatewayDocuments(self._documents)
            stopping = self._lifecycle.stopping
            runner = ArchiveRunner(config, self._captioner, queue, self._target.mark_down, documents, stopping)
            self._worker = Worker(
                queue,
                runner.run if self._tracing is None else _traced(runner, self._tracing),
                slots=config.archive_slots + config.archive_ahead,
                ready=self._is_ready,
                grace_s=config.archive_drain_s,
                on_end=self._captioner.metrics.run_ended,
            )
            name = self._worker.name
            self._captioner.metrics.watch_takes(self._worker.last_take_age_s)
            self._working = self._begin(self._work(self._worker))
        get_logger().info("archive.started", worker=name, slots=config.archive_slots, ahead=config.archive_ahead)

    def info(self) -> ArchiveInfo | None:
        """How it stands; None without a queue."""
        if self.queue is None:
            return None
        if (worker := self._worker) is None:
            return ArchiveInfo(self._takes_writes)
        age_s, lease_s = worker.lease_age_s(), self.queue.policy.lease_s
        return ArchiveInfo(self._takes_writes, worker.name, len(worker.live), worker.slots, age_s, lease_s)

    async def close(self) -> None:
        """Lets running jobs end for a while and gives back the others."""
        if self.queue is None:
            return
        if self._worker is not None and self._working is not None:
            self._worker.stop()
            await asyncio.wait({self._working}, timeout=self._config.archive_drain_s + SETTLE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.queue.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs `work` until `close`. If it fails, so does the process, as the rest alone is no gateway."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        get_logger().error("archive.failed", exc_info=error)
        self._lifecycle.fail(SlipstreamError(f"the archive's worker failed ({type(error).__name__}); see the log"))

    async def _check_keeping(self, url: str) -> None:
        """As soon as the store answers, and ever again: after a failover another server leads. At the address as it was
        at the start, like the queue itself: a password's file may go."""
        last, this = None, asyncio.current_task()
        assert this is not None
        while True:
            with contextlib.suppress(QueueUnavailable):
                keeping = await ask_keeping(url)
                if keeping != last and self._is_refused(keeping):
                    return
                last = keeping
            if this.cancelling():  # which a client may have taken for a timeout of its own
                return
            await asyncio.sleep(LEADER_S if last else CHECK_S)

    def _is_refused(self, keeping: Keeping) -> bool:
        """Whether a store that keeps jobs so ends the process; otherwise what is to be known of it is logged."""
        if keeping.unasked:
            reason = f"this user may not ask the queue's Redis how it was started: {keeping.unasked}"
            if self._config.redis_wait and keeping.unasked == INFO:
                reason += "; nor who follows it, so only as many replicas as --redis-wait says are waited for, not all"
            get_logger().warning("queue.unchecked", reason=reason)
        if not (fault := keeping.fault(self._config.redis_wait)):
            return False
        reason = f"the queue's Redis may lose accepted jobs (--redis-unsafe true takes it as it is): {fault}"
        if self._config.redis_unsafe:
            get_logger().warning("queue.unsafe", reason=reason)
            return False
        self._lifecycle.fail(InvalidConfig(reason))
        return True

    async def _work(self, worker: Worker) -> None:
        """Until `close`; from the beginning of the process's end on, nothing new is taken."""
        stopping = asyncio.create_task(self._stop(worker))
        try:
            await worker.run()
        finally:
            stopping.cancel()

    async def _stop(self, worker: Worker) -> None:
        await self._lifecycle.stopping.wait()
        worker.stop()
        await self._lifecycle.hurried.wait()
        worker.hurry()

    async def _is_ready(self) -> bool:
        return self._target.is_up

    async def _ask(self) -> None:
        """Raises `SlipstreamError` when the store takes no writes, or gives out no jobs."""
        assert self.queue is not None
        try:
            await self.queue.ping()
        except SlipstreamError:
            self._takes_writes = False
            raise
        self._takes_writes = True
        if self._worker is not None and self._worker.failed_takes >= MAX_FAILED_TAKES:
            raise ServiceUnavailable(f"{self._worker.failed_takes} takes in a row failed; the log says why")


def _traced(runner: ArchiveRunner, tracing: Tracing) -> Handler:
    async def run(lease: Lease, report: Progress) -> Outcome:
        with tracing.job_run(lease.traceparent, lease.request_id, lease.attempts + lease.crashes):
            return await runner.run(lease, report)

    return run


def make_queue(config: GatewayConfig, metrics: GatewayMetrics) -> RedisQueue | None:
    """The queue that the options name, if they name one. Raises `InvalidConfig`; connects when first used."""
    if not config.redis:
        return None
    url, name, policy = config.redis_url, config.redis_queue, _policy(config)
    how: Any = {"connections": config.redis_connections, "on_call": metrics.store_called, "replicas": config.redis_wait}
    if not config.results_to:
        return RedisQueue(url, name, policy, **how)
    return SpillQueue(url, ResultsFolder(config.results_to), name, policy, **how)


def _policy(config: GatewayConfig) -> QueuePolicy:
    return QueuePolicy(
        lease_s=config.lease_s,
        max_attempts=config.max_attempts,
        max_crashes=config.max_crashes,
        max_backlog=config.max_backlog,
        retention_s=config.retention_s,
        queue_bytes=config.queue_bytes if config.results_to else 0,
    )


async def _sweep(queue: JobQueue) -> None:
    """Deletes what is past its retention, for all gateways, a little at a time."""
    while True:
        num_deleted = 0
        with contextlib.suppress(QueueUnavailable, DamagedRecord):
            num_deleted = await queue.sweep()
        await asyncio.sleep(SWEEP_PAUSE_S if num_deleted else SWEEP_S)


async def watch_depth(queue: JobQueue, metrics: GatewayMetrics) -> None:
    """Keeps the queue's depth in `metrics` up to date, until cancelled. While the store is away it stays as it was."""
    while True:
        with contextlib.suppress(QueueUnavailable, DamagedRecord):
            depth = asdict(await queue.depth())
            metrics.queue_depth(depth, depth.pop("oldest_s"))
        metrics.queue_writable(await _takes_writes(queue))
        await asyncio.sleep(DEPTH_S)


async def _takes_writes(queue: JobQueue) -> bool:
    try:
        await queue.ping()
    except (QueueUnavailable, DamagedRecord):
        return False
    return True
