"""The commands of `slipstream archive` that ask about a batch or change it: status, watch, cancel, retry, export."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.archive.messages import Batch, Job, JobKind
from slipstream.archive.queue import BatchState, JobState
from slipstream.cli.archive.asking import BatchArgument, FormatOption, GatewayOption, JsonOption, RawOption, ask
from slipstream.cli.archive.audit import audit_command
from slipstream.cli.archive.batch_view import batch_dict, choose_view, describe, exit_status, overall, watch
from slipstream.cli.archive.estimate import estimate_command
from slipstream.cli.archive.output import (
    STDOUT,
    WITHOUT_RESULT,
    Output,
    check_output,
    choose_format,
    export,
    notes,
)
from slipstream.cli.archive.search import index_command, search_command
from slipstream.cli.archive.submit import submit_command
from slipstream.cli.common import ConnectionOptions, bundled, connection_options
from slipstream.cli.views import printable
from slipstream.client.archive_client import ArchiveClient
from slipstream.errors import InvalidRequest

SHOWN_PROBLEMS = 10
SHOWN_BATCHES = 100


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
        parts = "parts" if job.kind is JobKind.FILM else "pages"
        kept = f" ({job.parts_done} of {job.parts_total} {parts} are kept)" if job.parts_done else ""
        typer.echo(f"  {job.state} {_one_line(job.custom_id)}: {_one_line(job.error)}{kept}")


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
    if answer.state is BatchState.COMPLETED:
        typer.echo("slipstream: nothing was cancelled: the batch had ended", err=True)


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
    output: Annotated[str, typer.Option(help="A file, `-` for stdout, or a folder for vtt, srt and md.")],
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
    counts = ask(gateway, connection, lambda client: _export_of(client, batch, wanted))
    told = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items()) or "no jobs"
    line = json.dumps(counts) if as_json else f"{printable(output)}: {told}"
    typer.echo(line, err=not as_json or output == STDOUT)
    for note in [] if as_json else notes(counts, wanted):
        typer.echo(f"slipstream: {printable(note)}", err=True)


async def _export_of(client: ArchiveClient, batch: str, output: Output) -> Counter[str]:
    """Once begun an export waits for a gateway that restarts; where none answers at first there is none."""
    await client.get(batch)
    return await export(client, batch, output)


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
        "parts_done": job.parts_done,
        "parts_total": job.parts_total,
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


# -- app --------------------------------------------------------------------------------------------------------------

# Gathers the commands of `slipstream archive`.

archive_app = typer.Typer(help="Caption whole folders in the background: each video once, whatever fails meanwhile.")
archive_app.command("submit")(submit_command)
archive_app.command("estimate")(estimate_command)
archive_app.command("status")(status_command)
archive_app.command("watch")(watch_command)
archive_app.command("cancel")(cancel_command)
archive_app.command("retry")(retry_command)
archive_app.command("export")(export_command)
archive_app.command("index")(index_command)
archive_app.command("search")(search_command)
archive_app.command("audit")(audit_command)
