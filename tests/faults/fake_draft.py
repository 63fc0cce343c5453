"""A draft service without a model that behaves as told: a prophet that knows the answer, or one of many liars."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import grpc

from slipstream.rpc.grpc_options import SERVER_OPTIONS
from slipstream.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc

Event = draft_pb2.DraftEvent
Behaviour = Callable[["Orders"], AsyncIterator[Event]]


class Orders:
    """What the gateway has ordered of one session: which line to write, from where, and how far."""

    def __init__(self, start: draft_pb2.DraftStart) -> None:
        self.epoch = start.epoch
        self.known = len(start.committed)
        self.write_until = start.write_until
        self.changed = asyncio.Event()

    def take(self, message: draft_pb2.DraftRequest) -> None:
        """Obeys a restart or an advance."""
        if message.HasField("restart"):
            restart = message.restart
            self.epoch, self.known, self.write_until = (
                restart.epoch,
                restart.keep + len(restart.suffix),
                restart.write_until,
            )
        elif message.HasField("advance"):
            self.write_until = message.advance.write_until
        self.changed.set()

    async def wait(self) -> None:
        """Until there is something new."""
        self.changed.clear()
        await self.changed.wait()


class FakeDraft(draft_pb2_grpc.DraftServicer):
    """Serves at a unix socket in this process. `behaviour` and `model` may be changed at any time."""

    def __init__(self, folder: Path, model: common_pb2.ModelInfo) -> None:
        self.address = f"unix:{folder / 'fake.sock'}"
        self.model = model
        self.behaviour: Behaviour = silent
        self.num_sessions = 0
        self._server = grpc.aio.server(options=SERVER_OPTIONS)

    async def __aenter__(self) -> Self:
        draft_pb2_grpc.add_DraftServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ModelInfo:
        return self.model

    async def Session(
        self, requests: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Event]:
        self.num_sessions += 1
        orders = Orders((await anext(aiter(requests))).start)

        async def read() -> None:
            async for message in requests:
                orders.take(message)

        reading = asyncio.create_task(read())
        try:
            async for event in self.behaviour(orders):
                yield event
        finally:
            reading.cancel()


def ready(**fields: Any) -> Event:
    plausible: dict[str, Any] = {"kept_tokens": 1, "video_tokens": 48, "kept_digest": "0"}
    return Event(ready=draft_pb2.DraftReady(**plausible | fields))


def tokens(epoch: int, position: int, token_ids: Sequence[int], pass_s: float = 0.001) -> Event:
    return Event(tokens=draft_pb2.DraftTokens(epoch=epoch, position=position, token_ids=token_ids, pass_s=pass_s))


async def silent(orders: Orders) -> AsyncIterator[Event]:
    """Never even ready."""
    await asyncio.Event().wait()
    yield ready()


def says(*events: Callable[[Orders], Event], stays: bool = True) -> Behaviour:
    """Ready, then these events, then silence or the end of the stream."""

    async def behave(orders: Orders) -> AsyncIterator[Event]:
        yield ready()
        for event in events:
            yield event(orders)
        if stays:
            await asyncio.Event().wait()

    return behave


def writes(token_at: Callable[[int], int], *, pause_s: float = 0.0, pass_s: float = 0.001) -> Behaviour:
    """A draft that keeps to the protocol and writes `token_at(position)`."""

    async def behave(orders: Orders) -> AsyncIterator[Event]:
        yield ready()
        epoch, position = orders.epoch, orders.known
        while True:
            if orders.epoch != epoch:
                epoch, position = orders.epoch, orders.known
            if position >= orders.write_until:
                await orders.wait()
                continue
            token_ids = [token_at(position)]
            if not pause_s:
                token_ids = [token_at(index) for index in range(position, orders.write_until)]
            yield tokens(epoch, position, token_ids, pass_s)
            position += len(token_ids)
            await asyncio.sleep(pause_s)

    return behave


def floods(event: Callable[[Orders], Event]) -> Behaviour:
    """Ready, then the same event as fast as the stream takes it."""

    async def behave(orders: Orders) -> AsyncIterator[Event]:
        yield ready()
        while True:
            yield event(orders)

    return behave
