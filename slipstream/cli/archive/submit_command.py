"""`slipstream archive submit`: hands in, and with --output waits and writes the results."""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cli.archive.client import ArchiveClient
from slipstream.cli.archive.commands import FormatOption, GatewayOption, ask
from slipstream.cli.archive.export import Output, export
from slipstream.cli.archive.sources import Sources
from slipstream.cli.archive.submit import Submitted, Tell, batch_key, submit
from slipstream.cli.archive.watch import batch_dict, choose_view, exit_status
from slipstream.cli.archive.writers import STDOUT, Format, check_output, choose_format
from slipstream.cli.bundle import bundled
from slipstream.cli.caption_options import caption_options
from slipstream.cli.connection import ConnectionOptions, connection_options
from slipstream.cli.view import complain, printable
from slipstream.errors import InvalidConfig, InvalidRequest, SlipstreamError
from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions

FIRST_EXPORT_S = 60.0
EXPORT_SHARE = 0.05
"""Most of the waiting time that goes into writing what is done so far."""
LAST_EXPORT_S = 15.0
"""What an interrupted command may still take to write what is done."""
SHOWN_CONFLICTS = 10


class Priority(StrEnum):
    """Of a batch, against others."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True)
class _Request:
    """One command line, parsed."""

    sources: Sources
    batch: pb.BatchOptions
    output: Output | None
    wait: bool
    as_json: bool


@bundled(options=caption_options, connection=connection_options)
def submit_command(
    options: CaptionOptions,
    connection: ConnectionOptions,
    sources: Annotated[
        list[str],
        typer.Argument(help="Folders, quoted patterns, files, or MANIFEST.jsonl (`-`: stdin).", show_default=False),
    ],
    gateway: GatewayOption,
    output: Annotated[
        str | None, typer.Option(help="Wait, and write results here: a file, `-`, or a folder for vtt and srt.")
    ] = None,
    form: FormatOption = None,
    name: Annotated[
        str | None, typer.Option(help="Names the batch.", show_default="a digest of output or sources, and options")
    ] = None,
    priority: Annotated[Priority, typer.Option(help="Against other batches.")] = Priority.NORMAL,
    meta: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of your own; may be repeated.")] = None,
    root: Annotated[
        Path | None, typer.Option(help="Items are named relative to this folder.", show_default="each source's own")
    ] = None,
    wait: Annotated[
        bool | None, typer.Option("--wait/--no-wait", help="Until the batch ends.", show_default="with --output")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Hand in videos to be captioned in the background. Repeating the command adds what is new and goes on."""
    destination = None if output is None else _destination(output, form, as_json)
    batch = pb.BatchOptions(
        key=name or "",
        caption=options,
        metadata=_metadata(meta or ()),
        priority=f"JOB_PRIORITY_{priority.name}",
    )
    wait = output is not None if wait is None else wait
    with Sources(sources, root, complain) as found:
        found.check()
        if not batch.key:
            file = Path(destination.path) if destination and destination.path != STDOUT else None
            batch.key = batch_key(options, file, found.names())
        request = _Request(found, batch, destination, wait, as_json)
        raise typer.Exit(ask(gateway, connection, lambda client: _run(client, request)))


def _destination(output: str, form: Format | None, as_json: bool) -> Output:
    if output == STDOUT and as_json:
        raise InvalidConfig("--json and --output - would mix on stdout; give one of them")
    destination = Output(output, choose_format(form, output))
    check_output(destination.path, destination.form)
    return destination


def _metadata(pairs: list[str] | tuple[()]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise InvalidRequest(f"--meta {pair!r}: give KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


async def _run(client: ArchiveClient, request: _Request) -> int:
    submitted = Submitted()
    try:
        with _counter() as tell:
            await submit(client, request.batch, request.sources, submitted, tell)
    except asyncio.CancelledError:
        _tell(f"interrupted: {submitted.handed_in:,} items are handed in, the same command goes on")
        raise
    status = _tell_submitted(submitted, request)
    if not request.wait:
        if request.as_json:
            typer.echo(json.dumps(asdict(submitted) | {"key": request.batch.key}))
        return status
    batch = await _wait(client, submitted.batch_id, request.output)
    if request.as_json:
        typer.echo(json.dumps(asdict(submitted) | {"key": request.batch.key, "batch": batch_dict(batch)}))
    return status or exit_status(batch)


def _tell_submitted(submitted: Submitted, request: _Request) -> int:
    """Says what became of the items; the exit status so far."""
    line = f"batch {submitted.batch_id}: {submitted.added:,} added, {submitted.known:,} known already"
    if submitted.rejected:
        line += f", {submitted.rejected:,} of them cannot run (see `slipstream archive status`)"
    typer.echo(printable(line), err=request.wait or request.as_json)
    if not submitted.num_conflicts:
        return 0
    for custom_id in submitted.conflicts[:SHOWN_CONFLICTS]:
        complain(custom_id, "the batch has this item with another source or other options; it stays as it was")
    _tell(f"{submitted.num_conflicts:,} items were not taken; give another --name, or --root if names coincide")
    return InvalidRequest.exit_code


async def _wait(client: ArchiveClient, batch_id: str, output: Output | None) -> pb.Batch:
    """Follows the batch to its end and keeps the output up to date, also when interrupted."""
    last = pb.Batch()
    refresh_s, written_at = FIRST_EXPORT_S, time.monotonic()
    try:
        with choose_view(as_json=False, stream=sys.stderr) as show:
            async with aclosing(client.watch(batch_id)) as snapshots:
                async for last in snapshots:
                    show(last)
                    if output is not None and output.path != STDOUT and time.monotonic() - written_at > refresh_s:
                        began = time.monotonic()
                        await export(client, batch_id, output)
                        written_at = time.monotonic()
                        refresh_s = max(FIRST_EXPORT_S, (written_at - began) / EXPORT_SHARE)
    except asyncio.CancelledError:
        _tell(f"interrupted: batch {batch_id} goes on; the same command waits for it again")
        if output is not None:
            await _export_in_time(client, batch_id, output)
        raise
    if output is not None:
        await export(client, batch_id, output)
    return last


async def _export_in_time(client: ArchiveClient, batch_id: str, output: Output) -> None:
    """For an interrupted command: what was written earlier stays where this does not succeed."""
    try:
        async with asyncio.timeout(LAST_EXPORT_S):
            await export(client, batch_id, output)
    except (TimeoutError, SlipstreamError):
        _tell("the newest results could not be written in time; `slipstream archive export` fetches them")


@contextmanager
def _counter() -> Iterator[Tell]:
    """Tells how far the hand-in is: live on a terminal; in a pipe only what it waits for."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda handed_in, obstacle: _tell(obstacle) if obstacle else None
        return
    with console.status("reading") as line:
        yield lambda handed_in, obstacle: line.update(Text(printable(obstacle or f"{handed_in:,} items handed in")))


def _tell(line: str) -> None:
    typer.echo(f"slipstream: {printable(line)}", err=True)
