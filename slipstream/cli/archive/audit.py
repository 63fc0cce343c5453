"""`slipstream archive audit`: whether results are what plain decoding says, by making some of them again."""

import json
import secrets
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.archive.audits import AuditOutcome, Finding, sampled_share
from slipstream.archive.queue import JobState
from slipstream.cli.archive.asking import GatewayOption, JsonOption
from slipstream.cli.archive.batch_view import choose_view
from slipstream.cli.archive.job_lines import job_record
from slipstream.cli.common import ConnectionOptions, bundled, connection_options, run_async
from slipstream.cli.views import printable
from slipstream.client.archive_audit import Audit, Record, audit
from slipstream.client.archive_client import ArchiveClient
from slipstream.errors import InvalidRequest
from slipstream.objects.blocking import open_file
from slipstream.objects.store import is_object_url

NOT_CONFIRMED = 1
"""Exit status of an audit that found something, or nothing to compare."""
SHOWN_CHARS = 200


@bundled(connection=connection_options)
def audit_command(
    *,
    batch: Annotated[
        str, typer.Argument(help="Id or key of a batch, or CAPTIONS.jsonl of `export`, here or in a bucket.")
    ],
    gateway: GatewayOption,
    share: Annotated[str, typer.Option(help="How much is made again, such as 1% or 0.01; at least one.")] = "1%",
    replay_gateway: Annotated[
        str | None,
        typer.Option("--replay-gateway", help="Whose target makes it again.", show_default="that of --gateway"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Names the sample: the same results again.", show_default="a new one")
    ] = None,
    as_json: JsonOption = False,
    connection: ConnectionOptions,
) -> None:
    """Hold all texts against their receipts, and make a share of them again by plain decoding. Exit status 1 when one
    is another."""
    wanted, chosen = sampled_share(share), secrets.randbits(32) if seed is None else seed
    is_export = is_object_url(batch) or Path(batch).is_file()

    async def run() -> Audit:
        async with AsyncExitStack() as opened:
            client = ArchiveClient(await opened.enter_async_context(connection.gateway(gateway).open()))
            replayer = client
            if replay_gateway is not None:
                replayer = ArchiveClient(await opened.enter_async_context(connection.gateway(replay_gateway).open()))
            records = _records_in(batch) if is_export else _records_of(client, batch)
            with choose_view(as_json=False, stream=sys.stderr) as show:
                async with aclosing(records):
                    return await audit(records, replayer, job_record, wanted, chosen, show)

    done = run_async(run())
    for finding in done.findings:
        if finding.verdict is not AuditOutcome.SAME:
            typer.echo(json.dumps(asdict(finding)) if as_json else _line(finding))
    summary = _summary(done, chosen)
    typer.echo(json.dumps(summary) if as_json else _summary_line(summary))
    raise typer.Exit(0 if done.has_passed else NOT_CONFIRMED)


async def _records_of(client: ArchiveClient, batch: str) -> AsyncGenerator[Record, None]:
    await client.get(batch)  # where no gateway answers at first there is none to wait for
    async with aclosing(client.jobs(batch, {JobState.DONE})) as jobs:
        async for job in jobs:
            yield job_record(job, [part async for part in client.parts(batch, job)])


async def _records_in(export: str) -> AsyncGenerator[Record, None]:
    with open_file(export) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise InvalidRequest(f"{export} line {number} is no JSON object; give JSON lines of `export`")
            yield record


def _summary(done: Audit, seed: int) -> dict[str, Any]:
    texts = Counter(str(finding.verdict) for finding in done.findings)
    counts = {str(verdict): texts[verdict] for verdict in AuditOutcome}
    return {
        "results": done.num_results,
        "replayed": done.num_replayed,
        **counts,
        "seed": seed,
        "passed": done.has_passed,
    }


def _summary_line(summary: dict[str, Any]) -> str:
    texts = ", ".join(f"{summary[verdict]:,} {verdict}" for verdict in AuditOutcome if summary[verdict])
    word = "passed" if summary["passed"] else "NOT confirmed"
    return (
        f"{word}: {summary['results']:,} results held against their receipts, {summary['replayed']:,} of them made"
        f" again by plain decoding; texts: {texts or 'none compared'} (--seed {summary['seed']} takes the same)"
    )


def _line(finding: Finding) -> str:
    where = f" {finding.where}" if finding.where else ""
    line = f"{finding.verdict} {printable(finding.custom_id)}{where}: {printable(finding.reason)}"
    if finding.verdict is AuditOutcome.DIFFERS:
        line += f"\n  kept:  {_shown(finding.text)}\n  plain: {_shown(finding.plain)}"
    return line


def _shown(text: str) -> str:
    text = " ".join(printable(text).split())
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
