"""`slipstream up`: the whole stack on this machine until Ctrl-C; `slipstream info`: what a gateway serves."""

import asyncio
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.archive.results_folder import ResultsFolder
from slipstream.budget import MIB
from slipstream.cli.common import (
    MODELS_PANEL,
    ConnectionOptions,
    bundled,
    connection_options,
    model_options,
    run_async,
    tell_models,
)
from slipstream.cli.views import printable
from slipstream.client.async_captioner import AsyncCaptioner
from slipstream.config import user_folder
from slipstream.documents.pool import check_packages
from slipstream.errors import InvalidConfig
from slipstream.service_info import GatewayInfo, PeerInfo, Placement
from slipstream.stack.local import (
    DRAIN_S,
    GATEWAY_GRACE_S,
    REDIS_VARIABLE,
    Stack,
    StackOptions,
)
from slipstream.video.formats import DEFAULT_TIER, TIERS

# -- up ---------------------------------------------------------------------------------------------------------------

ARCHIVE_PANEL = "Archive"
NO_TOKENS = (
    "SLIPSTREAM_GATEWAY_TOKENS has the gateway ask for tokens, and the HTTP front takes none without"
    " SLIPSTREAM_FRONT_TOKENS, so it can ask the gateway for nothing: set it to the same file, or give --no-http"
)


def http_options(
    http: Annotated[
        int | None,
        typer.Option(
            min=0, max=65_535, help="Port of the HTTP front, on this machine alone.", show_default="a free port"
        ),
    ] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="Serve no HTTP.")] = False,
) -> int | None:
    """The front's port; None: there is none, because nobody wants it or because what it needs is not installed."""
    is_installed = importlib.util.find_spec("uvicorn") and importlib.util.find_spec("starlette")
    if http is not None and no_http:
        raise InvalidConfig("--http and --no-http contradict each other")
    if http is not None and not is_installed:
        raise InvalidConfig("--http needs packages that are not installed: install slipstream[front]")
    return None if no_http or not is_installed else http or 0


def queue_options(
    archive: Annotated[
        bool,
        typer.Option("--archive/--no-archive", help="Serve `slipstream archive`.", rich_help_panel=ARCHIVE_PANEL),
    ] = True,
    redis: Annotated[
        str,
        typer.Option(
            envvar=REDIS_VARIABLE,
            help="URL of a Redis for the queue.",
            show_default="one of its own",
            rich_help_panel=ARCHIVE_PANEL,
        ),
    ] = "",
    archive_slots: Annotated[
        int | None,
        typer.Option(min=0, help="Archive captions at once; 0: only hand in.", rich_help_panel=ARCHIVE_PANEL),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the queue of its own Redis.",
            show_default="the user's data folder",
            rich_help_panel=ARCHIVE_PANEL,
        ),
    ] = None,
    results_to: Annotated[
        str,
        typer.Option(
            help="Folder of objects that results leave the queue for: s3://BUCKET/PREFIX, gs://, az://, file:///FOLDER.",
            show_default="they stay in Redis",
            rich_help_panel=ARCHIVE_PANEL,
        ),
    ] = "",
    queue_bytes: Annotated[
        int | None,
        typer.Option(
            min=1024**2,
            help="Bytes that jobs may take in Redis, with --results-to; later ones wait outside.",
            show_default="the gateway's",
            rich_help_panel=ARCHIVE_PANEL,
        ),
    ] = None,
) -> dict[str, Any]:
    """What `StackOptions` has of the archive and its queue. Raises `InvalidConfig` for what does not fit together."""
    of_archive = {"--archive-slots": archive_slots, "--data": data, "--results-to": results_to or None}
    if not archive and (given := [flag for flag, value in of_archive.items() if value is not None]):
        raise InvalidConfig(f"{given[0]} is of the archive: leave --no-archive out")
    return {
        "archive": archive,
        "redis": redis,
        "archive_slots": archive_slots,
        "data": data or data_folder(os.environ),
        "extra_flags": {"gateway": _result_flags(results_to, queue_bytes)},
    }


def _result_flags(results_to: str, queue_bytes: int | None) -> Sequence[str]:
    """The gateway's. Raises `InvalidConfig` for a folder that cannot be one."""
    if not results_to:
        if queue_bytes is not None:
            raise InvalidConfig("--queue-bytes needs --results-to, the folder that what has no room in Redis goes to")
        return ()
    ResultsFolder(results_to)
    return "--results-to", results_to, *(() if queue_bytes is None else ("--queue-bytes", str(queue_bytes)))


