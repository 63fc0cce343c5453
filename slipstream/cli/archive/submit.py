"""`slipstream archive submit`: hands in videos and documents as a batch, and waits for the results where told to."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from slipstream.archive.messages import Batch, BatchItem, BatchOptions, Submitted
from slipstream.archive.queue import Priority
from slipstream.cli.archive.asking import (
    BATCH_PANEL,
    DocumentFlags,
    FormatOption,
    GatewayOption,
    RawOption,
    RootOption,
    SkipBadOption,
    SourcesArgument,
    document_flags,
)
from slipstream.cli.archive.batch_view import batch_dict, choose_view, exit_status
from slipstream.cli.archive.old_captions import OldCaptions
from slipstream.cli.archive.output import (
    STDOUT,
    Format,
    Output,
    check_output,
    check_unread,
    choose_format,
    export,
    notes,
)
from slipstream.cli.archive.sources import Sources, batch_key
from slipstream.cli.caption import caption_options
from slipstream.cli.common import ConnectionOptions, bundled, connection_options, run_async
from slipstream.cli.views import complain, printable
from slipstream.client.archive_client import ArchiveClient, Tell
from slipstream.client.caption_client import gateway_info
from slipstream.client.connection import Connection, GatewayAddress
from slipstream.errors import InvalidConfig, InvalidRequest, ServiceUnavailable, SlipstreamError
from slipstream.objects.store import is_object_url
from slipstream.options import CaptionOptions
from slipstream.speculation.methods import METHODS

FIRST_EXPORT_S = 60.0
EXPORT_SHARE = 0.05
"""Most of the waiting time that goes into writing what is done so far."""
LAST_EXPORT_S = 15.0
"""What an interrupted command may still take to write what is done."""
SHOWN_CONFLICTS = 10


HintsOption = Annotated[
    str | None,
    typer.Option(
        help="CAPTIONS.jsonl of an earlier batch, here or in a bucket: what was said of the same file is drafted from.",
        show_default="no hints",
        rich_help_panel=BATCH_PANEL,
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        help="Names the batch.",
        show_default="a digest of output or sources, and options",
        rich_help_panel=BATCH_PANEL,
    ),
]


@dataclass(frozen=True)
class _Request:
    """One command line, parsed."""

    items: "_Counted"
    is_left: threading.Event
    """Set when no more of them are wanted."""
    batch: BatchOptions
    output: Output | None
    wait: bool
    as_json: bool


@dataclass
class _Counted:
    """The items as they are handed in, and how many documents were among them."""

    items: Iterable[BatchItem]
    num_documents: int = 0

    def __iter__(self) -> Iterator[BatchItem]:
        for item in self.items:
            self.num_documents += item.is_document
            yield item


@bundled(options=caption_options, connection=connection_options, documents=document_flags)
def submit_command(
    *,
    sources: SourcesArgument,
    gateway: GatewayOption,
    output: Annotated[
        str | None, typer.Option(help="Wait, and write results here: a file, `-`, or a folder for vtt, srt and md.")
    ] = None,
    form: FormatOption = None,
    csv_raw: RawOption = False,
    name: NameOption = None,
    priority: Annotated[
        Priority, typer.Option(help="Against other batches.", rich_help_panel=BATCH_PANEL)
    ] = Priority.NORMAL,
    meta: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE of your own; may be repeated.", rich_help_panel=BATCH_PANEL),
    ] = None,
    root: RootOption = None,
    wait: Annotated[
        bool | None, typer.Option("--wait/--no-wait", help="Until the batch ends.", show_default="with --output")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    hints_from: HintsOption = None,
    skip_bad: SkipBadOption = False,
    documents: DocumentFlags,
    options: CaptionOptions,
    connection: ConnectionOptions,
) -> None:
    """Hand in videos and documents as a batch, to be captioned and read in the background. Repeating it adds what is
    new and goes on."""
    destination = None if output is None else _destination(output, form, as_json, csv_raw)
    if destination is not None:
        check_unread(destination.path, destination.form, sources if hints_from is None else [*sources, hints_from])
    wait = output is not None if wait is None else wait
    hints = None if hints_from is None else _read_hints(hints_from, options)
    with Sources(sources, root, complain, documents.in_folders, skip_bad) as found:
        found.check()
        file = _place(destination)
        names = found.names() if hints is None else [*found.names(), hints.name]
        key = name or batch_key(options, file, names, documents.reading)
        batch = BatchOptions(key, options.given(), _metadata(meta or ()), priority, documents.reading)
        is_left = threading.Event()
        items = found if hints is None else hints.hinted(found, is_left)
        request = _Request(_Counted(items), is_left, batch, destination, wait, as_json)
        status = run_async(_submit(connection.gateway(gateway), request))
        if hints is not None:
            _tell(hints.told_of_items())
        if found.num_bad:
            _tell(f"{found.num_bad:,} could not be handed in; each is named above")
        raise typer.Exit(status or (2 if found.num_bad else 0))


def _read_hints(export: str, options: CaptionOptions) -> OldCaptions:
    """Raises `InvalidRequest` for a file that holds no captions, and for a method that would not look at them."""
    takers = [name for name, method in METHODS.items() if method.takes_hints]
    if (method := options.get("method", takers[0])) not in takers:
        raise InvalidRequest(f"--hints-from: method {method!r} drafts from no hints; leave it out, or ask for {takers}")
    hints = OldCaptions.read(export)
    if told := hints.told_of_lines():
        _tell(told)
    return hints


def _destination(output: str, form: Format | None, as_json: bool, csv_raw: bool) -> Output:
    if output == STDOUT and as_json:
        raise InvalidConfig("--json and --output - would mix on stdout; give one of them")
    destination = Output(output, choose_format(form, output), csv_raw=csv_raw)
    check_output(destination.path, destination.form)
    return destination


def _place(destination: Output | None) -> Path | str | None:
    """Where results go that are kept."""
    if destination is None or destination.path == STDOUT:
        return None
    return destination.path if is_object_url(destination.path) else Path(destination.path)


def _metadata(pairs: list[str] | tuple[()]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise InvalidRequest(f"--meta {pair!r}: give KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


async def _submit(gateway: GatewayAddress, request: _Request) -> int:
    async with gateway.open() as channel:
        client = ArchiveClient(channel)
        submitted = await _hand_in(client, request)
        await _tell_of_documents(channel, request.items.num_documents)
        return await _go_on(client, request, submitted)


async def _tell_of_documents(channel: Connection, num_documents: int) -> None:
    """They wait, without a sign, until one of the archive's gateways has a reader."""
    with suppress(SlipstreamError):  # what is handed in stays so
        if num_documents and not (await gateway_info(channel)).reads_documents:
            are = "1 document waits" if num_documents == 1 else f"{num_documents:,} documents wait"
            _tell(f"{are} for a gateway with a reader, which the one that was asked has not (`slipstream up --reader`)")


