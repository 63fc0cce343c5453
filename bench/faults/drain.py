"""Two gateways drain a batch while everything is killed and frozen in turn; the checker says what came of it."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc

from bench.faults.batches import list_jobs, submit, wait_ended
from bench.faults.captions import caption_text
from bench.faults.checker import Verdict, check
from bench.faults.cluster import Cluster, ClusterOptions
from bench.faults.entries import read_entries
from bench.faults.history import History, count_events
from bench.faults.nemesis import Nemesis
from bench.faults.plan import plan_strikes
from bench.faults.workload import WorkItem, make_workload
from bench.running import say
from slipstream.rpc.v1 import archive_pb2

LEASE_S = 5.0
NUM_TOKENS = 100
"""Long enough that the batch outlasts the strikes that do not stop it, short enough that places become free."""
DRAIN_TIMEOUT_S = 900.0
HARM_GRACE_S = 60.0
"""How long the nemesis may go on with what it had begun when the batch ended; then there is nothing more to harm."""
CONCURRENCY = 4


@dataclass(frozen=True)
class Harmed:
    """What came of a batch that was harmed."""

    verdict: Verdict
    history: History
    jobs: Sequence[archive_pb2.Job]


async def run_drain(num_jobs: int, seed: int) -> dict[str, Any]:
    """The whole part: texts of an undisturbed run, the disturbed batch, the verdict."""
    with tempfile.TemporaryDirectory(prefix="slipstream-faults-") as folder:
        workload = make_workload(Path(folder) / "work", num_jobs, num_tokens=NUM_TOKENS)
        options = ClusterOptions(
            workload.pair.target, workload.pair.draft, workload.video_root, lease_s=LEASE_S, ahead=0
        )
        async with Cluster(options, say) as cluster:
            say(f"drain: {num_jobs} captions undisturbed, for comparison")
            expected = await undisturbed_texts(cluster, workload.items)
            plan = plan_strikes(seed, cluster.gateways)
            say(f"drain: seed {seed}: " + ", ".join(f"{s.kind} {s.victim} at {s.at_share:.0%}" for s in plan))
            began = time.monotonic()
            harmed = await harm_batch(
                cluster, "drain", workload.items, expected, lambda nemesis: nemesis.run(plan, num_jobs)
            )
            wall_s = time.monotonic() - began
            logged = {name: count_events(cluster.log(name), "request.failed") for name in cluster.processes}
        last_commit = max(event.at for event in harmed.history.events)
        in_time = [act for act in harmed.history.acts if act.at < last_commit]
        verdict = harmed.verdict
        return asdict(verdict) | {
            # A run whose strikes came too late or whose zombie had nothing to commit has shown nothing.
            "passed": verdict.passed and verdict.stale_commits_refused > 0 and len(in_time) >= len(plan),
            "acts_in_time": len(in_time),
            "wall_s": round(wall_s, 1),
            "distinct_texts": len(set(expected.values())),
            "attempts": sum(job.attempts for job in harmed.jobs),
            "crashes": sum(job.crashes for job in harmed.jobs),
            "internal_errors_logged": logged,
            "acts": [asdict(act) for act in harmed.history.acts],
        }


async def undisturbed_texts(cluster: Cluster, items: Sequence[WorkItem]) -> dict[str, str]:
    """The text of every item, by custom id, from plain calls."""
    texts: dict[str, str] = {}
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(channel: grpc.aio.Channel, item: WorkItem) -> None:
        async with places:
            texts[item.custom_id] = await caption_text(channel, item)

    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(cluster.channel(name)) for name in cluster.gateways]
        async with asyncio.TaskGroup() as group:
            for channel, item in zip(cycle(channels), items, strict=False):
                group.create_task(one(channel, item))
    return texts


async def harm_batch(
    cluster: Cluster,
    key: str,
    items: Sequence[WorkItem],
    expected: Mapping[str, str],
    harm: Callable[[Nemesis], Coroutine[Any, Any, None]],
) -> Harmed:
    """Hands a batch in, lets the nemesis do its harm, waits until the batch has ended, and checks what came of it."""
    nemesis = Nemesis(cluster, say)
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(cluster.channel(name)) for name in cluster.gateways]
        batch_id = (await submit(channels[0], key, items)).batch_id
        harming = asyncio.create_task(harm(nemesis))
        try:
            await wait_ended(channels, batch_id, DRAIN_TIMEOUT_S)
            await asyncio.wait({harming}, timeout=HARM_GRACE_S)
        finally:
            harming.cancel()
            await asyncio.wait({harming})
        if not harming.cancelled():
            harming.result()
        jobs = await list_jobs(channels[0], batch_id)
        entries = await read_entries(cluster.redis_url, batch_id, jobs)
    ids = {entry.job_id for entry in entries}
    events = [event for event in nemesis.events() if event.job_id in ids]
    history = History([item.custom_id for item in items], events, nemesis.acts, entries)
    return Harmed(check(history, expected, cluster.options.lease_s, places=cluster.options.places), history, jobs)