def budget_options(
    target_kv_budget_mb: Annotated[
        int,
        typer.Option(
            min=0,
            help="MiB for the target's keys and values, where draft and target share a GPU.",
            show_default="a share of what is free",
            rich_help_panel=MODELS_PANEL,
        ),
    ] = 0,
    draft_kv_budget_mb: Annotated[
        int,
        typer.Option(
            min=0,
            help="MiB for the draft's.",
            show_default="a share of what is free",
            rich_help_panel=MODELS_PANEL,
        ),
    ] = 0,
) -> dict[str, Sequence[str]]:
    """Flags by service."""
    given = {"target": target_kv_budget_mb, "draft": draft_kv_budget_mb}
    return {name: ("--kv-budget-mb", str(budget_mb)) for name, budget_mb in given.items() if budget_mb}


@bundled(stack_options=model_options, http_port=http_options, queue=queue_options, budgets=budget_options)
def up_command(
    stack_options: StackOptions,
    http_port: int | None,
    queue: dict[str, Any],
    budgets: dict[str, Sequence[str]],
    listen: Annotated[
        str | None, typer.Option(help="Where the gateway listens: host:port or unix:PATH.", show_default="a free port")
    ] = None,
    video_root: Annotated[
        list[Path] | None, typer.Option(help="A folder whose videos requests may name by path; may be repeated.")
    ] = None,
    object_root: Annotated[
        list[str] | None,
        typer.Option(help="s3://BUCKET/FOLDER, gs:// or az://, whose objects requests may name; may be repeated."),
    ] = None,
    max_video_bytes: Annotated[
        int | None, typer.Option(min=1, help="Largest video file.", show_default="the gateway's")
    ] = None,
    max_ranged_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Largest object whose frames are read by ranges.", show_default="the gateway's"),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(help=f"Containers and codecs that are decoded: {', '.join(TIERS)}.", show_default=DEFAULT_TIER),
    ] = None,
    reader: Annotated[
        bool, typer.Option("--reader/--no-reader", help="Serve `slipstream read`, by a reader of documents.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch threads of each model.", rich_help_panel=MODELS_PANEL)
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin/--no-pin", help="Give each model one core of its own.", rich_help_panel=MODELS_PANEL)
    ] = False,
) -> None:
    """Run target, draft, gateway and the archive's queue on this machine until Ctrl-C."""
    if formats is not None and formats not in TIERS:
        raise InvalidConfig(f"unknown --formats {formats!r}; known: {', '.join(TIERS)}")
    options = replace(
        stack_options,
        formats=formats,
        reader=reader,
        http=http_port,
        stop_grace_s=GATEWAY_GRACE_S,
        listen=listen,
        video_roots=tuple(video_root or ()),
        object_roots=tuple(object_root or ()),
        threads=threads,
        pin=pin,
        **queue,
    )
    limits = limit_flags({"max-video-bytes": max_video_bytes, "max-ranged-bytes": max_ranged_bytes})
    of_gateway = (*options.extra_flags.get("gateway", ()), *limits)
    run_async(_serve(replace(options, extra_flags={**options.extra_flags, **budgets, "gateway": of_gateway})))


def limit_flags(limits: Mapping[str, int | None]) -> Sequence[str]:
    """The gateway's, of those that were given."""
    return [word for flag, limit in limits.items() if limit is not None for word in (f"--{flag}", str(limit))]


def data_folder(environ: Mapping[str, str]) -> Path:
    """Where this user's stacks keep theirs. Raises `InvalidConfig` where nobody knows."""
    return user_folder(environ, "XDG_DATA_HOME", ".local/share") / "slipstream"


def _lacks_tokens(environ: Mapping[str, str]) -> bool:
    """Whether the gateway asks for tokens that the front takes from nobody."""
    return bool(environ.get("SLIPSTREAM_GATEWAY_TOKENS")) and not environ.get("SLIPSTREAM_FRONT_TOKENS")


