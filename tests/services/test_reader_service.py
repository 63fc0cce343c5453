"""The reader over a real socket: documents, refusals, readers killed in the middle; and peers that lie to a client."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio

from slipstream.documents import pool as pool_module
from slipstream.documents.messages import (
    DocumentFacts,
    DocumentLimits,
    DocumentRequest,
    PageDraft,
    PagePicture,
    ReadEvent,
)
from slipstream.documents.pool import ReaderPool, check_packages
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    ReaderFault,
    ServiceUnavailable,
    SessionIdle,
    SlipstreamError,
)
from slipstream.rpc.callers import Places
from slipstream.rpc.calls import open_channel
from slipstream.rpc.reader import RemoteReader
from slipstream.rpc.server import make_server
from slipstream.rpc.v1 import reader_pb2, reader_pb2_grpc
from slipstream.services.reader.servicer import ReaderServicer
from tests.rpc.secured import WiredConfig
from tests.support.documents import encrypted, many_pages, needs_documents, pdf_of, words_at
from tests.support.processes import eventually, logged, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = DocumentLimits(page_s=2, open_s=10, max_pages=50, max_bytes=1_000_000)
GOOD = pdf_of([words_at(72, 700, "one"), words_at(72, 700, "two")])
WHOLE = DocumentRequest()


async def drain(reader: RemoteReader, data: bytes, request: DocumentRequest = WHOLE, **more: Any) -> list[ReadEvent]:
    return [event async for event in reader.read(data, request, **more)]


@contextlib.asynccontextmanager
async def served(servicer: Any) -> AsyncIterator[str]:
    server, credentials, _ = make_server(WiredConfig(), ["slipstream.rpc.v1.Reader"])
    assert credentials is None
    reader_pb2_grpc.add_ReaderServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


# -- the servicer, with readers that do as documents say ---------------------------------------------------------------


class Served:
    """A service whose readers are `tests.support.bad_reader`, and a client of it."""

    def __init__(self, pool: ReaderPool, places: Places, address: str) -> None:
        self.pool, self.places, self.address, self.client = pool, places, address, RemoteReader(address)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Served]:
    pytest.importorskip("pypdfium2")
    pool = ReaderPool(LIMITS, module="tests.support.bad_reader")
    servicer = servicer_over(pool, upload_idle_s=30)
    async with served(servicer) as address:
        made = Served(pool, servicer.places, address)
        yield made
        await made.client.close()
    pool.close()


def servicer_over(pool: ReaderPool, upload_idle_s: float) -> ReaderServicer:
    return ReaderServicer(
        pool, max_documents=1, max_queued=1, owner_share=1.0, upload_idle_s=upload_idle_s, min_upload_rate=10_000
    )


@contextlib.asynccontextmanager
async def impatient(service: Served) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a service that waits for no upload."""
    async with served(servicer_over(service.pool, upload_idle_s=0.3)) as address, open_channel(address) as channel:
        yield channel


async def test_a_document_comes_over_the_wire_as_the_pool_reads_it(service: Served) -> None:
    request = DocumentRequest(pages="2,1", dpi=72, pictures=True)
    local = [event async for event in service.pool.read(GOOD, request)]
    remote = await drain(service.client, GOOD, request)
    assert [type(event) for event in remote] == [DocumentFacts, PagePicture, PageDraft, PagePicture, PageDraft]
    assert remote[0] == local[0] and remote[1] == local[1] and remote[3] == local[3]
    for ours, theirs in ((local[2], remote[2]), (local[4], remote[4])):
        assert isinstance(ours, PageDraft) and isinstance(theirs, PageDraft) and ours.regions == theirs.regions


async def test_what_it_takes_is_told(service: Served) -> None:
    info = await service.client.ask()
    assert (info.max_bytes, info.max_pages, info.max_documents) == (1_000_000, 50, 1) and info.version


