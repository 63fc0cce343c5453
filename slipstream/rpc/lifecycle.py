"""What a service's parts learn of the process's life, and say about it: health, the beginning of its end, failure."""

import asyncio

from grpc_health.v1 import health, health_pb2

from slipstream.errors import SlipstreamError


class Lifecycle:
    """Handed to a service's `setup`. The name "" stands for the process as a whole, serving once it is set up."""

    def __init__(self, health_servicer: health.aio.HealthServicer) -> None:
        self.stopping = asyncio.Event()
        """Set when the process begins to end: open calls may finish, nothing new should begin."""
        self.failed = asyncio.Event()
        self.failure: SlipstreamError | None = None
        self._health = health_servicer

    async def report(self, service: str, *, is_serving: bool) -> None:
        """Answers health checks for `service` so from now on, until the process ends."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(service, status)

    def fail(self, error: SlipstreamError) -> None:
        """Ends the process in good order, with this error's exit status."""
        self.failure = self.failure or error
        self.failed.set()