async def _serve(options: StackOptions) -> None:
    if options.reader:
        check_packages()
    tell_models(options)
    if options.http is not None and _lacks_tokens(os.environ):
        typer.echo(f"slipstream: {NO_TOKENS}", err=True)
    typer.echo("starting the models and the gateway...", err=True)
    async with Stack(options, report=lambda line: typer.echo(f"slipstream: {line}", err=True)) as stack:
        typer.echo(f"gateway: {stack.gateway_address}")
        if stack.http_address:
            typer.echo(f"http: http://{stack.http_address}/v1")
        typer.echo(f"logs: {stack.run_dir}", err=True)
        typer.echo(f"try: slipstream caption VIDEO --gateway {stack.gateway_address} (Ctrl-C ends the stack)", err=True)
        if options.reader:
            typer.echo(f"or: slipstream read DOCUMENT --output DIR --gateway {stack.gateway_address}", err=True)
        if options.archive:
            roots = "DIR" if options.video_roots else "DIR (with --video-root DIR here)"
            typer.echo(f"or: slipstream archive submit {roots} --gateway {stack.gateway_address}", err=True)
        try:
            await stack.wait_failed()
        except asyncio.CancelledError:
            typer.echo(f"ending; what is in work has {DRAIN_S:g} s to finish (Ctrl-C: end now)", err=True)
            raise


# -- info -------------------------------------------------------------------------------------------------------------

# `slipstream info`: what a gateway serves and its limits.


@bundled(connection=connection_options)
def info_command(
    *,
    gateway: Annotated[str, typer.Option(help="Address of the gateway: host:port, or unix:PATH.")],
    advise: Annotated[
        bool, typer.Option("--advise", help="Say how many targets one draft should serve, by measured captions.")
    ] = False,
    connection: ConnectionOptions,
) -> None:
    """Show what a gateway serves and its limits."""
    info = run_async(_fetch(gateway, connection))
    Console().print(_advice(info.placements) if advise else _table(info))


async def _fetch(address: str, connection: ConnectionOptions) -> GatewayInfo:
    async with AsyncCaptioner(gateway=connection.gateway(address)) as captioner:
        return await captioner.info()


def _advice(placements: Sequence[Placement]) -> RenderableType:
    """What each number of targets would give, and the words for it."""
    if not placements:
        raise InvalidConfig("the gateway has not measured a draft yet: caption some videos with one, then ask again")
    table = Table("targets a draft", "devices", "each target decodes", "all devices caption")
    for each in placements:
        decoding = _between(each.decoding_at_least, each.decoding_at_most)
        devices = _between(each.devices_at_least, each.devices_at_most)
        table.add_row(str(each.targets), str(each.targets + 1), decoding, devices)
    return Group(table, Text(placement_words(placements)))


def _between(least: float, most: float) -> str:
    return f"{least:.2f}x" if most - least < 0.005 else f"{least:.2f}x to {most:.2f}x"


def placement_words(placements: Sequence[Placement]) -> str:
    """Which placement is best, of those that were measured."""
    best = max(placements, key=lambda each: each.devices_at_least)
    note = "x: over plain targets on as many devices; each target has one caption at a time."
    if best.devices_at_least >= 1:
        return f"Best: one draft for {best.targets} target{'s' * (best.targets > 1)}. {note}"
    if any(each.devices_at_most >= 1 for each in placements):
        return f"Not sure: caption that many videos at once, so that the draft's passes are measured. {note}"
    return f"Best for a queue: no draft, a target on every device. A draft still makes one caption faster. {note}"


def _peer_words(peer: PeerInfo) -> str:
    """What one of several holds and takes."""
    if peer.left_out:
        return f"left out: {peer.left_out}"
    load = peer.load
    free_mib = (load.kv_budget_bytes - load.kv_bytes) // MIB
    serves = f"serves {load.sessions} of at most {load.max_sessions} captions, {load.queued} wait"
    return f"{serves}; {free_mib:,} MiB of keys and values are free; took {peer.placed} from this gateway"


def _table(info: GatewayInfo) -> Table:
    table = Table(show_header=False)
    table.add_column(overflow="fold")  # a name is told whole, however narrow the terminal
    table.add_column(overflow="fold")
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
        "documents": "yes" if info.reads_documents else "no: it has no reader",
    }
    rows |= {f"{peer.role} {peer.number}": _peer_words(peer) for peer in info.peers}
    for name, value in rows.items():
        table.add_row(name, Text(printable(str(value))))
    return table
