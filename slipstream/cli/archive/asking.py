"""What the commands of `slipstream archive` share: options, and one conversation with the archive."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from slipstream.archive.messages import OptionValues, document_options
from slipstream.cli.archive.output import Format
from slipstream.cli.common import ConnectionOptions, run_async
from slipstream.client.archive_client import ArchiveClient
from slipstream.documents.messages import DocumentRequest
from slipstream.documents.reading import OCR_WHEN, STAGES, DocumentOptions
from slipstream.documents.surfaces import SURFACES

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


# -- sources ----------------------------------------------------------------------------------------------------------

DOCUMENTS_PANEL = "Documents"

SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Folders, quoted patterns, files, s3://BUCKET/FOLDER/, MANIFEST.jsonl, .csv or .parquet (`-`: stdin).",
        show_default=False,
    ),
]
RootOption = Annotated[
    Path | None,
    typer.Option(
        help="Items are named relative to this folder.", show_default="each source's own", rich_help_panel=BATCH_PANEL
    ),
]
SkipBadOption = Annotated[
    bool,
    typer.Option("--skip-bad", help="Name bad rows of a manifest and hand in the others.", rich_help_panel=BATCH_PANEL),
]


OcrOption = Annotated[
    str | None,
    typer.Option(
        help=f"When pages without a text of their own are read by OCR: {', '.join(OCR_WHEN)}.",
        show_default=DocumentOptions.ocr,
        rich_help_panel=DOCUMENTS_PANEL,
    ),
]
SurfaceOption = Annotated[
    str | None,
    typer.Option(
        help=f"How the target writes: {', '.join(SURFACES)}.",
        show_default="as the target says",
        rich_help_panel=DOCUMENTS_PANEL,
    ),
]


@dataclass(frozen=True)
class DocumentFlags:
    """What was said of documents."""

    in_folders: bool
    reading: OptionValues
    """What was given of how they are read."""


def document_flags(
    documents: Annotated[
        bool,
        typer.Option(
            "--documents",
            help="Folders and patterns stand for PDFs and images, not for videos.",
            rich_help_panel=DOCUMENTS_PANEL,
        ),
    ] = False,
    pages: Annotated[
        str | None,
        typer.Option(help='Of documents, such as "1-5,9".', show_default="all", rich_help_panel=DOCUMENTS_PANEL),
    ] = None,
    dpi: Annotated[
        int | None,
        typer.Option(
            help="Resolution at which pages are drawn.",
            show_default=str(DocumentRequest.dpi),
            rich_help_panel=DOCUMENTS_PANEL,
        ),
    ] = None,
    text_layer: Annotated[
        bool | None,
        typer.Option(
            "--text-layer/--no-text-layer",
            help="Take the document's own text as a hint where it is genuine.",
            show_default="yes",
            rich_help_panel=DOCUMENTS_PANEL,
        ),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            help=f"{' or '.join(STAGES)}: whether the target reads the regions of a page first, for better hints.",
            show_default=DocumentOptions.stage,
            rich_help_panel=DOCUMENTS_PANEL,
        ),
    ] = None,
    ocr: OcrOption = None,
    surface: SurfaceOption = None,
) -> DocumentFlags:
    """For `bundled(documents=document_flags)`. Raises `InvalidRequest`."""
    given = {
        "pages": pages, "dpi": dpi, "text_layer": text_layer, "stage": stage, "ocr": ocr, "surface": surface
    }  # fmt: skip
    reading = {name: value for name, value in given.items() if value is not None}
    if reading:
        document_options(reading)
    return DocumentFlags(documents, reading)
