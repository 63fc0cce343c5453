"""The serving side: a process's main(), its gRPC server, health, errors answered in one place, and a clean end.

A service module gives `serve` a coroutine that registers its servicer; everything else is the same for all of them.
"""

import asyncio
import contextlib
import fcntl
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import IO, Any, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from slipstream.config import parse_config
from slipstream.errors import InvalidConfig, Overloaded, SlipstreamError
from slipstream.logs import configure_logs, get_logger, log_all_output
from slipstream.rpc.options import REQUEST_ID_KEY, RETRY_AFTER_KEY, SERVER_OPTIONS

PARENT_PID_VARIABLE = "SLIPSTREAM_PARENT_PID"
"""Set by whoever starts a service that must not outlive it."""
PARENT_CHECK_S = 0.5
DRAIN_S = 5.0
SETTLE_S = 5.0
MAX_PORT = 65_535
MAX_DETAILS_CHARS = 1000
"""An error may repeat what it complains of; a status that is too long for its header would arrive as another one."""
ConfigT = TypeVar("ConfigT")
Setup = Callable[[grpc.aio.Server, ConfigT], Coroutine[Any, Any, Callable[[], Awaitable[None]]]]
"""Registers servicers on the server, makes the service ready, and returns what closes it."""


def run_service(name: str, config_type: type[ConfigT], setup: Setup[ConfigT]) -> None:
    """The body of `python -m services.<name>`: exits 0 after SIGTERM, 2 on a configuration that cannot work."""
    log_all_output()
    sys.exit(_run(name, config_type, setup, sys.argv[1:], os.environ))


def _run(
    name: str, config_type: type[ConfigT], setup: Setup[ConfigT], argv: Sequence[str], environ: Mapping[str, str]
) -> int:
    configure_logs(name)
    try:
        parent_pid = _parent_pid(environ)
        config = parse_config(config_type, name, argv, environ)
        configure_logs(name, getattr(config, "log_level", "info"))
        asyncio.run(_serve(config, setup, parent_pid))
    except SlipstreamError as error:
        get_logger().error("service.failed", error=str(error))
        return error.exit_code
    return 0


def _parent_pid(environ: Mapping[str, str]) -> int | None:
    text = environ.get(PARENT_PID_VARIABLE, "")
    if text and not text.isdecimal():
        raise InvalidConfig(f"{PARENT_PID_VARIABLE}: {text!r} is no process id")
    return int(text) if text else None


async def _serve(config: Any, setup: Setup[Any], parent_pid: int | None) -> None:
    stopping = _stop_on_signals()
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[AnswerErrors()])
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    await health_servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    with _bound(server, config.listen) as address:
        end = asyncio.create_task(_wait_for_end(stopping, parent_pid))
        setting_up = asyncio.create_task(setup(server, config))
        await asyncio.wait({end, setting_up}, return_when=asyncio.FIRST_COMPLETED)
        if not setting_up.done():
            setting_up.cancel()
            return
        close = setting_up.result()
        await server.start()
        await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        get_logger().info("service.ready", address=address, pid=os.getpid())
        await end
        await health_servicer.enter_graceful_shutdown()
        await _drain(server, stopping)
        await close()
        await _settle()
    get_logger().info("service.stopped")


def _stop_on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def _drain(server: grpc.aio.Server, stopping: asyncio.Event) -> None:
    """Lets open calls finish for a while; a second signal ends the wait."""
    stopping.clear()
    draining = asyncio.create_task(server.stop(DRAIN_S))
    impatient = asyncio.create_task(stopping.wait())
    await asyncio.wait({draining, impatient}, return_when=asyncio.FIRST_COMPLETED)
    impatient.cancel()
    await server.stop(0)


async def _settle() -> None:
    """Lets gRPC's own tasks end: one that is cancelled with the loop prints its traceback."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while (others := asyncio.all_tasks() - {asyncio.current_task()}) and deadline > asyncio.get_running_loop().time():
        await asyncio.wait(others, timeout=deadline - asyncio.get_running_loop().time())


async def _wait_for_end(stopping: asyncio.Event, parent_pid: int | None) -> None:
    """Returns after a signal, or when the parent that started this process is no more."""
    while not stopping.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), PARENT_CHECK_S if parent_pid else None)
        if parent_pid and os.getppid() != parent_pid:
            stopping.set()


@contextlib.contextmanager
def _bound(server: grpc.aio.Server, listen: str) -> Iterator[str]:
    """Binds the address, or says that it is taken. A unix socket is guarded by a lock, as a second server would
    otherwise steal its path."""
    lock: IO[str] | None = None
    if listen.startswith("unix:"):
        lock = _open_lock(listen)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidConfig(f"{listen} is in use by another service; choose another --listen") from None
    try:
        if not lock and int(listen.rpartition(":")[2]) > MAX_PORT:  # gRPC would take the number modulo 2^16
            raise ValueError
        port = server.add_insecure_port(listen)
    except (RuntimeError, ValueError):
        raise InvalidConfig(f"cannot listen on {listen}: the address is in use or invalid") from None
    try:
        yield listen if lock else f"{listen.rpartition(':')[0]}:{port}"
    finally:
        if lock:
            lock.close()


def _open_lock(listen: str) -> IO[str]:
    try:
        return open(listen.removeprefix("unix:") + ".lock", "w")
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot listen on {listen}: {error}") from None


class AnswerErrors(grpc.aio.ServerInterceptor):
    """Binds the request id to the logs, logs a failure once, and answers it once with its own status."""

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith("/grpc.health."):
            return handler
        if handler.response_streaming:
            wrapped: Any = self._stream(handler.stream_stream or handler.unary_stream, details)
        else:
            wrapped = self._unary(handler.stream_unary or handler.unary_unary, details)
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
        return make_handler(wrapped, handler.request_deserializer, handler.response_serializer)

    def _stream(self, behaviour: Any, details: grpc.HandlerCallDetails) -> Any:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with _answered(context, details), contextlib.aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        return answer

    def _unary(self, behaviour: Any, details: grpc.HandlerCallDetails) -> Any:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with _answered(context, details):
                return await behaviour(request, context)

        return answer


@contextlib.asynccontextmanager
async def _answered(context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails) -> AsyncIterator[None]:
    metadata = dict(details.invocation_metadata or ())
    structlog.contextvars.bind_contextvars(request_id=metadata.get(REQUEST_ID_KEY), method=details.method)
    try:
        yield
    except SlipstreamError as error:
        get_logger().warning("request.refused", status=error.status, error=str(error))
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
        hint = () if retry_after_s is None else ((RETRY_AFTER_KEY, str(math.ceil(1000 * retry_after_s))),)
        await context.abort(grpc.StatusCode[error.status], str(error)[:MAX_DETAILS_CHARS], hint)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception:
        get_logger().exception("request.failed")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the service's log has the details")
