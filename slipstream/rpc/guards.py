"""What surrounds every call a service serves: it begins soon and ends, and its error is answered and logged once."""

import asyncio
import contextlib
import math
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from inspect import iscoroutine
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf.message import DecodeError

from slipstream.errors import (
    DeadlineExceeded,
    Overloaded,
    ProtocolViolation,
    ServiceStopping,
    ServiceUnavailable,
    SlipstreamError,
    UnreadableMedia,
    machine_lacks,
)
from slipstream.logs import LineBudget, get_logger
from slipstream.rpc.callers import Places, begin_call, current_caller
from slipstream.rpc.grpc_options import (
    ANSWERED_KEY,
    FIRST_MESSAGE_S,
    MAX_SILENT_CALLS,
    REQUEST_ID_KEY,
    RETRY_AFTER_KEY,
    RETRY_AFTER_S,
    UNARY_TIMEOUT_S,
    UNREADABLE_KEY,
)
from slipstream.rpc.message_limits import Arrivals, Requests, write_all

MAX_DETAILS_CHARS = 1000
"""An error may repeat what it complains of; a status that is too long for its header would arrive as another one."""

MAX_REQUEST_ID_CHARS = 128
ANSWERED = ((ANSWERED_KEY, "1"),)
NO_MESSAGE = "what was sent is no message of this method"
STOPPING = "this service is stopping and has ended the call; try again when it is up again"
LEAVING = "this service is stopping and begins nothing new; try again at another, or when it is up again"
HEALTH = "/grpc.health."
AUDITED = frozenset({"Caption", "CaptionSegments", "ReadDocument", "SubmitBatch", "CancelBatch", "RetryDead"})
"""Methods by which something is done in an owner's name."""


