"""`slipstream read`: documents to Markdown and JSON lines, read by a target with the OCR's text as its hint."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from slipstream.cli.caption import caption_options, flags
from slipstream.cli.common import (
    ConnectionOptions,
    bundled,
    check_no_models,
    connection_options,
    model_options,
    run_async,
)
from slipstream.cli.page_readers import OcrAlone, ReadPage, TargetReader, open_ocr, open_target, read_paper
from slipstream.cli.views import complain, printable
from slipstream.client.document_client import DocumentCall
from slipstream.documents.disagreements import (
    HTML_END,
    PageReadings,
    RegionReadings,
    html_head,
    page_html,
    split_by_regions,
)
from slipstream.documents.messages import (
    NO_OCR,
    Box,
    DocumentRequest,
    Origin,
    Region,
    RegionKind,
)
from slipstream.documents.output import markdown_page, page_record
from slipstream.documents.reading import NOT_OF_PAGES, OCR_WHEN, STAGES, DocumentOptions, PageReading
from slipstream.documents.surfaces import SURFACES, USUAL_SURFACE, page_text
from slipstream.errors import InvalidConfig, SlipstreamError, with_notes
from slipstream.options import OPTIONS_BY_NAME, CaptionOptions
from slipstream.stack.local import POCKET_READER, StackOptions

READER_PANEL = "Reader"
MAX_PICTURED_BYTES = 64 * 1024**2
"""Of a `disagreements.html`: pages behind them have their boxes drawn on white, as a browser must hold all of it."""
SurfaceOption = Annotated[
    str,
    typer.Option(
        help=f"How the target writes: {', '.join(SURFACES)}.",
        show_default=f"as the target says; {USUAL_SURFACE} with --ocr-only",
    ),
]
StageOption = Annotated[
    str,
    typer.Option(
        help=f"{' or '.join(STAGES)}: whether the target reads the regions of a page first, for better hints."
    ),
]
OcrOption = Annotated[
    str,
    typer.Option(
        help=f"When pages without a text of their own are read by OCR: {', '.join(OCR_WHEN)}. `paying` is while that"
        " saves more time than it takes; a page without it has no disagreements to show.",
    ),
]
ReaderOption = Annotated[
    str,
    typer.Option(
        help="Address of a reader service, with --ocr-only.",
        show_default="read in processes of one's own",
        rich_help_panel=READER_PANEL,
    ),
]


def page_options(**values: Any) -> CaptionOptions:
    """Those of a caption, of which the help shows what a page has a use for."""
    return caption_options(**values)


page_options.__signature__ = flags(hidden=NOT_OF_PAGES)  # type: ignore[attr-defined]


@bundled(stack_options=model_options, options=page_options, connection=connection_options)
def read_command(
    *,
    files: Annotated[list[Path], typer.Argument(help="PDF, PNG, JPEG, WebP or TIFF files.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Folder for the files that are written for each document.")],
    ocr_only: Annotated[
        bool, typer.Option("--ocr-only", help="The text layer's and the OCR's own text, without any model.")
    ] = False,
    pages: Annotated[str, typer.Option(help='Such as "1-5,9".', show_default="all")] = "",
    dpi: Annotated[int, typer.Option(help="Resolution at which pages are drawn.")] = DocumentRequest.dpi,
    text_layer: Annotated[
        bool, typer.Option("--text-layer/--no-text-layer", help="Take the document's own text where it is genuine.")
    ] = True,
    surface: SurfaceOption = "",
    stage: StageOption = DocumentOptions.stage,
    ocr: OcrOption = DocumentOptions.ocr,
    options: CaptionOptions,
    stack_options: StackOptions,
    gateway: Annotated[
        str | None, typer.Option(help="Address of a running gateway.", show_default="a stack of its own")
    ] = None,
    reader: ReaderOption = "",
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Documents read at once.", rich_help_panel=READER_PANEL)] = 1,
    connection: ConnectionOptions,
) -> None:
    """Read documents: for each a Markdown with page marks, a JSON line a page, and HTML that shows where target and OCR
    differ. What the OCR reads is a hint for the target: it saves time, and never changes what the target reads."""
    _check_names(files)
    of_targets = {"ocr": ocr != DocumentOptions.ocr, "stage": stage != DocumentOptions.stage, "gateway": bool(gateway)}
    of_targets |= {OPTIONS_BY_NAME[name].flag or name: True for name in options.given()}
    _check_who_reads(reader, ocr_only, of_targets)
    if ocr_only or gateway is not None:
        check_no_models(stack_options, "--ocr-only" if ocr_only else "--gateway")
    stack_options = _with_a_reader(stack_options)
    _check_known(("--surface", surface, ("", *SURFACES)), ("--stage", stage, STAGES), ("--ocr", ocr, OCR_WHEN))
    _make_folder(output)

    async def run() -> int:
        call = DocumentCall(
            pages=pages,
            dpi=dpi,
            text_layer=text_layer,
            surface=surface,
            stage=stage,
            ocr=ocr,
            pictures=True,
            options=options,
        )
        opened: AbstractAsyncContextManager[OcrAlone | TargetReader] = (
            open_ocr(reader, connection, jobs, call)
            if ocr_only
            else open_target(gateway, connection, stack_options, call)
        )
        async with opened as who:
            return await _Job(output, who, asyncio.Semaphore(jobs)).read_all(files)

    raise typer.Exit(run_async(run()))


def _check_names(files: Sequence[Path]) -> None:
    """Raises `InvalidConfig` for two documents of which one would be written over the other."""
    known: dict[str, Path] = {}
    for path in files:
        if (other := known.setdefault(path.stem, path)) is not path:
            both = f"{str(other)!r} and {str(path)!r}"
            raise InvalidConfig(f"{both} would have the same name in --output; read one of them into another folder")


def _check_who_reads(reader: str, ocr_only: bool, of_targets: Mapping[str, bool]) -> None:
    """`of_targets`: whether flags were given that only a target heeds. Raises `InvalidConfig`."""
    if ocr_only and (flag := next((name for name, is_given in of_targets.items() if is_given), "")):
        raise InvalidConfig(f"--{flag} is for a target that reads: leave it out with --ocr-only")
    if reader and not ocr_only:
        raise InvalidConfig("--reader is for --ocr-only: a gateway has a reader of its own")


def _check_known(*chosen: tuple[str, str, Collection[str]]) -> None:
    """Raises `InvalidConfig` for a flag whose value is not one of those known."""
    for flag, value, known in chosen:
        if value not in known:
            raise InvalidConfig(f"unknown {flag} {value!r}; known: {', '.join(filter(None, known))}")


def _make_folder(output: Path) -> None:
    """Raises `InvalidConfig`."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"--output: cannot write to {str(output)!r}: {error.strerror}") from None


