"""`python -m bench.faults.mutated_requests`: damaged requests to every method of a stack of its own.

Every answer must be a documented status and come in time; the services must stay up, serve, log no failure, load no
pickle and keep their memory. The last line is JSON; exit status 1 if any of that was not so.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.faults.cluster import Cluster, ClusterOptions
from bench.faults.mutate import Mutator, pickle_bomb
from bench.faults.request_samples import SERVICES, Sample, Samples, methods
from bench.faults.workload import make_workload
from bench.running import run_to_end, say
from slipstream.rpc.channels import open_channel
from slipstream.rpc.grpc_options import CHANNEL_OPTIONS

CONCURRENCY = 24
IN_TIME_S = 60.0
IMPATIENCE_S = 1.0
"""For calls that may wait by design: guidance of a session that is not open yet, a batch that is watched."""
MAX_GROWTH_BYTES = 1024**3
_GATEWAY_LIMITS = {
    "max-batch-items": 1000,
    "max-backlog": 20_000,
    "max-frames": 8,
    "default-frames": 2,
    "max-new-tokens": 32,
    "default-new-tokens": 8,
    "default-window": 8,
}
"""Small limits: no call may take long just because it asks for much."""
DOCUMENTED = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OUT_OF_RANGE",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
}
Way = Callable[["_Caller", Sample], "_Call"]


class _Call:
    """What is sent, and how. `ends`: the request stream is closed. `cancel_after_s`: the caller gives up."""

    def __init__(
        self,
        path: str,
        messages: Sequence[bytes],
        *,
        ends: bool = True,
        cancel_after_s: float | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        compression: grpc.Compression | None = None,
    ) -> None:
        self.path = path
        self.messages = messages
        self.ends = ends
        self.cancel_after_s = cancel_after_s
        self.metadata = metadata
        self.compression = compression


class _Caller:
    """Makes calls out of samples, in one of several ways each."""

    def __init__(self, chance: random.Random, mutator: Mutator) -> None:
        self.chance = chance
        self.mutator = mutator

    def make(self, sample: Sample) -> tuple[str, _Call]:
        """The way's name and the call."""
        names = [*_WAYS]
        name = self.chance.choices(names, [_WAYS[name][1] for name in names])[0]
        return name, _WAYS[name][0](self, sample)


def _serialized(sample: Sample) -> list[bytes]:
    return [message.SerializeToString() for message in sample.messages]


def _mutated(caller: _Caller, sample: Sample) -> _Call:
    messages, index = _serialized(sample), caller.chance.randrange(len(sample.messages))
    messages[index] = caller.mutator.message(sample.messages[index])
    return _Call(sample.path, messages)


def _disordered(caller: _Caller, sample: Sample) -> _Call:
    return _Call(sample.path, caller.mutator.stream(_serialized(sample)))


def _random(caller: _Caller, sample: Sample) -> _Call:
    return _Call(sample.path, [caller.mutator.raw(b"") for _ in range(caller.chance.randint(0, 4))])


def _unclosed(caller: _Caller, sample: Sample) -> _Call:
    messages = _serialized(sample)[: caller.chance.randint(0, 3)]
    return _Call(sample.path, messages, ends=False, cancel_after_s=caller.chance.uniform(0.05, 0.5))


def _cancelled(caller: _Caller, sample: Sample) -> _Call:
    return _Call(sample.path, _serialized(sample), cancel_after_s=caller.chance.expovariate(20))


def _other_method(caller: _Caller, sample: Sample) -> _Call:
    service, method = caller.chance.choice(methods())
    strange = ("/", "//", f"/{service}", f"{sample.path}/x", f"/slipstream.rpc.v2.{service}/{method}", "/" + "x" * 3000)
    known = [f"/slipstream.rpc.v1.{name}/{other}" for name, other in methods() if SERVICES[name] == SERVICES[service]]
    return _Call(caller.chance.choice((*strange, *known)), _serialized(sample))


