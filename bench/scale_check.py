"""The archive on engines that exist, part by part. `failover`: the queue's leader is lost again and again, while its
replicas follow it or when they were cut off, with and without `--redis-wait`. `manifests`: what Kubernetes would be
sent, by its schemas and by definitions of KEDA and LeaderWorkerSet. `ray`: a dataset captioned on two raylets, under
deaths. `slurm`: two tasks of a real Slurm, one of them preempted. `hosts` and `soak`: three hosts, network namespaces
of this machine, switched off, cut off and failed over. `queues`: four gateways on four queues, beside one. `releases`:
an older release and this one on one queue.
"""

import argparse
import asyncio
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from bench.common import machine_facts, make_parser, run_parts, run_to_end, say
from bench.host_check import run_hosts, run_soak
from bench.output import finish
from bench.queue_rates import run_queues
from bench.ray_check import run_ray
from bench.release_check import OLDER, run_releases
from bench.slurm_check import run_slurm
from slipstream.archive.queue import BatchSpec, JobSpec, QueuePolicy, QueueUnavailable, SubmitOutcome
from slipstream.archive.redis_queue import RedisQueue
from tests.support.manifests import FOLDER, KUBECTL, OVERLAYS, rendered
from tests.support.redis_group import RedisGroup, cut_seconds

Report = Mapping[str, Any]
BATCH, CALL_JOBS, CALLERS, PAGE = "batch", 10, 8, 500
POLICY = QueuePolicy(max_backlog=10_000_000)
AGAIN_S = 0.02
CRDS = Path(".cache/crds")

# -- failover ---------------------------------------------------------------------------------------------------------


@dataclass
class _Submitters:
    """Hand jobs in without an end, and remember which were acknowledged."""

    queue: RedisQueue
    accepted: set[str] = field(default_factory=set)
    longest_gap_s: float = 0.0
    numbers: "count[int]" = field(default_factory=count)
    _last: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """One of them, until cancelled. What was refused is handed in again, by the same names, until it is taken."""
        while True:
            names = [str(next(self.numbers)) for _ in range(CALL_JOBS)]
            while not await self._is_taken([JobSpec(name, "{}") for name in names]):  # noqa: ASYNC110
                await asyncio.sleep(AGAIN_S)
            self.accepted.update(names)
            now = time.monotonic()
            self._last, self.longest_gap_s = now, max(self.longest_gap_s, now - self._last)

    async def _is_taken(self, jobs: Sequence[JobSpec]) -> bool:
        try:
            outcomes = await self.queue.submit(BATCH, jobs)
        except QueueUnavailable:
            return False
        return set(outcomes) <= {SubmitOutcome.ADDED, SubmitOutcome.KNOWN}


async def run_failover(given: argparse.Namespace) -> Report:
    """The part `failover`."""
    return {f"wait_{replicas}": await _lose_leaders(given, replicas) for replicas in (0, 1)}


async def _lose_leaders(given: argparse.Namespace, replicas: int) -> Report:
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="slipstream-group-") as folder:
        async with RedisGroup(Path(folder)) as group:
            queue = RedisQueue(group.url, policy=POLICY, replicas=replicas)
            await queue.open_batch(BatchSpec(BATCH))
            submitters = _Submitters(queue)
            running = [asyncio.create_task(submitters.run()) for _ in range(CALLERS)]
            failovers = 0
            while failovers < given.failovers or len(submitters.accepted) < given.jobs:
                await group.fail_over(cut_seconds(chance) if failovers % 2 else 0.0)
                failovers += 1
                say(f"wait {replicas}: {failovers} failovers, {len(submitters.accepted)} jobs acknowledged")
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await group.settled()
            lost = submitters.accepted - await _names(queue)
            await queue.close()
    return {
        "acknowledged": len(submitters.accepted),
        "lost": len(lost),
        "failovers": failovers,
        "longest_gap_s": round(submitters.longest_gap_s, 1),
    }


async def _names(queue: RedisQueue) -> set[str]:
    names, position = set[str](), 0
    while True:
        jobs, position = await queue.list_jobs(BATCH, after=position, limit=PAGE)
        names |= {job.custom_id for job in jobs}
        if not position:
            return names


# -- manifests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Custom:
    """A kind of objects that Kubernetes does not define itself."""

    project: str
    """Whose definition is wanted, and of which release: any that takes the same version of the kind will do."""
    file: str


CUSTOM = {
    "keda.sh/v1alpha1 ScaledObject": _Custom("KEDA 2.20", "config/crd/bases/keda.sh_scaledobjects.yaml"),
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": _Custom(
        "LeaderWorkerSet 0.10", "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"
    ),
}


