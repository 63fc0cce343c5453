"""Documents through the whole stack, with a reader process that is killed, frozen, slow, or lies: the text of a page is
plain decoding's, and true hints that come late are used."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import slipstream
from slipstream.documents.messages import DocumentFacts, PageDraft, PagePicture
from slipstream.documents.reading import DocumentEvent, PageReading, page_readings
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    ServiceUnavailable,
    UnreadableDocument,
    VideoNotFound,
)
from slipstream.messages import Caption, CommittedText, StageChange
from slipstream.stack.local import POCKET_DIR, Stack, StackOptions
from tests.support.documents import encrypted, needs_documents, pdf_of, words_at
from tests.support.processes import START_S, check_logs, eventually, logged
from tests.support.scripted_reader import SCRIPT

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_documents]

NUM_TOKENS = 40
COLOURS = ((1, 0, 0), (0, 0.6, 0), (0, 0, 1))
NUM_PAGES = len(COLOURS)


def shape(index: int) -> bytes:
    """A page with a large coloured shape and a line of words: the pocket models know shapes."""
    box = (60 + 120 * index, 200 + 60 * index, 240, 300)
    return b"%g %g %g rg %g %g %g %g re f 0 g\n" % (*COLOURS[index], *box) + words_at(72, 700, f"page {index + 1}", 20)


PDF = pdf_of([shape(index) for index in range(NUM_PAGES)])
ASKED: dict[str, Any] = {"prompt": "Describe this video in detail.", "max_new_tokens": NUM_TOKENS, "dpi": 36}


@dataclass
class Documents:
    """A stack with a reader that does as it is told, and a client."""

    stack: Stack
    captioner: slipstream.AsyncCaptioner
    folder: Path
    plain: list[str]

    @contextlib.contextmanager
    def script(self, **pages: Any) -> Iterator[None]:
        """What the reader says of pages, by `page1` or `all`. It is as before afterwards."""
        told = {name.removeprefix("page"): what for name, what in pages.items()}
        (self.folder / "script.json").write_text(json.dumps(told))
        try:
            yield
        finally:
            (self.folder / "script.json").write_text("{}")
            for mark in (*self.folder.glob("dra*-*"), *self.folder.glob("go*")):
                mark.unlink()

    def seen(self, mark: str) -> bool:
        return (self.folder / mark).exists()

    def let(self, name: str = "go") -> str:
        """The file that a page is held by, to be made later by `touch`."""
        return str(self.folder / name)

    def signal_reader(self, number: int) -> None:
        os.kill(self.stack.processes["reader"].pid, number)

    async def read(self, on_event: Callable[[DocumentEvent], None] | None = None, **asked: Any) -> list[PageReading]:
        pages = []
        events = self.captioner.document_events(PDF, **ASKED | asked)
        async with contextlib.aclosing(page_readings(told(events, on_event))) as readings:
            async for page in readings:
                pages.append(page)
        return pages

    async def check(self, on_event: Callable[[DocumentEvent], None] | None = None, **asked: Any) -> list[PageReading]:
        """All pages, whose texts must be plain decoding's."""
        pages = await self.read(on_event, **asked)
        assert [page.page for page in pages] == list(range(1, NUM_PAGES + 1))
        assert [page.text for page in pages] == self.plain
        return pages


async def told(
    events: AsyncIterator[DocumentEvent], on_event: Callable[[DocumentEvent], None] | None
) -> AsyncIterator[DocumentEvent]:
    async with contextlib.aclosing(events):
        async for event in events:
            if on_event is not None:
                on_event(event)
            yield event


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def documents(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Documents]:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "script.json").write_text("{}")
    (folder / "roots").mkdir()
    (folder / "roots" / "a.pdf").write_bytes(PDF)
    made = StackOptions(
        target_model=POCKET_DIR.parent / "pocket-qwen" / "target",
        draft_model=None,
        reader=True,
        threads=1,
        restart=True,
        video_roots=(folder / "roots",),
        env={SCRIPT: str(folder / "script.json")},
        extra_flags={"gateway": ("--reader-wait-s", "120", "--max-document-bytes", "1000000")},
    )
    options = replace(made, modules={**made.modules, "reader": "tests.support.scripted_reader"})
    async with Stack(options) as stack, slipstream.connect_async(stack.gateway_address) as captioner:
        running = Documents(stack, captioner, folder, [])
        running.plain = [page.text for page in await running.read(method="autoregressive")]
        assert len(set(running.plain)) == NUM_PAGES, "every page has a text of its own"
        yield running
        check_logs(stack)


async def test_events_come_page_by_page(documents: Documents) -> None:
    events: list[DocumentEvent] = []
    pages = await documents.check(events.append, pictures=True, text_layer=True)
    assert events[0] == DocumentFacts(NUM_PAGES, (1, 2, 3))
    marks = [event for event in events if isinstance(event, PagePicture | PageDraft | Caption)]
    assert [type(mark) for mark in marks] == [PagePicture, Caption, PageDraft] * NUM_PAGES
    for index, page in enumerate(pages):
        shown = np.frombuffer(page.picture.pixels, np.uint8).reshape(page.picture.height, page.picture.width, 3)
        assert tuple(shown[-140 + 20 - 30 * index, 60 + 60 * index] > 127) == tuple(
            part > 0.5 for part in COLOURS[index]
        )
        assert page.draft.text.strip() == f"page {index + 1}"
        assert "".join(token.piece for token in page.caption.tokens) == page.text
        assert page.caption.options["method"] == "hints" and page.caption.request_id.endswith(f"-p{page.page}")
    texts = [str(event) for event in events if isinstance(event, CommittedText)]
    assert "".join(texts) == "".join(documents.plain)
    assert "prefill" in {event.stage for event in events if isinstance(event, StageChange)}
