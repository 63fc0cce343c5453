"""Pages whose regions the target reads first, through the whole stack: the text is plain decoding's, whatever the
reader says of regions, and whoever dies or refuses meanwhile."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import slipstream
from slipstream.documents.messages import PagePicture, RegionStage
from slipstream.documents.reading import DocumentEvent, PageReading, page_readings
from slipstream.errors import InvalidRequest
from slipstream.messages import StageChange
from slipstream.stack.local import POCKET_DIR, Stack, StackOptions
from tests.support.documents import needs_documents, pdf_of, words_at
from tests.support.processes import START_S, check_logs, logged
from tests.support.scripted_reader import FOLDER_VARIABLE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_documents]

COLOURS = ((1, 0, 0), (0, 0.6, 0), (0, 0, 1))
NUM_PAGES = len(COLOURS)
ASKED: dict[str, Any] = {"prompt": "Describe this video in detail.", "max_new_tokens": 60, "dpi": 36}
REGIONS = {"stage": "region+page"}
MOST_TRIES = 5
"""A text may be over before its regions are read, on a busy machine."""
OnEvent = Callable[[DocumentEvent], None]


def drawn(index: int) -> bytes:
    """A page with a large coloured shape: the pocket models know shapes."""
    shape = (*COLOURS[index], 60 + 120 * index, 200 + 60 * index, 240, 240)
    return b"%g %g %g rg %g %g %g %g re f 0 g\n" % shape + words_at(72, 700, f"page {index + 1}", 20)


PDF = pdf_of([drawn(index) for index in range(NUM_PAGES)])


def parts_of(text: str) -> list[list[Any]]:
    """Regions that say the text, piece by piece, and whose boxes overlap: the whole page, and parts of it."""
    third = len(text) // 3
    boxes = ([0, 0, 1, 1], [0.1, 0.2, 0.9, 0.5], [0, 0.5, 0.4, 0.6])
    return [[*box, text[number * third : (number + 1) * third]] for number, box in enumerate(boxes)]


@dataclass
class Documents:
    """A stack with a reader that does as it is told, and a client."""

    stack: Stack
    captioner: slipstream.AsyncCaptioner
    folder: Path
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
            for mark in self.folder.glob("go-*"):
                mark.unlink()

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def signal(self, service: str, number: int) -> None:
        os.kill(self.stack.processes[service].pid, number)

    def lost(self) -> int:
        """Regions that could not be read, so far."""
        return len(logged(self.stack.processes["gateway"].log_path, "region.lost"))

    async def read(self, on_event: OnEvent = lambda event: None, **asked: Any) -> list[PageReading]:
        async def heard() -> Any:
            async with contextlib.aclosing(self.captioner.document_events(PDF, **ASKED | asked)) as events:
                async for event in events:
                    on_event(event)
                    yield event

        async with contextlib.aclosing(page_readings(heard())) as pages:
            return [page async for page in pages]

    async def check(self, on_event: OnEvent = lambda event: None, **asked: Any) -> list[PageReading]:
        """All pages, whose texts must be plain decoding's."""
        pages = await self.read(on_event, **REGIONS | asked)
        assert [page.text for page in pages] == self.plain
        return pages


@contextlib.asynccontextmanager
async def opened(folder: Path, gateway: Sequence[str], target: Sequence[str] = ()) -> AsyncIterator[Documents]:
    """The target takes pictures of other sizes than pages, so that small regions are cut out."""
    shutil.copytree(POCKET_DIR.parent / "pocket-qwen" / "target", folder / "target")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((folder / "target" / name).read_text())
        settings["size"]["shortest_edge"] = 28 * 28
        (folder / "target" / name).write_text(json.dumps(settings))
    (folder / "script.json").write_text("{}")
    made = StackOptions(
        target_model=folder / "target",
        draft_model=None,
        reader=True,
        threads=1,
        env={FOLDER_VARIABLE: str(folder)},
        extra_flags={"gateway": gateway, "target": target},
    )
    options = replace(made, modules={**made.modules, "reader": "tests.support.scripted_reader"})
    async with Stack(options) as stack, slipstream.connect_async(stack.gateway_address) as captioner:
        running = Documents(stack, captioner, folder, [])
        running.plain += [page.text for page in await running.read(method="autoregressive")]
        assert len(set(running.plain)) == NUM_PAGES, "every page has a text of its own"
        yield running
        assert stack.failure is None
        check_logs(stack)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def documents(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Documents]:
    flags = ("--reader-wait-s", str(START_S), "--resume-wait-s", str(START_S), "--regions-at-once", "2")
    async with opened(tmp_path_factory.mktemp("documents"), flags) as running:
        yield running