async def run_manifests(given: argparse.Namespace) -> Report:
    """The part `manifests`: strictly by the schemas of Kubernetes and by the definitions of KEDA and LeaderWorkerSet in
    the folder `--crds`. What is not there is named."""
    schemas = _definitions(Path(given.crds))
    missing = [] if KUBECTL else ["kubectl"]
    missing += [] if importlib.util.find_spec("kubernetes_validate") else ["kubernetes-validate"]
    missing += [
        f"{name} in --crds {given.crds}: {custom.file} of {custom.project}"
        for name, custom in CUSTOM.items()
        if name not in schemas
    ]
    if missing:
        return {"missing": missing}
    complaints, checked = [], Counter[str]()
    for overlay in OVERLAYS:
        text = rendered(FOLDER / "overlays" / overlay)
        objects = [each for each in yaml.safe_load_all(text) if each]
        checked.update("custom" if _name_of(each) in CUSTOM else "kubernetes" for each in objects)
        complaints += _complaints([each for each in objects if _name_of(each) not in CUSTOM])
        complaints += _custom_complaints(objects, schemas)
    return {"overlays": OVERLAYS, "objects": dict(checked), "complaints": complaints}


def _name_of(found: Mapping[str, Any]) -> str:
    return f"{found['apiVersion']} {found['kind']}"


def _complaints(objects: Sequence[Mapping[str, Any]]) -> list[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all(objects, file)
        file.flush()
        words = (sys.executable, "-m", "kubernetes_validate", "--strict", file.name)
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    wrong = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("ERROR") or "WARN" in line]
    return wrong or ([f"kubernetes-validate ended with {done.returncode}"] if done.returncode else [])


def _definitions(folder: Path) -> dict[str, Any]:
    """Schemas by version and kind, of the `CustomResourceDefinition`s in a folder."""
    schemas = {}
    for path in folder.glob("*.yaml"):
        for found in yaml.safe_load_all(path.read_text()):
            spec = (found or {}).get("spec", {})
            for version in spec.get("versions", []):
                name = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
                schemas[name] = _closed(version["schema"]["openAPIV3Schema"] | {"title": name})
    return schemas


def _custom_complaints(objects: Sequence[Mapping[str, Any]], schemas: Mapping[str, Any]) -> list[str]:
    """What the definitions do not name is wrong."""
    import jsonschema  # comes with kubernetes-validate

    return [
        f"{_name_of(each)}: {error.message[:200]}"
        for each in objects
        if _name_of(each) in CUSTOM
        for error in jsonschema.Draft7Validator(schemas[_name_of(each)]).iter_errors({**each, "metadata": {}})
    ]


def _closed(schema: Any) -> Any:
    """The same, and nothing else: a server would drop fields that it does not know, and say so only if asked."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


# -- all --------------------------------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[argparse.Namespace], Coroutine[Any, Any, Report]]] = {
    "failover": run_failover,
    "manifests": run_manifests,
    "ray": run_ray,
    "slurm": run_slurm,
    "hosts": run_hosts,
    "soak": run_soak,
    "queues": run_queues,
    "releases": run_releases,
}


def passed(name: str, report: Report) -> bool:
    """Whether a part found what it must. A part that could not run has not passed."""
    if name == "failover":
        return bool(report["wait_1"]["lost"] == 0)
    if name == "manifests":
        return "missing" not in report and not report["complaints"]
    return bool(report.get("passed"))


def main(argv: Sequence[str]) -> None:
    """Exits with 1 when a part fails, or cannot run here."""
    flags = {"jobs": (40_000, "acknowledged, in each of the two runs"), "failovers": (5, "at least"), "seed": 1}
    flags |= {"crds": (str(CRDS), "folder of CustomResourceDefinitions to hold manifests to")}
    flags |= {"clips": (500, "of `hosts`"), "soak_clips": (60, "of each batch of `soak`")}
    flags |= {"soak_s": (1800, "seconds of `soak`, which ends with the batch that it is in then")}
    flags |= {"older": (OLDER, "of `releases`: the folder of an older checkout, or a commit of this one's history")}
    flags |= {"release_jobs": (10, "of `releases`, handed in before each of 12 moves")}
    flags |= {
        "other_python": (
            "",
            "of `ray`: an interpreter of another Python with the same Ray; without one that is skipped",
        )
    }
    flags |= {"seeds": ([1], "of `soak`, one after the other; each has a file of its own")}
    words, from_0 = "Does the archive hold what it promises on engines that exist?", ("seed", "seeds", "failovers")
    parser = make_parser("scale-check", words, from_0, **flags)
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS), help="parts to run")
    given = parser.parse_args(argv)
    reports = run_parts(given.only, lambda name: run_to_end(PARTS[name](given)))
    verdicts = {name: passed(name, report) for name, report in reports.items()}
    say(json.dumps(verdicts))
    finish("scale-check", {"passed": all(verdicts.values()), "parts": verdicts, **reports, "machine": machine_facts()})
    sys.exit(0 if all(verdicts.values()) else 1)
