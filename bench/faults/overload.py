"""More captions than the stack can make: each is taken or refused at once, and those that are taken are made.

An open loop: requests come when they come, whatever became of those before. The load is measured against the rate of
a closed loop that keeps the gateway full; both take turns, as the machine's speed drifts.
"""

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from bench.common import say
from slipstream import AsyncCaptioner, CaptionOptions, RemotePath
from slipstream.archive.messages import BatchItem
from slipstream.errors import SlipstreamError
from slipstream.stack.local import FRESH
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.workload import make_workload

MAX_CAPTIONS = 8
CAPTION_TIMEOUT_S = 120.0
ROUNDS = 3
NUM_ITEMS = 100
WARM_UP_S, RAMP_S, PEAK_S, LOAD_S = 8.0, 4.0, 19.0, 19.0
LAG_S, LAGS_PER_LOOK = 0.01, 100
LOADS = (1.0, 3.0)
DECIDED_WITHIN_S = 0.05
LEAST_GOODPUT = 0.8
MEMORY_GROWTH, MEMORY_SLACK_BYTES = 1.25, 64 * 2**20
"""What memory may be at the highest load, against that of the peak."""
CLEAR = frozenset({"OK", "RESOURCE_EXHAUSTED"})


@dataclass(frozen=True)
class Answer:
    status: str
    details: str
    decided_s: float
    """Until the first event or the refusal."""
    ended: float
    """Monotonic time."""


@dataclass
class Phase:
    """All answers at one load, over all rounds."""

    answers: list[Answer] = field(default_factory=list)
    made: int = 0
    seconds: float = 0.0
    most_memory: int = 0
    lags: list[float] = field(default_factory=list)
    """How late this process itself was woken."""

    @property
    def goodput(self) -> float:
        return self.made / self.seconds

    def figures(self, peak: "Phase") -> dict[str, Any]:
        waits = [answer.decided_s for answer in self.answers]
        refused = [answer.decided_s for answer in self.answers if answer.status != "OK"]
        unclear = [a for a in self.answers if a.status not in CLEAR or not (a.status == "OK" or a.details)]
        return {
            "requests": len(self.answers),
            "statuses": dict(Counter(answer.status for answer in self.answers)),
            "unclear": sorted({f"{answer.status}: {answer.details}" for answer in unclear})[:3],
            "captions_per_s": round(self.goodput, 3),
            "of_peak": round(self.goodput / peak.goodput, 3),
            "decided_p50_s": _quantile(waits, 0.5),
            "decided_p99_s": _quantile(waits, 0.99),
            "refused_p99_s": _quantile(refused, 0.99),
            "client_woken_late_p99_s": _quantile(self.lags, 0.99),
            "memory_mb": self.most_memory >> 20,
        }


async def run_overload(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="slipstream-faults-") as folder:
        workload = make_workload(Path(folder) / "work", NUM_ITEMS)
        flags = FRESH | {"gateway": (*FRESH["gateway"], "--max-captions", str(MAX_CAPTIONS))}
        options = ClusterOptions(
            workload.pair.target, workload.pair.draft, workload.video_root, gateways=1, slots=0, flags=flags
        )
        async with Cluster(options, say) as cluster, cluster.captioner() as captioner:
            return await _Load(cluster, captioner, workload.items, seed).run()


class _Load:
    def __init__(self, cluster: Cluster, captioner: AsyncCaptioner, items: Sequence[BatchItem], seed: int) -> None:
        self._cluster = cluster
        self._captioner = captioner
        self._items = items
        self._rng = random.Random(seed)
        self._numbers = count()

    async def run(self) -> dict[str, Any]:
        await self._closed_loop(WARM_UP_S)
        peak, phases = Phase(), {load: Phase() for load in LOADS}
        for number in range(ROUNDS):
            await self._measure(peak, self._closed_loop(PEAK_S), RAMP_S, PEAK_S)
            for load, phase in phases.items():
                await self._measure(phase, self._open_loop(load * peak.goodput, LOAD_S), RAMP_S, LOAD_S)
            say(
                f"overload: round {number + 1}: at the peak {peak.goodput:.2f} captions/s, then at {LOADS} times that: "
                f"{[round(phase.goodput, 2) for phase in phases.values()]}"
            )
        return _verdict(peak, phases)

    async def _measure(self, phase: Phase, work: Coroutine[Any, Any, list[Answer]], since: float, until: float) -> None:
        """Adds what `work` did, its goodput counted between two times after its beginning."""
        began = time.monotonic()
        watching = asyncio.create_task(self._watch(phase))
        try:
            answers = await work
        finally:
            watching.cancel()
        phase.answers += answers
        phase.made += sum(answer.status == "OK" and since < answer.ended - began <= until for answer in answers)
        phase.seconds += until - since

    async def _watch(self, phase: Phase) -> None:
        """Keeps the most memory that all services held together, and how late this process itself is woken."""
        while True:
            memory = await asyncio.to_thread(self._cluster.memory_bytes)
            phase.most_memory = max(phase.most_memory, sum(memory.values()))
            for _ in range(LAGS_PER_LOOK):
                began = time.monotonic()
                await asyncio.sleep(LAG_S)
                phase.lags.append(time.monotonic() - began - LAG_S)

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
        options = CaptionOptions.from_mapping(item.caption)
        began = time.monotonic()
        decided = 0.0
        status, details = "OK", ""
        try:
            async for _ in self._captioner.events(
                RemotePath(item.source), options=options, timeout_s=CAPTION_TIMEOUT_S
            ):
                decided = decided or time.monotonic()
        except SlipstreamError as error:
            status, details = error.status, str(error)
        ended = time.monotonic()
        return Answer(status, details, (decided or ended) - began, ended)


def _verdict(peak: Phase, phases: Mapping[float, Phase]) -> dict[str, Any]:
    most = phases[max(LOADS)]
    figures = {f"{load:g}x": phase.figures(peak) for load, phase in phases.items()}
    checks = {
        "decided_in_time": _quantile([answer.decided_s for answer in most.answers], 0.99) <= DECIDED_WITHIN_S,
        "goodput": most.goodput >= LEAST_GOODPUT * peak.goodput,
        "errors_clear": all(not row["unclear"] for row in figures.values()),
        "memory_bounded": most.most_memory <= MEMORY_GROWTH * peak.most_memory + MEMORY_SLACK_BYTES,
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "goodput_at_3x": round(most.goodput / peak.goodput, 3),
        "peak": peak.figures(peak),
        **figures,
    }


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else 0.0
