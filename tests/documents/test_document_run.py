"""The order of a document's events, what is at once, and that nothing is left behind."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.captioning.document_run import MOST_UNTOLD, DocumentRun, PageRun
from slipstream.documents.messages import DocumentFacts, PageDraft, PagePicture, ReadEvent
from slipstream.documents.reading import DocumentEvent, page_readings
from slipstream.errors import ProtocolViolation, ServiceUnavailable, UnreadableDocument
from slipstream.messages import Caption, CommittedText, CommittedToken, StageChange

NUM_PAGES = 5


class World:
    """A source and a reading of pages that go on step by step, in any order."""

    def __init__(self, *, source_fails_at: int = 0, page_fails: int = 0) -> None:
        self.source_fails_at, self.page_fails = source_fails_at, page_fails
        self.at_once = self.most_at_once = self.num_drawn = self.num_ended = 0
        self.steps: list[asyncio.Event] = []

    async def step(self) -> None:
        event = asyncio.Event()
        self.steps.append(event)
        await event.wait()

    async def source(self) -> AsyncGenerator[ReadEvent, None]:
        yield DocumentFacts(NUM_PAGES, tuple(range(1, NUM_PAGES + 1)))
        for page in range(1, NUM_PAGES + 1):
            await self.step()
            if page == self.source_fails_at:
                raise UnreadableDocument("torn")
            self.num_drawn += 1
            yield PagePicture(page, 2, 1, 72, bytes(6))
            await self.step()
            yield PageDraft(page, 2, 1, ())

    async def read(self, page: PageRun) -> None:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            for index in range(2):
                await self.step()
                page.emit(CommittedText((CommittedToken(index, f"{page.picture.page}{index} ", from_draft=False),)))
            if page.picture.page == self.page_fails:
                raise ServiceUnavailable("the target is gone")
            page.emit(Caption(f"{page.picture.page}", 2, None))
        finally:
            self.at_once -= 1
            self.num_ended += 1

    async def drive(self, choose: Random) -> None:
        """Lets one or the other go on."""
        while True:
            await asyncio.sleep(0)
            if self.steps:
                self.steps.pop(choose.randrange(len(self.steps))).set()

    def run(self, pages_at_once: int = 2, *, pixels: bool = False) -> DocumentRun:
        return DocumentRun(self.source(), self.read, pages_at_once=pages_at_once, pixels=pixels)


async def events_of(world: World, run: DocumentRun, choose: Random, leave_after: int = 10**6) -> list[DocumentEvent]:
    """As many as come; checks that all work has ended then."""
    driving, events, before = asyncio.create_task(world.drive(choose)), [], asyncio.all_tasks()
    try:
        async with aclosing(run.events()) as source:
            async for event in source:
                events.append(event)
                if len(events) == leave_after:
                    break
    except (UnreadableDocument, ServiceUnavailable) as error:
        events.append(StageChange(str(error)))
    finally:
        assert asyncio.all_tasks() - before == {driving} - before and not world.at_once
        driving.cancel()
    return events


WHOLE = [
    DocumentFacts,
    *[PagePicture, CommittedText, CommittedText, Caption, PageDraft] * NUM_PAGES,
]


@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_pages_come_in_their_order_whatever_goes_on_first(seed: int, pages_at_once: int, pixels: bool) -> None:
    world = World()
    events = asyncio.run(events_of(world, world.run(pages_at_once, pixels=pixels), Random(seed)))
    assert [type(event) for event in events] == WHOLE
    assert "".join(str(event) for event in events if isinstance(event, CommittedText)) == "".join(
        f"{page}{index} " for page in range(1, NUM_PAGES + 1) for index in range(2)
    )
    assert world.most_at_once <= pages_at_once
    assert [bool(event.pixels) for event in events if isinstance(event, PagePicture)] == [pixels] * NUM_PAGES


@given(st.integers(0, 2**32), st.integers(1, NUM_PAGES), st.sampled_from(["source", "page"]))
def test_a_page_that_fails_ends_the_document_after_those_before(seed: int, page: int, where: str) -> None:
    world = World(source_fails_at=page if where == "source" else 0, page_fails=page if where == "page" else 0)
    events = asyncio.run(events_of(world, world.run(), Random(seed)))
    assert [event.page for event in events if isinstance(event, PageDraft)] == list(range(1, page))
    assert events[-1] == StageChange("torn" if where == "source" else "the target is gone")


@given(st.integers(0, 2**32), st.integers(1, len(WHOLE)))
def test_whoever_leaves_leaves_no_work_behind(seed: int, leave_after: int) -> None:
    world = World()
    events = asyncio.run(events_of(world, world.run(), Random(seed), leave_after))
    assert [type(event) for event in events] == WHOLE[:leave_after]
    assert world.num_drawn <= NUM_PAGES


@given(st.integers(0, 2**32))
def test_readings_are_made_of_events(seed: int) -> None:
    async def read() -> list[tuple[int, str, int]]:
        world = World()
        driving = asyncio.create_task(world.drive(Random(seed)))
        pages = page_readings(world.run().events())
        found = [(page.page, page.text, len(page.caption.tokens)) async for page in pages]
        driving.cancel()
        return found

    assert asyncio.run(read()) == [(page, f"{page}", 2) for page in range(1, NUM_PAGES + 1)]


async def test_events_that_make_no_page() -> None:
    async def only_a_draft() -> AsyncGenerator[DocumentEvent, None]:
        yield PageDraft(1, 2, 1, ())

    with pytest.raises(ProtocolViolation, match="has not read"):
        await anext(page_readings(only_a_draft()))


@pytest.mark.parametrize("stays", ["the first page", "who hears it"])
async def test_few_pages_are_held_behind_one_that_takes_long(stays: str) -> None:
    """Or behind a caller who takes nothing: each has its picture with it."""
    num_pages, drawn, long = 100, list[int](), asyncio.Event()

    async def source() -> AsyncGenerator[ReadEvent, None]:
        for page in range(1, num_pages + 1):
            drawn.append(page)
            yield PagePicture(page, 2, 1, 72, bytes(6))
            yield PageDraft(page, 2, 1, ())

    async def read(page: PageRun) -> None:
        if page.picture.page == 1 and stays == "the first page":
            await long.wait()

    events = DocumentRun(source(), read, pages_at_once=2, pixels=False).events()
    async with aclosing(events):
        assert isinstance(await anext(events), PagePicture)
        following = asyncio.ensure_future(anext(events)) if stays == "the first page" else None
        for _ in range(20 * num_pages):
            await asyncio.sleep(0)
        assert len(drawn) == 2 + MOST_UNTOLD + 1, "the picture of one more is held ready"
        long.set()
        first = [await following] if following else []
        pages = [event.page for event in [*first, *[event async for event in events]] if isinstance(event, PageDraft)]
    assert pages == list(range(1, num_pages + 1))