async def _go_on(client: ArchiveClient, request: _Request, submitted: Submitted) -> int:
    """Says what was handed in, and waits where told to; the exit status."""
    status = _tell_submitted(submitted, request)
    document = _submitted_dict(submitted, request.batch.key)
    if request.wait:
        batch = await _wait(client, submitted.batch_id, request.output)
        status = status or exit_status(batch)
        document["batch"] = batch_dict(batch)
    if request.as_json:
        typer.echo(json.dumps(document))
    return status


async def _hand_in(client: ArchiveClient, request: _Request) -> Submitted:
    so_far = Submitted()
    try:
        with _counter() as tell:

            def follow(submitted: Submitted, obstacle: str) -> None:
                nonlocal so_far
                so_far = submitted
                tell(submitted, obstacle)

            return await client.submit_all(request.batch, request.items, follow, request.is_left)
    except asyncio.CancelledError:
        _tell(f"interrupted: {so_far.num_handed_in:,} items are handed in, the same command goes on")
        raise
    except (SlipstreamError, OSError) as error:
        if so_far.num_handed_in and not isinstance(error, ServiceUnavailable):  # which says it itself
            _tell(f"{so_far.num_handed_in:,} items were handed in before this; the same command goes on behind them")
        raise


def _submitted_dict(submitted: Submitted, key: str) -> dict[str, Any]:
    return {
        "batch_id": submitted.batch_id,
        "added": submitted.num_added,
        "known": submitted.num_known,
        "num_conflicts": submitted.num_conflicts,
        "rejected": submitted.num_rejected,
        "conflicts": submitted.conflicts,
        "key": key,
    }


