"""The client of the fault runs: captions an item, or hands in a batch, waits, lists, whatever gateway answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import grpc

from slipstream.errors import ProtocolViolation
from slipstream.rpc.v1 import archive_pb2, archive_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tests.support.workload import WorkItem

CAPTION_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 10.0
POLL_S = 0.5
PAGE_SIZE = 500
ENDED = (archive_pb2.BATCH_STATE_COMPLETED, archive_pb2.BATCH_STATE_CANCELLED)


async def submit(
    channel: grpc.aio.Channel, key: str, items: Sequence[WorkItem], timeout_s: float = CALL_TIMEOUT_S
) -> archive_pb2.SubmitBatchResponse:
    """One call. Raises AioRpcError."""
    stub = archive_pb2_grpc.ArchiveStub(channel)
    response: archive_pb2.SubmitBatchResponse = await stub.SubmitBatch(_requests(key, items), timeout=timeout_s)
    return response


async def wait_ended(channels: Sequence[grpc.aio.Channel], batch: str, timeout_s: float) -> archive_pb2.Batch:
    """Polls until the batch has ended, asking one gateway after the other. Raises TimeoutError."""
    last = archive_pb2.Batch()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for channel in channels:
            try:
                stub = archive_pb2_grpc.ArchiveStub(channel)
                last = await stub.GetBatch(archive_pb2.GetBatchRequest(batch=batch), timeout=CALL_TIMEOUT_S)
                break
            except grpc.aio.AioRpcError:
                continue
        if last.state in ENDED:
            return last
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"the batch has not ended within {timeout_s:.0f} s: {last.counts}")


async def list_jobs(channel: grpc.aio.Channel, batch: str) -> list[archive_pb2.Job]:
    """All jobs, page by page."""
    stub, token, jobs = archive_pb2_grpc.ArchiveStub(channel), "", list[archive_pb2.Job]()
    while True:
        request = archive_pb2.ListJobsRequest(batch=batch, page_token=token, page_size=PAGE_SIZE)
        page = await stub.ListJobs(request, timeout=CALL_TIMEOUT_S)
        jobs += page.jobs
        token = page.next_page_token
        if not token:
            return jobs


async def _requests(key: str, items: Sequence[WorkItem]) -> AsyncIterator[archive_pb2.SubmitBatchRequest]:
    yield archive_pb2.SubmitBatchRequest(batch=archive_pb2.BatchOptions(key=key))
    for item in items:
        message = archive_pb2.BatchItem(custom_id=item.custom_id, source=item.source, caption=item.caption)
        yield archive_pb2.SubmitBatchRequest(item=message)


async def caption_text(channel: grpc.aio.Channel, item: WorkItem) -> str:
    """The caption's text, by a plain call. Raises AioRpcError."""
    call = gateway_pb2_grpc.GatewayStub(channel).Caption(caption_requests(item), timeout=CAPTION_TIMEOUT_S)
    async for event in call:
        if event.HasField("summary"):
            return str(event.summary.text)
    raise ProtocolViolation("the gateway ended the caption without a summary")


async def caption_requests(item: WorkItem) -> AsyncIterator[gateway_pb2.CaptionRequest]:
    """The request that names the clip by its path."""
    options = gateway_pb2.CaptionOptions()
    options.CopyFrom(item.caption)
    options.path = item.source
    yield gateway_pb2.CaptionRequest(options=options)
