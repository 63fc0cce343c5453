"""The reader's gRPC face: takes the bytes of a document, hands out what its pages look like and seem to say."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from slipstream import __version__
from slipstream.documents.messages import PageDraft, ReaderInfo
from slipstream.documents.pool import ReaderPool
from slipstream.errors import LimitExceeded, ProtocolViolation
from slipstream.logs import get_logger
from slipstream.rpc.callers import Places
from slipstream.rpc.codec import to_message
from slipstream.rpc.message_limits import chunks_of, first_of, steady
from slipstream.rpc.reader import event_messages, read_start
from slipstream.rpc.v1 import reader_pb2, reader_pb2_grpc

DATA_RULE = "after `start` a document takes `data` only"


class ReaderServicer(reader_pb2_grpc.ReaderServicer):
    """Implements `proto/slipstream/rpc/v1/reader.proto`."""

    def __init__(
        self,
        pool: ReaderPool,
        *,
        max_documents: int,
        max_queued: int,
        owner_share: float,
        upload_idle_s: float,
        min_upload_rate: int,
    ) -> None:
        self.places = Places("documents", max_documents + max_queued, owner_share, are="are read or wait")
        """One that is uploaded has its place already, as its bytes are held."""
        self._pool = pool
        self._max_documents = max_documents
        self._upload_idle_s, self._min_upload_rate = upload_idle_s, min_upload_rate

    def register(self, server: grpc.aio.Server) -> None:
        """Serves from now on."""
        reader_pb2_grpc.add_ReaderServicer_to_server(self, server)

    async def GetReader(
        self, request: reader_pb2.GetReaderRequest, context: grpc.aio.ServicerContext
    ) -> reader_pb2.ReaderInfo:
        limits = self._pool.limits
        info = ReaderInfo(__version__, limits.max_bytes, limits.max_pages, limits.max_page_pixels, self._max_documents)
        return to_message(info, reader_pb2.ReaderInfo)

    async def Read(
        self, requests: AsyncIterator[reader_pb2.ReadRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[reader_pb2.ReadEvent]:
        first = await first_of(requests, "start", "a document")
        request, num_bytes = read_start(first.start), first.start.num_bytes
        if num_bytes > self._pool.limits.max_bytes:
            raise LimitExceeded(f"a document has at most {self._pool.limits.max_bytes} bytes here")
        with self.places.held():
            data = await self._upload(requests, num_bytes)
            num_drafts = 0
            async with aclosing(self._pool.read(data, request)) as events:
                async for event in events:
                    num_drafts += isinstance(event, PageDraft)
                    for message in event_messages(event):
                        yield message
            get_logger().info("document.read", num_bytes=num_bytes, num_pages=num_drafts)

    async def _upload(self, requests: AsyncIterator[reader_pb2.ReadRequest], num_bytes: int) -> bytes:
        data = bytearray()
        async for chunk in steady(chunks_of(requests, "data", DATA_RULE), self._upload_idle_s, self._min_upload_rate):
            data += chunk
            if len(data) > num_bytes:
                raise ProtocolViolation("the document has more bytes than were announced")
        if len(data) < num_bytes:
            raise ProtocolViolation("the document ended before all of the bytes that were announced")
        return bytes(data)