async def test_regions_become_hints_and_the_text_is_plain_decodings(documents: Documents) -> None:
    """A region is the whole page, so its text is the page's. By the method that asks no clock whether rows pay."""
    stages: list[StageChange] = []

    def note(event: DocumentEvent) -> None:
        if isinstance(event, StageChange) and event.stage == "regions":
            stages.append(event)

    for _ in range(MOST_TRIES):
        stages.clear()
        with documents.script({1: {"regions": [[0, 0, 1, 1, documents.plain[0]]]}}):
            (page,) = await documents.read(note, pages="1", method="hsd", **REGIONS)
        assert page.text == documents.plain[0] and page.caption.regions is not None
        if page.caption.speculation.accepted_prediction_tokens:
            break
    facts = page.caption.regions
    assert (facts.num_regions, facts.num_read) == (1, 1) and facts.num_tokens > 1
    assert facts.accepted_prediction_tokens and facts.passes < facts.num_tokens and facts.seconds > 0
    assert page.caption.speculation.passes < page.caption.num_tokens - 1
    assert [(stage.done, stage.total) for stage in stages] == [(0, 1), (1, 1)]


@pytest.mark.parametrize("method", ["hints", "hsd"])
async def test_what_is_said_of_regions_does_not_change_the_text(documents: Documents, method: str) -> None:
    lies = [[0, 0, 1, 1, "another text \u4e2d " * 500], [0, 0.9, 0.001, 1, "x"], [0.5, 0.5, 0.9, 0.6, "y" * 300]]
    script = {
        1: {"regions": lies + parts_of(documents.plain[2])},
        2: {"regions": [[0.2, 0.2, 3, 0.4, "far"]]},
        3: {"regions": [[0.3, 0.3, 0.5, 0.4, documents.plain[2]]] * 80},
    }
    with documents.script(script):
        pages = await documents.check(method=method)
    assert "is not on its page" in pages[1].draft.warnings[0]
    assert pages[1].caption.regions == RegionStage(), "a page without a draft has no regions"
    assert pages[2].caption.regions is not None and pages[2].caption.regions.num_read <= 64


async def test_a_text_that_depends_on_its_regions_waits_for_all_of_them(documents: Documents) -> None:
    asked: dict[str, Any] = {"method": "hsd", "tolerance": 0.5, "pages": "1", **REGIONS}
    with documents.script({1: {"regions": parts_of(documents.plain[0])}}):
        (one,), (other,) = await documents.read(**asked), await documents.read(**asked)
    assert one.text == other.text and one.caption.options["tolerance"] == 0.5
    for page in (one, other):
        assert page.caption.regions is not None and page.caption.regions.num_read == 3
    assert replace(one.caption.regions, seconds=0.0) == replace(other.caption.regions, seconds=0.0)  # type: ignore


async def test_a_reader_that_dies_midway(documents: Documents) -> None:
    def kill(event: DocumentEvent) -> None:
        if isinstance(event, PagePicture) and event.page == 1:
            documents.signal("reader", signal.SIGKILL)

    script: dict[int, dict[str, Any]] = {page + 1: {"regions": parts_of(documents.plain[page])} for page in (1, 2)}
    with documents.script({1: {"hold": "go-never"}} | script):
        pages = await documents.check(kill)
    assert "read without a draft" in pages[0].draft.warnings[0]
    assert [len(page.draft.regions) for page in pages] == [0, 3, 3]


async def test_a_target_that_dies_while_it_reads_regions(documents: Documents) -> None:
    def kill(event: DocumentEvent) -> None:
        nonlocal num_killed
        if isinstance(event, StageChange) and event.stage == "regions" and not num_killed:
            num_killed += 1
            documents.signal("target", signal.SIGKILL)

    num_killed = 0
    with documents.script({page + 1: {"regions": parts_of(documents.plain[page])} for page in range(NUM_PAGES)}):
        await documents.check(kill)
    assert num_killed


async def test_a_document_can_be_left_while_its_regions_are_read(documents: Documents) -> None:
    with documents.script({page + 1: {"regions": parts_of(documents.plain[page])} for page in range(NUM_PAGES)}):
        async with contextlib.aclosing(documents.captioner.document_events(PDF, **ASKED, **REGIONS)) as events:
            async for event in events:
                if isinstance(event, StageChange) and event.stage == "regions":
                    break
        await documents.check()


async def test_what_is_refused(documents: Documents) -> None:
    for asked, words in [
        ({"stage": "regions"}, r"stage 'regions' is unknown; choose one of page, region\+page"),
        (REGIONS | {"method": "autoregressive"}, "method 'autoregressive' drafts from none"),
        (REGIONS | {"method": "prompt_lookup"}, "or ask for hints or hsd"),
    ]:
        with pytest.raises(InvalidRequest, match=words):
            await documents.read(**asked)


async def test_a_target_that_refuses_regions(tmp_path: Path) -> None:
    """It has one place, which the page has, and lets one region wait."""
    target = ("--max-sessions", "1", "--max-queued", "1")
    async with opened(tmp_path, ("--pages-at-once", "1"), target) as documents:

        def let_go(event: DocumentEvent) -> None:
            if isinstance(event, StageChange) and event.stage == "prefill":
                documents.touch("go-1")

        for _ in range(MOST_TRIES):
            with documents.script({1: {"regions": parts_of(documents.plain[0]), "hold": "go-1"}}):
                (page,) = await asyncio.wait_for(documents.read(let_go, pages="1", **REGIONS), START_S)
            assert page.text == documents.plain[0]
            if documents.lost():
                break
        assert documents.lost()
