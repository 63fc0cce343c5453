"""A draft service without a model that behaves as told: a prophet that knows the answer, or one of many liars."""

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import grpc

from slipstream.rpc.grpc_options import SERVER_OPTIONS
from slipstream.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc

Event = draft_pb2.DraftEvent
Behaviour = Callable[["Orders"], AsyncIterator[Event | bytes]]
"""What a session answers: events, or bytes that need not be one."""


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
        self.answers = asyncio.Event()
        """While it is not set, nobody is told which model this is."""
        self.answers.set()
        self.behaviour: Behaviour = silent
        self.num_sessions = 0
        self._server = grpc.aio.server(options=SERVER_OPTIONS)

    async def __aenter__(self) -> Self:
        handlers: dict[str, grpc.RpcMethodHandler] = {
            "GetModel": grpc.unary_unary_rpc_method_handler(
                self.GetModel, common_pb2.GetModelRequest.FromString, common_pb2.ModelInfo.SerializeToString
            ),
            "Session": grpc.stream_stream_rpc_method_handler(
                self.Session, draft_pb2.DraftRequest.FromString, _as_bytes
            ),
        }
        handler = grpc.method_handlers_generic_handler("slipstream.rpc.v1.Draft", handlers)
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ModelInfo:
        await self.answers.wait()
        return self.model

    async def Session(
        self, requests: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Event | bytes]:
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


def _as_bytes(event: Event | bytes) -> bytes:
    return event if isinstance(event, bytes) else event.SerializeToString()


def ready(**fields: Any) -> Event:
    plausible: dict[str, Any] = {"kept_tokens": 1, "video_tokens": 48, "kept_digest": "0"}
    return Event(ready=draft_pb2.DraftReady(**plausible | fields))


def tokens(epoch: int, position: int, token_ids: Sequence[int], pass_s: float = 0.001) -> Event:
    return Event(tokens=draft_pb2.DraftTokens(epoch=epoch, position=position, token_ids=token_ids, pass_s=pass_s))


async def silent(orders: Orders) -> AsyncIterator[Event | bytes]:
    """Never even ready."""
    await asyncio.Event().wait()
    yield ready()


def says(*events: Callable[[Orders], Event | bytes], stays: bool = True) -> Behaviour:
    """Ready, then these events, then silence or the end of the stream."""

    async def behave(orders: Orders) -> AsyncIterator[Event | bytes]:
        yield ready()
        for event in events:
            yield event(orders)
        if stays:
            await asyncio.Event().wait()

    return behave


def writes(token_at: Callable[[int], int], *, pause_s: float = 0.0, pass_s: float = 0.001) -> Behaviour:
    """A draft that keeps to the protocol and writes `token_at(position)`."""

    async def behave(orders: Orders) -> AsyncIterator[Event | bytes]:
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


def floods(event: Callable[[Orders], Event | bytes]) -> Behaviour:
    """Ready, then the same event as fast as the stream takes it."""

    async def behave(orders: Orders) -> AsyncIterator[Event | bytes]:
        yield ready()
        while True:
            yield event(orders)

    return behave


async def hangs_up(orders: Orders) -> AsyncIterator[Event | bytes]:
    """Ends every session before it began."""
    nothing: tuple[Event, ...] = ()
    for event in nothing:
        yield event


async def complains(orders: Orders) -> AsyncIterator[Event | bytes]:
    """Fails with a flood of words that a terminal might take for more than words."""
    yield ready()
    raise RuntimeError("[bold]\x1b[2J[/bold] <b>\n" * 100_000)


def boasts(**fields: Any) -> Behaviour:
    """Ready, with figures that cannot be."""

    async def behave(orders: Orders) -> AsyncIterator[Event | bytes]:
        yield ready(**fields)
        await asyncio.Event().wait()

    return behave


async def repeats_what_ended(orders: Orders) -> AsyncIterator[Event | bytes]:
    """Writes nonsense as it may, and then the line that ended for it, again and again."""
    yield ready()
    first, position = orders.epoch, orders.known
    yield tokens(first, position, [7])
    while orders.epoch == first:
        await orders.wait()
    while True:
        yield tokens(first, position, [7])


@functools.cache
def millions_of_tokens() -> bytes:
    """Made once: a draft that makes them anew each time is silent meanwhile."""
    return tokens(0, 0, [5] * 4_000_000).SerializeToString()


LIES: dict[str, Behaviour] = {
    "floods of ready": floods(lambda at: ready()),
    "floods of a stale line": floods(lambda at: tokens(0, 0, [5])),
    "a line that ended": repeats_what_ended,
    "millions of tokens": floods(lambda at: millions_of_tokens()),
    "out of range": floods(lambda at: tokens(at.epoch, at.known + 1000, [5])),
    "past the limit": floods(lambda at: tokens(at.epoch, at.known, [5] * 5000)),
    "outside the vocabulary": floods(lambda at: tokens(at.epoch, at.known, [2**32 - 1])),
    "no time": floods(lambda at: tokens(at.epoch, at.known, [5], math.nan)),
    "negative time": floods(lambda at: tokens(at.epoch, at.known, [5], -1.0)),
    "endless time": floods(lambda at: tokens(at.epoch, at.known, [5], 1e300)),
    "a future line": floods(lambda at: tokens(at.epoch + 7, at.known, [5])),
    "empty messages": floods(lambda at: Event()),
    "no messages": floods(lambda at: b"\xff" * 50),
    "boasts": boasts(kept_tokens=2**32 - 1, video_tokens=0, guidance_bytes=2**64 - 1, encode_s=math.nan),
    "a huge digest": boasts(kept_digest="[bold]" * 10_000),
    "hangs up": hangs_up,
    "ready and hangs up": says(stays=False),
    "never ready": silent,
    "mute": says(),
    "complains": complains,
    "nonsense": writes(lambda at: 7),
    "claims to be slow": writes(lambda at: 7, pass_s=0.9),
    "claims to be fast": writes(lambda at: 7, pass_s=1e-6),
}
"""Ways to lie, each for as long as it is let."""
FAULTLESS = ("never ready", "mute", "complains", "nonsense", "claims to be slow", "claims to be fast")
"""Those that keep to the protocol, so that they are not held against a draft."""
KIND_OF_LIE = {
    "millions of tokens": "size",
    "hangs up": "ended",
    "ready and hangs up": "ended",
} | dict.fromkeys(
    (
        "outside the vocabulary",
        "no time",
        "negative time",
        "endless time",
        "empty messages",
        "no messages",
        "boasts",
        "a huge digest",
    ),
    "content",
)
"""As which fault a lie is counted; the others are of the kind "order"."""
