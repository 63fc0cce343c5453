"""What surrounds every call a service serves: its error is answered once, and it ends."""

import asyncio
import contextlib
import math
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError

from slipstream.errors import (
    DeadlineExceeded,
    Overloaded,
    ProtocolViolation,
    ServiceUnavailable,
    SessionIdle,
    SlipstreamError,
    Unauthenticated,
)
from slipstream.logs import get_logger
from slipstream.rpc.grpc_options import ANSWERED_KEY, REQUEST_ID_KEY, RETRY_AFTER_KEY, UNARY_TIMEOUT_S

# -- idle limit ------------------------------------------------------------------------------------------------------

# Messages of a stream whose sender may pause, but not for ever.

T = TypeVar("T")


class IdleLimit(AsyncIterator[T], Generic[T]):
    """The same messages. Time counts only while somebody waits for the next.

    Args:
        idle_timeout_s: longest pause; after it `anext` raises `SessionIdle`.
    """

    def __init__(self, messages: AsyncIterator[T], idle_timeout_s: float) -> None:
        self._messages = aiter(messages)
        self._idle_timeout_s = idle_timeout_s

    async def __anext__(self) -> T:
        limit = asyncio.timeout(self._idle_timeout_s)
        try:
            async with limit:
                return await anext(self._messages)
        except TimeoutError:
            if not limit.expired():
                raise
            raise SessionIdle(
                f"nothing was said for {self._idle_timeout_s:g} s, so the session gave up its place; open it again, or"
                " raise --idle-timeout-s"
            ) from None


# -- revocation -------------------------------------------------------------------------------------------------------

LOOK_S = 5.0
"""An open stream ends within this time after what let it in is no longer so."""


class WhileAllowed:
    """Ends open streams when what let them in is no longer so. It looks only while there are any."""

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self._open: dict[asyncio.Timeout, str] = {}
        self._next_look: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def around(self, proof: str) -> AsyncIterator[None]:
        """Surrounds a stream that `proof` let in. Raises `Unauthenticated` when it does so no more."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._open[limit] = proof
                self._look_later()
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Unauthenticated("the token of this call is no longer accepted") from None
        finally:
            self._open.pop(limit, None)

    def _look_later(self) -> None:
        if self._open and self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        for limit, proof in self._open.items():
            if not (limit.expired() or self._is_allowed(proof)):
                limit.reschedule(asyncio.get_running_loop().time())
        self._look_later()


# -- guards -----------------------------------------------------------------------------------------------------------

MAX_DETAILS_CHARS = 1000
"""An error may repeat what it complains of; a status that is too long for its header would arrive as another one."""

MAX_REQUEST_ID_CHARS = 128
ANSWERED = ((ANSWERED_KEY, "1"),)
NO_MESSAGE = "what was sent is no message of this method"
STOPPING = "this service is stopping and has ended the call; try again when it is up again"


class Guard(grpc.aio.ServerInterceptor):
    """An interceptor that surrounds every call but health's with one context manager."""

    reads_single_requests = False
    """Whether it reads the one message of a method that takes one, instead of gRPC: that would answer bytes which are
    no message with UNKNOWN and log an error, and would leave a caller who sends nothing without any answer."""

    @abstractmethod
    def around(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AbstractAsyncContextManager[None]:
        """What a call runs in. `is_stream`: whether either side may send many messages."""

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith("/grpc.health."):
            return handler
        reads = self.reads_single_requests and not handler.request_streaming
        is_stream = handler.request_streaming or handler.response_streaming
        surrounded = partial(self.around, details=details, is_stream=is_stream)
        if handler.response_streaming:
            wrapped: Any = _stream(handler.stream_stream or handler.unary_stream, surrounded, reads)
        else:
            wrapped = _unary(handler.stream_unary or handler.unary_unary, surrounded, reads)
        request_kind = "stream" if handler.request_streaming or reads else "unary"
        response_kind = "stream" if handler.response_streaming else "unary"
        make_handler = getattr(grpc, f"{request_kind}_{response_kind}_rpc_method_handler")
        return make_handler(wrapped, _careful(handler.request_deserializer), handler.response_serializer)


def _stream(behaviour: Any, surrounded: Any, reads: bool) -> Any:
    async def answer(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async with surrounded(context):
            given = await _only(request) if reads else request
            async with contextlib.aclosing(behaviour(given, context)) as responses:
                async for response in responses:
                    yield response

    return answer


def _unary(behaviour: Any, surrounded: Any, reads: bool) -> Any:
    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with surrounded(context):
            return await behaviour(await _only(request) if reads else request, context)

    return answer


async def _only(requests: AsyncIterator[Any]) -> Any:
    """The message of a method that takes one."""
    request = await anext(aiter(requests), None)
    if request is None:
        raise ProtocolViolation("this method takes a message, and none came")
    return request


def _careful(read: Any) -> Any:
    def read_carefully(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            raise ProtocolViolation(NO_MESSAGE) from None

    return read_carefully


class AnswerErrors(Guard):
    """Binds the request id to the logs, ends a call that takes too long, logs a failure once, and answers it once
    with its own status."""

    reads_single_requests = True

    def __init__(self, stream_timeout_s: float | None = None) -> None:
        self._stream_timeout_s = stream_timeout_s
        self._limits: set[asyncio.Timeout] = set()
        self._is_ending = False

    def end_calls(self) -> None:
        """Ends all open calls and every later one at once, with UNAVAILABLE and the reason."""
        self._is_ending = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def around(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AsyncIterator[None]:
        metadata = dict(details.invocation_metadata or ())
        structlog.contextvars.bind_contextvars(request_id=_request_id(metadata), method=details.method)
        try:
            async with self._limited(self._stream_timeout_s if is_stream else UNARY_TIMEOUT_S):
                yield
        except SlipstreamError as error:
            get_logger().warning("request.refused", status=error.status, error=str(error))
            retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
            hint = () if retry_after_s is None else ((RETRY_AFTER_KEY, str(math.ceil(1000 * retry_after_s))),)
            await context.abort(grpc.StatusCode[error.status], str(error)[:MAX_DETAILS_CHARS], (*ANSWERED, *hint))
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            get_logger().exception("request.failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; the service's log has the details", ANSWERED)

    @contextlib.asynccontextmanager
    async def _limited(self, timeout_s: float | None) -> AsyncIterator[None]:
        limit = asyncio.timeout(0 if self._is_ending else timeout_s)
        self._limits.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            if self._is_ending:
                raise ServiceUnavailable(STOPPING) from None
            raise DeadlineExceeded(f"the call was not done within this server's limit of {timeout_s:g} s") from None
        finally:
            self._limits.discard(limit)


def _request_id(metadata: dict[str, Any]) -> str | None:
    """The caller's; it goes into every line of the log, so it must be short."""
    given = metadata.get(REQUEST_ID_KEY)
    return given[:MAX_REQUEST_ID_CHARS] if isinstance(given, str) else None
