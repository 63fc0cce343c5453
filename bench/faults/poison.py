"""A job whose gateway is killed every time that it runs: it is given up, and its neighbours are done all the same."""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.faults.batches import list_jobs, submit, wait_ended
from bench.faults.cluster import Cluster, ClusterOptions
from bench.faults.history import Kind
from bench.faults.nemesis import Nemesis
from bench.faults.workload import WorkItem, make_workload
from bench.running import say
from slipstream.rpc.v1 import archive_pb2

NUM_NEIGHBOURS = 16
LEASE_S = 3.0
MAX_CRASHES = 3
POLL_S = 0.03
TIMEOUT_S = 300.0
POISON_TOKENS = 600
"""Long enough not to end before its gateway does."""


async def run_poison() -> dict[str, Any]:
    """The whole part."""
    with tempfile.TemporaryDirectory(prefix="slipstream-faults-") as folder:
        workload = make_workload(Path(folder) / "work", NUM_NEIGHBOURS + 1)
        flags = {"gateway": ("--max-crashes", str(MAX_CRASHES))}
        options = ClusterOptions(
            workload.pair.target, workload.pair.draft, workload.video_root, lease_s=LEASE_S, flags=flags
        )
        items = list(workload.items)
        items[NUM_NEIGHBOURS // 2] = _poisonous(items[NUM_NEIGHBOURS // 2])
        async with Cluster(options, say) as cluster, cluster.channel() as channel:
            began = time.monotonic()
            batch = (await submit(channel, "poison", items)).batch_id
            ids = {job.custom_id: job.job_id for job in await list_jobs(channel, batch)}
            nemesis = Nemesis(cluster, say)
            killing = asyncio.create_task(_kill_whoever_runs(ids["poison"], nemesis, cluster))
            try:
                async with cluster.channel("gateway-1") as other:
                    await wait_ended([channel, other], batch, TIMEOUT_S)
            finally:
                killing.cancel()
            await cluster.wait_serving("gateway-0")
            jobs = {job.custom_id: job for job in await list_jobs(channel, batch)}
            taken = [event for event in nemesis.events() if event.kind is Kind.TAKEN]
        poison, neighbours = jobs.pop("poison"), list(jobs.values())
        done = sum(job.state == archive_pb2.JOB_STATE_DONE for job in neighbours)
        dead = poison.state == archive_pb2.JOB_STATE_DEAD
        runs = sum(event.job_id == poison.job_id for event in taken)
        return {
            "passed": dead and bool(poison.error) and runs == MAX_CRASHES and done == NUM_NEIGHBOURS,
            "poison_state": archive_pb2.JobState.Name(poison.state),
            "poison_error": poison.error,
            "poison_runs": runs,
            "neighbours": NUM_NEIGHBOURS,
            "neighbours_done": done,
            "neighbours_most_crashes": max(job.crashes for job in neighbours),
            "wall_s": round(time.monotonic() - began, 1),
        }


def _poisonous(item: WorkItem) -> WorkItem:
    item.caption.max_new_tokens = POISON_TOKENS
    return WorkItem("poison", item.source, item.caption)


async def _kill_whoever_runs(job_id: str, nemesis: Nemesis, cluster: Cluster) -> None:
    killed = 0
    while True:
        runs = [event for event in nemesis.events() if event.kind is Kind.TAKEN and event.job_id == job_id]
        if len(runs) > killed:
            killed, victim = len(runs), max(runs, key=lambda event: event.at).process
            say(f"poison: run {killed}, on {victim}: killing it")
            cluster.kill(victim)
        await asyncio.sleep(POLL_S)
