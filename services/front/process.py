"""The front's process: its configuration, its application on a bound socket, and a clean end."""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence

from slipstream.config import parse_config
from slipstream.errors import SlipstreamError
from slipstream.logs import configure_logs, get_logger
from slipstream.metrics import PROCESS, REGISTRY
from slipstream.process_life import ServiceLoop, parent_pid, raise_descriptor_limit, wait_for_end
from slipstream.rpc.tls import expiries
from slipstream.rpc.tracing import Tracing, traced
from slipstream.services.front.app import make_app
from slipstream.services.front.config import FrontConfig
from slipstream.services.front.figures import FrontFigures
from slipstream.services.front.front import make_front
from slipstream.services.front.routes import ENDPOINTS
from slipstream.services.front.server import address_of, bound_socket, serving


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit status."""
    try:
        parent = parent_pid(environ)
        config = parse_config(FrontConfig, "front", argv, environ)
        configure_logs("front", config.log_level)
        with (
            bound_socket(config) as listening,
            traced("front", config.otlp) as tracing,
            asyncio.Runner(loop_factory=ServiceLoop) as runner,
        ):
            runner.run(_serve(config, listening, parent, tracing))
    except SlipstreamError as error:
        get_logger().error("service.failed", error=str(error))
        return error.exit_code
    return 0


async def _serve(config: FrontConfig, listening: socket.socket, parent: int | None, tracing: Tracing | None) -> None:
    stopping, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: hurry.set() if stopping.is_set() else stopping.set()
        )
    raise_descriptor_limit()
    front = make_front(config, FrontFigures(REGISTRY), tracing)
    running = asyncio.create_task(front.batches.run()) if front.batches else None
    try:
        async with serving(make_app(front, ENDPOINTS), config, listening, front.stopping, hurry):
            PROCESS.started("front", expiries(config.tls_cert, config.gateway_cert))
            get_logger().info("service.ready", address=address_of(listening), pid=os.getpid())
            await wait_for_end([stopping], parent)
    finally:
        if front.batches is not None and running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await front.batches.close()
        await front.gateways.close()
    get_logger().info("service.stopped")
