"""The pages of a document over readers that are lost: each picture once and in order, each with a draft."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.captioning import ocr_gate, page_source
from slipstream.captioning.ocr_gate import OcrGate, OcrWatch
from slipstream.captioning.page_source import MAX_TRIES, PageSource
from slipstream.documents.messages import (
    NO_OCR,
    Box,
    DocumentFacts,
    DocumentRequest,
    Origin,
    PageDraft,
    PagePicture,
    ReaderInfo,
    ReadEvent,
    Region,
    RegionKind,
)
from slipstream.documents.pages import parse_pages
from slipstream.errors import ReaderFault, ServiceUnavailable, ServiceUnreachable, SlipstreamError, UnreadableDocument
from slipstream.messages import Caption, Speculation, Timings

NUM_PAGES = 6
LOSSES = (ServiceUnreachable("it is gone"), ReaderFault("it was silent"))


WORDS = Region(Box(0, 0, 1, 1), RegionKind.TEXT, 0, "x", 1.0, Origin.OCR)


@dataclass
class FakeReader:
    """Each call says so many events and then fails; those behind the list are whole."""

    calls: list[tuple[int, SlipstreamError]]
    is_back: bool = True
    asked: list[str] = field(default_factory=list)
    by_ocr: list[bool] = field(default_factory=list)
    """Of each call, whether pages are to be read by OCR."""
    is_slow: bool = False
    """The OCR never ends."""
    is_busy: bool = False
    """Who asks for OCR waits for a turn that never comes."""
    num_pages: int = NUM_PAGES
    has_drawn: asyncio.Event = field(default_factory=asyncio.Event)
    """The last page's picture was asked for."""

    async def ask(self, timeout_s: float) -> ReaderInfo:
        if not self.is_back:
            raise ServiceUnreachable("still gone")
        return ReaderInfo()

    async def read(
        self, data: bytes, request: DocumentRequest, *, request_id: str, silence_s: float
    ) -> AsyncGenerator[ReadEvent, None]:
        assert request.pictures
        self.asked.append(request.pages)
        self.by_ocr.append(request.ocr)
        if self.is_busy and request.ocr:
            await asyncio.Event().wait()
        num_events, failure = self.calls.pop(0) if self.calls else (10**6, None)
        for index, event in enumerate(self.events(parse_pages(request.pages, self.num_pages, 500))):
            if failure is not None and index == num_events:
                raise failure
            if self.is_slow and request.ocr and isinstance(event, PageDraft):
                await asyncio.Event().wait()
            if isinstance(event, PagePicture) and event.page == self.num_pages:
                self.has_drawn.set()
            yield replace(event, regions=(WORDS,)) if request.ocr and isinstance(event, PageDraft) else event

    def events(self, pages: tuple[int, ...]) -> list[ReadEvent]:
        told = [(PagePicture(page, 2, 1, 72, bytes(6)), PageDraft(page, 2, 1, (), (), 0.01)) for page in pages]
        return [DocumentFacts(self.num_pages, pages), *(event for pair in told for event in pair)]


def source_of(reader: FakeReader, pages: str = "", wait_s: float = 5.0, watch: OcrWatch | None = None) -> PageSource:
    return PageSource(cast(Any, reader), b"x", DocumentRequest(pages), wait_s=wait_s, silence_s=1.0, watch=watch)


async def collect(source: PageSource, into: list[ReadEvent]) -> list[ReadEvent]:
    async for event in source.events():
        into.append(event)
    return into


losses = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(LOSSES)), max_size=MAX_TRIES - 1)


@given(losses, st.sampled_from(["", "4-6,1", "2", "6,5,4,1-3"]))
def test_losses_cost_drafts_at_most(calls: list[tuple[int, SlipstreamError]], pages: str) -> None:
    """Fewer in a row than end a document."""
    events = asyncio.run(collect(source_of(FakeReader(list(calls)), pages), []))
    wanted = parse_pages(pages, NUM_PAGES, 100)
    assert [type(event) for event in events] == [DocumentFacts, *([PagePicture, PageDraft] * len(wanted))]
    for kind in (PagePicture, PageDraft):
        assert tuple(event.page for event in events if isinstance(event, kind)) == wanted
    missing = [event for event in events if isinstance(event, PageDraft) and event.warnings]
    assert len(missing) <= len(calls) and all("read without a draft: it " in draft.warnings[0] for draft in missing)