def _odd_metadata(caller: _Caller, sample: Sample) -> _Call:
    size = caller.chance.choice((10, 4000, 7000, 9000, 20_000, 70_000))
    metadata: list[tuple[str, str | bytes]] = [("x-request-id", "r" * size)]
    if caller.chance.random() < 0.5:
        metadata = [("x-request-id", "../{}"), ("x-request-id", "b"), ("odd-bin", caller.chance.randbytes(300))]
    return _Call(sample.path, _serialized(sample), metadata=metadata)


def _too_large(caller: _Caller, sample: Sample) -> _Call:
    zeros = bytes(caller.chance.choice((8 * 1024**2 - 64, 8 * 1024**2 + 1, 24 * 1024**2)))
    squeezed = grpc.Compression.Gzip if caller.chance.random() < 0.7 else None
    return _Call(sample.path, [*_serialized(sample)[:1], zeros], compression=squeezed)


_WAYS: dict[str, tuple[Way, float]] = {
    "mutated": (_mutated, 50),
    "disordered": (_disordered, 15),
    "random": (_random, 12),
    "unclosed": (_unclosed, 6),
    "cancelled": (_cancelled, 6),
    "other_method": (_other_method, 5),
    "odd_metadata": (_odd_metadata, 5),
    "too_large": (_too_large, 0.5),
}


class _Tally:
    """Statuses by service and way, and what must not happen."""

    def __init__(self) -> None:
        self.by_status: collections.Counter[str] = collections.Counter()
        self.by_way: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.wrong: list[dict[str, str]] = []
        self.longest_s, self.longest = 0.0, ""

    def add(self, way: str, call: _Call, status: str, details: str, seconds: float) -> None:
        self.by_status[status] += 1
        self.by_way[way][status] += 1
        gave_up = call.cancel_after_s is not None and status in ("CANCELLED", "DEADLINE_EXCEEDED")
        if gave_up or status in DOCUMENTED:
            if seconds > self.longest_s:
                self.longest_s, self.longest = seconds, f"{way} {call.path[:100]} {status}"
            return
        self.wrong.append({"way": way, "path": call.path[:200], "status": status, "details": details[:200]})


async def mutated_requests(
    addresses: Mapping[str, str], clip: Path, *, count: int = 10_000, seed: int = 0, canary: str = "/nonexistent/canary"
) -> _Tally:
    """Sends `count` damaged requests to the services at these addresses: gateway, target, draft. `clip` lies below the
    gateway's roots. `canary` is a path that a server which unpickles would create."""
    chance = random.Random(seed)
    bomb = pickle_bomb(canary)
    caller = _Caller(chance, Mutator(chance, (bomb, b"\x0a" + bytes([len(bomb) & 127]) + bomb)))
    samples = Samples(chance, await asyncio.to_thread(clip.read_bytes), str(clip), addresses["target"])
    tally, every = _Tally(), methods()
    numbers = iter(range(count))
    channels = {name: grpc.insecure_channel(address, options=CHANNEL_OPTIONS) for name, address in addresses.items()}
    threads = ThreadPoolExecutor(CONCURRENCY)
    loop = asyncio.get_running_loop()

    async def work() -> None:
        for number in numbers:
            service, method = every[number % len(every)] if chance.random() < 0.5 else chance.choice(_HEAVY)
            way, call = caller.make(samples.make(service, method))
            if call.cancel_after_s is None and (service, method) in _PATIENT:
                call.cancel_after_s = IMPATIENCE_S
            began = time.monotonic()
            status, details = await loop.run_in_executor(threads, _send, channels[SERVICES[service]], call)
            tally.add(way, call, status, details, time.monotonic() - began)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())
    threads.shutdown()
    for channel in channels.values():
        channel.close()
    return tally


