"""Damaged requests to every method of a stack of its own: every answer is a documented status, in time.

The services must stay up, serve, log no failure, load no pickle and keep their memory. An example is a handful of calls
at the same time. `make faults` makes 10,000 calls.
"""

import asyncio
import collections
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rpc.grpc_options import CHANNEL_OPTIONS
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.damage import damaged_bytes, damaged_message, damaged_stream
from tests.support.fuzzing import CALLS, fuzzing, report_findings
from tests.support.request_samples import SERVICES, Sample, Samples, methods
from tests.support.workload import make_workload

IN_TIME_S = 60.0
IMPATIENCE_S = 0.3
"""For calls that may wait by design: guidance of a session that is not open yet, a batch that is watched."""
MAX_GROWTH_BYTES = 1024**3
LIMITS = {
    "max-batch-items": 1000,
    "max-backlog": 20_000,
    "max-frames": 8,
    "default-frames": 2,
    "max-new-tokens": 32,
    "default-new-tokens": 8,
    "default-window": 8,
}
"""Small ones for the gateway: no call may take long just because it asks for much."""
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
NO_BEGINNING = "the caption cannot go on after its"
"""Said with ABORTED of a caption that claims to be resumed: the text does not begin with what was delivered."""
GIVEN_UP = {"CANCELLED", "DEADLINE_EXCEEDED"}
PROCESSES = {"gateway": "gateway-0", "target": "target", "draft": "draft"}
PATIENT = (("Target", "PullGuidance"), ("Target", "AddHints"), ("Archive", "WatchBatch"), ("Draft", "Session"))
HEAVY = (("Gateway", "Caption"), ("Target", "Session"), ("Draft", "Session"), ("Archive", "SubmitBatch"))


@dataclass
class Call:
    """What is sent, and how. `ends`: the request stream is closed. `give_up_s`: the caller gives up."""

    service: str
    path: str
    messages: Sequence[bytes]
    ends: bool = True
    give_up_s: float | None = None
    metadata: list[tuple[str, str | bytes]] = field(default_factory=list)
    compression: grpc.Compression | None = None


