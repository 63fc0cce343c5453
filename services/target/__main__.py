"""Starts the target service: `python -m services.target --model DIR --listen ADDRESS`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from services.target.engine import TargetEngine
from services.target.servicer import TargetServicer
from slipstream.config import between, option
from slipstream.models.config import ModelServiceConfig
from slipstream.models.registry import load_model
from slipstream.models.thread import ModelThread
from slipstream.models.warmup import warm_up
from slipstream.rpc.server import run_service
from slipstream.rpc.v1 import target_pb2_grpc


@dataclass(frozen=True, kw_only=True)
class TargetConfig(ModelServiceConfig):
    """Options of the target service."""

    guidance_layer: int = option(
        "layer L after which guidance is taken; 0 for 20, at most a quarter of the layers",
        default=0,
        check=between(0, 512),
    )


async def setup(server: grpc.aio.Server, config: TargetConfig) -> Callable[[], Awaitable[None]]:
    """Loads the weights, runs a warm-up pass and registers the servicer."""
    config.pin()
    thread = ModelThread(config.num_threads)
    model = await thread.run(
        lambda: load_model(config.model, dtype=config.dtype, device=config.device, attention=config.attention)
    )
    engine = TargetEngine(model, thread, guidance_layer=config.guidance_layer, max_sessions=config.max_sessions)
    await thread.run(lambda: warm_up(model))
    target_pb2_grpc.add_TargetServicer_to_server(TargetServicer(engine), server)

    async def close() -> None:
        thread.close()

    return close


if __name__ == "__main__":
    run_service("target", TargetConfig, setup)