async def test_what_is_left_is_asked_for() -> None:
    reader = FakeReader([(4, LOSSES[0]), (3, LOSSES[1])])
    await collect(source_of(reader, "1-3,6"), [])
    assert reader.asked == ["1-3,6", "3,6", "6"]


async def test_what_is_left_may_be_more_than_can_be_named_at_once() -> None:
    """Pages that are named twice are short to ask for, and long without their names again."""
    pages = ",".join(map(str, range(2, 500, 2))) + ",1-500"
    reader = FakeReader([(3, LOSSES[0])], num_pages=500)
    events = await collect(source_of(reader, pages), [])
    drawn = [event.page for event in events if isinstance(event, PagePicture)]
    assert tuple(drawn) == parse_pages(pages, 500, 500) and len(reader.asked) > 2


@pytest.mark.parametrize(("num_events", "words"), [(0, "the document cannot be opened: it was"), (1, "page 1 cannot")])
async def test_a_page_that_no_reader_draws_ends_the_document(num_events: int, words: str) -> None:
    reader, events = FakeReader([(num_events, LOSSES[1])] * 10), []
    with pytest.raises(ServiceUnavailable, match=words):
        await collect(source_of(reader), events)
    assert len(reader.asked) == MAX_TRIES and len(events) == num_events


async def test_a_reader_that_stays_away_ends_the_document_after_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_source, "RETRY_S", 0.01)
    events: list[ReadEvent] = []
    with pytest.raises(ServiceUnavailable, match="page 2 cannot be had: it is gone"):
        await collect(source_of(FakeReader([(2, LOSSES[0])], is_back=False), wait_s=0.05), events)
    assert isinstance(events[-1], PageDraft) and "without a draft" in events[-1].warnings[0]
    with pytest.raises(ServiceUnavailable, match="page 1 cannot"):
        await collect(source_of(FakeReader([(1, LOSSES[0])]), wait_s=0), [])


async def test_the_last_pages_draft_is_not_waited_for() -> None:
    events = await collect(source_of(FakeReader([(2 * NUM_PAGES, LOSSES[0])], is_back=False)), [])
    assert isinstance(events[-1], PageDraft) and events[-1].page == NUM_PAGES


async def test_what_is_wrong_with_the_document_is_not_tried_again() -> None:
    reader, events = FakeReader([(3, UnreadableDocument("page 2 is torn"))]), []
    with pytest.raises(UnreadableDocument, match="torn"):
        await collect(source_of(reader), events)
    assert len(reader.asked) == 1 and len(events) == 3


async def test_another_document_from_the_next_reader_is_a_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FakeReader([(3, LOSSES[0])])
    source = source_of(reader)
    events = source.events()
    for _ in range(3):
        await anext(events)
    monkeypatch.setattr(FakeReader, "events", staticmethod(lambda pages: [DocumentFacts(NUM_PAGES + 1, pages)]))
    with pytest.raises(ServiceUnavailable, match="counts other pages"):
        await anext(events)


PAGE = Caption("", 11, None, timings=Timings(total_s=0.01, generate_s=0.01), speculation=Speculation(plain_pass_s=1e-3))


async def read_at_once(source: PageSource, watch: OcrWatch) -> list[ReadEvent]:
    """By a target that has read each page as soon as it is there."""
    events = []
    async for event in source.events():
        events.append(event)
        if isinstance(event, PagePicture):
            watch.on_begun()
            watch.on_ended(PAGE)
    return events


