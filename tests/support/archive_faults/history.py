"""What happened in a run, from the gateways' logs, the injected faults and the queue's last word."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from slipstream.archive.messages import Job
from slipstream.archive.queue import JobRecord, JobState, QueueUnavailable
from slipstream.archive.redis_queue import RedisQueue

AWAY_S = 60.0
"""How long the store may be away when it is asked for its last word."""


class Kind(StrEnum):
    """What a gateway logs of a job that it holds."""

    TAKEN = "job.taken"
    COMMITTED = "job.committed"
    REFUSED = "job.stale_commit_refused"
    LOST = "job.lost"
    RETRIED = "job.retried"
    CRASHED = "job.crashed"


@dataclass(frozen=True)
class JobEvent:
    at: float
    """Unix time."""
    kind: Kind
    process: str
    """Name of the process in the cluster, the same after a restart."""
    job_id: str
    worker: str
    epoch: int
    reason: str = ""


@dataclass(frozen=True)
class Act:
    """What was done to a process: it was of no use from `at` to `until`."""

    at: float
    until: float
    kind: str
    """"kill" or "freeze", of what runs, or "fail over"."""
    victim: str


@dataclass(frozen=True)
class Entry:
    """How a job stands in the queue at the end."""

    custom_id: str
    job_id: str
    state: JobState
    worker: str
    epoch: int
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class Run:
    """One time that a job was taken, up to what is known of its end."""

    job_id: str
    process: str
    worker: str
    epoch: int
    began: float
    ended: float | None
    """None: its worker never said; it died."""
    end: Kind | None
    end_reason: str = ""


@dataclass(frozen=True)
class History:
    """All that the checker goes by."""

    submitted: Sequence[str]
    """Custom ids."""
    events: Sequence[JobEvent]
    acts: Sequence[Act]
    entries: Sequence[Entry]

    def runs(self) -> dict[str, list[Run]]:
        ends = {(e.job_id, e.worker, e.epoch): e for e in sorted(self.events, key=lambda e: -e.at) if e.kind in ENDS}
        found: dict[str, list[Run]] = {}
        for event in sorted(self.events, key=lambda event: event.at):
            if event.kind is not Kind.TAKEN:
                continue
            end = ends.get((event.job_id, event.worker, event.epoch))
            ended = (end.at, end.kind, end.reason) if end else (None, None, "")
            run = Run(event.job_id, event.process, event.worker, event.epoch, event.at, *ended)
            found.setdefault(event.job_id, []).append(run)
        return found


ENDS = frozenset(Kind) - {Kind.TAKEN}


def read_events(process: str, path: Path) -> list[JobEvent]:
    """The job events of one log of JSON lines; other lines are passed over, torn ones too."""
    lines = path.read_text(errors="replace").splitlines()
    parsed = (_parse(line) for line in lines if '"job.' in line)  # far from all of a long run
    return [_job_event(process, line) for line in parsed if line.get("event") in set(Kind) and "job_id" in line]


def count_events(path: Path, *names: str) -> int:
    return sum(_parse(line).get("event") in names for line in path.read_text(errors="replace").splitlines())


def finished_captions(path: Path) -> set[str]:
    """Request ids of the captions that one log calls finished: `job-epoch` where a job asked for it."""
    parsed = map(_parse, path.read_text(errors="replace").splitlines())
    return {str(line.get("request_id")) for line in parsed if line.get("event") == "caption.finished"}


def overlapping(acts: Iterable[Act], began: float, ended: float) -> list[Act]:
    """The acts that were felt at some time between the two."""
    return [act for act in acts if act.at <= ended and act.until >= began]


def _job_event(process: str, line: dict[str, Any]) -> JobEvent:
    at = datetime.fromisoformat(str(line["timestamp"])).timestamp()
    kind, job_id, worker = Kind(line["event"]), str(line["job_id"]), str(line.get("worker", ""))
    return JobEvent(at, kind, process, job_id, worker, int(line.get("epoch", 0)), str(line.get("reason", "")))


def _parse(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


async def read_entries(redis_url: str, batch_id: str, jobs: Sequence[Job]) -> list[Entry]:
    """One entry a job of the store, joined to what the archive says of it."""
    texts = {job.job_id: job.caption.text for job in jobs if job.caption}
    entries: list[Entry] = []
    queue, after = RedisQueue(redis_url), 0
    try:
        while True:
            page, after = await _page(queue, batch_id, after)
            entries += [
                Entry(job.custom_id, job.job_id, job.state, job.worker, job.epoch, texts.get(job.job_id, ""), job.error)
                for job in page
            ]
            if not after:
                return entries
    finally:
        await queue.close()


async def _page(queue: RedisQueue, batch_id: str, after: int) -> tuple[list[JobRecord], int]:
    """Asked again while the store is away or slow, as after a failover on a busy machine."""
    async with asyncio.timeout(AWAY_S):
        while True:
            try:
                return await queue.list_jobs(batch_id, after=after)
            except QueueUnavailable:
                await asyncio.sleep(0.5)
