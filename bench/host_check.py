"""The parts `hosts` and `soak` of scale-check: an archive over three hosts, network namespaces of this machine.

`hosts`: a batch, while one host is switched off, one is cut off by a network that drops packets, and the queue's Redis
fails over. `soak`: batch after batch, while all of that and more happens at random. Texts are compared to those of
plain decoding, made before; the checker of `faults` says whether every job was done once.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from bench.common import ROOT, run_to_end, say
from bench.faults.drain import LEASE_S, Harmed, harm_batch, longest_pause_s, undisturbed_texts
from bench.output import FOLDER
from bench.soak_memory import Memory, growth_of, memory_faults
from slipstream.archive.messages import BatchItem
from slipstream.archive.redis_queue import RedisQueue
from tests.support.archive_faults.history import Act
from tests.support.archive_faults.injector import FaultInjector, Strike
from tests.support.cluster import ClusterOptions
from tests.support.hosts import REDIS_PORT, HostCluster
from tests.support.network import HOSTS, address, cut, inside, make_network, mend, plug_in
from tests.support.redis_group import failovers
from tests.support.workload import make_workload

NUM_TOKENS = 40
OFF_S, CUT_S, FROZEN_S = (6.0, 15.0), (3.0, 25.0), (3.0, 15.0)
"""How long a host is switched off, cut off, a process frozen: drawn between these."""
STRIKES = 3
"""Of each batch of the soak."""
PROCESS_KINDS = ("kill", "freeze")
SERVICES = ("gateway", "target", "draft", "redis", "sentinel")
STORE = {"sentinel": "redis"}


# -- what happens to hosts --------------------------------------------------------------------------------------------


class HostInjector(FaultInjector):
    """Does to whole hosts what `FaultInjector` does to processes; each returns when all is well again."""

    def __init__(self, cluster: HostCluster, chance: random.Random) -> None:
        super().__init__(cluster, say)
        self._hosts = cluster
        self._chance = chance
        self._before = super().num_committed()
        self._began = time.time()

    @property
    def acts(self) -> Sequence[Act]:
        """And when sentinels chose another leader, which on a busy machine they do of themselves, too: one that lives
        may seem to be gone."""
        logs = (path.read_text(errors="replace") for path in self._hosts.run_dir.glob("sentinel-*.log"))
        found = (Act(began, ended, "fail over", "redis") for began, ended in failovers(logs) if ended > self._began)
        return [*self._acts, *found]

    async def switch_off(self, host: int) -> None:
        """All of its processes end at one moment, and its network with them; it starts again after a while."""
        async with self._struck("kill", host):
            with self._hosts.held_host(host):
                starts = {name: self._hosts.processes[name].starts for name in self._hosts.on(host)}
                self._hosts.switch_off(host)
                await self._sleep(OFF_S)
                plug_in(host)
            for name, number in starts.items():
                await self._hosts.wait_serving(name, number + 1)

    async def cut_off(self, host: int) -> None:
        """The network drops all that it sends and is sent."""
        async with self._struck("freeze", host):
            cut(host)
            try:
                await self._sleep(CUT_S)
            finally:
                mend(host)

    async def fail_over(self) -> None:
        """The queue's leading server is killed and not started until another one leads."""
        host = await self._hosts.leading()
        began, name = time.time(), f"redis-{host}"
        with self._hosts.held(name):
            self._hosts.kill(name)
            while await self._hosts.sentinels.leader() in (None, (address(host), REDIS_PORT)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await self._hosts.wait_whole()
        self._remember("kill", "redis", began)

    async def drain(self, host: int) -> None:
        """Its gateway is asked to end, and is started again."""
        name = f"gateway-{host}"
        began, process = time.time(), self._hosts.processes[name]
        starts = process.starts
        os.kill(process.pid, signal.SIGTERM)
        await self._hosts.wait_serving(name, starts + 1)
        self._remember("drain", name, began)

    async def strike(self, strike: Strike) -> None:
        say(f"strike: {strike.kind} {strike.victim}")
        host = int(strike.victim.partition("-")[2] or 0)
        if strike.kind in PROCESS_KINDS:
            began = time.time()
            await super().strike(strike)
            await self._hosts.wait_whole()
            if strike.victim.partition("-")[0] in ("redis", *STORE):  # another server may lead since
                self._remember(strike.kind, "redis", began)
        elif strike.kind == "fail over":
            await self.fail_over()
        else:
            await {"switch off": self.switch_off, "cut off": self.cut_off, "drain": self.drain}[strike.kind](host)

    def num_committed(self) -> int:
        """Of this injector's batch."""
        return super().num_committed() - self._before

    @contextlib.asynccontextmanager
    async def _struck(self, kind: str, host: int) -> Any:
        """What ran on its gateway is excused; so is all, if the queue's leader was there, until there is one again."""
        leads, began = await self._hosts.leading() == host, time.time()
        yield
        await self._hosts.wait_whole()
        for victim in (f"gateway-{host}", *(["redis"] if leads else [])):
            self._remember(kind, victim, began)

    def _remember(self, kind: str, victim: str, began: float) -> None:
        """The checker knows gateways, and what they need by its kind."""
        service = victim.partition("-")[0]
        super()._remember(kind, victim if service == "gateway" else STORE.get(service, service), began)

    async def _sleep(self, between: tuple[float, float]) -> None:
        await asyncio.sleep(self._chance.uniform(*between))


def plan_hosts(seed: int) -> list[Strike]:
    """One host is switched off, another one cut off, and the queue fails over, in random order."""
    chance = random.Random(seed)
    off, apart = chance.sample(range(HOSTS), 2)
    struck = [("switch off", f"host-{off}"), ("cut off", f"host-{apart}"), ("fail over", "redis")]
    chance.shuffle(struck)
    return [Strike(kind, victim, share, 0.0) for (kind, victim), share in zip(struck, (0.1, 0.4, 0.7), strict=True)]


def plan_batch(chance: random.Random) -> list[Strike]:
    """Whatever may happen, `STRIKES` times."""
    shares = sorted(chance.uniform(0, 0.8) for _ in range(STRIKES))
    return [_draw_strike(chance, share) for share in shares]


def _draw_strike(chance: random.Random, share: float) -> Strike:
    kind = chance.choice(("switch off", "cut off", "cut off", "fail over", "drain", "kill", "kill", "freeze", "freeze"))
    service = chance.choice(SERVICES) if kind in PROCESS_KINDS else "host"
    victim = f"{service}-{chance.randrange(HOSTS)}"
    return Strike(kind, victim, share, chance.uniform(0, 1.5), freeze_s=chance.uniform(*FROZEN_S))


# -- the two parts ----------------------------------------------------------------------------------------------------


async def run_hosts(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `hosts`."""
    return await _apart("hosts", given.clips, given.seed, 0)


async def run_soak(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `soak`, seed after seed. What each has found so far is in a file of its own after each of its batches,
    whatever becomes of it, of the next seeds and of this machine."""
    reports: dict[str, Any] = {}
    for seed in given.seeds:
        path = _kept_soak(seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        found = await _apart("soak", given.soak_clips, seed, given.soak_s)
        reports[str(seed)] = found if "missing" in found or not path.exists() else json.loads(path.read_text()) | found
        path.write_text(json.dumps(reports[str(seed)]) + "\n")
        say(f"soak, seed {seed}: {'passed' if reports[str(seed)].get('passed') else 'NOT passed'}: {path}")
    return {"passed": all(report.get("passed") for report in reports.values()), "seeds": reports}


def _kept_soak(seed: int) -> Path:
    return FOLDER / f"soak-seed-{seed}.json"


async def _apart(part: str, *asked: object) -> Mapping[str, Any]:
    """What the part says that runs where hosts can be made."""
    try:
        words = inside([sys.executable, "-m", "bench.host_check", part, *map(str, asked)])
    except OSError as error:
        return {"passed": False, "missing": str(error)}
    process = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        return {"passed": False, "ended_with": process.returncode}
    found: dict[str, Any] = json.loads(output.decode().splitlines()[-1])
    return found


@contextlib.asynccontextmanager
async def _three_hosts(num_jobs: int) -> AsyncIterator[tuple[HostCluster, Sequence[BatchItem], Mapping[str, str]]]:
    """Hosts at rest, what to ask them for, and what plain decoding says."""
    make_network()
    with tempfile.TemporaryDirectory(prefix="slipstream-hosts-") as folder:
        workload = make_workload(Path(folder) / "work", num_jobs, num_clips=num_jobs, num_tokens=NUM_TOKENS)
        options = ClusterOptions(workload.pair.target, workload.pair.draft, workload.video_root, HOSTS, lease_s=LEASE_S)
        async with HostCluster(options, say) as cluster:
            say(f"{num_jobs} plain captions undisturbed, for comparison")
            plain = [replace(item, caption={**item.caption, "method": "autoregressive"}) for item in workload.items]
            yield cluster, workload.items, await undisturbed_texts(cluster, plain)


async def strike_hosts(num_jobs: int, seed: int) -> dict[str, Any]:
    """One batch, and the strikes of `plan_hosts`."""
    async with _three_hosts(num_jobs) as (cluster, items, expected):
        plan, began = plan_hosts(seed), time.monotonic()
        batch = await _harm(cluster, "hosts", items, expected, plan, random.Random(seed))
        wall_s = time.monotonic() - began
        left = await _left(cluster)
    last_commit = max(event.at for event in batch.history.events)
    in_time = {act.victim for act in batch.history.acts if act.at < last_commit}
    verdict = batch.verdict
    return asdict(verdict) | {
        "passed": verdict.passed and not left and verdict.identical == num_jobs and len(in_time) >= len(plan),
        "plan": [f"{strike.kind} {strike.victim} at {strike.at_share:.0%}" for strike in plan],
        "distinct_texts": len(set(expected.values())),
        "by_gateway": sorted(Counter(entry.worker for entry in batch.history.entries).values()),
        "left_in_queue": left,
        "longest_pause_s": longest_pause_s(batch),
        "wall_s": round(wall_s, 1),
        "acts": [asdict(act) for act in batch.history.acts],
    }


async def soak_hosts(num_jobs: int, seed: int, seconds: int) -> dict[str, Any]:
    """Batch after batch, until the time is over."""
    chance, soak, left = random.Random(seed), Soak(seed), dict[str, int]()
    async with _three_hosts(num_jobs) as (cluster, items, expected):
        began = time.monotonic()
        while time.monotonic() - began < seconds and not left:
            plan = plan_batch(chance)
            batch = await _harm(cluster, f"soak-{len(soak.batches)}", items, expected, plan, chance)
            left = await _left(cluster)
            soak.add(batch, time.monotonic() - began, left, _memory(cluster))
            say(f"batch {len(soak.batches)}: {batch.verdict.violations or 'well'}")
            if batch.verdict.violations or left:
                _keep_logs(cluster, seed)
            await _forget_results(cluster)
    return soak.report()


def _keep_logs(cluster: HostCluster, seed: int) -> None:
    """What the services say of what went wrong, which would end with them."""
    folder = _kept_soak(seed).with_suffix(".logs")
    folder.mkdir(parents=True, exist_ok=True)
    for log in cluster.run_dir.glob("*.log"):
        shutil.copy(log, folder)


@dataclass
class Soak:
    """What came of the batches of one seed so far."""

    seed: int
    batches: list[Harmed] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    seconds: float = 0.0
    left: Mapping[str, int] = field(default_factory=dict)

    def add(self, batch: Harmed, seconds: float, left: Mapping[str, int], memory: Memory) -> None:
        """One more, which is kept on the disk at once as one of a seed that has not ended."""
        self.batches.append(batch)
        self.memory.append(memory)
        self.seconds, self.left = seconds, left
        kept = self.report() | {"passed": False, "has_ended": False}
        _kept_soak(self.seed).write_text(json.dumps(kept) + "\n")

    def report(self) -> dict[str, Any]:
        verdicts = [batch.verdict for batch in self.batches]
        jobs, identical = (sum(getattr(verdict, name) for verdict in verdicts) for name in ("jobs", "identical"))
        violations = [fault for verdict in verdicts for fault in verdict.violations]
        violations += memory_faults(growths := growth_of(self.memory), SERVICES)
        return {
            "passed": not violations and not self.left and identical == jobs,
            "has_ended": True,
            "seconds": round(self.seconds),
            "batches": len(self.batches),
            "jobs": jobs,
            "identical": identical,
            "committed_once": sum(verdict.committed_once for verdict in verdicts),
            "stale_commits_refused": sum(verdict.stale_commits_refused for verdict in verdicts),
            "reruns": sum(verdict.reruns for verdict in verdicts),
            "acts": Counter(f"{act.kind} {act.victim}" for batch in self.batches for act in batch.history.acts),
            "left_in_queue": self.left,
            "longest_pause_s": max(map(longest_pause_s, self.batches)),
            "memory": {service: asdict(growth) for service, growth in growths.items()},
            "violations": violations[:50],
        }


async def _harm(
    cluster: HostCluster,
    key: str,
    items: Sequence[BatchItem],
    expected: Mapping[str, str],
    plan: Sequence[Strike],
    chance: random.Random,
) -> Harmed:
    injector = HostInjector(cluster, chance)
    return await harm_batch(cluster, key, items, expected, lambda _: injector.run(plan, len(items)), injector)


async def _left(cluster: HostCluster) -> dict[str, int]:
    """What an idle queue must not have: jobs that wait, or that somebody is said to run."""
    queue = RedisQueue(cluster.redis_url)
    try:
        depth = asdict(await queue.depth())
    finally:
        await queue.close()
    return {name: depth[name] for name in ("queued", "delayed", "suspects", "running", "dead") if depth[name]}


async def _forget_results(cluster: HostCluster) -> None:
    """So that the same may be asked again, and is captioned again."""
    async with Redis(host=address(await cluster.leading()), port=REDIS_PORT) as redis:
        async for key in redis.scan_iter("{slipstream}:r:*", count=1000):
            await redis.delete(key)


def _memory(cluster: HostCluster) -> Memory:
    """Of every process: how often it was started, and what it holds now."""
    held = cluster.memory_bytes()
    return {name: (process.starts, held[name]) for name, process in cluster.processes.items()}


if __name__ == "__main__":
    part, num_jobs, seed, seconds = sys.argv[1], *map(int, sys.argv[2:])
    work = strike_hosts(num_jobs, seed) if part == "hosts" else soak_hosts(num_jobs, seed, seconds)
    print(json.dumps(run_to_end(work)))
