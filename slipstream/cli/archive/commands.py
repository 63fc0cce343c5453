"""The commands of `slipstream archive` that ask about a batch or change it: status, watch, cancel, retry, export."""

import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.cli.archive.client import ArchiveClient
from slipstream.cli.archive.export import WITHOUT_RESULT, Output, export
from slipstream.cli.archive.figures import describe, overall
from slipstream.cli.archive.records import NAMES, STATES
from slipstream.cli.archive.watch import batch_dict, choose_view, exit_status, state_name, watch
from slipstream.cli.archive.writers import STDOUT, Format, check_output, choose_format
from slipstream.cli.bundle import bundled
from slipstream.cli.connection import ConnectionOptions, connection_options, open_gateway_channel
from slipstream.cli.runtime import run_async
from slipstream.cli.view import printable
from slipstream.errors import InvalidRequest
from slipstream.rpc.v1 import archive_pb2 as pb

SHOWN_PROBLEMS = 10
SHOWN_BATCHES = 100

ResultT = TypeVar("ResultT")

GatewayOption = Annotated[str, typer.Option("--gateway", help="Address of a gateway: host:port, or unix:PATH.")]
BatchArgument = Annotated[str, typer.Argument(help="Id of the batch, or its key.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="How results are written.", show_default="by the extension, or jsonl")
]


def ask(
    gateway: str, connection: ConnectionOptions, question: Callable[[ArchiveClient], Awaitable[ResultT]]
) -> ResultT:
    """Runs one conversation with the archive behind `gateway`."""

    async def run() -> ResultT:
        async with open_gateway_channel(gateway, connection) as channel:
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
    typer.echo(f"{printable(found.batch_id)} {state_name(found)}: {describe(found, overall(found))}")
    for job in problems:
        typer.echo(f"  {NAMES.get(job.state)} {_one_line(job.custom_id)}: {_one_line(job.error)}")


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
    line = f"{printable(answer.batch_id)} {state_name(answer)}: {describe(answer, overall(answer))}"
    typer.echo(json.dumps(batch_dict(answer)) if as_json else line)


@bundled(connection=connection_options)
def retry_command(
    connection: ConnectionOptions,
    batch: BatchArgument,
    gateway: GatewayOption,
    failed: Annotated[bool, typer.Option("--failed", help="Also jobs whose video or options were at fault.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Give the jobs that were given up another chance."""
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
    as_json: JsonOption = False,
) -> None:
    """Write the results there are; jobs without one go to OUTPUT.errors.jsonl. Repeating it gives the same files."""
    wanted = Output(output, choose_format(form, output), _states(state or ()))
    check_output(wanted.path, wanted.form)
    counts = ask(gateway, connection, lambda client: export(client, batch, wanted))
    if as_json:
        typer.echo(json.dumps(counts), err=output == STDOUT)
    else:
        told = ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "no jobs"
        typer.echo(f"{printable(output)}: {told}", err=True)


def _states(names: list[str] | tuple[()]) -> frozenset[pb.JobState]:
    unknown = [name for name in names if name not in STATES]
    if unknown:
        raise InvalidRequest(f"--state {unknown[0]!r}: the states are {', '.join(STATES)}")
    return frozenset(STATES[name] for name in names)


async def _batch_with_problems(client: ArchiveClient, batch: str) -> tuple[pb.Batch, list[pb.Job]]:
    found = await client.get(batch)
    problems: list[pb.Job] = []
    if found.counts.failed or found.counts.dead:
        states = sorted(WITHOUT_RESULT - {pb.JOB_STATE_CANCELLED})
        async with aclosing(client.jobs(batch, states)) as jobs:
            async for job in jobs:
                problems.append(job)
                if len(problems) == SHOWN_PROBLEMS:
                    break
    return found, problems


def _problem_dict(job: pb.Job) -> dict[str, Any]:
    return {
        "custom_id": job.custom_id,
        "state": NAMES.get(job.state),
        "error": job.error,
        "error_code": job.error_code,
        "attempts": job.attempts,
        "crashes": job.crashes,
    }


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())


def _table(batches: list[pb.Batch] | Any) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("batch", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("jobs")
    for batch in batches:
        table.add_row(Text(printable(batch.batch_id)), Text(state_name(batch)), Text(describe(batch, overall(batch))))
    return table
