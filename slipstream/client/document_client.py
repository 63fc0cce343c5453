"""Documents for programs: one is sent to the gateway, and its pages come as the target reads them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from slipstream.client.caption_client import RemotePath, Upload, Video, call_failure, check_video
from slipstream.client.connection import Connection, closing_told
from slipstream.config import own_number
from slipstream.documents.messages import DocumentRequest, PageDraft
from slipstream.documents.reading import DocumentEvent, DocumentOptions
from slipstream.errors import (
    InvalidConfig,
    ProtocolViolation,
    ServiceUnavailable,
    ServiceUnreachable,
    UnreadableDocument,
)
from slipstream.options import CallOptions, keywords_of
from slipstream.rpc.calls import FirstStatus
from slipstream.rpc.document_codec import (
    call_read_document,
    document_chunk_message,
    document_options_message,
    read_document_events,
)
from slipstream.service_info import GatewayInfo

DOCUMENT_TIMEOUT_S = 6 * 3600.0
LOST = "the gateway was lost; ask it for the rest ({} pages were read)"
EventT = TypeVar("EventT")


@dataclass(frozen=True)
class DocumentCall(CallOptions):
    """What a caller says of one document: the options of each page's caption, and how it is drawn and read."""

    pages: str = field(default="", kw_only=True)
    dpi: int = field(default=DocumentRequest.dpi, kw_only=True)
    ocr_dpi: int = field(default=0, kw_only=True)
    text_layer: bool = field(default=True, kw_only=True)
    surface: str = field(default=DocumentOptions.surface, kw_only=True)
    stage: str = field(default=DocumentOptions.stage, kw_only=True)
    ocr: str = field(default=DocumentOptions.ocr, kw_only=True)
    pictures: bool = field(default=False, kw_only=True)
    request_id: str = field(default="", kw_only=True)
    timeout_s: float = field(default=DOCUMENT_TIMEOUT_S, kw_only=True)

    def document(self) -> DocumentOptions:
        """All that the gateway is asked. Raises `InvalidRequest`."""
        told: list[Any] = [own_number(value) for value in (self.dpi, self.ocr_dpi, self.pictures, self.text_layer)]
        request = DocumentRequest(self.pages, *told)
        return DocumentOptions(request, self.surface, self.asked(), self.stage, self.ocr).check()


with_document_keywords = keywords_of(
    DocumentCall,
    {
        "pages": 'which pages, such as "1-5,9"; empty for all.',
        "dpi": "resolution at which pages are drawn.",
        "ocr_dpi": "that at which the OCR sees them, for making it worse on purpose; 0: the same.",
        "text_layer": "whether the document's own text is taken for a draft, where it is genuine.",
        "surface": 'how the target writes, such as "markdown"; empty: as it says itself.',
        "stage": '"page", or "region+page": the target reads the regions of a page first, for better hints.',
        "ocr": '"always", "paying" (while the OCR saves more time than it takes), or "never".',
        "pictures": "whether the pixels of the pages are wanted.",
        "request_id": "names the document in every log and in the results; made by the gateway when empty.",
        "timeout_s": "seconds that the document may take in all.",
    },
)


def check_document(document: Video) -> None:
    """Raises what is wrong with the document as far as that shows without reading it, as `check_video` does."""
    if isinstance(document, bytes | bytearray | memoryview) and not len(document):
        raise UnreadableDocument("the document has no bytes")
    check_video(document)


def check_reads_documents(info: GatewayInfo) -> None:
    """Raises `InvalidConfig` for a gateway that would refuse every document."""
    if not info.reads_documents:
        raise InvalidConfig(
            "this gateway reads no documents; start it with --reader, the address of a reader service"
            " (`slipstream up --reader` does)"
        )


async def document_events(
    connection: Connection, document: Video, asked: DocumentOptions, *, request_id: str, timeout_s: float
) -> AsyncGenerator[DocumentEvent, None]:
    """Asks for a document and yields its events, see `DocumentEvent`. Closing it ends the work.

    Raises what is wrong with the document, what the gateway says, and ServiceUnavailable when the gateway is not there,
    was lost, or took longer than `timeout_s`. The pages that came before are whole.
    """
    path = document.path if isinstance(document, RemotePath) else ""
    first = document_options_message(asked, path=path, request_id=request_id)
    upload = Upload(document, first, document_chunk_message)
    await connection.settle()
    call = call_read_document(connection.channel, upload.messages(), timeout_s=timeout_s, metadata=connection.metadata)
    answered = answered_events(call, upload, read_document_events(call), PageDraft, LOST, timeout_s)
    async with aclosing(answered) as events:
        async for event in events:
            yield event


async def answered_events(
    call: Any,
    upload: Upload,
    read: AsyncGenerator[EventT, None],
    whole: type,
    lost: str,
    timeout_s: float,
) -> AsyncGenerator[EventT, None]:
    """The events of a call that answers part by part; `whole` is the event that ends a part, and `lost` what to say
    with the number of those when the gateway is.

    Raises what the gateway says, and ServiceUnavailable, see `document_events`.
    """
    first_status, num_parts, is_begun = FirstStatus(call), 0, False
    try:
        with closing_told(lambda: upload.failure):
            async with aclosing(read) as events:
                async for event in events:
                    is_begun, num_parts = True, num_parts + isinstance(event, whole)
                    yield event
    except grpc.aio.AioRpcError as error:
        failure = call_failure(await first_status.correct(error), timeout_s)
        if isinstance(failure, ServiceUnreachable) and is_begun:
            failure = ServiceUnavailable(lost.format(num_parts))
        raise failure from error
    finally:
        call.cancel()
        upload.close()
    if not is_begun:
        raise ProtocolViolation("the gateway ended the call without a word")