class Canary:
    """What a server that unpickles would do: create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


Way = Callable[[st.DrawFn, Sample, Sequence[bytes]], Call]


def _plain(sample: Sample) -> Call:
    return Call(SERVICES[sample.service], sample.path, [message.SerializeToString() for message in sample.messages])


def _mutated(draw: st.DrawFn, sample: Sample, payloads: Sequence[bytes]) -> Call:
    call, index = _plain(sample), draw(st.integers(0, len(sample.messages) - 1))
    messages = list(call.messages)
    messages[index] = damaged_message(draw, sample.messages[index], payloads)
    call.messages = messages
    return call


def _disordered(draw: st.DrawFn, sample: Sample, payloads: Sequence[bytes]) -> Call:
    call = _plain(sample)
    call.messages = damaged_stream(draw, call.messages, payloads)
    return call


def _random(draw: st.DrawFn, sample: Sample, payloads: Sequence[bytes]) -> Call:
    call = _plain(sample)
    call.messages = [damaged_bytes(draw, b"", payloads) for _ in range(draw(st.integers(0, 4)))]
    return call


def _unclosed(draw: st.DrawFn, sample: Sample, payloads: Sequence[bytes]) -> Call:
    call = _plain(sample)
    call.messages = call.messages[: draw(st.integers(0, 3))]
    call.ends, call.give_up_s = False, draw(st.sampled_from((0.05, 0.2, 0.5)))
    return call


def _cancelled(draw: st.DrawFn, sample: Sample, payloads: Sequence[bytes]) -> Call:
    call = _plain(sample)
    call.give_up_s = draw(st.sampled_from((0.001, 0.005, 0.02, 0.05, 0.1)))
    return call


def _other_method(draw: st.DrawFn, sample: Sample, payloads: Sequence[bytes]) -> Call:
    call, (service, method) = _plain(sample), draw(st.sampled_from(methods()))
    strange = ("/", "//", f"/{service}", f"{sample.path}/x", f"/slipstream.rpc.v2.{service}/{method}", "/" + "x" * 3000)
    known = [f"/slipstream.rpc.v1.{name}/{other}" for name, other in methods() if SERVICES[name] == call.service]
    call.path = draw(st.sampled_from((*strange, *known)))
    return call


def _odd_metadata(draw: st.DrawFn, sample: Sample, payloads: Sequence[bytes]) -> Call:
    call = _plain(sample)
    call.metadata = [("x-request-id", "r" * draw(st.sampled_from((10, 4000, 7000, 9000, 20_000, 70_000))))]
    if draw(st.booleans()):
        call.metadata = [("x-request-id", "../{}"), ("x-request-id", "b"), ("odd-bin", draw(st.binary(max_size=300)))]
    return call


def _too_large(draw: st.DrawFn, sample: Sample, payloads: Sequence[bytes]) -> Call:
    call = _plain(sample)
    zeros = bytes(draw(st.sampled_from((8 * 1024**2 - 64, 8 * 1024**2 + 1, 24 * 1024**2))))
    call.messages = [*call.messages[:1], zeros]
    call.compression = draw(st.sampled_from((grpc.Compression.Gzip, None)))
    return call


WAYS: Mapping[Way, int] = {
    _mutated: 100,
    _disordered: 30,
    _random: 24,
    _unclosed: 12,
    _cancelled: 12,
    _other_method: 10,
    _odd_metadata: 10,
    _too_large: 1,
}
"""How often each is drawn."""
_DRAWN = [way for way, weight in WAYS.items() for _ in range(weight)]


@st.composite
def calls(draw: st.DrawFn, make_samples: Callable[[st.DrawFn], Samples], payloads: Sequence[bytes]) -> list[Call]:
    """Some calls to all services, damaged in some way each."""
    made, samples = [], make_samples(draw)
    for _ in range(CALLS):
        service, method = draw(st.sampled_from(methods()) | st.sampled_from(HEAVY))
        call = draw(st.sampled_from(_DRAWN))(draw, samples.make(service, method), payloads)
        if call.give_up_s is None and any(f"{name}/{other}" in call.path for name, other in PATIENT):
            call.give_up_s = IMPATIENCE_S
        made.append(call)
    return made


def send(channels: Mapping[str, grpc.Channel], call: Call) -> tuple[str, str]:
    """Status and details of one call. On a thread: grpc.aio sometimes reports a write that failed after the answer
    instead of the answer (https://github.com/grpc/grpc/issues/36066)."""
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        yield from call.messages
        if not call.ends:
            over.wait(IN_TIME_S)

    stub: Any = channels[call.service].stream_stream(call.path)
    timeout_s = IN_TIME_S if call.give_up_s is None else call.give_up_s
    try:
        for _ in stub(messages(), timeout=timeout_s, metadata=call.metadata, compression=call.compression):
            pass
        return "OK", ""
    except grpc.RpcError as failure:
        error: Any = failure
        return error.code().name, error.details() or ""
    finally:
        over.set()


async def test_damaged_requests_get_documented_answers(tmp_path: Path) -> None:
    workload = make_workload(tmp_path / "world", num_jobs=2)
    options = ClusterOptions(
        workload.pair.target,
        workload.pair.draft,
        workload.video_root,
        gateways=1,
        slots=1,
        flags={"gateway": [f"--{name}={limit}" for name, limit in LIMITS.items()]},
    )
    async with Cluster(options) as cluster:
        before = cluster.memory_bytes()
        found = await asyncio.to_thread(_attack, cluster, workload.clips[0], tmp_path / "canary")
        growth = {name: used - before[name] for name, used in cluster.memory_bytes().items()}
        assert {name: process.starts for name, process in cluster.processes.items() if process.starts > 1} == {}
        assert [failure for name in PROCESSES.values() for failure in failures_in(cluster.log(name))] == []
        assert max(growth.values()) < MAX_GROWTH_BYTES, growth
    report_findings("requests", found)


def _attack(cluster: Cluster, clip: Path, canary: Path) -> dict[str, Any]:
    """On a thread beside the cluster's own loop, which starts again what dies."""
    addresses = {role: cluster.processes[name].address for role, name in PROCESSES.items()}
    bomb = pickle.dumps(Canary(canary))
    payloads = (bomb, b"\x0a" + bytes([len(bomb) & 127]) + bomb)
    video, by_status, longest_s = clip.read_bytes(), collections.Counter[str](), 0.0
    channels = {role: grpc.insecure_channel(address, options=CHANNEL_OPTIONS) for role, address in addresses.items()}

    def make_samples(draw: st.DrawFn) -> Samples:
        return Samples(draw, video, str(clip), addresses["target"])

    with ThreadPoolExecutor(CALLS) as threads:

        @fuzzing(usual_examples=25)
        @given(calls(make_samples, payloads))
        def attack(asked: list[Call]) -> None:
            nonlocal longest_s
            began = time.monotonic()
            for call, (status, details) in zip(asked, threads.map(partial(send, channels), asked), strict=True):
                by_status[status] += 1
                gave_up = call.give_up_s is not None and status in GIVEN_UP
                mismatched = status == "ABORTED" and details.startswith(NO_BEGINNING)
                assert gave_up or mismatched or status in DOCUMENTED, f"{call.path[:200]}: {status}: {details[:200]}"
            longest_s = max(longest_s, time.monotonic() - began)
            assert not canary.exists()

        attack()
    assert all(is_serving(channel) for channel in channels.values())
    for channel in channels.values():
        channel.close()
    return {"requests": by_status.total(), "by_status": dict(by_status), "longest_answer_s": round(longest_s, 2)}


def is_serving(channel: grpc.Channel) -> bool:
    """What the service says of itself."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=IN_TIME_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def failures_in(log: Path) -> list[str]:
    """Events of a log that tell of a failure inside the service."""
    entries = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [json.dumps(entry)[:3000] for entry in entries if entry.get("level") in ("error", "critical")]
