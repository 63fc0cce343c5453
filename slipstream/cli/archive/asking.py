"""What the commands of `slipstream archive` share: options, and one conversation with the archive."""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from slipstream.cli.archive.output import Format
from slipstream.cli.common import ConnectionOptions, run_async
from slipstream.client.archive_client import ArchiveClient

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