def _with_a_reader(options: StackOptions) -> StackOptions:
    """The options for a stack that reads. The default pair cannot: the pocket reader takes its place, or the target
    that is named. Hints need no draft."""
    pair = StackOptions()
    target = POCKET_READER if str(options.target_model) == str(pair.target_model) else options.target_model
    draft = None if str(options.draft_model) == str(pair.draft_model) else options.draft_model
    return replace(options, target_model=target, draft_model=draft)


@dataclass(frozen=True)
class _Job:
    """How all documents of a command are read."""

    output: Path
    reader: OcrAlone | TargetReader
    places: asyncio.Semaphore

    async def read_all(self, paths: Sequence[Path]) -> int:
        """Reads the documents; the first exit status that is not 0. What fails for all, as stdout does, ends those that
        are under way."""
        try:
            async with asyncio.TaskGroup() as group:
                reads = [group.create_task(self.read_one(path)) for path in paths]
        except ExceptionGroup as failures:  # the first that failed has ended the others
            raise failures.exceptions[0] from None
        return next(filter(None, (read.result() for read in reads)), 0)

    async def read_one(self, path: Path) -> int:
        """Reads one document and says on stdout what came of it; its exit status."""
        async with self.places:
            try:
                pages = await self._write_document(path)
            except SlipstreamError as error:
                complain(str(path), with_notes(error))
                return error.exit_code
            except OSError as error:
                complain(str(path), f"cannot be written to {str(self.output)!r}: {error.strerror}")
                return InvalidConfig.exit_code
        for page in pages:
            for warning in page.complaints:
                complain(str(path), f"page {page.number}: {warning}")
        typer.echo(printable(f"{self.output / path.stem}.md  [{', '.join(_told(pages))}]"))
        return 0

    async def _write_document(self, path: Path) -> "Sequence[_PageFacts]":
        """Writes page by page beside the files' places, and moves them there when all pages are read: a document that
        fails leaves the files of an earlier run as they were."""
        file = await asyncio.to_thread(read_paper, path)
        endings = [".md", ".jsonl", *([".disagreements.html"] if isinstance(self.reader, TargetReader) else [])]
        targets = [self.output / f"{path.stem}{ending}" for ending in endings]
        parts = [target.with_name(f".{target.name}.part") for target in targets]
        facts = []
        try:
            with ExitStack() as files:
                markdown, lines, *compared = (files.enter_context(part.open("w", encoding="utf-8")) for part in parts)
                async with aclosing(self.reader.pages(file)) as pages:
                    async for page in pages:
                        page_facts = _PageFacts.of(page)
                        facts.append(page_facts)
                        text, more = self._text(page)
                        markdown.write(markdown_page(page_facts.number, text, page_facts.lossy))
                        lines.write(page_record(file.name, page.draft, **more))
                        if page.reading is not None:
                            await self._compare(page.reading, html_head(file.name, page_facts.lossy), compared[0])
                for html in compared:
                    html.write(HTML_END)
            for part, target in zip(parts, targets, strict=True):
                part.replace(target)
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
        return facts

    def _text(self, page: ReadPage) -> tuple[str, dict[str, Any]]:
        """The text to write, and what else is known of it."""
        if page.reading is None:
            return page_text(page.draft.regions, self.reader.surface), {}
        return page.reading.text, {"text": page.reading.text, "receipt": page.receipt}

    async def _compare(self, page: PageReading, head: str, html: TextIO) -> None:
        """Writes where the two readings differ, behind the head where it is the first page."""
        if not html.tell():
            html.write(head)
        is_pictured = html.tell() < MAX_PICTURED_BYTES
        html.write(await asyncio.to_thread(_compared_html, page, self.reader.surface, is_pictured=is_pictured))


