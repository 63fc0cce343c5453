"""One caption of a work item by a plain call. Knows no archive and no process."""

from collections.abc import AsyncIterator

import grpc

from bench.faults.workload import WorkItem
from slipstream.errors import ProtocolViolation
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc

TIMEOUT_S = 120.0


async def caption_text(channel: grpc.aio.Channel, item: WorkItem, timeout_s: float = TIMEOUT_S) -> str:
    """The caption's text. Raises AioRpcError."""
    call = gateway_pb2_grpc.GatewayStub(channel).Caption(caption_requests(item), timeout=timeout_s)
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
