"""The worker on the queue in memory: what handlers may raise, cancellation, draining, and a store that goes away."""

import asyncio
import contextlib
import errno
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from slipstream.archive import worker as worker_module
from slipstream.archive.queue import (
    BatchSpec,
    BatchState,
    BeatAnswer,
    JobState,
    Lease,
    Outcome,
    QueuePolicy,
    QueueUnavailable,
)
from slipstream.archive.worker import LONGEST_DELAY_S, Handler, RetryLater, RunnerDied, Worker
from slipstream.errors import LimitExceeded, Overloaded, ServiceUnavailable, UnreadableVideo, VideoNotFound
from tests.archive.worlds import DONE, specs, until
from tests.support.memory_queue import MemoryQueue

Progress = Callable[[str], None]
POLICY = QueuePolicy(lease_s=0.5, max_attempts=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "POLL_S", (0.005, 0.01))
    monkeypatch.setattr(worker_module, "AWAY_S", (0.01, 0.02))
    monkeypatch.setattr(worker_module, "UNCOUNTED_BACK_OFF_S", 0.01)
    monkeypatch.setattr(worker_module, "MAX_BACK_OFF_S", 0.01)


async def make(*custom_ids: str, queue: MemoryQueue | None = None) -> MemoryQueue:
    queue = queue or MemoryQueue(POLICY)
    await queue.open_batch(BatchSpec("batch"))
    await queue.submit("batch", specs(*custom_ids))
    await queue.seal_batch("batch")
    return queue


@contextlib.asynccontextmanager
async def working(queue: MemoryQueue, handler: Handler, **options: Any) -> AsyncIterator[Worker]:
    worker = Worker(queue, handler, **({"slots": 4, "grace_s": 5.0} | options))
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        yield worker
        worker.stop()


async def completed(queue: MemoryQueue) -> None:
    async def is_over() -> bool:
        return (await queue.get_batch("batch")).state in (BatchState.COMPLETED, BatchState.CANCELLED)

    await until(is_over)


async def has_progress(queue: MemoryQueue, progress: str) -> bool:
    return (await queue.list_jobs("batch"))[0][0].progress == progress


async def has(worker: Worker, num_jobs: int) -> bool:
    return len(worker.live) == num_jobs


async def states(queue: MemoryQueue) -> dict[str, tuple[JobState, str]]:
    return {job.custom_id: (job.state, job.error_code) for job in (await queue.list_jobs("batch"))[0]}


async def test_no_peer_has_a_job_wait_for_hours() -> None:
    async def handler(lease: Lease, progress: Progress) -> Outcome:
        raise Overloaded("no room", retry_after_s=7200.0)

    async def delays() -> list[float]:
        return [entry["delay_s"] for entry in logs if entry["event"] == "job.retried"]

    with capture_logs() as logs:
        async with working(await make("full"), handler):
            await until(delays)
    assert await delays() == [LONGEST_DELAY_S]


