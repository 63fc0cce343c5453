"""More captions than the stack can make: each is taken or refused at once, and those that are taken are made.

An open loop: requests come when they come, whatever became of those before. The load is measured against the rate of
a closed loop that keeps the gateway full.
"""

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import grpc

from bench.faults.captions import TIMEOUT_S, caption_requests
from bench.faults.cluster import Cluster, ClusterOptions
from bench.faults.workload import WorkItem, make_workload
from bench.running import say
from slipstream.cli.launch import FRESH
from slipstream.rpc.v1 import gateway_pb2_grpc

MAX_CAPTIONS = 4
NUM_ITEMS = 100
WARM_UP_S, PEAK_S, RAMP_S, LOAD_S = 8.0, 25.0, 5.0, 35.0
LOADS = (1.0, 3.0)
DECIDED_WITHIN_S = 0.05
LEAST_GOODPUT = 0.8
MEMORY_GROWTH, MEMORY_SLACK_BYTES = 1.25, 64 * 2**20
"""What memory may be at the highest load, against that of the peak."""
CLEAR = frozenset({"OK", "RESOURCE_EXHAUSTED"})
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What one request got."""

    status: str
    details: str
    decided_s: float
    """Until the first event or the refusal."""
    ended: float
    """Monotonic time."""


async def run_overload(seed: int) -> dict[str, Any]:
    """The whole part."""
    with tempfile.TemporaryDirectory(prefix="slipstream-faults-") as folder:
        workload = make_workload(Path(folder) / "work", NUM_ITEMS)
        flags = {"gateway": ("--max-captions", str(MAX_CAPTIONS)), **FRESH}
        options = ClusterOptions(
            workload.pair.target, workload.pair.draft, workload.video_root, gateways=1, slots=0, flags=flags
        )
        async with Cluster(options, say) as cluster, cluster.channel() as channel:
            return await _Load(cluster, channel, workload.items, seed).run()


class _Load:
    """Phases of one run against one gateway."""

    def __init__(self, cluster: Cluster, channel: grpc.aio.Channel, items: Sequence[WorkItem], seed: int) -> None:
        self._cluster = cluster
        self._gateway = gateway_pb2_grpc.GatewayStub(channel)
        self._items = items
        self._rng = random.Random(seed)
        self._numbers = count()

    async def run(self) -> dict[str, Any]:
        await self._closed_loop(WARM_UP_S)
        peak_memory = _MemoryWatch(self._cluster)
        began = time.monotonic()
        peak_rate = _goodput(await peak_memory.during(self._closed_loop(PEAK_S)), began, began + PEAK_S)
        say(f"overload: peak {peak_rate:.2f} captions/s with {MAX_CAPTIONS} in work")
        phases = {}
        for load in LOADS:
            memory = _MemoryWatch(self._cluster)
            began = time.monotonic()
            answers = await memory.during(self._open_loop(load * peak_rate, LOAD_S))
            made = _goodput(answers, began + RAMP_S, began + LOAD_S)
            phases[load] = _phase(answers) | {"goodput": round(made / peak_rate, 3), "memory_mb": memory.megabytes}
            say(f"overload: {load:g}x: {phases[load]}")
        most = phases[max(LOADS)]
        bound = MEMORY_GROWTH * peak_memory.most + MEMORY_SLACK_BYTES
        checks = {
            "decided_in_time": most["decided_p99_s"] <= DECIDED_WITHIN_S,
            "goodput": most["goodput"] >= LEAST_GOODPUT,
            "errors_clear": all(phase["unclear"] == 0 for phase in phases.values()),
            "memory_bounded": most["memory_mb"] * 2**20 <= bound,
        }
        return {
            "passed": all(checks.values()),
            "checks": checks,
            "peak_per_s": round(peak_rate, 3),
            "peak_memory_mb": peak_memory.megabytes,
            "goodput_at_3x": most["goodput"],
            "phases": {f"{load:g}x": phase for load, phase in phases.items()},
        }

    async def _closed_loop(self, seconds: float) -> list[Answer]:
        until = time.monotonic() + seconds
        answers: list[Answer] = []

        async def keep_asking() -> None:
            while time.monotonic() < until:
                answers.append(await self._ask())

        async with asyncio.TaskGroup() as group:
            for _ in range(MAX_CAPTIONS):
                group.create_task(keep_asking())
        return answers

    async def _open_loop(self, per_s: float, seconds: float) -> list[Answer]:
        began = time.monotonic()
        tasks, due = [], began
        while due < began + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self._ask()))
            due += self._rng.expovariate(per_s)
        return await asyncio.gather(*tasks)

    async def _ask(self) -> Answer:
        item = self._items[next(self._numbers) % len(self._items)]
        began = time.monotonic()
        decided = 0.0
        status, details = "OK", ""
        try:
            async for _ in self._gateway.Caption(caption_requests(item), timeout=TIMEOUT_S):
                decided = decided or time.monotonic()
        except grpc.aio.AioRpcError as error:
            status, details = error.code().name, error.details() or ""
        ended = time.monotonic()
        return Answer(status, details, (decided or ended) - began, ended)


class _MemoryWatch:
    """The most that all services together held, looked at once a second."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.most = 0

    @property
    def megabytes(self) -> int:
        return self.most >> 20

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`."""
        watching = asyncio.create_task(self._watch())
        try:
            return await work
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            self.most = max(self.most, sum(self._cluster.memory_bytes().values()))
            await asyncio.sleep(1.0)


def _goodput(answers: Sequence[Answer], since: float, until: float) -> float:
    """Captions a second that were made between the two."""
    return sum(answer.status == "OK" and since < answer.ended <= until for answer in answers) / (until - since)


def _phase(answers: Sequence[Answer]) -> dict[str, Any]:
    waits = sorted(answer.decided_s for answer in answers)
    refusals = sorted(answer.decided_s for answer in answers if answer.status != "OK")
    unclear = [a for a in answers if a.status not in CLEAR or (a.status != "OK" and not a.details)]
    return {
        "requests": len(answers),
        "statuses": dict(Counter(answer.status for answer in answers)),
        "unclear": len(unclear),
        "unclear_details": sorted({f"{answer.status}: {answer.details}" for answer in unclear})[:3],
        "decided_p50_s": _quantile(waits, 0.5),
        "decided_p99_s": _quantile(waits, 0.99),
        "refused_p50_s": _quantile(refusals, 0.5),
        "refused_p99_s": _quantile(refusals, 0.99),
        "late": sum(wait > DECIDED_WITHIN_S for wait in waits),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else 0.0
