"""The reader service on the wire: between reader.proto and plain types, and the client, which believes little of it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from slipstream.documents.messages import (
    MAX_DRAFT_BYTES,
    MAX_REGIONS,
    BadDraft,
    Box,
    DocumentFacts,
    DocumentLimits,
    DocumentRequest,
    Origin,
    PageDraft,
    PagePicture,
    ReaderInfo,
    ReadEvent,
    Region,
    RegionKind,
    checked_draft,
)
from slipstream.documents.pages import check_request, parse_pages
from slipstream.errors import ReaderFault, ServiceUnavailable, SlipstreamError
from slipstream.rpc.calls import FirstStatus, as_slipstream_error, is_too_large, open_channel, token_metadata
from slipstream.rpc.codec import from_message, to_message
from slipstream.rpc.grpc_options import CHUNK_BYTES, REQUEST_ID_KEY
from slipstream.rpc.tls import PeerSecurity
from slipstream.rpc.v1 import gateway_pb2, reader_pb2, reader_pb2_grpc

# -- codec -------------------------------------------------------------------------------------------------------------

_KINDS: dict[RegionKind, Any] = {kind: reader_pb2.RegionKind.Value(f"REGION_KIND_{kind.name}") for kind in RegionKind}
_KIND_NAMES = {number: kind for kind, number in _KINDS.items()}
_ORIGINS: dict[Origin, Any] = {origin: reader_pb2.Origin.Value(f"ORIGIN_{origin.name}") for origin in Origin}
_ORIGIN_NAMES = {number: origin for origin, number in _ORIGINS.items()}


def request_messages(data: bytes, request: DocumentRequest) -> Iterator[reader_pb2.ReadRequest]:
    """What asks for a document."""
    start = reader_pb2.ReadStart(
        pages=request.pages,
        dpi=request.dpi,
        ocr_dpi=request.ocr_dpi,
        pictures=request.pictures,
        no_text_layer=not request.text_layer,
        num_bytes=len(data),
        no_ocr=not request.ocr,
    )
    yield reader_pb2.ReadRequest(start=start)
    for first in range(0, len(data), CHUNK_BYTES):
        yield reader_pb2.ReadRequest(data=data[first : first + CHUNK_BYTES])


def read_start(message: reader_pb2.ReadStart) -> DocumentRequest:
    """What is asked of the document that follows. Raises InvalidRequest for resolutions that are not served."""
    request = replace(read_request(message), ocr=not message.no_ocr)
    check_request(request)
    return request


def read_request(message: reader_pb2.ReadStart | gateway_pb2.DocumentOptions) -> DocumentRequest:
    """What is asked of a document, not checked."""
    return DocumentRequest(
        pages=message.pages,
        dpi=message.dpi or DocumentRequest.dpi,
        ocr_dpi=message.ocr_dpi,
        pictures=message.pictures,
        text_layer=not message.no_text_layer,
    )


def event_messages(event: ReadEvent) -> Iterator[reader_pb2.ReadEvent]:
    """What a document says, for the wire."""
    match event:
        case DocumentFacts():
            yield reader_pb2.ReadEvent(facts=to_message(event, reader_pb2.DocumentFacts))
        case PagePicture():
            header = to_message(event, reader_pb2.PagePicture, num_bytes=len(event.pixels))
            yield reader_pb2.ReadEvent(picture=header)
            for first in range(0, len(event.pixels), CHUNK_BYTES):
                yield reader_pb2.ReadEvent(data=event.pixels[first : first + CHUNK_BYTES])
        case PageDraft():
            yield reader_pb2.ReadEvent(draft=draft_message(event))


def draft_message(draft: PageDraft) -> reader_pb2.PageDraft:
    """What a page seems to say, for the wire."""
    return to_message(draft, reader_pb2.PageDraft, regions=[_region_message(region) for region in draft.regions])


def _region_message(region: Region) -> reader_pb2.Region:
    left, top, right, bottom = region.box
    return reader_pb2.Region(
        left=left,
        top=top,
        right=right,
        bottom=bottom,
        kind=_KINDS[region.kind],
        order=region.order,
        text=region.text,
        score=region.score,
        origin=_ORIGINS[region.origin],
    )


def read_draft(message: reader_pb2.PageDraft, picture: PagePicture) -> PageDraft:
    """What the page of that picture seems to say. Raises BadDraft."""
    if len(message.regions) > MAX_REGIONS:
        raise BadDraft("a page has more regions than are taken")
    try:
        regions = tuple(_read_region(region) for region in message.regions)
    except KeyError as failure:
        raise BadDraft(f"a region is of a kind or origin that is not known ({failure})") from None
    draft = PageDraft(
        message.page, picture.width, picture.height, regions, tuple(message.warnings), float(message.seconds)
    )
    return checked_draft(draft, picture.page, picture.width, picture.height)


def _read_region(message: reader_pb2.Region) -> Region:
    box = Box(message.left, message.top, message.right, message.bottom)
    kind, origin = _KIND_NAMES[message.kind], _ORIGIN_NAMES[message.origin]
    return Region(box, kind, message.order, message.text, message.score, origin)


# -- client ------------------------------------------------------------------------------------------------------------

READ = "/slipstream.rpc.v1.Reader/Read"
SILENCE_S = 120.0
"""A reader that says nothing for so long is given up: one page with its two tries takes less, unless others keep the
reader from its cores, where it has up to three times as long."""
ASK_TIMEOUT_S = 5.0
MAX_PICTURE_PIXELS = 4 * DocumentLimits.max_page_pixels
"""Of a page that is taken from a reader, whose own limit may be another than ours."""
_MAX_PAGES = 100_000
_MAX_MESSAGE_BYTES = MAX_DRAFT_BYTES + 2 * CHUNK_BYTES


class RemoteReader:
    """The reader service at an address."""

    def __init__(self, address: str, security: PeerSecurity | None = None, token: str = "") -> None:
        """Raises InvalidConfig for a token that others on the way could read."""
        self._metadata = token_metadata(address, security, token)
        self._channel = open_channel(address, security, max_receive_bytes=_MAX_MESSAGE_BYTES)
        self._stub = reader_pb2_grpc.ReaderStub(self._channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._read = self._channel.stream_stream(READ, reader_pb2.ReadRequest.SerializeToString, _event_or_none)

    async def ask(self, timeout_s: float = ASK_TIMEOUT_S) -> ReaderInfo:
        """What it takes. Raises ServiceUnavailable when it is not reachable."""
        try:
            message = await self._stub.GetReader(
                reader_pb2.GetReaderRequest(), timeout=timeout_s, metadata=self._metadata, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise as_slipstream_error(error, "reader") from None
        if message is None:
            raise ServiceUnavailable("the reader sent bytes that are no message")
        return from_message(message, ReaderInfo)

    async def read(
        self, data: bytes, request: DocumentRequest, *, request_id: str = "", silence_s: float = SILENCE_S
    ) -> AsyncGenerator[ReadEvent, None]:
        """What the document says: its facts, then each page's picture and draft. Close the iterator to end the work.

        Raises what the service refuses, ServiceUnavailable when it is gone, and ReaderFault when it says what cannot
        be, too much, or nothing for `silence_s`.
        """
        metadata = [*self._metadata, *([(REQUEST_ID_KEY, request_id)] if request_id else [])]
        call = self._read(request_messages(data, request), metadata=grpc.aio.Metadata(*metadata))
        first_status = FirstStatus(call)
        try:
            async with aclosing(_messages(call, first_status, silence_s)) as messages:
                async for event in _checked_events(messages, request):
                    yield event
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


def _event_or_none(data: bytes) -> reader_pb2.ReadEvent | None:
    """None for bytes that are no message, for which gRPC itself would write an error to the log."""
    try:
        return reader_pb2.ReadEvent.FromString(data)
    except DecodeError:
        return None


async def _messages(
    call: Any, first_status: FirstStatus, silence_s: float
) -> AsyncGenerator[reader_pb2.ReadEvent, None]:
    while True:
        try:
            async with asyncio.timeout(silence_s):
                message = await call.read()
        except TimeoutError:
            raise ReaderFault(f"the reader was silent for {silence_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            first = await first_status.correct(error)
            if first.code() is grpc.StatusCode.OK:  # it had ended before it was told all
                return
            raise _failure(first) from None
        if message is grpc.aio.EOF:
            return
        if message is None:
            raise ReaderFault("the reader sent bytes that are no message")
        yield message


def _failure(error: grpc.aio.AioRpcError) -> SlipstreamError:
    if is_too_large(error):
        return ReaderFault(f"the reader sent a message of more than {_MAX_MESSAGE_BYTES} bytes")
    return as_slipstream_error(error, "reader")


async def _checked_events(
    messages: AsyncIterator[reader_pb2.ReadEvent], request: DocumentRequest
) -> AsyncIterator[ReadEvent]:
    """The events, if they are those that the request asks for, in their order. Raises ReaderFault."""
    try:
        facts = _read_facts(await _next(messages, "facts"), request)
        yield facts
        for page in facts.pages:
            picture = await _read_picture(messages, page, request.pictures)
            yield picture
            yield read_draft((await _next(messages, "draft")).draft, picture)
    except BadDraft as failure:
        raise ReaderFault(f"the reader says what cannot be: {failure}") from None
    async for _ in messages:
        raise ReaderFault("the reader says more than was asked")


async def _next(messages: AsyncIterator[reader_pb2.ReadEvent], kind: str) -> reader_pb2.ReadEvent:
    message = await anext(messages, None)
    if message is None:
        raise ReaderFault("the reader ended before its last page")
    if message.WhichOneof("message") != kind:
        raise ReaderFault(f"the reader says something else than {kind}")
    return message


def _read_facts(message: reader_pb2.ReadEvent, request: DocumentRequest) -> DocumentFacts:
    facts = from_message(message.facts, DocumentFacts)
    try:
        is_right = facts.pages == parse_pages(request.pages, min(facts.num_pages, _MAX_PAGES), len(facts.pages))
    except SlipstreamError:
        is_right = False
    if not is_right:
        raise ReaderFault("the reader reads other pages than were asked for")
    return facts


async def _read_picture(messages: AsyncIterator[reader_pb2.ReadEvent], page: int, with_pixels: bool) -> PagePicture:
    header = (await _next(messages, "picture")).picture
    num_pixels = header.width * header.height
    if header.page != page or not 0 < num_pixels <= MAX_PICTURE_PIXELS or not 0 <= header.dpi < 10_000:
        raise ReaderFault("the reader sends another page's picture, or one that is too large")
    if header.num_bytes != (3 * num_pixels if with_pixels else 0):
        raise ReaderFault("the reader sends more or fewer pixels than the picture has")
    pixels = bytearray()
    while len(pixels) < header.num_bytes:
        chunk = (await _next(messages, "data")).data
        if not 0 < len(chunk) <= header.num_bytes - len(pixels):
            raise ReaderFault("the reader sends more pixels than the picture has, or none")
        pixels += chunk
    return PagePicture(page, header.width, header.height, header.dpi, bytes(pixels))
