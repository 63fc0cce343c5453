"""`slipstream info`: what a gateway serves and its limits."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.cli.bundle import bundled
from slipstream.cli.client import gateway_info
from slipstream.cli.connection import ConnectionOptions, connection_options, open_gateway_channel
from slipstream.cli.runtime import run_async
from slipstream.rpc.v1 import gateway_pb2


@bundled(connection=connection_options)
def info_command(
    connection: ConnectionOptions,
    gateway: Annotated[str, typer.Option(help="Address of the gateway: host:port, or unix:PATH.")],
) -> None:
    """Show what a gateway serves and its limits."""
    Console().print(_table(run_async(_fetch(gateway, connection))))


async def _fetch(address: str, connection: ConnectionOptions) -> gateway_pb2.GatewayInfo:
    async with open_gateway_channel(address, connection) as channel:
        return await gateway_info(channel)


def _table(info: gateway_pb2.GatewayInfo) -> Table:
    table = Table(show_header=False)
    rows = {
        "version": info.version,
        "target": info.target_model,
        "draft": info.draft_model or "not connected",
        "video tokens a frame": info.tokens_per_frame,
        "most frames": info.max_frames,
        "most new tokens": info.max_new_tokens,
        "longest window": info.max_window,
        "largest video": f"{info.max_video_bytes / 1e6:,.0f} MB",
        "default prompt": info.default_prompt,
        "paths below its roots": "yes" if info.accepts_paths else "no: videos are uploaded",
    }
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    return table