@pytest.mark.parametrize(
    ("data", "request_", "error", "words"),
    [
        (encrypted(), WHOLE, InvalidRequest, "needs a password"),
        (b"", WHOLE, InvalidRequest, "no bytes"),
        (b"nothing", WHOLE, InvalidRequest, "neither a PDF"),
        (many_pages(60), WHOLE, LimitExceeded, "1-50"),
        (bytes(1_000_001), WHOLE, LimitExceeded, "at most 1000000 bytes"),
        (GOOD, DocumentRequest(pages="7"), InvalidRequest, "pages 1 to 2"),
        (GOOD, DocumentRequest(dpi=5), InvalidRequest, "dpi is 5"),
        pytest.param(*(b"draw hang", WHOLE, LimitExceeded, "page 2 cannot be opened in time"), marks=pytest.mark.long),
        (b"open crash", WHOLE, InvalidRequest, "crashed"),
    ],
)
async def test_refusals_have_their_code(
    service: Served, data: bytes, request_: DocumentRequest, error: type[SlipstreamError], words: str
) -> None:
    with pytest.raises(error, match=words):
        await drain(service.client, data, request_)
    assert len(await drain(service.client, GOOD)) == 5


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "begins with `start`"),
        ([reader_pb2.ReadRequest(data=b"x")], "begins with `start`"),
        (
            [reader_pb2.ReadRequest(start=reader_pb2.ReadStart(num_bytes=2)), reader_pb2.ReadRequest(data=b"xyz")],
            "more",
        ),
        (
            [reader_pb2.ReadRequest(start=reader_pb2.ReadStart(num_bytes=9)), reader_pb2.ReadRequest(data=b"xyz")],
            "ended",
        ),
        ([reader_pb2.ReadRequest(start=reader_pb2.ReadStart(num_bytes=9))] * 2, "takes `data` only"),
    ],
)
async def test_calls_that_break_the_protocol(service: Served, messages: list[Any], words: str) -> None:
    async with open_channel(service.address) as channel:
        call = reader_pb2_grpc.ReaderStub(channel).Read(iter(messages))
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_upload_that_stalls_gives_its_place_to_others(service: Served) -> None:
    async def stalling() -> AsyncIterator[reader_pb2.ReadRequest]:
        yield reader_pb2.ReadRequest(start=reader_pb2.ReadStart(num_bytes=9))
        await asyncio.Event().wait()

    async with impatient(service) as channel:
        call = reader_pb2_grpc.ReaderStub(channel).Read(stalling())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code().name == SessionIdle.status


@pytest.mark.parametrize("piece", [b"", b"x"])
async def test_an_upload_that_trickles_gives_its_place_to_others(service: Served, piece: bytes) -> None:
    async def trickling() -> AsyncIterator[reader_pb2.ReadRequest]:
        yield reader_pb2.ReadRequest(start=reader_pb2.ReadStart(num_bytes=10**6))
        while True:
            yield reader_pb2.ReadRequest(data=piece)
            await asyncio.sleep(0.05)

    async with impatient(service) as channel:
        call = reader_pb2_grpc.ReaderStub(channel).Read(trickling())
        with pytest.raises(grpc.aio.AioRpcError, match="bytes a second") as caught:
            await call.read()
        assert caught.value.code().name == SessionIdle.status


async def test_more_documents_than_may_wait_are_refused(service: Served) -> None:
    calls = [service.client.read(b"draft hang", DocumentRequest(pages="2")) for _ in range(2)]
    assert isinstance(await anext(calls[0]), DocumentFacts)
    waiting = asyncio.ensure_future(anext(calls[1]))
    await eventually(lambda: service.places.used == 2)
    with pytest.raises(Overloaded, match="documents are read or wait"):
        await drain(service.client, GOOD)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    for call in calls:
        await call.aclose()
    assert len(await drain(service.client, GOOD)) == 5


async def test_readers_killed_in_the_middle_cost_drafts_at_most(service: Served) -> None:
    said: list[ReadEvent] = []
    async for event in service.client.read(many_pages(6), WHOLE):
        said.append(event)
        if isinstance(event, PageDraft):
            for pid in service.pool.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert [event.page for event in said if isinstance(event, PageDraft)] == [1, 2, 3, 4, 5, 6]


# -- the process -------------------------------------------------------------------------------------------------------


@needs_documents
async def test_the_service_as_a_process(tmp_path: Path) -> None:
    async with running("reader", tmp_path, "--max-documents", "1") as process:
        client = RemoteReader(process.address)
        events = await drain(client, pdf_of([words_at(72, 700, "Seven foxes read", 20)]))
        await client.close()
        assert isinstance(events[2], PageDraft) and [region.text for region in events[2].regions] == [
            "Seven foxes read"
        ]
        assert process.pid is not None
        children = psutil.Process(process.pid).children(recursive=True)
    assert children
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 60)
    assert not alive
    assert logged(process.log_path, "service.stopped") and logged(process.log_path, "document.read", num_pages=1)


async def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(InvalidConfig, match=r"no_such_package\): pip install 'slipstream\[documents\]'") as caught:
        check_packages()
    assert caught.value.exit_code == 2


# -- peers that lie ----------------------------------------------------------------------------------------------------


def event(**fields: Any) -> reader_pb2.ReadEvent:
    return reader_pb2.ReadEvent(**fields)


