"""`slipstream caption`: captions video files through a gateway, or through a stack of its own."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console

from slipstream.cli.common import (
    CONNECTION_PANEL,
    ConnectionOptions,
    bundled,
    connection_options,
    open_gateway_channel,
    run_async,
)
from slipstream.cli.up import model_options, tell_models
from slipstream.cli.views import View, choose_view
from slipstream.client.caption_client import CAPTION_TIMEOUT_S, caption, check_video
from slipstream.errors import SlipstreamError
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions
from slipstream.stack.local import Stack, StackOptions

# -- caption options --------------------------------------------------------------------------------------------------

# What to ask of a video, as command-line options that `caption` and `archive submit` share.

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1


def caption_options(
    prompt: Annotated[str | None, typer.Option(help="What to ask of the video.")] = None,
    method: Annotated[str | None, typer.Option(help="slipstream, autoregressive (plain), parallelvlm...")] = None,
    frames: Annotated[int | None, typer.Option(min=1, max=UINT32_MAX, help="Frames to sample.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, max=UINT32_MAX, help="Most tokens.")] = None,
    pruner: Annotated[str | None, typer.Option(help="Chooses the draft's video tokens: uv, random, uniform...")] = None,
    alpha: Annotated[float | None, typer.Option(min=0, max=1, help="Share of them that the draft drops.")] = None,
    policy: Annotated[str | None, typer.Option(help="When the target starts a pass: self_clocked, fixed...")] = None,
    max_window: Annotated[int | None, typer.Option(min=1, max=UINT32_MAX, help="Most draft tokens a pass.")] = None,
    guidance: Annotated[str | None, typer.Option(help="What the draft prunes by: hidden_states or scores.")] = None,
    positions: Annotated[str | None, typer.Option(help="Of the kept video tokens: original or compact.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: the likeliest token; above: sample.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, max=UINT32_MAX, help="Sample from the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest that have this probability.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeat less.")] = None,
    sampling_rule: Annotated[str | None, typer.Option(help="Judges draft tokens: coupled or rejection.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=UINT64_MAX, help="Of sampling and random pruners.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    gamma: Annotated[int | None, typer.Option(min=1, max=UINT32_MAX, help="Window of fixed pacing.")] = None,
    shape: Annotated[str | None, typer.Option(help="Of a window: chain or tree.")] = None,
    lossy: Annotated[str | None, typer.Option(help="Prunes the target too, which changes the text: fastv...")] = None,
    lossy_keep: Annotated[float | None, typer.Option(min=0, max=1, help="Share of the tokens that it keeps.")] = None,
    gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="Decode plainly while that is faster.", show_default=True)
    ] = True,
) -> CaptionOptions:
    """The options that were given; the gateway's defaults stand for the others."""
    return CaptionOptions(
        prompt=prompt,
        method=method,
        num_frames=frames,
        max_new_tokens=max_new_tokens,
        pruner=pruner,
        alpha=alpha,
        policy=policy,
        max_window=max_window,
        guidance=guidance,
        positions=positions,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        sampling_rule=sampling_rule,
        seed=seed,
        stop=stop,
        gamma=gamma,
        shape=shape,
        lossy=lossy,
        lossy_keep=lossy_keep,
        gate=None if gate else False,
    )


# -- caption ----------------------------------------------------------------------------------------------------------


@bundled(stack_options=model_options, options=caption_options, connection=connection_options)
def caption_command(
    *,
    videos: Annotated[list[Path], typer.Argument(help="Video files.", show_default=False)],
    options: CaptionOptions,
    stack_options: StackOptions,
    gateway: Annotated[
        str | None, typer.Option(help="Address of a running gateway.", show_default="a stack of its own")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a video.")] = False,
    connection: ConnectionOptions,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds that one caption may take.", rich_help_panel=CONNECTION_PANEL),
    ] = CAPTION_TIMEOUT_S,
) -> None:
    """Caption video files. What is not given is the gateway's default; without --gateway a private stack is run."""
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
    tell_models(options)
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
