"""A service without a model for tests of the stack: takes every service's flags, serves health, behaves as told."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from slipstream.config import option
from slipstream.errors import ModelNotUsable
from slipstream.logs import get_logger
from slipstream.rpc.server import Lifecycle, run_service
from slipstream.rpc.service_options import ServiceOptions
from slipstream.rpc.v1 import gateway_pb2_grpc
from tests.cli.fake_gateway import FakeGateway


@dataclass(frozen=True, kw_only=True)
class FakeConfig(ServiceOptions):
    behaviour: str = option("what to do", default="serve")
    model: str = option("ignored", default="")
    device: str = option("ignored", default="")
    dtype: str = option("ignored", default="")
    threads: int = option("ignored", default=0)
    prefill_threads: int = option("ignored", default=0)
    cpu: int = option("ignored", default=0)
    target: str = option("ignored", default="")
    draft: str = option("ignored", default="")
    video_roots: str = option("ignored", default="")
    archive_slots: int = option("ignored", default=0)
    archive_drain_s: float = option("ignored", default=0.0)


async def _setup(server: grpc.aio.Server, config: FakeConfig, lifecycle: Lifecycle) -> Callable[[], Awaitable[None]]:
    if config.behaviour == "fail":
        raise ModelNotUsable("the weights are damaged")
    if config.behaviour == "vanish":
        os._exit(7)
    if config.behaviour == "hang":
        await asyncio.sleep(3600)
    if config.behaviour == "crash":
        asyncio.get_running_loop().call_later(1.0, os._exit, 9)
    if config.behaviour == "deaf":
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    if config.target:
        gateway_pb2_grpc.add_GatewayServicer_to_server(FakeGateway(), server)  # type: ignore[no-untyped-call]

    async def close() -> None:
        if config.behaviour == "linger":
            get_logger().info("service.lingers")
            await lifecycle.hurried.wait()

    return close


if __name__ == "__main__":
    run_service("fake", FakeConfig, _setup)