def _tell_submitted(submitted: Submitted, request: _Request) -> int:
    """Says what became of the items; the exit status so far."""
    line = f"batch {submitted.batch_id}: {submitted.num_added:,} added, {submitted.num_known:,} known already"
    if submitted.num_rejected:
        line += f", {submitted.num_rejected:,} of them cannot run (see `slipstream archive status`)"
    typer.echo(printable(line), err=request.wait or request.as_json)
    if not submitted.num_conflicts:
        return 0
    for custom_id in submitted.conflicts[:SHOWN_CONFLICTS]:
        complain(custom_id, "the batch has this item with another source or other options; it stays as it was")
    _tell(f"{submitted.num_conflicts:,} items were not taken; give another --name, or --root if names coincide")
    return InvalidRequest.exit_code


async def _wait(client: ArchiveClient, batch_id: str, output: Output | None) -> Batch:
    """Follows the batch to its end and keeps the output up to date, also when interrupted."""
    try:
        batch = await _follow(client, batch_id, output)
    except asyncio.CancelledError:
        if output is not None:
            await _export_in_time(client, batch_id, output)
        _tell(f"interrupted: batch {batch_id} goes on; the same command waits for it again")
        raise
    if output is not None:
        for note in notes(await export(client, batch_id, output), output):
            _tell(note)
    return batch


async def _follow(client: ArchiveClient, batch_id: str, output: Output | None) -> Batch:
    """Shows the batch until it has ended, and writes what is done from time to time."""
    refresh_s, written_at, written = FIRST_EXPORT_S, time.monotonic(), None
    with choose_view(as_json=False, stream=sys.stderr) as show:
        async with aclosing(client.follow(batch_id)) as snapshots:
            async for batch in snapshots:
                show(batch)
                if output is None or output.path == STDOUT or batch == written:
                    continue
                if time.monotonic() - written_at > refresh_s:
                    began = time.monotonic()
                    await _export_so_far(client, batch_id, output)
                    written_at, written = time.monotonic(), batch
                    refresh_s = max(FIRST_EXPORT_S, (written_at - began) / EXPORT_SHARE)
    return batch


async def _export_so_far(client: ArchiveClient, batch_id: str, output: Output) -> None:
    """One that fails, as on a full disk, ends no wait of hours: the next one, or the last, may succeed."""
    try:
        await export(client, batch_id, output)
    except (SlipstreamError, OSError) as error:
        _tell(f"what is done so far could not be written, and is tried again: {error}")


async def _export_in_time(client: ArchiveClient, batch_id: str, output: Output) -> None:
    """For an interrupted command: what was written earlier stays where this does not succeed."""
    try:
        async with asyncio.timeout(LAST_EXPORT_S):
            await export(client, batch_id, output)
    except (OSError, SlipstreamError):  # TimeoutError among them
        _tell("the newest results could not be written in time; `slipstream archive export` fetches them")


@contextmanager
def _counter() -> Iterator[Tell]:
    """Tells how far the hand-in is: live on a terminal; in a pipe only what it waits for."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda submitted, obstacle: _tell(obstacle) if obstacle else None
        return
    with console.status("reading") as line:
        yield lambda submitted, obstacle: line.update(
            Text(printable(obstacle or f"{submitted.num_handed_in:,} items handed in"))
        )


def _tell(line: str) -> None:
    typer.echo(f"slipstream: {printable(line)}", err=True)
