"""Who reads documents for `slipstream read`: a gateway's target, or the OCR alone; and what is known of each page."""

import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.cli.caption import open_gateway
from slipstream.cli.common import ConnectionOptions
from slipstream.cli.views import caption_dict, printable
from slipstream.client.async_captioner import AsyncCaptioner
from slipstream.client.document_client import DocumentCall, check_reads_documents
from slipstream.client.receipts import caller_receipt
from slipstream.documents.messages import DocumentLimits, DocumentRequest, PageDraft, ReadEvent
from slipstream.documents.pool import ReaderPool, check_packages
from slipstream.documents.reading import PAGE_OPTIONS, PageReading, page_readings
from slipstream.documents.surfaces import surface_of
from slipstream.errors import UnreadableDocument
from slipstream.logs import configure_logs
from slipstream.messages import Caption
from slipstream.options import TOLD_BESIDE
from slipstream.rpc.reader import RemoteReader
from slipstream.rpc.tls import make_peer_security
from slipstream.service_info import GatewayInfo
from slipstream.stack.local import StackOptions


@dataclass(frozen=True)
class PaperFile:
    """A document's bytes, and what they are called."""

    name: str
    data: bytes
    sha256: str


@dataclass(frozen=True)
class OcrAlone:
    """Who reads without any model."""

    read: Callable[[bytes], AsyncGenerator[ReadEvent, None]]
    surface: str

    async def pages(self, file: PaperFile) -> AsyncGenerator["ReadPage", None]:
        """What the OCR says of each page."""
        async with aclosing(self.read(file.data)) as events:
            async for event in events:
                if isinstance(event, PageDraft):
                    yield ReadPage(event)


@dataclass(frozen=True)
class TargetReader:
    """Who reads with the OCR's words as hints."""

    captioner: AsyncCaptioner
    call: DocumentCall
    surface: str

    async def pages(self, file: PaperFile) -> AsyncGenerator["ReadPage", None]:
        """Each page as the target reads it, with its receipt."""
        info = await self.captioner.info()
        async with aclosing(page_readings(self.captioner.start_document(file.data, self.call))) as readings:
            async for reading in readings:
                yield ReadPage(reading.draft, reading, self._receipt(reading.caption, info, file))

    def _receipt(self, caption: Caption, info: GatewayInfo, file: PaperFile) -> dict[str, Any]:
        """In the form of the archive's; options as far as they were given or the summary tells."""
        given = self.call.asked().over(PAGE_OPTIONS).given()
        left_out = {*TOLD_BESIDE} | (set() if caption.lossy_facts else {"prediction"})
        used = given | {name: value for name, value in caption.options.items() if value}
        receipt = caller_receipt(
            caption,
            info,
            {name: value for name, value in used.items() if name not in left_out},
            sha256=file.sha256,
            num_bytes=len(file.data),
        )
        summary = caption_dict(caption)
        del summary["text"]  # which stands beside the receipt
        return receipt.as_record() | summary


@dataclass(frozen=True)
class ReadPage:
    """One page: what the OCR says of it, and, where a target has read it, that with its receipt."""

    draft: PageDraft
    reading: PageReading | None = None
    receipt: Mapping[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def open_target(
    gateway: str | None, connection: ConnectionOptions, stack_options: StackOptions, call: DocumentCall
) -> AsyncIterator[TargetReader]:
    """A gateway's target; without an address, that of a stack of this command's own."""
    if gateway is None:
        check_packages()
    async with (
        open_gateway(gateway, replace(stack_options, reader=True)) as address,
        AsyncCaptioner(gateway=connection.gateway(address)) as captioner,
    ):
        info = await captioner.info()
        check_reads_documents(info)
        yield TargetReader(captioner, call, surface_of(call.surface, info.surface))


@asynccontextmanager
async def open_ocr(
    address: str, connection: ConnectionOptions, jobs: int, call: DocumentCall
) -> AsyncIterator[OcrAlone]:
    """The OCR alone: of a service, or without an address in processes of this command's own."""
    request = DocumentRequest(pages=call.pages, dpi=call.dpi, text_layer=call.text_layer)
    surface = surface_of(call.surface, "")
    if address:
        ca, cert, key = (str(path or "") for path in (connection.ca, connection.cert, connection.key))
        security = make_peer_security(("--ca", ca), ("--cert", cert), ("--key", key))
        remote = RemoteReader(address, security, connection.token(os.environ))
        try:
            yield OcrAlone(lambda data: remote.read(data, request), surface)
        finally:
            await remote.close()
        return
    check_packages()
    configure_logs("read", "error")
    pool = ReaderPool(DocumentLimits(), max_documents=jobs)
    try:
        yield OcrAlone(lambda data: pool.read(data, request), surface)
    finally:
        pool.close()


def read_paper(path: Path) -> PaperFile:
    """Raises UnreadableDocument."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UnreadableDocument("no regular file")
        if size > DocumentLimits.max_bytes:
            raise UnreadableDocument(f"it has {size} bytes, and a document has at most {DocumentLimits.max_bytes}")
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableDocument(f"cannot be read: {error.strerror}") from None
    return PaperFile(printable(path.name), data, hashlib.sha256(data).hexdigest())  # a name may be no UTF-8
