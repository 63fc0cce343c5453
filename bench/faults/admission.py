"""What callers who mean harm can keep from others: thousands of them watch health, and uploads stall."""

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.common import say
from slipstream import CaptionOptions, RemotePath, connect_async
from slipstream.errors import SlipstreamError
from slipstream.rpc.calls import open_channel, token_metadata
from slipstream.rpc.probe import probe
from slipstream.rpc.security import new_token
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.workload import make_workload

NUM_WATCHERS, NUM_CONNECTIONS = 4200, 5
NUM_UPLOADS, UPLOAD_BYTES, CHUNK_BYTES = 16, 30 * 2**20, 2**20
WAIT_S = 30.0


async def run_admission() -> dict[str, Any]:
    """Each harm by one caller, and while it lasts: does health answer, and does another's caption end?"""
    with tempfile.TemporaryDirectory(prefix="slipstream-faults-") as folder:
        workload = make_workload(Path(folder) / "work", 1)
        tokens = {owner: new_token(owner) for owner in ("alice", "bob")}
        (Path(folder) / "tokens").write_text("\n".join(line for _, line in tokens.values()))
        flags = {"gateway": ("--tokens", str(Path(folder) / "tokens"))}
        options = ClusterOptions(
            workload.pair.target, workload.pair.draft, workload.video_root, gateways=1, slots=0, flags=flags
        )
        async with Cluster(options, say) as cluster:
            address, item = cluster.processes["gateway-0"].address, workload.items[0]
            caption = RemotePath(item.source), CaptionOptions.from_mapping(item.caption)
            harms = {"watch_flood": _watching(address), "upload_stall": _stalling(address, tokens["alice"][0])}
            found: dict[str, dict[str, Any]] = {}
            for name, harm in harms.items():
                async with harm as statuses:
                    found[name] = {"harm": statuses, **await _others(address, tokens["bob"][0], *caption)}
                say(f"admission: {name}: {found[name]}")
    oks = {f"{name}_ok": row["health"] == "SERVING" and row["caption_s"] is not None for name, row in found.items()}
    return {"passed": all(oks.values()), **oks, **found}


async def _others(address: str, token: str, video: RemotePath, options: CaptionOptions) -> dict[str, Any]:
    """What somebody else gets meanwhile."""
    health, began = await probe(address, timeout_s=WAIT_S), time.monotonic()
    caption_s = error = None
    async with connect_async(address, token=token) as captioner:
        try:
            async with asyncio.timeout(WAIT_S):
                await captioner.caption(video, options=options)
            caption_s = round(time.monotonic() - began, 2)
        except (SlipstreamError, TimeoutError) as failure:
            error = f"{type(failure).__name__}: {failure}"
    return {"health": health, "caption_s": caption_s, "error": error}


@contextlib.asynccontextmanager
async def _watching(address: str) -> AsyncIterator[dict[str, int]]:
    """Strangers without a token who watch health."""
    async with AsyncExitStack() as exits:
        stubs: list[Any] = [
            health_pb2_grpc.HealthStub(await exits.enter_async_context(open_channel(address)))
            for _ in range(NUM_CONNECTIONS)
        ]
        calls = [stubs[n % NUM_CONNECTIONS].Watch(health_pb2.HealthCheckRequest()) for n in range(NUM_WATCHERS)]
        await asyncio.wait([asyncio.ensure_future(call.read()) for call in calls], timeout=WAIT_S)
        yield await _ended(calls)


@contextlib.asynccontextmanager
async def _stalling(address: str, token: str) -> AsyncIterator[dict[str, int]]:
    """One owner, who begins as many uploads as there are places for captions, and says no more."""
    async with open_channel(address) as channel:
        stub, metadata = gateway_pb2_grpc.GatewayStub(channel), token_metadata(address, None, token)
        calls = [stub.Caption(metadata=metadata) for _ in range(NUM_UPLOADS)]
        await asyncio.gather(*map(_begin, calls), return_exceptions=True)
        yield await _ended(calls)


async def _begin(call: Any) -> None:
    await call.write(gateway_pb2.CaptionRequest(options=gateway_pb2.CaptionOptions()))
    for _ in range(UPLOAD_BYTES // CHUNK_BYTES):
        await call.write(gateway_pb2.CaptionRequest(video=bytes(CHUNK_BYTES)))


async def _ended(calls: Sequence[Any]) -> dict[str, int]:
    """How many go on, and the statuses of the others."""
    return dict(Counter([(await call.code()).name if call.done() else "OPEN" for call in calls]))