class Guard(Protocol):
    """What calls run in, one inside the other."""

    def around(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AbstractAsyncContextManager[None]:
        """The surroundings of one call. `is_stream`: whether either side may send many messages."""


class Surrounded(grpc.aio.ServerInterceptor):
    """An interceptor that surrounds every call with itself and with inner guards, which are not asked about health's.

    It reads the one message of a method that takes one, instead of gRPC: that would answer bytes which are no message
    with UNKNOWN and log an error, and would leave a caller who sends nothing without any answer.
    """

    def __init__(self, *inner: Guard) -> None:
        self.arrivals = Arrivals(FIRST_MESSAGE_S, MAX_SILENT_CALLS)
        self._inner = inner

    @abstractmethod
    def around(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AbstractAsyncContextManager[None]:
        """As of a `Guard`."""

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        is_stream = handler.request_streaming or handler.response_streaming
        surrounded = partial(self._surrounded, details=details, is_stream=is_stream)
        reads = not handler.request_streaming
        if handler.response_streaming:
            wrapped: Any = _stream(handler.stream_stream or handler.unary_stream, surrounded, reads, self.arrivals)
        else:
            wrapped = _unary(handler.stream_unary or handler.unary_unary, surrounded, reads, self.arrivals)
        response_kind = "stream" if handler.response_streaming else "unary"
        make_handler = getattr(grpc, f"stream_{response_kind}_rpc_method_handler")
        return make_handler(wrapped, _careful(handler.request_deserializer), handler.response_serializer)

    @contextlib.asynccontextmanager
    async def _surrounded(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AsyncIterator[None]:
        inner = () if details.method.startswith(HEALTH) else self._inner
        async with contextlib.AsyncExitStack() as guards:
            for guard in (self, *inner):
                await guards.enter_async_context(guard.around(context, details, is_stream=is_stream))
            yield


def _stream(behaviour: Any, surrounded: Any, reads: bool, arrivals: Arrivals) -> Any:
    async def answer(messages: Any, context: grpc.aio.ServicerContext) -> None:
        requests = Requests(messages, arrivals)
        async with surrounded(context):
            responses = behaviour(await _only(requests) if reads else requests, context)
            if iscoroutine(responses):  # it writes by itself
                await responses
                return
            async with contextlib.aclosing(responses):
                await write_all(context, responses)

    return answer


def _unary(behaviour: Any, surrounded: Any, reads: bool, arrivals: Arrivals) -> Any:
    async def answer(messages: Any, context: grpc.aio.ServicerContext) -> Any:
        requests = Requests(messages, arrivals)
        async with surrounded(context):
            return await behaviour(await _only(requests) if reads else requests, context)

    return answer


async def _only(requests: AsyncIterator[Any]) -> Any:
    """The message of a method that takes one."""
    request = await anext(requests, None)
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


class Admit:
    """Bounds the calls that are open."""

    def __init__(self, places: Places) -> None:
        self._places = places

    @contextlib.asynccontextmanager
    async def around(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AsyncIterator[None]:
        with self._places.held():
            yield


class AnswerErrors(Surrounded):
    """Binds the request id to the logs, ends a call that takes too long, logs a failure once, and answers it once
    with its own status."""

    def __init__(
        self,
        stream_timeout_s: float | None = None,
        *inner: Guard,
        on_refused: Callable[[SlipstreamError], None] = lambda error: None,
    ) -> None:
        super().__init__(*inner)
        self._stream_timeout_s = stream_timeout_s
        self._on_refused = on_refused
        self._limits: set[asyncio.Timeout] = set()
        self._num_open = 0
        self._idle = asyncio.Event()
        self._is_leaving = self._is_ending = False
        self._refusals, self._audits = LineBudget(), LineBudget()

    def refuse_new(self) -> None:
        """Lets open calls go on, and answers every new one but health's with UNAVAILABLE and when to try again."""
        self._is_leaving = True
        self._note_idle()

    async def wait_idle(self) -> None:
        """After `refuse_new` or `end_calls`: until no call is open but health's."""
        await self._idle.wait()

    def end_calls(self) -> None:
        """Ends all open calls and every later one at once, with UNAVAILABLE and the reason."""
        self._is_ending = True
        self._note_idle()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def around(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AsyncIterator[None]:
        metadata = dict(details.invocation_metadata or ())
        structlog.contextvars.bind_contextvars(request_id=_request_id(metadata), method=details.method)
        begin_call(context.peer())
        outcome = "CANCELLED"
        try:
            with self._counted(details.method):
                async with self._limited(self._stream_timeout_s if is_stream else UNARY_TIMEOUT_S):
                    yield
            outcome = "OK"
        except SlipstreamError as error:
            outcome = error.status
            await self._answer(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as failure:
            if (lack := machine_lacks(failure)) is not None:
                outcome = lack.status
                await self._answer(context, lack)
            outcome = "INTERNAL"
            get_logger().exception("request.failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; the service's log has the details", ANSWERED)
        finally:
            self._audit(details.method, outcome)

    async def _answer(self, context: grpc.aio.ServicerContext, error: SlipstreamError) -> None:
        caller, message = current_caller(), str(error)[:MAX_DETAILS_CHARS]
        self._on_refused(error)
        if (left_out := self._refusals.spend(caller.name)) is not None:
            more = {"left_out": left_out} if left_out else {}
            get_logger().warning("request.refused", status=error.status, error=message, peer=caller.host, **more)
        retry_after_s = error.retry_after_s
        if retry_after_s is None and error.status == Overloaded.status:
            retry_after_s = RETRY_AFTER_S
        hint = () if retry_after_s is None else ((RETRY_AFTER_KEY, str(math.ceil(1000 * retry_after_s))),)
        about = ((UNREADABLE_KEY, "1"),) if isinstance(error, UnreadableMedia) else ()
        await context.abort(grpc.StatusCode[error.status], message, (*ANSWERED, *hint, *about))

    def _audit(self, method: str, outcome: str) -> None:
        """One line on who did what, or tried to. Successes are never left out."""
        if method.rpartition("/")[2] not in AUDITED and outcome not in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            return
        caller = current_caller()
        left_out = 0 if outcome == "OK" else self._audits.spend(caller.name)
        if left_out is not None:
            more = {"left_out": left_out} if left_out else {}
            get_logger().info("audit", **{"owner": caller.owner, "peer": caller.host, "outcome": outcome} | more)

    @contextlib.contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        """Counts what an end would wait for."""
        if method.startswith(HEALTH):
            yield
            return
        if self._is_leaving and not self._is_ending:
            raise ServiceStopping(LEAVING)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._note_idle()

    def _note_idle(self) -> None:
        if (self._is_leaving or self._is_ending) and not self._num_open:
            self._idle.set()

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
