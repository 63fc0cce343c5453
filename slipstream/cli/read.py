"""`slipstream read`: documents to Markdown and JSON lines. `--ocr-only` needs no model: the OCR's own text."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.common import ConnectionOptions, bundled, connection_options, run_async
from slipstream.cli.views import complain, printable
from slipstream.documents.messages import DocumentLimits, DocumentRequest, PageDraft, ReadEvent
from slipstream.documents.output import markdown_page, page_record
from slipstream.documents.pool import ReaderPool, check_packages
from slipstream.errors import InvalidConfig, SlipstreamError, UnreadableDocument
from slipstream.logs import configure_logs
from slipstream.rpc.reader import RemoteReader
from slipstream.rpc.tls import make_peer_security

Read = Callable[[bytes, DocumentRequest], AsyncGenerator[ReadEvent, None]]
"""What reads a document: a pool of this process's own, or a service's client."""
READER_PANEL = "Reader"


@bundled(connection=connection_options)
def read_command(
    *,
    files: Annotated[list[Path], typer.Argument(help="PDF, PNG, JPEG or TIFF files.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Folder for one .md and one .jsonl file a document.")],
    ocr_only: Annotated[
        bool, typer.Option("--ocr-only", help="The text layer's and the OCR's own text, without any model.")
    ] = False,
    pages: Annotated[str, typer.Option(help='Such as "1-5,9".', show_default="all")] = "",
    dpi: Annotated[int, typer.Option(help="Resolution at which pages are drawn.")] = DocumentRequest.dpi,
    text_layer: Annotated[
        bool, typer.Option("--text-layer/--no-text-layer", help="Take the document's own text where it is genuine.")
    ] = True,
    reader: Annotated[
        str,
        typer.Option(
            help="Address of a reader service.",
            show_default="read in processes of one's own",
            rich_help_panel=READER_PANEL,
        ),
    ] = "",
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Documents read at once.", rich_help_panel=READER_PANEL)] = 1,
    connection: ConnectionOptions,
) -> None:
    """Read documents: one Markdown a document with page marks, and one JSON line a page with its regions."""
    if not ocr_only:
        raise InvalidConfig("reading by a target model is not served yet; add --ocr-only for the OCR's own text")
    if len({path.stem for path in files}) < len(files):
        raise InvalidConfig("two of the documents would have the same name in --output; read them one by one")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"--output: cannot write to {str(output)!r}: {error.strerror}") from None
    request = DocumentRequest(pages=pages, dpi=dpi, text_layer=text_layer)

    async def run() -> int:
        async with _open_reader(reader, connection, jobs) as read:
            places = asyncio.Semaphore(jobs)
            exit_codes = await asyncio.gather(*(_read_one(path, output, request, read, places) for path in files))
        return next(filter(None, exit_codes), 0)

    raise typer.Exit(run_async(run()))


@asynccontextmanager
async def _open_reader(address: str, connection: ConnectionOptions, jobs: int) -> AsyncIterator[Read]:
    """A service's client; without an address, processes of this command's own."""
    if address:
        ca, cert, key = (str(path or "") for path in (connection.ca, connection.cert, connection.key))
        security = make_peer_security(("--ca", ca), ("--cert", cert), ("--key", key))
        remote = RemoteReader(address, security, connection.token(os.environ))
        try:
            yield remote.read
        finally:
            await remote.close()
        return
    check_packages()
    configure_logs("read", "error")
    pool = ReaderPool(DocumentLimits(), max_documents=jobs)
    try:
        yield pool.read
    finally:
        pool.close()


async def _read_one(path: Path, output: Path, request: DocumentRequest, read: Read, places: asyncio.Semaphore) -> int:
    """Reads one document and says on stdout what came of it; its exit status."""
    async with places:
        try:
            drafts = await _write_document(path, output, request, read)
        except SlipstreamError as error:
            complain(str(path), str(error))
            return error.exit_code
        except OSError as error:
            complain(str(path), f"cannot be written to {str(output)!r}: {error.strerror}")
            return InvalidConfig.exit_code
    for draft in drafts:
        for warning in draft.warnings:
            complain(str(path), f"page {draft.page}: {warning}")
    seconds = sum(draft.seconds for draft in drafts)
    typer.echo(printable(f"{output / path.stem}.md  [{len(drafts)} pages, {seconds:.1f} s of reading]"))
    return 0


async def _write_document(path: Path, output: Path, request: DocumentRequest, read: Read) -> Sequence[PageDraft]:
    """Writes page by page beside the files' places, and moves both there when all pages are read: a document that
    fails leaves the files of an earlier run as they were."""
    data = await asyncio.to_thread(_bytes_of, path)
    targets = [output / f"{path.stem}{ending}" for ending in (".md", ".jsonl")]
    parts = [target.with_name(f".{target.name}.part") for target in targets]
    drafts = []
    try:
        with ExitStack() as files:
            markdown, lines = (files.enter_context(part.open("w", encoding="utf-8")) for part in parts)
            async with aclosing(read(data, request)) as events:
                async for event in events:
                    if isinstance(event, PageDraft):
                        markdown.write(markdown_page(event))
                        lines.write(page_record(path.name, event))
                        drafts.append(event)
        for part, target in zip(parts, targets, strict=True):
            part.replace(target)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    return drafts


def _bytes_of(path: Path) -> bytes:
    """Raises UnreadableDocument."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UnreadableDocument("no regular file")
        if size > DocumentLimits.max_bytes:
            raise UnreadableDocument(f"it has {size} bytes, and a document has at most {DocumentLimits.max_bytes}")
        return path.read_bytes()
    except OSError as error:
        raise UnreadableDocument(f"cannot be read: {error.strerror}") from None
