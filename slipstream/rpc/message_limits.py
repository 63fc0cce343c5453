"""What is expected of a call's messages: which come, and how long who sends and takes them may pause."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from slipstream.errors import DeadlineExceeded, ProtocolViolation, SessionIdle
from slipstream.time_limits import within

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]
SESSION_IDLE = "the session gave up its place; open it again, or raise --idle-timeout-s"


class IdleLimit(AsyncIterator[T], Generic[T]):
    """The same messages. Time counts only while somebody waits for the next.

    Args:
        idle_timeout_s: longest pause; after it `anext` raises `SessionIdle`.
        advice: what that means for the caller, and what to do.
    """

    def __init__(self, messages: AsyncIterator[T], idle_timeout_s: float, advice: str = SESSION_IDLE) -> None:
        self._messages = aiter(messages)
        self._idle_timeout_s = idle_timeout_s
        self._advice = advice

    async def __anext__(self) -> T:
        async with within(self._idle_timeout_s, self._late):
            return await anext(self._messages)

    def _late(self) -> SessionIdle:
        return SessionIdle(f"nothing was said for {self._idle_timeout_s:g} s, so {self._advice}")


async def steady(chunks: AsyncIterator[bytes], idle_s: float, least_rate: float) -> AsyncIterator[bytes]:
    """The chunks of an upload that goes on. Raises `SessionIdle` after a pause of `idle_s`, or when they come with less
    than `least_rate` bytes a second; time counts only while the next is awaited."""
    clock = asyncio.get_running_loop().time
    patient = IdleLimit(chunks, idle_s, "the upload was ended; send it in smaller chunks, or raise --upload-idle-s")
    waited_s, num_bytes = 0.0, 0
    while True:
        since = clock()
        chunk = await anext(patient, None)
        if chunk is None:
            return
        waited_s += clock() - since
        num_bytes += len(chunk)
        if num_bytes < least_rate * (waited_s - idle_s):
            raise SessionIdle(
                f"{num_bytes} bytes of the upload came in {waited_s:.0f} s, and this server ends one of less than"
                f" {least_rate:g} bytes a second (--min-upload-rate)"
            )
        yield chunk


class Arrivals:
    """Calls whose first message has not come yet. Each has `limit_s`; beyond `most` of them the oldest has no more."""

    def __init__(self, limit_s: float, most: int) -> None:
        self.limit_s = limit_s
        self._most = most
        self._waiting: dict[asyncio.Timeout, None] = {}

    async def first(self, messages: AsyncIterator[T]) -> T:
        """The first message. Raises `DeadlineExceeded`, or StopAsyncIteration where there is none."""
        async with within(self.limit_s, self._late) as limit:
            self._waiting[limit] = None
            try:
                if len(self._waiting) > self._most:
                    self._end_oldest()
                return await anext(messages)
            finally:
                self._waiting.pop(limit, None)

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the call was opened and nothing was sent on it, for which a caller has {self.limit_s:g} s, or less where"
            " many do so"
        )

    def _end_oldest(self) -> None:
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        if not oldest.expired():
            oldest.reschedule(0)


class Requests(AsyncIterator[T], Generic[T]):
    """The messages of a call, the first of which must come soon."""

    def __init__(self, messages: AsyncIterator[T], arrivals: Arrivals) -> None:
        self._messages = messages
        self._arrivals: Arrivals | None = arrivals

    async def __anext__(self) -> T:
        messages = aiter(self._messages)  # not before it is read: gRPC complains of one that never is
        arrivals, self._arrivals = self._arrivals, None
        return await (anext(messages) if arrivals is None else arrivals.first(messages))


async def write(context: grpc.aio.ServicerContext, response: Any) -> None:
    """Behind `send_headers`. A caller that dies while it is answered has ended its call; gRPC may say so by an error
    of its own."""
    try:
        await context.write(response)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def send_headers(context: grpc.aio.ServicerContext, metadata: Metadata = ()) -> None:
    """Before the first message, unless it was done. They go out whole, even where what asked for it is cancelled: gRPC
    forgets headers whose sending was given up, and can then not end the call, nor tell its caller anything."""
    sending = asyncio.ensure_future(context.send_initial_metadata(metadata))
    try:
        await asyncio.shield(sending)
    except asyncio.CancelledError:
        await asyncio.gather(sending, return_exceptions=True)
        raise
    except grpc.aio.UsageError:
        pass  # done before, or the call has ended, which a write will say
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def write_all(context: grpc.aio.ServicerContext, responses: AsyncIterator[Any]) -> None:
    """Here, and not in gRPC: what ends a call may find it writing."""
    begun = False
    async for response in responses:
        if not begun:
            await send_headers(context)
            begun = True
        await write(context, response)


async def write_steadily(context: grpc.aio.ServicerContext, responses: Iterable[Any], idle_s: float) -> None:
    """Writes all of them. Raises `SessionIdle` when the caller takes nothing for `idle_s`; what gRPC has been given by
    then, at most a response, it holds until the caller goes."""
    await send_headers(context)
    late = f"nothing was taken for {idle_s:g} s, so the call was ended; read it on"
    for response in responses:
        async with within(idle_s, lambda: SessionIdle(late)):
            await write(context, response)


# -- what comes -------------------------------------------------------------------------------------------------------

MessageT = TypeVar("MessageT", bound=Message)


async def first_of(requests: AsyncIterator[MessageT], kind: str, what: str) -> MessageT:
    """The message that begins `what`. Raises `ProtocolViolation` where there is none, or one of another kind."""
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("message") != kind:
        raise ProtocolViolation(f"{what} begins with `{kind}`")
    return first


async def chunks_of(requests: AsyncIterator[Message], kind: str, rule: str) -> AsyncIterator[bytes]:
    """What the messages behind the first bring. Raises `ProtocolViolation`, which says the rule, for another kind."""
    async for message in requests:
        if message.WhichOneof("message") != kind:
            raise ProtocolViolation(rule)
        yield getattr(message, kind)


async def of_one_message(
    answers: AsyncGenerator[T, None], requests: AsyncIterator[Message], rule: str
) -> AsyncGenerator[T, None]:
    """The answers to a call whose first message has said all. Raises `ProtocolViolation`, which says the rule, in place
    of the next answer where another message has come."""
    following = asyncio.create_task(_comes(requests))
    try:
        async with aclosing(answers):
            async for answer in answers:
                if following.done() and following.result():
                    raise ProtocolViolation(rule)
                yield answer
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _comes(requests: AsyncIterator[Message]) -> bool:
    return await anext(aiter(requests), None) is not None
