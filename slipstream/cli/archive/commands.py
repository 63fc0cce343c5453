"""The commands of `slipstream archive`: submit, status, watch, cancel, retry, export."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.archive.messages import Batch, BatchOptions, Job, Submitted
from slipstream.archive.queue import JobState, Priority
from slipstream.cli.archive.batch_view import batch_dict, choose_view, describe, exit_status, overall, watch
from slipstream.cli.archive.output import (
    STDOUT,
    WITHOUT_RESULT,
    Format,
    Output,
    check_output,
    choose_format,
    export,
)
from slipstream.cli.archive.sources import Sources, batch_key
from slipstream.cli.caption import caption_options
from slipstream.cli.common import ConnectionOptions, bundled, connection_options, run_async
from slipstream.cli.views import complain, printable
from slipstream.client.archive_client import ArchiveClient, Tell
from slipstream.errors import InvalidConfig, InvalidRequest, SlipstreamError
from slipstream.options import CaptionOptions

# -- commands ---------------------------------------------------------------------------------------------------------

# The commands of `slipstream archive` that ask about a batch or change it: status, watch, cancel, retry, export.

SHOWN_PROBLEMS = 10
SHOWN_BATCHES = 100

ResultT = TypeVar("ResultT")

GatewayOption = Annotated[str, typer.Option("--gateway", help="Address of a gateway: host:port, or unix:PATH.")]
BatchArgument = Annotated[str, typer.Argument(help="Id of the batch, or its key.", show_default=False)]
BATCH_PANEL = "Batch"
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="How results are written.", show_default="by the extension, or jsonl")
]
RawOption = Annotated[bool, typer.Option("--csv-raw", help="Cells as they are: a spreadsheet may take one as formula.")]


def ask(
    gateway: str, connection: ConnectionOptions, question: Callable[[ArchiveClient], Awaitable[ResultT]]
) -> ResultT:
    """Runs one conversation with the archive behind `gateway`."""

    async def run() -> ResultT:
        async with connection.gateway(gateway).open() as channel:
            return await question(ArchiveClient(channel))

    return run_async(run())


@bundled(connection=connection_options)
def status_command(
    connection: ConnectionOptions,
    gateway: GatewayOption,
    batch: Annotated[str | None, typer.Argument(help="Id or key of a batch.", show_default="all batches")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show all batches, or one with the first of its jobs that failed."""
    if batch is None:
        batches = ask(gateway, connection, lambda client: client.list_batches(SHOWN_BATCHES))
        if as_json:
            typer.echo(json.dumps([batch_dict(one) for one in batches]))
        else:
            Console().print(_table(batches))
        return
    found, problems = ask(gateway, connection, lambda client: _batch_with_problems(client, batch))
    if as_json:
        typer.echo(json.dumps(batch_dict(found) | {"problems": [_problem_dict(job) for job in problems]}))
        return
    typer.echo(f"{printable(found.batch_id)} {found.state}: {describe(found, overall(found))}")
    for job in problems:
        typer.echo(f"  {job.state} {_one_line(job.custom_id)}: {_one_line(job.error)}")


@bundled(connection=connection_options)
def watch_command(
    connection: ConnectionOptions, batch: BatchArgument, gateway: GatewayOption, as_json: JsonOption = False
) -> None:
    """Follow a batch until it ends; exit status 5 if it ends with jobs that have no result."""
    view = choose_view(as_json)
    raise typer.Exit(exit_status(ask(gateway, connection, lambda client: watch(client, batch, view))))


@bundled(connection=connection_options)
def cancel_command(
    connection: ConnectionOptions, batch: BatchArgument, gateway: GatewayOption, as_json: JsonOption = False
) -> None:
    """Stop a batch: what waits is dropped, what runs stops soon, results stay."""
    answer = ask(gateway, connection, lambda client: client.cancel(batch))
    line = f"{printable(answer.batch_id)} {answer.state}: {describe(answer, overall(answer))}"
    typer.echo(json.dumps(batch_dict(answer)) if as_json else line)


