"""Two gateways drain a batch while everything is killed and frozen in turn; the checker says what came of it."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, TypeVar

from bench.common import say
from bench.faults.batches import list_jobs, submit, wait_ended
from slipstream import AsyncCaptioner, CaptionOptions, RemotePath
from slipstream.archive.messages import BatchItem, Job
from slipstream.archive.queue import JobState
from slipstream.errors import ServiceUnavailable
from tests.support.archive_faults.checker import Verdict, check
from tests.support.archive_faults.history import Entry, History, JobEvent, Kind, count_events, read_entries
from tests.support.archive_faults.injector import FaultInjector, plan_strikes
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.workload import make_workload

AnswerT = TypeVar("AnswerT")
LEASE_S = 5.0
NUM_TOKENS = 300
"""Long enough that the batch outlasts the strikes that do not stop it, short enough that places become free."""
DRAIN_TIMEOUT_S = 900.0
HARM_GRACE_S = 60.0
"""How long the injector may go on with what it had begun when the batch ended; then there is nothing more to harm."""
CONCURRENCY = 4
AGAIN_S, SAID_S = 0.5, 30.0
"""Pauses between two tries, and how long a gateway may take to say what it has committed: nothing is promised until the
leader has dropped a replica that is cut off."""


@dataclass(frozen=True)
class Harmed:
    """What came of a batch that was harmed."""

    verdict: Verdict
    history: History
    jobs: Sequence[Job]


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
                cluster, "drain", workload.items, expected, lambda injector: injector.run(plan, num_jobs)
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


async def undisturbed_texts(cluster: Cluster, items: Sequence[BatchItem]) -> dict[str, str]:
    """The text of every item, by custom id, from plain calls."""
    texts: dict[str, str] = {}
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(captioner: AsyncCaptioner, item: BatchItem) -> None:
        async with places:
            options = CaptionOptions.from_mapping(item.caption)
            caption = partial(captioner.caption, RemotePath(item.source), options=options)
            texts[item.custom_id] = (await _once_there(item.custom_id, caption)).text

    async with AsyncExitStack() as stack:
        captioners = [await stack.enter_async_context(cluster.captioner(name)) for name in cluster.gateways]
        async with asyncio.TaskGroup() as group:
            for captioner, item in zip(cycle(captioners), items, strict=False):
                group.create_task(one(captioner, item))
    return texts


async def _handed_in(captioner: AsyncCaptioner, key: str, items: Sequence[BatchItem]) -> str:
    """The batch's id; it is handed in again where the queue's leader was just replaced, as it is by one key."""
    return await _once_there(key, lambda: submit(captioner, key, items))


async def _once_there(what: str, call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """Asks again while who is asked is away, or not heard on a machine that starts a dozen services."""
    async with asyncio.timeout(DRAIN_TIMEOUT_S):
        while True:
            try:
                return await call()
            except ServiceUnavailable as error:
                say(f"{what}: asked for again: {error}")
                await asyncio.sleep(AGAIN_S)


async def harm_batch(
    cluster: Cluster,
    key: str,
    items: Sequence[BatchItem],
    expected: Mapping[str, str],
    harm: Callable[[FaultInjector], Coroutine[Any, Any, None]],
    injector: FaultInjector | None = None,
) -> Harmed:
    """Hands a batch in, lets the injector do its harm, waits until the batch has ended, and checks what came of it."""
    injector = injector or FaultInjector(cluster, say)
    async with AsyncExitStack() as stack:
        captioners = [await stack.enter_async_context(cluster.captioner(name)) for name in cluster.gateways]
        batch_id = await _handed_in(captioners[0], key, items)
        harming = asyncio.create_task(harm(injector))
        try:
            await wait_ended(captioners, batch_id, DRAIN_TIMEOUT_S)
            await asyncio.wait({harming}, timeout=HARM_GRACE_S)
        finally:
            harming.cancel()
            await asyncio.wait({harming})
        if not harming.cancelled():
            harming.result()
    return await judge(cluster, batch_id, items, expected, injector)


async def judge(
    cluster: Cluster, batch_id: str, items: Sequence[BatchItem], expected: Mapping[str, str], injector: FaultInjector
) -> Harmed:
    """What came of a batch that has ended."""
    async with cluster.captioner() as captioner:
        jobs = await list_jobs(captioner, batch_id)
    entries = await read_entries(cluster.redis_url, batch_id, jobs)
    ids = {entry.job_id for entry in entries}
    events = [event for event in await _events_of(injector, entries) if event.job_id in ids]
    history = History([item.custom_id for item in items], events, injector.acts, entries)
    return Harmed(check(history, expected, cluster.options.lease_s, places=cluster.options.places), history, jobs)


async def _events_of(injector: FaultInjector, entries: Sequence[Entry]) -> Sequence[JobEvent]:
    """What gateways have logged. One that was refused its promise, or frozen, when its result was in says so later."""
    done = {entry.job_id for entry in entries if entry.state is JobState.DONE}
    deadline = time.monotonic() + SAID_S
    while True:
        events = injector.events()
        is_said = done <= {event.job_id for event in events if event.kind is Kind.COMMITTED}
        if is_said or time.monotonic() > deadline:
            return events
        await asyncio.sleep(AGAIN_S)


def longest_pause_s(batch: Harmed) -> float:
    """In which nothing was committed, between the first commit and the last."""
    moments = sorted(event.at for event in batch.history.events if event.kind is Kind.COMMITTED)
    return round(max((after - before for before, after in pairwise(moments)), default=0.0), 1)


NUM_NEIGHBOURS = 16
POISON_LEASE_S = 3.0
MAX_CRASHES = 3
POLL_S = 0.03
TIMEOUT_S = 300.0
POISON_TOKENS = 600
"""Long enough not to end before its gateway does."""


async def run_poison() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="slipstream-faults-") as folder:
        workload = make_workload(Path(folder) / "work", NUM_NEIGHBOURS + 1)
        flags = {"gateway": ("--max-crashes", str(MAX_CRASHES))}
        options = ClusterOptions(
            workload.pair.target, workload.pair.draft, workload.video_root, lease_s=POISON_LEASE_S, flags=flags
        )
        items = list(workload.items)
        items[NUM_NEIGHBOURS // 2] = _poisonous(items[NUM_NEIGHBOURS // 2])
        async with Cluster(options, say) as cluster, cluster.captioner() as captioner:
            began = time.monotonic()
            batch = await submit(captioner, "poison", items)
            ids = {job.custom_id: job.job_id for job in await list_jobs(captioner, batch)}
            injector = FaultInjector(cluster, say)
            killing = asyncio.create_task(_kill_whoever_runs(ids["poison"], injector, cluster))
            try:
                async with cluster.captioner("gateway-1") as other:
                    await wait_ended([captioner, other], batch, TIMEOUT_S)
            finally:
                killing.cancel()
            await cluster.wait_serving("gateway-0")
            jobs = {job.custom_id: job for job in await list_jobs(captioner, batch)}
            taken = [event for event in injector.events() if event.kind is Kind.TAKEN]
        poison, neighbours = jobs.pop("poison"), list(jobs.values())
        done = sum(job.state is JobState.DONE for job in neighbours)
        dead = poison.state is JobState.DEAD
        runs = sum(event.job_id == poison.job_id for event in taken)
        return {
            "passed": dead and bool(poison.error) and runs == MAX_CRASHES and done == NUM_NEIGHBOURS,
            "poison_state": poison.state,
            "poison_error": poison.error,
            "poison_runs": runs,
            "neighbours": NUM_NEIGHBOURS,
            "neighbours_done": done,
            "neighbours_most_crashes": max(job.crashes for job in neighbours),
            "wall_s": round(time.monotonic() - began, 1),
        }


def _poisonous(item: BatchItem) -> BatchItem:
    return BatchItem("poison", item.source, {**item.caption, "max_new_tokens": POISON_TOKENS})


async def _kill_whoever_runs(job_id: str, injector: FaultInjector, cluster: Cluster) -> None:
    killed = 0
    while True:
        runs = [event for event in injector.events() if event.kind is Kind.TAKEN and event.job_id == job_id]
        if len(runs) > killed:
            killed, victim = len(runs), max(runs, key=lambda event: event.at).process
            say(f"poison: run {killed}, on {victim}: killing it")
            cluster.kill(victim)
        await asyncio.sleep(POLL_S)
