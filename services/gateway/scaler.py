"""Tells KEDA how much work the archive has, at an address of its own that is open before the target is there.

Of its own, because KEDA sends no token, and because it must be heard while there is no target: the gateway begins to
serve when its target does, and with nothing to run it there may be none.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import grpc
from grpc_health.v1 import health_pb2_grpc

from slipstream.archive.queue import DamagedRecord, JobQueue, QueueUnavailable
from slipstream.captioning.config import GatewayConfig
from slipstream.errors import InvalidConfig, InvalidRequest
from slipstream.logs import get_logger
from slipstream.metrics import PROCESS
from slipstream.rpc.callers import Places
from slipstream.rpc.grpc_options import MAX_WATCHERS, SERVER_OPTIONS
from slipstream.rpc.grpc_options import WATCH_S as HEALTH_WATCH_S
from slipstream.rpc.guards import Admit, AnswerErrors
from slipstream.rpc.server import Health, bound, caller_guards
from slipstream.rpc.v1 import externalscaler_pb2 as messages
from slipstream.rpc.v1 import externalscaler_pb2_grpc

METRIC = "slipstream_jobs"
SHARE_KEY = "jobsPerReplica"
LOOK_S = 1.0
WATCH_S = 3600.0
"""After which a stream ends well: KEDA opens it again at once, where it would wait longer and longer after an error."""
MAX_CALLS = 256
MAX_SHARE = 1_000_000
"""Jobs of one replica."""


class ScalerServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Implements `proto/slipstream/rpc/v1/externalscaler.proto`. Work is what waits and what runs, and no less than a
    replica's share for each worker that has a job: so there are never fewer replicas than workers at work.

    Args:
        jobs_per_replica: where the trigger has no `jobsPerReplica`.
    """

    def __init__(self, queue: JobQueue, jobs_per_replica: float, stopping: asyncio.Event) -> None:
        self._queue = queue
        self._jobs_per_replica = jobs_per_replica
        self._stopping = stopping

    async def IsActive(
        self, request: messages.ScaledObjectRef, context: grpc.aio.ServicerContext
    ) -> messages.IsActiveResponse:
        return messages.IsActiveResponse(result=await self._num_jobs() > 0)

    async def StreamIsActive(
        self, request: messages.ScaledObjectRef, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[messages.IsActiveResponse]:
        clock = asyncio.get_running_loop().time
        last, until = None, clock() + WATCH_S
        while clock() < until and not self._stopping.is_set():
            with contextlib.suppress(QueueUnavailable, DamagedRecord):  # what was said last holds
                is_active = await self._num_jobs() > 0
                if is_active != last:
                    yield messages.IsActiveResponse(result=is_active)
                    last = is_active
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LOOK_S)

    async def GetMetricSpec(
        self, request: messages.ScaledObjectRef, context: grpc.aio.ServicerContext
    ) -> messages.GetMetricSpecResponse:
        share = _share(request.scalerMetadata.get(SHARE_KEY, ""), self._jobs_per_replica)
        spec = messages.MetricSpec(metricName=METRIC, targetSize=math.ceil(share), targetSizeFloat=share)
        return messages.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(
        self, request: messages.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> messages.GetMetricsResponse:
        if request.metricName != METRIC:
            raise InvalidRequest(f"there is no metric {request.metricName[:100]!r} here; the one there is is {METRIC}")
        share = _share(request.scaledObjectRef.scalerMetadata.get(SHARE_KEY, ""), self._jobs_per_replica)
        work = max(await self._num_jobs(), share * await self._queue.num_busy())
        value = messages.MetricValue(metricName=METRIC, metricValue=math.ceil(work), metricValueFloat=work)
        return messages.GetMetricsResponse(metricValues=[value])

    async def _num_jobs(self) -> int:
        """Raises `QueueUnavailable`: KEDA then leaves all as it is, or does what its `fallback` says."""
        depth = await self._queue.depth()
        return depth.queued + depth.running


def _share(told: str, otherwise: float) -> float:
    try:
        share = float(told or otherwise)
    except ValueError:
        share = math.nan
    if not 0 < share <= MAX_SHARE:
        raise InvalidRequest(
            f"{SHARE_KEY} of the trigger must be a number above 0 and at most {MAX_SHARE}, not {told[:100]!r}"
        )
    return share


async def open_scaler(
    config: GatewayConfig, queue: JobQueue | None, stopping: asyncio.Event
) -> Callable[[], Awaitable[None]]:
    """Serves at `--scaler-listen` until what it returns is called. Raises `InvalidConfig`.

    TLS is the gateway's. Who calls needs a token where the gateway asks for one, or, with `--scaler-client-ca`, a
    certificate of that authority instead."""
    if queue is None:
        raise InvalidConfig("--scaler-listen needs --redis as well: what is told is how much the archive has to do")
    wire = replace(config, listen=config.scaler_listen)
    if config.scaler_client_ca:
        if not config.tls_cert:
            raise InvalidConfig("--scaler-client-ca needs --tls-cert as well")
        wire = replace(wire, tokens="", tls_client_ca=config.scaler_client_ca, tls_client_names="")
    credentials = wire.server_credentials()
    places, watchers = Places("scaler_calls", MAX_CALLS), Places("scaler_watchers", MAX_WATCHERS)
    PROCESS.watch(places, watchers)
    guards = (*caller_guards(wire), Admit(places))
    calls = AnswerErrors(wire.stream_timeout_s, *guards, on_refused=PROCESS.refused)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[calls])
    servicer = ScalerServicer(queue, max(1, config.archive_slots), stopping)
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(Health(watchers, HEALTH_WATCH_S), server)
    held = contextlib.ExitStack()
    address = held.enter_context(bound(server, wire.listen, credentials))
    await server.start()
    get_logger().info("scaler.listens", address=address)

    async def close() -> None:
        await server.stop(LOOK_S)
        held.close()

    return close