@bundled(connection=connection_options)
def retry_command(
    connection: ConnectionOptions,
    batch: BatchArgument,
    gateway: GatewayOption,
    failed: Annotated[bool, typer.Option("--failed", help="Also jobs whose video or options were at fault.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Queue the dead jobs of a batch again: those that were given up."""
    retried = ask(gateway, connection, lambda client: client.retry(batch, failed))
    typer.echo(json.dumps({"retried": retried}) if as_json else f"{retried:,} jobs are queued again")


@bundled(connection=connection_options)
def export_command(
    connection: ConnectionOptions,
    batch: BatchArgument,
    gateway: GatewayOption,
    output: Annotated[str, typer.Option(help="A file, `-` for stdout, or a folder for vtt and srt.")],
    form: FormatOption = None,
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs in this state, all into the output; may be repeated.", show_default="done"),
    ] = None,
    csv_raw: RawOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the results there are; jobs without one go to OUTPUT.errors.jsonl. Repeating it gives the same files."""
    wanted = Output(output, choose_format(form, output), _states(state or ()), csv_raw)
    check_output(wanted.path, wanted.form)
    counts = ask(gateway, connection, lambda client: export(client, batch, wanted))
    told = ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "no jobs"
    line = json.dumps(counts) if as_json else f"{printable(output)}: {told}"
    typer.echo(line, err=not as_json or output == STDOUT)


def _states(names: list[str] | tuple[()]) -> frozenset[JobState]:
    unknown = [name for name in names if name not in list(JobState)]
    if unknown:
        raise InvalidRequest(f"--state {unknown[0]!r}: the states are {', '.join(JobState)}")
    return frozenset(JobState(name) for name in names)


async def _batch_with_problems(client: ArchiveClient, batch: str) -> tuple[Batch, list[Job]]:
    found = await client.get(batch)
    problems: list[Job] = []
    if found.counts.failed or found.counts.dead:
        async with aclosing(client.jobs(batch, WITHOUT_RESULT - {JobState.CANCELLED})) as jobs:
            async for job in jobs:
                problems.append(job)
                if len(problems) == SHOWN_PROBLEMS:
                    break
    return found, problems


def _problem_dict(job: Job) -> dict[str, Any]:
    return {
        "custom_id": job.custom_id,
        "state": job.state,
        "error": job.error,
        "error_code": job.error_code,
        "attempts": job.attempts,
        "crashes": job.crashes,
    }


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())


def _table(batches: Sequence[Batch]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("batch", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("jobs")
    for batch in batches:
        table.add_row(Text(printable(batch.batch_id)), Text(batch.state), Text(describe(batch, overall(batch))))
    return table


# -- submit command ---------------------------------------------------------------------------------------------------

FIRST_EXPORT_S = 60.0
EXPORT_SHARE = 0.05
"""Most of the waiting time that goes into writing what is done so far."""
LAST_EXPORT_S = 15.0
"""What an interrupted command may still take to write what is done."""
SHOWN_CONFLICTS = 10


@dataclass(frozen=True)
class _Request:
    """One command line, parsed."""

    sources: Sources
    batch: BatchOptions
    output: Output | None
    wait: bool
    as_json: bool


@bundled(options=caption_options, connection=connection_options)
def submit_command(
    *,
    sources: Annotated[
        list[str],
        typer.Argument(help="Folders, quoted patterns, files, or MANIFEST.jsonl (`-`: stdin).", show_default=False),
    ],
    gateway: GatewayOption,
    output: Annotated[
        str | None, typer.Option(help="Wait, and write results here: a file, `-`, or a folder for vtt and srt.")
    ] = None,
    form: FormatOption = None,
    csv_raw: RawOption = False,
    name: Annotated[
        str | None,
        typer.Option(
            help="Names the batch.",
            show_default="a digest of output or sources, and options",
            rich_help_panel=BATCH_PANEL,
        ),
    ] = None,
    priority: Annotated[
        Priority, typer.Option(help="Against other batches.", rich_help_panel=BATCH_PANEL)
    ] = Priority.NORMAL,
    meta: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE of your own; may be repeated.", rich_help_panel=BATCH_PANEL),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            help="Items are named relative to this folder.",
            show_default="each source's own",
            rich_help_panel=BATCH_PANEL,
        ),
    ] = None,
    wait: Annotated[
        bool | None, typer.Option("--wait/--no-wait", help="Until the batch ends.", show_default="with --output")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    options: CaptionOptions,
    connection: ConnectionOptions,
) -> None:
    """Hand in videos as a batch, to be captioned in the background. Repeating it adds what is new and goes on."""
    destination = None if output is None else _destination(output, form, as_json, csv_raw)
    wait = output is not None if wait is None else wait
    with Sources(sources, root, complain) as found:
        found.check()
        file = Path(destination.path) if destination and destination.path != STDOUT else None
        key = name or batch_key(options, file, found.names())
        batch = BatchOptions(key, options.given(), _metadata(meta or ()), priority)
        request = _Request(found, batch, destination, wait, as_json)
        raise typer.Exit(ask(gateway, connection, lambda client: _run(client, request)))


def _destination(output: str, form: Format | None, as_json: bool, csv_raw: bool) -> Output:
    if output == STDOUT and as_json:
        raise InvalidConfig("--json and --output - would mix on stdout; give one of them")
    destination = Output(output, choose_format(form, output), csv_raw=csv_raw)
    check_output(destination.path, destination.form)
    return destination


def _metadata(pairs: list[str] | tuple[()]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise InvalidRequest(f"--meta {pair!r}: give KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


async def _run(client: ArchiveClient, request: _Request) -> int:
    submitted = await _hand_in(client, request)
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

            return await client.submit_all(request.batch, request.sources, follow)
    except asyncio.CancelledError:
        _tell(f"interrupted: {so_far.num_handed_in:,} items are handed in, the same command goes on")
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
    refresh_s, written_at = FIRST_EXPORT_S, time.monotonic()
    try:
        with choose_view(as_json=False, stream=sys.stderr) as show:
            async with aclosing(client.watch(batch_id)) as snapshots:
                async for batch in snapshots:
                    show(batch)
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
    return batch


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
        yield lambda submitted, obstacle: _tell(obstacle) if obstacle else None
        return
    with console.status("reading") as line:
        yield lambda submitted, obstacle: line.update(
            Text(printable(obstacle or f"{submitted.num_handed_in:,} items handed in"))
        )


def _tell(line: str) -> None:
    typer.echo(f"slipstream: {printable(line)}", err=True)


# -- app --------------------------------------------------------------------------------------------------------------

# Gathers the commands of `slipstream archive`.

archive_app = typer.Typer(help="Caption whole folders in the background: each video once, whatever fails meanwhile.")
archive_app.command("submit")(submit_command)
archive_app.command("status")(status_command)
archive_app.command("watch")(watch_command)
archive_app.command("cancel")(cancel_command)
archive_app.command("retry")(retry_command)
archive_app.command("export")(export_command)
