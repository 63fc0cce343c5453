"""Documents through the whole stack, with a reader process that is killed, frozen, slow, or lies: the text of a page is
plain decoding's, and true hints that come late are used."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

import slipstream
from slipstream.documents.messages import NO_OCR, DocumentFacts, PageDraft, PagePicture
from slipstream.documents.reading import DocumentEvent, PageReading
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    SlipstreamError,
    UnreadableDocument,
    UnreadableMedia,
    UnreadableVideo,
    VideoNotFound,
)
from slipstream.messages import Caption, CommittedText, StageChange
from slipstream.rpc.calls import FirstStatus
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from slipstream.stack.local import Stack
from tests.support.document_stack import COLOURS, NUM_PAGES, PAGES_ASKED, PDF, SHAPE, Documents, corner, opened
from tests.support.documents import cyclic, encrypted, needs_documents
from tests.support.gateway_client import TIMEOUT_S
from tests.support.processes import START_S, eventually, logged

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_documents]

NUM_PLACES = 3
"""For captions, at the gateway."""
MOST_TRIES = 5
"""A text may be over before its hints have come, on a busy machine."""
MAX_BYTES = 100_000
GATEWAY_FLAGS = (
    *("--reader-wait-s", str(START_S), "--max-captions", str(NUM_PLACES), "--max-document-bytes", str(MAX_BYTES)),
    *("--upload-idle-s", "2"),
)
ASKED = PAGES_ASKED | {"max_new_tokens": 40}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def documents(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Documents]:
    folder = tmp_path_factory.mktemp("documents")
    root = folder / "root"
    root.mkdir()
    (root / "a.pdf").write_bytes(PDF)
    (root / "empty.pdf").touch()
    async with opened(folder, {"gateway": GATEWAY_FLAGS}, ASKED, roots=(root,)) as running:
        yield running


async def test_events_come_page_by_page(documents: Documents) -> None:
    events: list[DocumentEvent] = []
    pages = await documents.check(events.append, pictures=True)
    assert events[0] == DocumentFacts(NUM_PAGES, (1, 2, 3))
    marks = [event for event in events if isinstance(event, PagePicture | PageDraft | Caption)]
    assert [type(mark) for mark in marks] == [PagePicture, Caption, PageDraft] * NUM_PAGES
    for index, page in enumerate(pages):
        (left, bottom), picture = corner(index), page.picture
        shown = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
        middle = shown[picture.height - (bottom + SHAPE // 2) // 2, (left + SHAPE // 2) // 2]
        assert tuple(middle > 127) == tuple(part > 0.5 for part in COLOURS[index])
        assert page.draft.text.strip() == f"page {index + 1}"
        assert "".join(token.piece for token in page.caption.tokens) == page.text
        assert page.caption.options["method"] == "hints" and page.caption.request_id.endswith(f"-p{page.page}")
    assert "".join(str(event) for event in events if isinstance(event, CommittedText)) == "".join(documents.plain)
    assert "prefill" in {event.stage for event in events if isinstance(event, StageChange)}
    info = await documents.captioner.info()
    assert (info.surface, len(info.target_revision), info.draft_revision) == ("html_tables", 64, "")


async def test_pages_are_chosen_and_come_without_pixels(documents: Documents) -> None:
    pages = await documents.read(pages="3,1", method="prompt_lookup")
    assert [page.page for page in pages] == [3, 1] and not any(page.picture.pixels for page in pages)
    assert [page.text for page in pages] == [documents.plain[2], documents.plain[0]]


@pytest.mark.parametrize("method", ["hints", "hsd"])
async def test_what_the_reader_says_does_not_change_the_text(documents: Documents, method: str) -> None:
    lies = {1: {"text": "another text \u4e2d " * 500}, 2: {"text": "far", "beyond": 1}, 3: {"text": documents.plain[0]}}
    with documents.script(lies):
        pages = await documents.check(method=method)
    assert "is not on its page" in pages[1].draft.warnings[0]


async def test_an_ocr_that_takes_longer_than_the_page_is_left_out_where_it_is_to_pay(documents: Documents) -> None:
    """Never begun, or on a busy machine given up."""
    with documents.script({page: {"hold": "never"} for page in range(1, NUM_PAGES + 1)}):
        pages = await documents.check(ocr="paying")
    assert all(set(page.draft.warnings) <= {NO_OCR} for page in pages)
    with pytest.raises(InvalidRequest, match="ocr 'often' is unknown; choose one of always, paying, never"):
        await documents.read(ocr="often")


async def test_the_target_does_not_wait_for_the_reader_and_late_hints_are_used(documents: Documents) -> None:
    """The draft, which is the page's text, is held until the target has begun with the page. By the method that asks no
    clock whether rows pay."""

    def let_go(event: DocumentEvent) -> None:
        if isinstance(event, StageChange) and event.stage == "prefill":
            documents.touch("go-1")

    for _ in range(MOST_TRIES):
        with documents.script({1: {"text": documents.plain[0], "hold": "go-1"}}):
            (page,) = await documents.read(let_go, pages="1", method="hsd")
        assert page.text == documents.plain[0]
        speculation = page.caption.speculation
        if is_used := speculation.passes < page.caption.num_tokens - 1:
            break
    assert is_used, "a busy machine may have read the page before the draft came, but not each time"
    assert speculation.accepted_prediction_tokens == sum(token.from_draft for token in page.caption.tokens) > 0
    assert logged(documents.log("gateway"), "hints.delivered")


async def test_a_slow_reader_is_not_waited_for(documents: Documents) -> None:
    """The draft of each page comes when its text is whole."""

    def let_go(event: DocumentEvent) -> None:
        if isinstance(event, PagePicture):
            begun.append(event.page)
        elif isinstance(event, Caption):
            documents.touch(f"go-{begun[-1]}")

    begun: list[int] = []
    with documents.script({page: {"hold": f"go-{page}"} for page in range(1, NUM_PAGES + 1)}):
        pages = await documents.check(let_go)
    assert [page.draft.text.strip() for page in pages] == ["page 1", "page 2", "page 3"]
    assert not any(page.caption.speculation.judged for page in pages)


async def test_a_reader_that_is_killed_is_done_without_and_the_next_goes_on(documents: Documents) -> None:
    def kill(event: DocumentEvent) -> None:
        if isinstance(event, PagePicture) and event.page == 1:
            documents.signal("reader", signal.SIGKILL)

    with documents.script({1: {"hold": "never-1"}}):
        pages = await documents.check(kill)
    assert "read without a draft" in pages[0].draft.warnings[0] and not pages[0].draft.regions
    assert [page.draft.text.strip() for page in pages[1:]] == ["page 2", "page 3"]


async def test_a_reader_that_freezes_is_done_without_until_it_thaws(documents: Documents) -> None:
    async def thaw() -> None:
        await asyncio.wait_for(frozen.wait(), START_S)
        await eventually(lambda: len(logged(documents.log("gateway"), "reader.given_up")) > before, START_S)
        documents.signal("reader", signal.SIGCONT)

    def freeze(event: DocumentEvent) -> None:
        if isinstance(event, PagePicture) and event.page == 1:
            documents.signal("reader", signal.SIGSTOP)
            frozen.set()

    frozen, before = asyncio.Event(), len(logged(documents.log("gateway"), "reader.given_up"))
    thawing = asyncio.create_task(thaw())
    with documents.script({1: {"hold": "never-1"}}):
        pages = await documents.check(freeze)
    await thawing
    assert "read without a draft" in pages[0].draft.warnings[0]


async def test_a_target_that_dies_is_gone_on_from_with_the_same_hints(documents: Documents) -> None:
    def kill(event: DocumentEvent) -> None:
        nonlocal is_killed
        if isinstance(event, CommittedText) and not is_killed:
            is_killed = True
            documents.signal("target", signal.SIGKILL)

    for _ in range(MOST_TRIES):  # all may be read before this process hears of the first words
        is_killed, starts = False, documents.stack.processes["target"].starts
        with documents.script({page: {"text": documents.plain[page - 1]} for page in range(1, NUM_PAGES + 1)}):
            pages = await documents.check(kill)
        await documents.stack.wait_started("target", starts + 1)
        if num_resumptions := sum(page.caption.timings.resumptions for page in pages):
            break
    assert num_resumptions >= 1


async def test_a_text_that_depends_on_its_hints_waits_for_them(documents: Documents) -> None:
    stages: list[str] = []

    def let_go(event: DocumentEvent) -> None:
        if isinstance(event, PagePicture):
            documents.touch("go-all")
        elif isinstance(event, StageChange):
            stages.append(event.stage)

    asked: dict[str, Any] = {"method": "hsd", "tolerance": 0.5, "pages": "1"}
    with documents.script({1: {"text": documents.plain[0], "hold": "go-all"}}):
        (late,) = await documents.read(let_go, **asked)
        (early,) = await documents.read(**asked)
    assert late.text == early.text and late.caption.options["tolerance"] == 0.5
    assert late.caption.speculation.judged == early.caption.speculation.judged > 0


async def test_a_document_can_be_left(documents: Documents) -> None:
    """The page that is read and the one after it end at the target, and the places are free again."""
    for turn in range(NUM_PLACES):
        events = documents.captioner.document_events(PDF, request_id=f"left-{turn}", **ASKED)
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, CommittedText):
                    break
        closed = partial(logged, documents.log("target"), "session.closed", request_id=f"left-{turn}-p1")
        await eventually(closed)
    await documents.check()


async def test_the_synchronous_twin(documents: Documents, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(PDF)

    def read() -> list[PageReading]:
        with slipstream.connect(documents.stack.gateway_address) as captioner:
            with captioner.document_events(tmp_path / "a.pdf", **ASKED) as events:
                assert isinstance(next(events), DocumentFacts)
            return list(captioner.read_document(tmp_path / "a.pdf", **ASKED))

    assert [page.text for page in await asyncio.to_thread(read)] == documents.plain


# -- what is refused --------------------------------------------------------------------------------------------------


async def test_a_document_below_a_root_is_read(documents: Documents) -> None:
    (page,) = [
        page async for page in documents.captioner.read_document(slipstream.RemotePath("a.pdf"), pages="1", **ASKED)
    ]
    assert page.text == documents.plain[0]
    assert (await documents.captioner.info()).reads_documents


@pytest.mark.parametrize(
    ("document", "asked", "error", "words"),
    [
        (encrypted(), {}, UnreadableMedia, "needs a password"),
        (PDF[:200], {}, UnreadableMedia, "no PDF that can be read"),
        (cyclic(), {}, UnreadableMedia, "no page that can be found"),
        (b"nothing", {}, UnreadableMedia, "neither a PDF"),
        (b"", {}, UnreadableDocument, "no bytes"),
        (slipstream.RemotePath("empty.pdf"), {}, UnreadableMedia, "no bytes"),
        (slipstream.RemotePath("absent.pdf"), {}, VideoNotFound, "below the allowed folders"),
        (slipstream.RemotePath("/etc/hostname"), {}, VideoNotFound, "below the allowed folders"),
        (slipstream.RemotePath("../script.json"), {}, InvalidRequest, "'..'"),
        (slipstream.RemotePath("https://example.com/a.pdf"), {}, InvalidRequest, "fetches nothing from the network"),
        (bytes(MAX_BYTES + 1), {}, LimitExceeded, f"at most {MAX_BYTES} bytes"),
        (PDF, {"pages": "4"}, InvalidRequest, "pages 1 to 3"),
        (PDF, {"pages": "0"}, InvalidRequest, "pages 1 to 3"),
        (PDF, {"pages": "none"}, InvalidRequest, "no page and no range"),
        (PDF, {"dpi": 5}, InvalidRequest, "dpi is 5"),
        (PDF, {"surface": "latex"}, InvalidRequest, "choose one of markdown"),
        (PDF, {"num_frames": 2}, InvalidRequest, "one frame"),
        (PDF, {"method": "slipstream"}, InvalidConfig, "needs a draft"),
        (PDF, {"max_new_tokens": 10**6}, LimitExceeded, "max_new_tokens"),
        (PDF, {"prediction": ("x",), "method": "autoregressive"}, InvalidRequest, "drafts from no prediction"),
    ],
)
async def test_refusals(
    documents: Documents, document: Any, asked: dict[str, Any], error: type[SlipstreamError], words: str
) -> None:
    with pytest.raises(error, match=words):
        async for _ in documents.captioner.read_document(document, **ASKED | asked):
            pass


async def test_an_upload_that_breaks_off(documents: Documents) -> None:
    class Torn:
        def read(self, size: int, /) -> bytes:
            raise OSError("the disk is gone")

    with pytest.raises(UnreadableVideo, match="the disk is gone"):
        await anext(documents.captioner.read_document(Torn(), **ASKED))

    async def paused() -> AsyncIterator[gateway_pb2.ReadDocumentRequest]:
        yield gateway_pb2.ReadDocumentRequest(options=gateway_pb2.DocumentOptions())
        yield gateway_pb2.ReadDocumentRequest(document=PDF[:100])
        await asyncio.sleep(60)

    code, said = await refusal(documents, paused())
    assert code == "ABORTED" and "the upload was ended" in said


async def test_messages_out_of_order(documents: Documents) -> None:
    async def sent(*messages: gateway_pb2.ReadDocumentRequest) -> AsyncIterator[gateway_pb2.ReadDocumentRequest]:
        for message in messages:
            yield message

    options = gateway_pb2.ReadDocumentRequest(options=gateway_pb2.DocumentOptions())
    misplaced = gateway_pb2.DocumentOptions(caption=gateway_pb2.CaptionOptions(path="a.pdf"))
    for messages, words in [
        ((), "begins with `options`"),
        ((gateway_pb2.ReadDocumentRequest(document=PDF),), "begins with `options`"),
        ((options, options), "`document` chunks only"),
        ((options,), "no bytes"),
        ((gateway_pb2.ReadDocumentRequest(options=misplaced),), "are the document's"),
    ]:
        code, said = await refusal(documents, sent(*messages))
        assert code == "INVALID_ARGUMENT" and words in said


async def refusal(documents: Documents, requests: AsyncIterator[gateway_pb2.ReadDocumentRequest]) -> tuple[str, str]:
    """Code and message that these requests are answered with."""
    connection = await documents.captioner.connection()
    call = gateway_pb2_grpc.GatewayStub(connection.channel).ReadDocument(requests, timeout=TIMEOUT_S)
    first_status = FirstStatus(call)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        error = await first_status.correct(error)
        return error.code().name, error.details() or ""
    raise AssertionError("accepted")


async def test_a_gateway_without_a_reader_says_what_to_do(stack: Stack) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        assert not (await captioner.info()).reads_documents
        with pytest.raises(InvalidConfig, match="start it with --reader"):
            await anext(captioner.read_document(PDF, **ASKED))
