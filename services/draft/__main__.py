"""Starts the draft service: `python -m services.draft --model DIR --listen ADDRESS`."""

from collections.abc import Awaitable, Callable

import grpc

from services.draft.engine import DraftEngine
from services.draft.servicer import DraftServicer
from slipstream.models.config import ModelServiceConfig
from slipstream.models.registry import load_model
from slipstream.models.thread import ModelThread
from slipstream.models.warmup import warm_up
from slipstream.rpc.server import run_service
from slipstream.rpc.v1 import draft_pb2_grpc


async def setup(server: grpc.aio.Server, config: ModelServiceConfig) -> Callable[[], Awaitable[None]]:
    """Loads the weights, runs a warm-up pass and registers the servicer."""
    config.pin()
    thread = ModelThread(config.num_threads)
    model = await thread.run(
        lambda: load_model(config.model, dtype=config.dtype, device=config.device, attention=config.attention)
    )
    await thread.run(lambda: warm_up(model))
    servicer = DraftServicer(DraftEngine(model, thread, max_sessions=config.max_sessions))
    draft_pb2_grpc.add_DraftServicer_to_server(servicer, server)

    async def close() -> None:
        await servicer.close()
        thread.close()

    return close


if __name__ == "__main__":
    run_service("draft", ModelServiceConfig, setup)
