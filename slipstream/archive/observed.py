"""A queue whose outcomes and depth are counted. Stands in for the queue itself, whatever is asked of it."""

import asyncio
import contextlib
from typing import Any, cast

from slipstream.archive.queue import JobQueue, Lease, Outcome, QueueUnavailable
from slipstream.metrics import GatewayMetrics

DEPTH_S = 5.0


def observed_queue(queue: JobQueue, metrics: GatewayMetrics) -> JobQueue:
    """The same queue, which tells `metrics` how each run ends."""
    return cast(JobQueue, _Observed(queue, metrics))


async def watch_depth(queue: JobQueue, metrics: GatewayMetrics, interval_s: float = DEPTH_S) -> None:
    """Keeps the queue's depth in `metrics` up to date, until cancelled. While the store is away it stays as it was."""
    while True:
        with contextlib.suppress(QueueUnavailable):
            depth = await queue.depth()
            states = ("queued", "delayed", "suspects", "running", "dead")
            metrics.queue_depth({state: getattr(depth, state) for state in states})
        await asyncio.sleep(interval_s)


class _Observed:
    def __init__(self, queue: JobQueue, metrics: GatewayMetrics) -> None:
        self._queue = queue
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def finish(self, lease: Lease, outcome: Outcome) -> bool:
        was_held = await self._queue.finish(lease, outcome)
        if not was_held:
            self._metrics.commit_refused()
        return self._ended(outcome.state.value, was_held)

    async def retry(self, lease: Lease, reason: str, delay_s: float, *, counted: bool = True) -> bool:
        return self._ended("retried", await self._queue.retry(lease, reason, delay_s, counted=counted))

    async def crash(self, lease: Lease, reason: str) -> bool:
        return self._ended("crashed", await self._queue.crash(lease, reason))

    def _ended(self, outcome: str, was_held: bool) -> bool:
        self._metrics.job_ended(outcome if was_held else "lost")
        return was_held
