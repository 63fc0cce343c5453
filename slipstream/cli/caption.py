"""`slipstream caption`: captions video files through a gateway, or through a stack of its own."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console

from slipstream.cli.bundle import bundled
from slipstream.cli.caption_options import caption_options
from slipstream.cli.client import CAPTION_TIMEOUT_S, caption, check_video
from slipstream.cli.connection import ConnectionOptions, connection_options, open_gateway_channel
from slipstream.cli.launch import POCKET_DIR, PRIVATE_GRACE_S
from slipstream.cli.runtime import run_async
from slipstream.cli.stack import Stack, StackOptions
from slipstream.cli.up import DeviceOption, DraftDeviceOption, DraftOption, DtypeOption, TargetOption
from slipstream.cli.view import View, choose_view
from slipstream.errors import SlipstreamError
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions


@bundled(options=caption_options, connection=connection_options)
def caption_command(
    options: CaptionOptions,
    connection: ConnectionOptions,
    videos: Annotated[list[Path], typer.Argument(help="Video files.", show_default=False)],
    gateway: Annotated[
        str | None, typer.Option(help="Address of a running gateway.", show_default="a stack of its own")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that one caption may take.")] = CAPTION_TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a video.")] = False,
    target: TargetOption = POCKET_DIR / "target",
    draft: DraftOption = POCKET_DIR / "draft",
    device: DeviceOption = "cpu",
    draft_device: DraftDeviceOption = None,
    dtype: DtypeOption = "float32",
) -> None:
    """Caption video files. What is not given is the gateway's default; without --gateway a private stack is run."""
    stack_options = StackOptions(
        target_model=target,
        draft_model=draft,
        device=device,
        draft_device=draft_device,
        dtype=dtype,
        stop_grace_s=PRIVATE_GRACE_S,
    )
    view = choose_view(as_json, len(videos))

    async def run() -> int:
        usable, exit_codes = _check_videos(videos, view)
        if usable:
            async with (
                _gateway(gateway, stack_options) as address,
                open_gateway_channel(address, connection) as channel,
            ):
                for video in usable:
                    exit_codes.append(await _caption_one(channel, video, options, timeout, view))
        return next(filter(None, exit_codes), 0)

    raise typer.Exit(run_async(run()))


def _check_videos(videos: Sequence[Path], view: View) -> tuple[list[Path], list[int]]:
    """The files that look usable, and the exit statuses of the others: no model is loaded for a mistyped name."""
    usable, exit_codes = [], []
    for video in videos:
        try:
            check_video(video)
        except SlipstreamError as error:
            view.fail(str(video), str(error))
            exit_codes.append(error.exit_code)
        else:
            usable.append(video)
    return usable, exit_codes


@asynccontextmanager
async def _gateway(address: str | None, options: StackOptions) -> AsyncIterator[str]:
    """The address of the given gateway, or of one that lives as long as this context."""
    if address is not None:
        yield address
        return
    async with AsyncExitStack() as exits:
        with Console(stderr=True).status("loading the models"):
            stack = await exits.enter_async_context(Stack(options))
        yield stack.gateway_address


async def _caption_one(
    channel: grpc.aio.Channel, video: Path, options: CaptionOptions, timeout_s: float, view: View
) -> int:
    """Shows one caption; returns the exit status that this video asks for."""
    try:
        with view.caption(str(video)) as show:
            async with aclosing(caption(channel, video, options, timeout_s)) as events:
                async for event in events:
                    show(event)
    except SlipstreamError as error:
        view.fail(str(video), str(error))
        return error.exit_code
    return 0
