"""Documents as in gateway.proto, to and from plain types; and the method as a client calls it."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import grpc

from slipstream.documents.messages import BadDraft, DocumentFacts, PageDraft, PagePicture
from slipstream.documents.reading import DocumentEvent, DocumentOptions
from slipstream.errors import InvalidRequest, ProtocolViolation
from slipstream.rpc.codec import (
    caption_event,
    from_message,
    options_message,
    read_caption_event,
    read_options,
    to_message,
)
from slipstream.rpc.grpc_options import CHUNK_BYTES
from slipstream.rpc.reader import draft_message, read_draft, read_request
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc, reader_pb2

# -- the request -------------------------------------------------------------------------------------------------------


def document_options_message(
    asked: DocumentOptions, *, path: str = "", request_id: str = ""
) -> gateway_pb2.ReadDocumentRequest:
    """What asks for a document."""
    request = asked.request
    options = gateway_pb2.DocumentOptions(
        path=path,
        request_id=request_id,
        pages=request.pages,
        dpi=request.dpi,
        ocr_dpi=request.ocr_dpi,
        no_text_layer=not request.text_layer,
        surface=asked.surface,
        pictures=request.pictures,
        caption=options_message(asked.caption),
        stage=asked.stage,
        ocr=asked.ocr,
    )
    return gateway_pb2.ReadDocumentRequest(options=options)


def document_chunk_message(data: bytes) -> gateway_pb2.ReadDocumentRequest:
    """The next bytes of a document."""
    return gateway_pb2.ReadDocumentRequest(document=data)


def read_document_options(message: gateway_pb2.DocumentOptions) -> DocumentOptions:
    """What is asked of the document that follows. Raises `InvalidRequest` for values that no gateway takes."""
    if message.caption.path or message.caption.request_id:
        raise InvalidRequest("path and request_id are the document's, not its caption options'")
    usual = DocumentOptions
    return DocumentOptions(
        read_request(message),
        surface=message.surface or usual.surface,
        caption=read_options(message.caption),
        stage=message.stage or usual.stage,
        ocr=message.ocr or usual.ocr,
    ).check()


# -- what is answered --------------------------------------------------------------------------------------------------


def document_event_messages(event: DocumentEvent) -> Iterator[gateway_pb2.ReadDocumentEvent]:
    """What a document says, for the wire."""
    match event:
        case DocumentFacts():
            yield gateway_pb2.ReadDocumentEvent(facts=to_message(event, reader_pb2.DocumentFacts))
        case PagePicture():
            page = to_message(event, reader_pb2.PagePicture, num_bytes=len(event.pixels))
            yield gateway_pb2.ReadDocumentEvent(page=page)
            for first in range(0, len(event.pixels), CHUNK_BYTES):
                yield gateway_pb2.ReadDocumentEvent(pixels=event.pixels[first : first + CHUNK_BYTES])
        case PageDraft():
            yield gateway_pb2.ReadDocumentEvent(draft=draft_message(event))
        case _:
            yield gateway_pb2.ReadDocumentEvent(caption=caption_event(event))


async def read_document_events(messages: AsyncIterator[Any]) -> AsyncGenerator[DocumentEvent, None]:
    """What a document says. Raises `ProtocolViolation` for messages that say nothing, or are out of order."""
    picture: PagePicture | None = None
    messages = aiter(messages)
    async for message in messages:
        match message.WhichOneof("message"):
            case "facts":
                yield from_message(message.facts, DocumentFacts)
            case "page":
                picture = await _read_page(messages, message.page)
                yield picture
            case "caption" if picture is not None:
                yield read_caption_event(message.caption)
            case "draft" if picture is not None:
                try:
                    yield read_draft(message.draft, picture)
                except BadDraft as failure:
                    raise ProtocolViolation(f"the gateway sent a draft that cannot be: {failure}") from None
            case kind:
                raise ProtocolViolation(f"the gateway sent {kind or 'an empty message'} out of its place")


async def _read_page(messages: AsyncIterator[Any], header: reader_pb2.PagePicture) -> PagePicture:
    pixels = bytearray()
    while len(pixels) < header.num_bytes:
        message = await anext(messages, None)
        if message is None or not message.pixels or len(pixels) + len(message.pixels) > header.num_bytes:
            raise ProtocolViolation("the gateway sent more or fewer pixels than the page has")
        pixels += message.pixels
    return PagePicture(header.page, header.width, header.height, header.dpi, bytes(pixels))


def call_read_document(
    channel: grpc.aio.Channel,
    requests: AsyncIterator[gateway_pb2.ReadDocumentRequest],
    *,
    timeout_s: float,
    metadata: grpc.aio.Metadata,
) -> Any:
    """The call, begun."""
    return gateway_pb2_grpc.GatewayStub(channel).ReadDocument(requests, timeout=timeout_s, metadata=metadata)
