"""A document whose pages the pocket models tell apart, and a stack whose reader does as it is told, with a client."""

import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import slipstream
from slipstream.documents.reading import DocumentEvent, PageReading, page_readings
from slipstream.stack.local import POCKET_DIR, Stack, StackOptions
from tests.support.documents import pdf_of, words_at
from tests.support.processes import check_logs
from tests.support.scripted_reader import FOLDER_VARIABLE

TARGET = POCKET_DIR.parent / "pocket-qwen" / "target"
COLOURS = ((1, 0, 0), (0, 0.6, 0), (0, 0, 1))
NUM_PAGES = len(COLOURS)
SHAPE = 240
"""Width and height in points."""
PAGES_ASKED: dict[str, Any] = {"prompt": "Describe this video in detail.", "dpi": 36}
"""Half a pixel a point."""
OnEvent = Callable[[DocumentEvent], None]


def corner(index: int) -> tuple[int, int]:
    """Left and bottom of the page's shape, in points."""
    return 60 + 120 * index, 200 + 60 * index


def drawn(index: int) -> bytes:
    """A page with a large coloured shape and a line of words: the pocket models know shapes."""
    shape = (*COLOURS[index], *corner(index), SHAPE, SHAPE)
    return b"%g %g %g rg %g %g %g %g re f 0 g\n" % shape + words_at(72, 700, f"page {index + 1}", 20)


PDF = pdf_of([drawn(index) for index in range(NUM_PAGES)])


@dataclass
class Documents:
    """A stack with a reader that does as it is told, and a client."""

    stack: Stack
    captioner: slipstream.AsyncCaptioner
    folder: Path
    asked: dict[str, Any]
    """Of every document, where a test says nothing else."""
    plain: list[str]
    """The texts of plain decoding."""

    @contextlib.contextmanager
    def script(self, pages: dict[int, dict[str, Any]]) -> Iterator[None]:
        """What the reader says of pages. It is as before afterwards."""
        (self.folder / "script.json").write_text(json.dumps(pages))
        try:
            yield
        finally:
            (self.folder / "script.json").write_text("{}")
            for mark in self.folder.glob("*-*"):
                mark.unlink()

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def log(self, service: str) -> Path:
        return self.stack.processes[service].log_path

    def signal(self, service: str, number: int) -> None:
        os.kill(self.stack.processes[service].pid, number)

    async def read(self, on_event: OnEvent = lambda event: None, **asked: Any) -> list[PageReading]:
        events = heard(self.captioner.document_events(PDF, **self.asked | asked), on_event)
        async with contextlib.aclosing(page_readings(events)) as pages:
            return [page async for page in pages]

    async def check(self, on_event: OnEvent = lambda event: None, **asked: Any) -> list[PageReading]:
        """All pages, whose texts must be plain decoding's."""
        pages = await self.read(on_event, **asked)
        assert [page.page for page in pages] == list(range(1, NUM_PAGES + 1))
        assert [page.text for page in pages] == self.plain
        return pages


async def heard(events: AsyncGenerator[DocumentEvent, None], on_event: OnEvent) -> AsyncGenerator[DocumentEvent, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            on_event(event)
            yield event


@contextlib.asynccontextmanager
async def opened(
    folder: Path,
    flags: dict[str, Sequence[str]],
    asked: dict[str, Any],
    *,
    target: Path = TARGET,
    roots: tuple[Path, ...] = (),
) -> AsyncIterator[Documents]:
    """The stack, with these flags of its services, in whose `folder` marks and the script are."""
    (folder / "script.json").write_text("{}")
    made = StackOptions(
        target_model=target,
        draft_model=None,
        reader=True,
        threads=1,
        env={FOLDER_VARIABLE: str(folder)},
        video_roots=roots,
        extra_flags=flags,
    )
    options = replace(made, modules={**made.modules, "reader": "tests.support.scripted_reader"})
    async with Stack(options) as stack, slipstream.connect_async(stack.gateway_address) as captioner:
        running = Documents(stack, captioner, folder, asked, [])
        running.plain += [page.text for page in await running.read(method="autoregressive")]
        assert len(set(running.plain)) == NUM_PAGES, "every page has a text of its own"
        yield running
        assert stack.failure is None
        check_logs(stack)