FACTS = event(facts=reader_pb2.DocumentFacts(num_pages=1, pages=[1]))
PICTURE = event(picture=reader_pb2.PagePicture(page=1, width=10, height=10))
REGION = reader_pb2.Region(right=5, bottom=5, kind=1, text="fox", score=0.5, origin=2)
DRAFT = event(draft=reader_pb2.PageDraft(page=1, regions=[REGION]))


def drafted(**fields: Any) -> list[Any]:
    region = reader_pb2.Region()
    region.CopyFrom(REGION)
    region.MergeFrom(reader_pb2.Region(**fields))
    return [FACTS, PICTURE, event(draft=reader_pb2.PageDraft(page=1, regions=[region]))]


LIES: dict[str, list[Any]] = {
    "nothing": [],
    "an empty message": [event()],
    "no facts": [PICTURE, DRAFT],
    "other pages": [event(facts=reader_pb2.DocumentFacts(num_pages=2, pages=[2]))],
    "too many pages": [event(facts=reader_pb2.DocumentFacts(num_pages=4_000_000_000, pages=[1]))],
    "no page": [event(facts=reader_pb2.DocumentFacts())],
    "an end before the draft": [FACTS, PICTURE],
    "another page's picture": [FACTS, event(picture=reader_pb2.PagePicture(page=2, width=1, height=1))],
    "a picture of nothing": [FACTS, event(picture=reader_pb2.PagePicture(page=1))],
    "a vast picture": [FACTS, event(picture=reader_pb2.PagePicture(page=1, width=2**31, height=2**31))],
    "pixels that nobody wants": [FACTS, event(picture=reader_pb2.PagePicture(page=1, width=1, height=1, num_bytes=3))],
    "a draft of another page": [FACTS, PICTURE, event(draft=reader_pb2.PageDraft(page=7))],
    "a box off the page": drafted(right=11),
    "an unknown kind": drafted(kind=77),
    "an unknown origin": drafted(origin=77),
    "a score that is none": drafted(score=float("nan")),
    "an order with holes": drafted(order=5),
    "too many regions": [FACTS, PICTURE, event(draft=reader_pb2.PageDraft(page=1, regions=[REGION] * 2001))],
    "too long a text": drafted(text="x" * 200_001),
    "a message beyond all sizes": drafted(text="x" * 4_000_000),
    "more than was asked": [FACTS, PICTURE, DRAFT, PICTURE],
}


class Liar(reader_pb2_grpc.ReaderServicer):
    """Says what it was given, once it has heard the request out: its caller loses what is said behind a write that
    fails (https://github.com/grpc/grpc/issues/36066)."""

    def __init__(self, says: Iterable[Any], *, then_waits: bool = False) -> None:
        self._says, self._then_waits = says, then_waits

    async def Read(self, requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async for _ in requests:
            pass
        for message in self._says:
            yield message
        if self._then_waits:
            await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def lied_to(says: Iterable[Any], **more: Any) -> AsyncIterator[RemoteReader]:
    async with served(Liar(says, **more)) as address:
        client = RemoteReader(address)
        try:
            yield client
        finally:
            await client.close()


@pytest.mark.parametrize("name", LIES)
async def test_lies_end_in_a_fault(name: str) -> None:
    async with lied_to(LIES[name]) as client:
        with pytest.raises(ReaderFault, match="reader"):
            await drain(client, GOOD)


async def test_pixels_are_counted() -> None:
    header = event(picture=reader_pb2.PagePicture(page=1, width=2, height=1, num_bytes=6))
    wants = DocumentRequest(pictures=True)
    for chunks in ([b"1234567"], [b"123", b""], [b"123", b"1234"]):
        async with lied_to([FACTS, header, *(event(data=chunk) for chunk in chunks)]) as client:
            with pytest.raises(ReaderFault, match="more pixels"):
                await drain(client, GOOD, wants)
    async with lied_to([FACTS, header, event(data=b"1234"), event(data=b"56"), DRAFT]) as client:
        with pytest.raises(ReaderFault, match="not on its page"):  # the pixels are well
            await drain(client, GOOD, wants)


async def test_a_silent_reader_is_given_up() -> None:
    async with lied_to([FACTS, PICTURE], then_waits=True) as client:
        with pytest.raises(ReaderFault, match=r"silent for 0\.2 s"):
            await drain(client, GOOD, silence_s=0.2)


async def test_a_reader_that_is_gone() -> None:
    client = RemoteReader("127.0.0.1:1")
    with pytest.raises(ServiceUnavailable, match="not reachable"):
        await drain(client, GOOD)
    await client.close()


async def test_texts_are_cleaned() -> None:
    async with lied_to(drafted(text="a\x1b[2Jb")) as client:
        draft = (await drain(client, GOOD))[2]
    assert isinstance(draft, PageDraft) and draft.regions[0].text == "a[2Jb"
