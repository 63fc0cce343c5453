"""Pages whose regions the target reads first, through the whole stack: the text is plain decoding's, whatever the
reader says of regions, and whoever dies or refuses meanwhile."""

import asyncio
import contextlib
import json
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from slipstream.documents.messages import PagePicture, RegionStage
from slipstream.documents.reading import DocumentEvent
from slipstream.errors import InvalidRequest
from slipstream.messages import StageChange
from tests.support.document_stack import NUM_PAGES, PAGES_ASKED, PDF, TARGET, Documents, opened
from tests.support.documents import needs_documents
from tests.support.processes import START_S, logged
from tests.support.variants import some

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_documents]

ASKED = PAGES_ASKED | {"max_new_tokens": 60}
REGIONS = {"stage": "region+page"}
MOST_TRIES = 5
"""A text may be over before its regions are read, on a busy machine."""


def parts_of(text: str) -> list[list[Any]]:
    """Regions that say the text, piece by piece, and whose boxes overlap: the whole page, and parts of it."""
    third = len(text) // 3
    boxes = ([0, 0, 1, 1], [0.1, 0.2, 0.9, 0.5], [0, 0.5, 0.4, 0.6])
    return [[*box, text[number * third : (number + 1) * third]] for number, box in enumerate(boxes)]


def resizing_target(folder: Path) -> Path:
    """One that takes pictures of other sizes than pages, so that small regions are cut out."""
    made = folder / "target"
    shutil.copytree(TARGET, made)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((made / name).read_text())
        settings["size"]["shortest_edge"] = 28 * 28
        (made / name).write_text(json.dumps(settings))
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def documents(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Documents]:
    flags = ("--reader-wait-s", str(START_S), "--resume-wait-s", str(START_S), "--regions-at-once", "2")
    folder = tmp_path_factory.mktemp("documents")
    async with opened(folder, {"gateway": flags}, ASKED, target=resizing_target(folder)) as running:
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
        facts = page.caption.regions
        assert page.text == documents.plain[0] and facts is not None
        if page.caption.speculation.passes < page.caption.num_tokens - 1 and facts.passes < facts.num_tokens:
            break
    assert (facts.num_regions, facts.num_read) == (1, 1) and facts.num_tokens > 1
    assert facts.accepted_prediction_tokens and facts.passes < facts.num_tokens and facts.seconds > 0
    assert page.caption.speculation.passes < page.caption.num_tokens - 1
    assert [(stage.done, stage.total) for stage in stages] == [(0, 1), (1, 1)]


@pytest.mark.parametrize("method", some(["hints", "hsd"], keep=("hints",)))
async def test_what_is_said_of_regions_does_not_change_the_text(documents: Documents, method: str) -> None:
    lies = [[0, 0, 1, 1, "another text \u4e2d " * 500], [0, 0.9, 0.001, 1, "x"], [0.5, 0.5, 0.9, 0.6, "y" * 300]]
    script = {
        1: {"regions": lies + parts_of(documents.plain[2])},
        2: {"regions": [[0.2, 0.2, 3, 0.4, "far"]]},
        3: {"regions": [[0.3, 0.3, 0.5, 0.4, documents.plain[2]]] * 80},
    }
    with documents.script(script):
        pages = await documents.check(method=method, **REGIONS)
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
        pages = await documents.check(kill, **REGIONS)
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
        await documents.check(kill, **REGIONS)
    assert num_killed


async def test_a_document_can_be_left_while_its_regions_are_read(documents: Documents) -> None:
    with documents.script({page + 1: {"regions": parts_of(documents.plain[page])} for page in range(NUM_PAGES)}):
        async with contextlib.aclosing(documents.captioner.document_events(PDF, **ASKED, **REGIONS)) as events:
            async for event in events:
                if isinstance(event, StageChange) and event.stage == "regions":
                    break
        await documents.check(**REGIONS)


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
    flags = {"gateway": ("--pages-at-once", "1"), "target": ("--max-sessions", "1", "--max-queued", "1")}
    async with opened(tmp_path, flags, ASKED, target=resizing_target(tmp_path)) as documents:

        def let_go(event: DocumentEvent) -> None:
            if isinstance(event, StageChange) and event.stage == "prefill":
                documents.touch("go-1")

        for _ in range(MOST_TRIES):
            with documents.script({1: {"regions": parts_of(documents.plain[0]), "hold": "go-1"}}):
                (page,) = await asyncio.wait_for(documents.read(let_go, pages="1", **REGIONS), START_S)
            assert page.text == documents.plain[0]
            if lost := logged(documents.log("gateway"), "region.lost"):
                break
        assert lost