@dataclass(frozen=True)
class _PageFacts:
    """What is told of a page when its document is done."""

    number: int
    warnings: tuple[str, ...]
    seconds: float
    num_tokens: int = 0
    num_hinted: int = 0
    num_regions: int = 0
    """That the target read first."""
    lossy: tuple[str, ...] = ()
    """See `Caption.lossy_facts`."""

    @property
    def complaints(self) -> list[str]:
        """Warnings that are told page by page; the rest is counted."""
        return [warning for warning in self.warnings if warning != NO_OCR]

    @classmethod
    def of(cls, page: ReadPage) -> "_PageFacts":
        draft = page.draft
        if page.reading is None:
            return cls(draft.page, draft.warnings, draft.seconds)
        caption = page.reading.caption
        return cls(
            draft.page,
            draft.warnings,
            draft.seconds,
            num_tokens=caption.num_tokens,
            num_hinted=caption.speculation.accepted_prediction_tokens,
            num_regions=caption.regions.num_read if caption.regions else 0,
            lossy=caption.lossy_facts,
        )


def _told(pages: Sequence[_PageFacts]) -> list[str]:
    num_tokens = sum(page.num_tokens for page in pages)
    lossy = dict.fromkeys(fact for page in pages for fact in page.lossy)
    told = [*lossy, f"{len(pages)} pages", f"{sum(page.seconds for page in pages):.1f} s of OCR"]
    if num_unread := sum(NO_OCR in page.warnings for page in pages):
        told.append(f"{num_unread} pages without OCR")
    if num_regions := sum(page.num_regions for page in pages):
        told.append(f"{num_regions} regions read first")
    return told + ([f"{num_tokens} tokens, {sum(p.num_hinted for p in pages)} from hints"] if num_tokens else [])


def _compared_html(page: PageReading, surface: str, *, is_pictured: bool) -> str:
    """Region by region: what the OCR has there, as the target would write it, and the target's own words."""
    draft = page.draft
    whole = Region(Box(0, 0, draft.width, draft.height), RegionKind.TEXT, 0, "", 0.0, Origin.OCR)
    regions = draft.regions or (whole,)
    texts = SURFACES[surface](regions)
    own = split_by_regions(texts, page.caption.text)
    compared = [
        RegionReadings(replace(region, text=text), model_text)
        for region, text, model_text in zip(regions, texts, own, strict=True)
    ]
    picture = page.picture if is_pictured else replace(page.picture, pixels=b"")
    return page_html(PageReadings(picture, compared))
