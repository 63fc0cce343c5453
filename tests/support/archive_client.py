"""The archive for tests: the product's own door to one, and a client that says and hears just what is on the wire."""

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import grpc

from slipstream.archive.messages import Job
from slipstream.archive.queue import JobState
from slipstream.client.batch_handles import AsyncArchive, AsyncBatchHandle
from slipstream.client.connection import Connection
from slipstream.rpc.v1 import archive_pb2, archive_pb2_grpc, gateway_pb2

TIMEOUT_S = 120.0
Item = tuple[str, str]
"""custom_id and source."""


def archive_at(channel: grpc.aio.Channel) -> AsyncArchive:
    """The archive behind a channel."""

    async def connect() -> Connection:
        return Connection(channel)

    return AsyncArchive(connect)


async def jobs_of(batch: AsyncBatchHandle, states: Collection[JobState] = ()) -> dict[str, Job]:
    """All jobs by custom id, in the order they were handed in."""
    return {job.custom_id: job async for job in batch.jobs(states)}


class WireClient:
    """One caller of one gateway. Raises what gRPC does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = archive_pb2_grpc.ArchiveStub(channel)

    async def submit(
        self, items: Sequence[Item | archive_pb2.BatchItem], *, key: str = "", **caption: Any
    ) -> archive_pb2.SubmitBatchResponse:
        """Hands in items with these caption options for all."""
        options = archive_pb2.BatchOptions(key=key, caption=gateway_pb2.CaptionOptions(**caption))
        return await self.send([batch_message(options), *map(item_message, items)])

    async def send(self, messages: Sequence[archive_pb2.SubmitBatchRequest]) -> archive_pb2.SubmitBatchResponse:
        """Raises AioRpcError."""
        response: archive_pb2.SubmitBatchResponse = await self.stub.SubmitBatch(_stream(messages), timeout=TIMEOUT_S)
        return response

    async def get(self, batch: str) -> archive_pb2.Batch:
        found: archive_pb2.Batch = await self.stub.GetBatch(archive_pb2.GetBatchRequest(batch=batch), timeout=TIMEOUT_S)
        return found

    async def watch(self, batch: str) -> list[archive_pb2.Batch]:
        """Everything that a watch says until it ends."""
        call = self.stub.WatchBatch(archive_pb2.WatchBatchRequest(batch=batch), timeout=TIMEOUT_S)
        return [change async for change in call]

    async def jobs(self, batch: str, page_size: int = 0, states: Sequence[Any] = ()) -> dict[str, archive_pb2.Job]:
        """All jobs by custom id, in the order they were handed in."""
        found: dict[str, archive_pb2.Job] = {}
        token = ""
        while True:
            request = archive_pb2.ListJobsRequest(batch=batch, page_size=page_size, page_token=token, states=states)
            page = await self.stub.ListJobs(request, timeout=TIMEOUT_S)
            found |= {job.custom_id: job for job in page.jobs}
            token = page.next_page_token
            if not token:
                return found


def batch_message(options: archive_pb2.BatchOptions) -> archive_pb2.SubmitBatchRequest:
    return archive_pb2.SubmitBatchRequest(batch=options)


def item_message(item: Item | archive_pb2.BatchItem) -> archive_pb2.SubmitBatchRequest:
    if isinstance(item, tuple):
        item = archive_pb2.BatchItem(custom_id=item[0], source=item[1])
    return archive_pb2.SubmitBatchRequest(item=item)


async def _stream(messages: Sequence[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message
