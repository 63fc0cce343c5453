"""`slipstream demo`: captions sample clips with both methods on a stack of its own and shows what speculation gains."""

import importlib
import json
import os
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console

from slipstream.cli.client import caption
from slipstream.cli.demo_archive import ArchiveResult, archive_clips, has_queue_server
from slipstream.cli.demo_report import ClipResult, Run, demo_document, demo_table
from slipstream.cli.launch import FRESH, POCKET_DIR, PRIVATE_GRACE_S
from slipstream.cli.runtime import run_async
from slipstream.cli.stack import Stack, StackOptions
from slipstream.errors import InvalidConfig, ProtocolViolation
from slipstream.rpc.client import open_channel
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions

CLIP_FOLDER = POCKET_DIR.parents[1] / ".cache" / "demo"
MAX_NEW_TOKENS = 320
WARM_UP_TOKENS = 16
METHODS = ("autoregressive", "parallel")
PIPE_WIDTH = 140
"""Columns of the table where no terminal gives them."""

Say = Callable[[str], None]


def demo_command(
    clips: Annotated[int, typer.Option(min=1, max=1000, help="Clips to caption.")] = 3,
    frames: Annotated[int, typer.Option(min=1, max=4096, help="Frames to sample of each.")] = 128,
    json_only: Annotated[bool, typer.Option("--json-only", help="Print only the JSON document.")] = False,
) -> None:
    """Caption sample clips with both methods, compare speed and text, and run an archive; the last line is JSON."""
    console = Console(stderr=True)
    with console.status("rendering sample clips") as status:
        videos = _sample_clips(clips)
        results, archived = run_async(_caption_clips(videos, frames, status.update))
    if not json_only:
        terminal = Console()
        terminal = terminal if terminal.is_terminal else Console(width=PIPE_WIDTH)
        terminal.print(demo_table(results))
        if archived is not None:
            terminal.print(archived.table())
    document = demo_document(results, frames) | {"archive": None if archived is None else archived.document()}
    typer.echo(json.dumps(document))
    if not document["identical"] or (archived is not None and not archived.identical):
        raise typer.Exit(1)


def _sample_clips(count: int) -> list[Path]:
    """Clips that the models were never trained on; rendered unless an earlier run did."""
    first: int = _training("world").HELD_OUT_SEEDS.start
    paths: list[Path] = _training("data").render_folder(CLIP_FOLDER, range(first, first + count))
    return paths


def _training(module: str) -> Any:
    """A module of the trainer's package, which alone knows the world of the sample clips."""
    try:
        return importlib.import_module(f"training.{module}")
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"the demo renders its clips with the package `training`, which is not installed here ({error.name} is "
            "missing): run it in a checkout of the project, after `make setup`"
        ) from None


async def _caption_clips(videos: list[Path], frames: int, say: Say) -> tuple[list[ClipResult], ArchiveResult | None]:
    say("loading the models")
    stack_options = StackOptions(
        threads=1,
        pin=len(os.sched_getaffinity(0)) > 1,
        stop_grace_s=PRIVATE_GRACE_S,
        extra_flags=FRESH,
        archive=has_queue_server(),
        video_roots=(CLIP_FOLDER,),
    )
    async with Stack(stack_options) as stack, open_channel(stack.gateway_address) as channel:
        say("warming up")
        options = CaptionOptions(num_frames=frames, max_new_tokens=WARM_UP_TOKENS)
        await _run(channel, videos[0], options)
        results = []
        for number, video in enumerate(videos):
            order = METHODS if number % 2 == 0 else METHODS[::-1]
            runs = {}
            for method in order:
                say(f"clip {number + 1} of {len(videos)}: {method}")
                options = CaptionOptions(num_frames=frames, max_new_tokens=MAX_NEW_TOKENS, method=method)
                runs[method] = await _run(channel, video, options)
            right, total = _score(runs["parallel"].summary.text, video)
            results.append(ClipResult(video.stem, right, total, runs["autoregressive"], runs["parallel"]))
        if not stack_options.archive:
            return results, None
        say("the archive")
        return results, await archive_clips(channel, videos, frames, MAX_NEW_TOKENS)


def _score(text: str, video: Path) -> tuple[int, int]:
    """How many attributes of the clip the caption states rightly, and how many there are."""
    truth = json.loads(video.with_suffix(".json").read_text())
    right, total = _training("captions").score_caption(text, truth["scenes"])
    return right, total


async def _run(channel: grpc.aio.Channel, video: Path, options: CaptionOptions) -> Run:
    token_ids: list[int] = []
    async with aclosing(caption(channel, video, options)) as events:
        async for event in events:
            token_ids += [token.token_id for token in event.text.tokens]
            if event.HasField("summary"):
                return Run(tuple(token_ids), event.summary)
    raise ProtocolViolation("the gateway ended the caption without a summary")