async def test_what_handlers_raise_decides_how_jobs_end() -> None:
    first_time = {
        "retry": RetryLater("soon", counted=True, delay_s=0.0),
        "waits": ServiceUnavailable("the target restarts"),
        "full": Overloaded("no room", retry_after_s=0.01),
        "died": RunnerDied("the target died"),
        "bug": ZeroDivisionError("oops"),
        "no descriptor": OSError(errno.EMFILE, "Too many open files"),
        "no thread": RuntimeError("can't start new thread"),
    }
    always = {"bad": UnreadableVideo("no video"), "none": VideoNotFound("no file"), "big": LimitExceeded("too long")}
    seen: dict[str, int] = {}

    async def handler(lease: Lease, progress: Progress) -> Outcome:
        seen[lease.custom_id] = seen.get(lease.custom_id, 0) + 1
        if error := always.get(lease.custom_id) or (first_time if lease.epoch == 1 else {}).get(lease.custom_id):
            raise error
        if lease.custom_id == "broken":
            raise RuntimeError("every time")
        return DONE

    queue = await make(*first_time, *always, "good", "broken")
    ended: Counter[tuple[str, bool]] = Counter()
    with capture_logs() as logs:
        async with working(queue, handler, on_end=lambda *how: ended.update([how])):
            await completed(queue)
    done, dead = (JobState.DONE, ""), (JobState.DEAD, "ABORTED")
    assert await states(queue) == {
        **dict.fromkeys(first_time, done),
        "bad": (JobState.FAILED, "INVALID_ARGUMENT"),
        "none": (JobState.FAILED, "NOT_FOUND"),
        "big": (JobState.FAILED, "OUT_OF_RANGE"),
        "good": done,
        "broken": dead,
    }
    jobs = {job.custom_id: job for job in (await queue.list_jobs("batch"))[0]}
    assert {name: job.attempts for name, job in jobs.items() if name in first_time} == {
        **dict.fromkeys(first_time, 0),
        **dict.fromkeys(("retry", "bug"), 1),
    }
    assert jobs["died"].crashes == 1
    assert jobs["broken"].error == "RuntimeError: every time"
    assert seen["bad"] == 1
    assert ended == {("done", True): 8, ("failed", True): 3, ("crashed", True): 1, ("retried", True): 8}
    committed = [entry for entry in logs if entry["event"] == "job.committed"]
    assert len(committed) == len(first_time) + len(always) + 1
    assert {"job_id", "batch_id", "worker", "epoch", "crashes"} <= committed[0].keys()


async def test_slots_and_readiness_bound_what_is_taken() -> None:
    is_ready, running, most = False, 0, 0

    async def handler(lease: Lease, progress: Progress) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return DONE

    async def ready() -> bool:
        return is_ready

    queue = await make(*map(str, range(12)))
    async with working(queue, handler, slots=3, ready=ready):
        await asyncio.sleep(0.05)
        assert (await queue.depth()).running == 0
        is_ready = True
        await completed(queue)
    assert most == 3


async def test_cancelling_stops_the_running_handler_and_progress_is_told() -> None:
    stopped = asyncio.Event()

    async def handler(lease: Lease, progress: Progress) -> Outcome:
        progress("prefill 3/8")
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return DONE

    queue = await make("a")
    async with working(queue, handler):
        await until(lambda: has_progress(queue, "prefill 3/8"))
        await queue.cancel_batch("batch")
        await stopped.wait()
        await completed(queue)
    assert await states(queue) == {"a": (JobState.CANCELLED, "")}


async def test_a_stopping_worker_lets_jobs_end_and_gives_the_rest_back_uncounted() -> None:
    started = asyncio.Semaphore(0)

    async def handler(lease: Lease, progress: Progress) -> Outcome:
        started.release()
        await asyncio.sleep(0.05 if lease.custom_id == "short" else 60)
        return DONE

    queue = await make("short", "long")
    async with working(queue, handler, grace_s=0.3) as worker:
        for _ in range(2):
            await started.acquire()
        assert len(worker.live) == 2
        worker.stop()
    assert await states(queue) == {"short": (JobState.DONE, ""), "long": (JobState.QUEUED, "")}
    (lease,) = await queue.take("other", 5)
    assert (lease.attempts, lease.crashes) == (0, 0)


class AwayQueue(MemoryQueue):
    """Its store can be out of reach."""

    is_away = False
    num_refused = 0

    async def was_refused(self) -> bool:
        return self.num_refused > 5

    def check(self) -> None:
        if self.is_away:
            self.num_refused += 1
            raise QueueUnavailable("away")

    async def take(self, worker: str, limit: int, *, suspects: bool = True) -> list[Lease]:
        self.check()
        return await super().take(worker, limit, suspects=suspects)

    async def beat(self, leases: Sequence[Lease], progress: Mapping[str, str]) -> list[BeatAnswer]:
        self.check()
        return await super().beat(leases, progress)

    async def finish(self, lease: Lease, outcome: Outcome) -> bool:
        self.check()
        return await super().finish(lease, outcome)


