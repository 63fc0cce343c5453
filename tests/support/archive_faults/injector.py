"""Kills and freezes the processes of a cluster as planned, and remembers what it did and when."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tests.support.archive_faults.history import ENDS, Act, JobEvent, Kind, finished_captions, read_events
from tests.support.cluster import Cluster

FREEZE_S = 20.0
KINDS = ("kill", "freeze")
SERVICES = ("gateway", "target", "draft", "redis")
POLL_S = 0.2
BUSY_POLL_S = 0.03
TAKEN_OVER_LEASES, TAKEN_OVER_S = 3, 20.0
"""How long to wait until others have taken all jobs of a gateway: so many leases, and so long."""
UNCOMMITTED_S, MOST_UNCOMMITTED_S = 3.0, 60.0
"""How long the queue is down before a gateway is frozen as a zombie, at least, and until it has captions to commit."""


@dataclass(frozen=True)
class Strike:
    """One thing that the injector does."""

    kind: str
    """"kill" (SIGKILL), "freeze" (SIGSTOP for `freeze_s`) or "zombie": a gateway that has work to commit while the
    queue is down is frozen until others have done the work again."""
    victim: str
    at_share: float
    """Share of the jobs that are done when it happens."""
    delay_s: float
    """And so long after that."""
    freeze_s: float = FREEZE_S


def plan_strikes(seed: int, gateways: Sequence[str], freeze_s: float = FREEZE_S) -> list[Strike]:
    """Every service killed and frozen once, and one zombie, in random order, spread over the run."""
    rng = random.Random(seed)
    wanted = [(kind, service) for service in SERVICES for kind in KINDS] + [("zombie", "gateway")]
    rng.shuffle(wanted)
    width = 1 / (len(wanted) + 1)
    return [
        Strike(
            kind,
            rng.choice(list(gateways)) if service == "gateway" else service,
            at_share=(index + rng.uniform(0.1, 0.9)) * width,
            delay_s=rng.uniform(0, 1.5),
            freeze_s=freeze_s,
        )
        for index, (kind, service) in enumerate(wanted)
    ]


class FaultInjector:
    """Strikes one process at a time; the next strike waits until everything serves again."""

    def __init__(self, cluster: Cluster, report: Callable[[str], None]) -> None:
        self._acts: list[Act] = []
        self._cluster = cluster
        self._report = report

    @property
    def acts(self) -> Sequence[Act]:
        """What was done, and when it was felt."""
        return self._acts

    async def run(self, plan: Sequence[Strike], num_jobs: int) -> None:
        for strike in sorted(plan, key=lambda strike: strike.at_share):
            while self.num_committed() < strike.at_share * num_jobs:  # noqa: ASYNC110 (what the logs of others say)
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(strike.delay_s)
            await self.strike(strike)

    async def strike(self, strike: Strike) -> None:
        """Returns when what was struck serves again."""
        await self.wait_busy()
        if strike.kind == "kill":
            await self.kill(strike.victim)
        elif strike.kind == "freeze":
            await self.freeze(strike.victim, strike.freeze_s)
        else:
            await self.make_zombie()

    async def kill(self, victim: str) -> None:
        began, starts = time.time(), self._cluster.processes[victim].starts
        self._cluster.kill(victim)
        await self._cluster.wait_serving(victim, starts + 1)
        self._remember("kill", victim, began)

    async def freeze(self, victim: str, seconds: float) -> None:
        began = time.time()
        self._cluster.freeze(victim)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._cluster.thaw(victim)
        self._remember("freeze", victim, began)

    async def make_zombie(self) -> None:
        """Freezes a gateway whose captions are done but not committed, as the queue is down; lets others do the work
        again; and wakes it, so that it commits what is no longer its own."""
        cluster = self._cluster
        began, starts = time.time(), cluster.processes["redis"].starts
        with cluster.held("redis"):
            cluster.kill("redis")
            victim = await self._wait_uncommitted()
            froze = time.time()
            cluster.freeze(victim)
        try:
            await cluster.wait_serving("redis", starts + 1)
            self._remember("kill", "redis", began)
            held = self._in_hand()[victim]
            await self._wait_taken_over(held)
        finally:
            cluster.thaw(victim)
        self._remember("freeze", victim, froze)
        await self._wait_noticed(victim, held)

    async def _wait_uncommitted(self) -> str:
        """The gateway with most captions that are done and not committed, of which there is one then."""
        await asyncio.sleep(UNCOMMITTED_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOST_UNCOMMITTED_S):
                while not any(self._uncommitted().values()):  # noqa: ASYNC110 (what the logs of others say)
                    await asyncio.sleep(POLL_S)
        uncommitted = self._uncommitted()
        return max(uncommitted, key=lambda name: uncommitted[name])

    async def _wait_noticed(self, victim: str, held: set[tuple[str, int]]) -> None:
        """Until who woke up has said how its jobs ended, which may be after the batch has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKEN_OVER_S):
                while held:
                    await asyncio.sleep(POLL_S)
                    held -= {(e.job_id, e.epoch) for e in self.events() if e.process == victim and e.kind in ENDS}

    async def _wait_taken_over(self, left: set[tuple[str, int]]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKEN_OVER_LEASES * self._cluster.options.lease_s + TAKEN_OVER_S):
                while left:
                    await asyncio.sleep(POLL_S)
                    latest = {e.job_id: e.epoch for e in sorted(self.events(), key=lambda e: e.epoch)}
                    left = {(job_id, epoch) for job_id, epoch in left if latest[job_id] <= epoch}

    def events(self) -> list[JobEvent]:
        return [event for name in self._cluster.gateways for event in read_events(name, self._cluster.log(name))]

    def num_committed(self) -> int:
        return len({event.job_id for event in self.events() if event.kind is Kind.COMMITTED})

    async def wait_busy(self) -> str:
        """Waits until some gateway has a job in hand; returns the one with most."""
        while not any(self._in_hand().values()):  # noqa: ASYNC110 (what the logs of others say)
            await asyncio.sleep(BUSY_POLL_S)
        return self._busiest()

    def _busiest(self) -> str:
        in_hand = self._in_hand()
        return max(in_hand, key=lambda name: len(in_hand[name]))

    def _uncommitted(self) -> dict[str, int]:
        """Captions by gateway that are done, of jobs that it has in hand."""
        found = {}
        for name, jobs in self._in_hand().items():
            done = finished_captions(self._cluster.log(name))
            found[name] = sum(f"{job_id}-{epoch}" in done for job_id, epoch in jobs)
        return found

    def _in_hand(self) -> dict[str, set[tuple[str, int]]]:
        """Jobs and epochs by gateway that it took last and has not ended."""
        last = {event.job_id: event for event in sorted(self.events(), key=lambda event: (event.epoch, event.at))}
        in_hand: dict[str, set[tuple[str, int]]] = {name: set() for name in self._cluster.gateways}
        for event in last.values():
            if event.kind is Kind.TAKEN:
                in_hand[event.process].add((event.job_id, event.epoch))
        return in_hand

    def _remember(self, kind: str, victim: str, began: float) -> None:
        act = Act(began, time.time(), kind, victim)
        self._acts.append(act)
        self._report("fault: " + json.dumps(asdict(act)))
