"""KEDA as far as a scaler notices it: what it asks, in which order, and what it and the autoscaler make of the answers.

After KEDA's `pkg/scalers/external_scaler.go`: every poll asks GetMetrics and then IsActive; a stream of StreamIsActive
is held beside it. The number of replicas is the autoscaler's for a metric of the type AverageValue.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from slipstream.rpc.v1 import externalscaler_pb2 as messages
from slipstream.rpc.v1 import externalscaler_pb2_grpc


@dataclass(frozen=True)
class Poll:
    """What one poll found."""

    work: float
    is_active: bool
    replicas: int
    """That there should be."""


class KedaClient:
    """One ScaledObject with one trigger."""

    def __init__(
        self, channel: grpc.aio.Channel, metadata: Mapping[str, str], *, min_replicas: int = 0, max_replicas: int = 100
    ) -> None:
        self._stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        self._ref = messages.ScaledObjectRef(name="worker", namespace="slipstream", scalerMetadata=dict(metadata))
        self._min, self._max = min_replicas, max_replicas
        self.pushed: list[bool] = []
        """What the stream has said."""

    async def spec(self) -> tuple[str, float]:
        """Name of the metric, and how much of it one replica should have."""
        (spec,) = (await self._stub.GetMetricSpec(self._ref)).metricSpecs
        assert spec.targetSize == math.ceil(spec.targetSizeFloat)
        return spec.metricName, spec.targetSizeFloat

    async def poll(self) -> Poll:
        name, share = await self.spec()
        request = messages.GetMetricsRequest(scaledObjectRef=self._ref, metricName=name)
        (value,) = (await self._stub.GetMetrics(request)).metricValues
        work = value.metricValueFloat if value.metricValueFloat > 0 else float(value.metricValue)
        is_active = bool((await self._stub.IsActive(self._ref)).result)
        wanted = max(1, math.ceil(work / share)) if is_active else 0
        return Poll(work, is_active, min(self._max, max(self._min, wanted)))

    async def watch(self) -> None:
        """Keeps `pushed` until cancelled, or until the stream ends."""
        async for answer in self._stub.StreamIsActive(self._ref):
            self.pushed.append(answer.result)

    async def heard(self, last: bool) -> None:
        """Returns when the stream's last word is this one."""
        async with asyncio.timeout(60):
            while self.pushed[-1:] != [last]:  # noqa: ASYNC110 (another task appends)
                await asyncio.sleep(0.005)