async def test_an_ocr_that_the_target_waits_for_is_given_up_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr_gate, "FIRST_REST", 3)
    monkeypatch.setattr(ocr_gate, "LOSS_SHARE", 1e9)
    monkeypatch.setattr(OcrGate, "expects_gain", property(lambda gate: not gate.closed))
    reader, watch = FakeReader([], is_slow=True), OcrWatch(OcrGate())
    events = await read_at_once(source_of(reader, watch=watch), watch)
    assert [event.page for event in events if isinstance(event, PagePicture)] == list(range(1, NUM_PAGES + 1))
    drafts = [event for event in events if isinstance(event, PageDraft)]
    assert [event.page for event in drafts] == list(range(1, NUM_PAGES + 1))
    assert reader.asked == ["", "2-6", "5-6", "6"] and reader.by_ocr == [True, False, True, False]
    assert [draft.warnings for draft in drafts] == [(NO_OCR,), (), (), (), (NO_OCR,), ()]


async def test_a_target_that_reads_pages_at_once_is_never_kept_by_an_ocr_that_nobody_knows() -> None:
    reader, watch = FakeReader([], is_slow=True), OcrWatch(OcrGate())
    events = await read_at_once(source_of(reader, watch=watch), watch)
    assert len(events) == 1 + 2 * NUM_PAGES and reader.by_ocr == [False]


async def test_the_next_picture_is_fetched_while_a_page_is_read() -> None:
    """Its draft is held then, as nobody asked the OCR."""
    reader, watch = FakeReader([], num_pages=2), OcrWatch(OcrGate())
    async for event in source_of(reader, watch=watch).events():
        if isinstance(event, PagePicture):
            watch.on_begun()
            asyncio.create_task(reader.has_drawn.wait()).add_done_callback(lambda _: watch.on_ended(PAGE))
    assert reader.asked == [""]


@pytest.mark.parametrize("failure", [None, LOSSES[0]])
async def test_a_second_reader_reads_a_page_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, failure: SlipstreamError | None
) -> None:
    """And one that fails, or does not come to its end before the page, costs nothing but its draft."""
    monkeypatch.setattr(ocr_gate, "EXPECTED_OCR_S", 0.01)
    reader, watch, events = FakeReader([]), OcrWatch(OcrGate()), []
    async for event in source_of(reader, "5,2,6", watch=watch).events():
        events.append(event)
        if isinstance(event, PagePicture):
            reader.is_slow, reader.calls = event.page == 2, [(2, failure)] * (failure is not None)
            asyncio.get_running_loop().call_later(0.1 if reader.is_slow else 60, watch.on_ended, None)
        elif isinstance(event, PageDraft) and not reader.is_slow:
            watch.on_ended(None)
    assert [event.page for event in events[1:]] == [5, 5, 2, 2, 6, 6]
    assert reader.asked == ["5,2,6", "5", "2", "6"] and reader.by_ocr == [False, True, True, True]
    by_ocr = [event.page for event in events if isinstance(event, PageDraft) and event.regions]
    assert by_ocr == ([5, 6] if failure is None else [])


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_second_reader_takes_no_time_before_it_has_its_turn(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    monkeypatch.setattr(ocr_gate, "EXPECTED_OCR_S", 0.01)
    reader, watch = FakeReader([], is_slow=True, is_busy=is_busy, num_pages=1), OcrWatch(OcrGate())
    slower: list[float] = []
    monkeypatch.setattr(watch, "on_slower", slower.append)
    async for event in source_of(reader, watch=watch).events():
        if isinstance(event, PagePicture):
            asyncio.get_running_loop().call_later(0.3, watch.on_ended, None)
    assert reader.asked == ["", "1"] and len(slower) == (0 if is_busy else 1)


async def test_who_is_asked_for_no_ocr_gives_none_up() -> None:
    reader, watch = FakeReader([], is_slow=True), OcrWatch(OcrGate())
    source = PageSource(cast(Any, reader), b"x", DocumentRequest(ocr=False), wait_s=5.0, silence_s=1.0, watch=watch)
    events = await read_at_once(source, watch)
    assert len(events) == 1 + 2 * NUM_PAGES and reader.by_ocr == [False]