async def test_work_goes_on_while_the_store_is_away_and_is_committed_later() -> None:
    queue = AwayQueue(POLICY)
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def handler(lease: Lease, progress: Progress) -> Outcome:
        await may_end.wait()
        ended.set()
        return DONE

    await make("a", queue=queue)
    with capture_logs() as logs:
        async with working(queue, handler) as worker:
            await until(lambda: has(worker, 1))
            queue.is_away = True
            await asyncio.sleep(2 * POLICY.lease_s)
            may_end.set()
            await ended.wait()
            await until(queue.was_refused)
            queue.is_away = False
            await completed(queue)
    job = (await queue.list_jobs("batch"))[0][0]
    assert (job.state, job.epoch) == (JobState.DONE, 1)
    assert [entry["event"] for entry in logs if entry["event"].startswith("queue.")] == ["queue.away", "queue.back"]


async def test_a_lost_job_is_stopped_and_a_late_commit_refused() -> None:
    now = [0.0]
    queue = await make("stopped", "finished", queue=MemoryQueue(POLICY, lambda: now[0]))
    ended: list[tuple[str, bool]] = []
    both = asyncio.Semaphore(0)
    may_end, stopped = asyncio.Event(), asyncio.Event()

    async def handler(lease: Lease, progress: Progress) -> Outcome:
        both.release()
        if lease.custom_id == "finished":
            await may_end.wait()
            return DONE
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return DONE

    with capture_logs() as logs:
        async with working(queue, handler, slots=2, on_end=lambda *how: ended.append(how)) as worker:
            for _ in range(2):
                await both.acquire()
            now[0] += 10
            thief = await queue.take("thief", 2)
            may_end.set()
            await stopped.wait()
            await until(lambda: has(worker, 0))
    events = [entry["event"] for entry in logs]
    assert ended == [("done", False)]
    assert events.count("job.lost") == 1 and events.count("job.stale_commit_refused") == 1
    assert await queue.finish(thief[0], DONE) and await queue.finish(thief[1], DONE)


async def test_leases_that_could_not_be_renewed_in_time_are_told_of() -> None:
    """A process that is starved, or was frozen: it says why somebody else has had its jobs."""
    queue = await make("a")

    async def handler(lease: Lease, progress: Progress) -> Outcome:
        time.sleep(POLICY.lease_s + 0.1)  # noqa: ASYNC251 (nothing else of the process runs)
        await until(lambda: told(logs))
        return DONE

    async def told(logs: Sequence[Mapping[str, Any]]) -> bool:
        return any(entry["event"] == "leases.late" for entry in logs)

    with capture_logs() as logs:
        async with working(queue, handler):
            await completed(queue)
    (entry,) = (entry for entry in logs if entry["event"] == "leases.late")
    assert entry["seconds"] >= POLICY.lease_s


async def test_a_job_taken_back_by_its_own_worker_is_never_run_twice_at_once() -> None:
    now, policy = [0.0], QueuePolicy(lease_s=3600.0)  # no beat, of which there are five in that time, comes first
    queue = MemoryQueue(policy, lambda: now[0])
    running = most = 0
    started = asyncio.Semaphore(0)

    async def handler(lease: Lease, progress: Progress) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        started.release()
        try:
            await asyncio.sleep(0.0 if lease.epoch > 1 else 60)
        finally:
            await asyncio.sleep(0.05)  # slow to stop
            running -= 1
        return DONE

    await make("a", queue=queue)
    async with working(queue, handler, slots=2):
        await started.acquire()
        now[0] += policy.lease_s
        await completed(queue)
    job = (await queue.list_jobs("batch"))[0][0]
    assert (job.epoch, most) == (2, 1)
