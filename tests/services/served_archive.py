"""The archive's calls on a queue in memory, behind a real socket, and a client of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipstream.archive.queue import JobState, Outcome, QueuePolicy
from slipstream.captioning.config import GatewayConfig
from slipstream.rpc.calls import open_channel
from slipstream.rpc.grpc_options import SERVER_OPTIONS
from slipstream.rpc.guards import AnswerErrors
from slipstream.rpc.v1 import archive_pb2, archive_pb2_grpc
from slipstream.services.gateway.archive_servicer import ArchiveServicer
from tests.support.archive_client import WireClient
from tests.support.memory_queue import MemoryQueue

CONFIG = GatewayConfig(
    listen="", target="t:1", draft="d:1", max_batch_items=700, max_backlog=700, owner_max_watches=1000
)
ITEMS = [(str(number), f"/videos/{number}.mp4") for number in range(5)]


class Served:
    """A servicer on a queue in memory, behind a real socket."""

    def __init__(self, channel: grpc.aio.Channel, queue: MemoryQueue, servicer: ArchiveServicer) -> None:
        self.channel = channel
        self.archive = WireClient(channel)
        self.stub = self.archive.stub
        self.queue = queue
        self.servicer = servicer

    async def end_all(self, state: JobState = JobState.DONE, result: str = "") -> int:
        """Takes every job and ends it so."""
        leases = await self.queue.take("tester", 1000)
        for lease in leases:
            assert await self.queue.finish(lease, Outcome(state, result, tallies={"tokens": 3, "video_s": 1.5}))
        return len(leases)

    async def refusal(self, *messages: archive_pb2.SubmitBatchRequest) -> tuple[grpc.StatusCode, str]:
        """How a submit of these messages fails."""
        return await refused(self.archive.send(messages))


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code(), failure.value.details() or ""


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    queue, stopping = MemoryQueue(QueuePolicy(max_backlog=600)), asyncio.Event()
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[AnswerErrors()])
    servicer = ArchiveServicer(CONFIG, queue, stopping)
    archive_pb2_grpc.add_ArchiveServicer_to_server(servicer, server)
    address = f"unix:{folder}/archive.sock"
    server.add_insecure_port(address)
    await server.start()
    async with open_channel(address) as channel:
        yield Served(channel, queue, servicer)
    await server.stop(0)
