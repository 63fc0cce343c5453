"""The queue's store is killed, frozen, and runs out of disk while captions are made and batches are handed in.

A batch that was accepted is found afterwards, one that was not is refused soon and clearly, and the captions that were
in work are committed once the store is back.
"""

import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import say
from bench.faults.batches import list_jobs, submit, wait_ended
from slipstream import AsyncCaptioner
from slipstream.archive.messages import BatchItem
from slipstream.archive.queue import UnknownBatch
from slipstream.errors import SlipstreamError
from tests.support.archive_faults.history import Kind
from tests.support.archive_faults.injector import FaultInjector
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.workload import make_workload

FAULTS = ("disk_full", "kill", "freeze")
FREEZE_S, DISK_FULL_S, KILL_DOWN_S = 20.0, 12.0, 4.0
REFUSED_WITHIN_S = 4.0
SUBMIT_EVERY_S = 0.2
SUBMIT_TIMEOUT_S = 15.0
NUM_JOBS = 16
NUM_TOKENS = 80
TIMEOUT_S = 180.0
DISK_MB = 16
BALLAST = "ballast"
LEFT_BYTES = 48 * 1024
"""Room that is left when the disk is said to be full: for a few writes."""


class Submission(NamedTuple):
    """One batch that was handed in during a fault."""

    key: str
    status: str
    details: str
    took_s: float


async def run_redis_faults() -> dict[str, Any]:
    """The whole part: one fault after the other on one cluster."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-faults-")))
        disk = folder / "disk"
        disk.mkdir()
        if may_mount():
            await stack.enter_async_context(small_disk(disk))
        workload = make_workload(folder / "work", NUM_JOBS * len(FAULTS), num_tokens=NUM_TOKENS)
        options = ClusterOptions(workload.pair.target, workload.pair.draft, workload.video_root, redis_dir=disk)
        cluster = await stack.enter_async_context(Cluster(options, say))
        found = {}
        for index, fault in enumerate(FAULTS):
            if fault == "disk_full" and not may_mount():
                found[fault] = {"passed": False, "skipped": "not tried: a small disk needs root"}
                continue
            items = workload.items[index * NUM_JOBS : (index + 1) * NUM_JOBS]
            found[fault] = await _FaultRun(cluster, fault, items, disk).run()
            say(f"redis: {fault}: {found[fault]}")
        return {"passed": all(part["passed"] for part in found.values()), **found}


class _FaultRun:
    """One fault: a batch in work, submissions meanwhile, and what is left of both."""

    def __init__(self, cluster: Cluster, fault: str, items: Sequence[BatchItem], disk: Path) -> None:
        self._cluster = cluster
        self._fault = fault
        self._items = items
        self._disk = disk
        self._injector = FaultInjector(cluster, say)
        self._submissions: list[Submission] = []

    async def run(self) -> dict[str, Any]:
        async with self._cluster.captioner() as captioner:
            batch = await submit(captioner, f"{self._fault}-running", self._items)
            ids = {job.job_id for job in await list_jobs(captioner, batch)}
            await self._wait_taken(ids)
            async with self._fault_lasting():
                submitting = asyncio.create_task(self._keep_submitting(captioner))
                await asyncio.sleep({"disk_full": DISK_FULL_S, "kill": KILL_DOWN_S, "freeze": FREEZE_S}[self._fault])
            submitting.cancel()
            await asyncio.wait({submitting})
            healed = time.monotonic()
            ended = await wait_ended([captioner], batch, TIMEOUT_S)
            ended_after_s = time.monotonic() - healed
            lost = [s.key for s in self._submissions if s.status == "OK" and not await _is_kept(captioner, s.key)]
            attempts = sum(job.attempts for job in await list_jobs(captioner, batch))
        return self._verdict(ids, attempts, ended.counts.done, lost) | {"batch_ended_after_s": round(ended_after_s, 1)}

    def _verdict(self, ids: set[str], attempts: int, done: int, lost: Sequence[str]) -> dict[str, Any]:
        refused = [submission for submission in self._submissions if submission.status != "OK"]
        slowest = max((submission.took_s for submission in refused), default=0.0)
        kinds = Counter(event.kind for event in self._injector.events() if event.job_id in ids)
        statuses = Counter(submission.status for submission in self._submissions)
        clear = set(statuses) <= {"OK", "UNAVAILABLE"} and all(submission.details for submission in refused)
        return {
            "passed": clear and not lost and slowest <= REFUSED_WITHIN_S and done == len(self._items),
            "submissions": dict(statuses),
            "refused_within_s": round(slowest, 2),
            "reasons": sorted({submission.details for submission in refused})[:3],
            "accepted_but_lost": len(lost),
            "jobs": len(self._items),
            "done": done,
            "runs": kinds[Kind.TAKEN],
            "commits": kinds[Kind.COMMITTED],
            "stale_commits_refused": kinds[Kind.REFUSED],
            "attempts": attempts,
        }

    async def _wait_taken(self, ids: set[str]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            # What the logs of others say:
            while not any(e.kind is Kind.TAKEN and e.job_id in ids for e in self._injector.events()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)

    @contextlib.asynccontextmanager
    async def _fault_lasting(self) -> AsyncIterator[None]:
        """The fault is there within; at the end the store is well again."""
        cluster, starts = self._cluster, self._cluster.processes["redis"].starts
        if self._fault == "freeze":
            cluster.freeze("redis")
            try:
                yield
            finally:
                cluster.thaw("redis")
        elif self._fault == "kill":
            with cluster.held("redis"):
                cluster.kill("redis")
                yield
            await cluster.wait_serving("redis", starts + 1)
        else:
            with filled(self._disk):
                yield
            await cluster.wait_serving("redis", cluster.processes["redis"].starts)

    async def _keep_submitting(self, captioner: AsyncCaptioner) -> None:
        for number in itertools.count():
            self._submissions.append(await _submission(captioner, f"{self._fault}-{number}", self._items[:1]))
            await asyncio.sleep(SUBMIT_EVERY_S)


async def _submission(captioner: AsyncCaptioner, key: str, items: Sequence[BatchItem]) -> Submission:
    began = time.monotonic()
    status, details = "OK", ""
    try:
        await submit(captioner, key, items, SUBMIT_TIMEOUT_S)
    except SlipstreamError as error:
        status, details = error.status, str(error)
    except TimeoutError:
        status, details = "DEADLINE_EXCEEDED", ""
    return Submission(key, status, details, time.monotonic() - began)


async def _is_kept(captioner: AsyncCaptioner, key: str) -> bool:
    try:
        return len(await list_jobs(captioner, key)) == 1
    except UnknownBatch:
        return False


# -- a disk that can be filled up --------------------------------------------------------------------------------------


def may_mount() -> bool:
    return os.geteuid() == 0


@contextlib.asynccontextmanager
async def small_disk(folder: Path) -> AsyncIterator[None]:
    """A new file system at `folder`, which exists; gone at the end."""
    await _command("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder))
    try:
        yield
    finally:
        await _command("umount", "-l", str(folder))


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leaves next to no room, and makes room again."""
    room, ballast = os.statvfs(folder), folder / BALLAST
    ballast.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - LEFT_BYTES)))
    try:
        yield
    finally:
        ballast.unlink()


async def _command(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    if await process.wait():
        raise OSError(f"{' '.join(command)} failed")