_PATIENT = (("Target", "PullGuidance"), ("Archive", "WatchBatch"), ("Draft", "Session"))
_HEAVY = (("Gateway", "Caption"), ("Target", "Session"), ("Draft", "Session"), ("Archive", "SubmitBatch"))


def _send(channel: grpc.Channel, call: _Call) -> tuple[str, str]:
    """Status and details of one call. On a thread: grpc.aio sometimes reports a write that failed after the answer
    instead of the answer (https://github.com/grpc/grpc/issues/36066)."""
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        yield from call.messages
        if not call.ends:
            over.wait(IN_TIME_S)

    stub: Any = channel.stream_stream(call.path)
    timeout_s = IN_TIME_S if call.cancel_after_s is None else max(call.cancel_after_s, 0.001)
    try:
        for _ in stub(messages(), timeout=timeout_s, metadata=call.metadata, compression=call.compression):
            pass
        return "OK", ""
    except grpc.RpcError as failure:
        error: Any = failure
        return error.code().name, error.details() or ""
    finally:
        over.set()


async def is_serving(address: str) -> bool:
    """What the service says of itself."""
    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=IN_TIME_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def failures_in(log: Path) -> list[str]:
    """Events of a log that tell of a failure inside the service."""
    entries = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [json.dumps(entry)[:3000] for entry in entries if entry.get("level") in ("error", "critical")]


async def run_mutated_requests(count: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """The whole run, on processes of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        workload = make_workload(Path(scratch) / "world", num_jobs=2)
        options = ClusterOptions(
            target_model=workload.pair.target,
            draft_model=workload.pair.draft,
            video_root=workload.video_root,
            gateways=1,
            slots=1,
            flags={"gateway": [f"--{name}={limit}" for name, limit in _GATEWAY_LIMITS.items()]},
        )
        async with Cluster(options, say) as cluster:
            return await _attack(cluster, workload.clips[0], count, seed, Path(scratch) / "canary")


async def _attack(cluster: Cluster, clip: Path, count: int, seed: int, canary: Path) -> dict[str, Any]:
    names = {"gateway": "gateway-0", "target": "target", "draft": "draft"}
    addresses = {role: cluster.processes[name].address for role, name in names.items()}
    await mutated_requests(addresses, clip, count=min(200, count), seed=seed + 1, canary=str(canary))
    before, began = cluster.memory_bytes(), time.monotonic()
    tally = await mutated_requests(addresses, clip, count=count, seed=seed, canary=str(canary))
    wall_s, after = time.monotonic() - began, cluster.memory_bytes()
    serving = {role: await is_serving(address) for role, address in addresses.items()}
    failures = [failure for name in names.values() for failure in failures_in(cluster.log(name))]
    crashes = {name: process.starts - 1 for name, process in cluster.processes.items()}
    unpickled = os.path.exists(canary)  # noqa: ASYNC240 (nothing waits for this)
    growth = {name: after[name] - before[name] for name in after}
    passed = (
        not tally.wrong
        and all(serving.values())
        and not failures
        and not any(crashes.values())
        and not unpickled
        and max(growth.values()) < MAX_GROWTH_BYTES
    )
    return {
        "passed": passed,
        "requests": count,
        "by_status": dict(tally.by_status),
        "by_way": {way: dict(statuses) for way, statuses in tally.by_way.items()},
        "wrong": tally.wrong[:20],
        "num_wrong": len(tally.wrong),
        "failures_logged": failures[:5],
        "crashes": crashes,
        "serving": serving,
        "unpickled": unpickled,
        "longest_answer_s": round(tally.longest_s, 2),
        "longest_answer": tally.longest,
        "growth_mib": {name: grown // 1024**2 for name, grown in growth.items()},
        "wall_s": round(wall_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.faults.mutated_requests", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    document = run_to_end(run_mutated_requests(given.count, given.seed))
    print(json.dumps(document))
    sys.exit(0 if document["passed"] else 1)


if __name__ == "__main__":
    main()
