"""The serving side: a process's main(), its gRPC server, health, errors answered in one place, and a clean end.

A service module gives `serve` a coroutine that registers its servicer; everything else is the same for all of them.
"""

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import IO, Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from slipstream.config import parse_config
from slipstream.errors import InvalidConfig, SlipstreamError
from slipstream.logs import configure_logs, get_logger, log_all_output
from slipstream.metrics import shown_at
from slipstream.rpc.grpc_options import MAX_CONCURRENT_CALLS, SERVER_OPTIONS
from slipstream.rpc.guards import AnswerErrors
from slipstream.rpc.security import WireOptions, make_identify, warn_of_plaintext

# -- lifecycle and health ----------------------------------------------------------------------------------------------

# What a service's parts learn of the process's life, and say about it: health, the beginning of its end, failure.


class Lifecycle:
    """Handed to a service's `setup`. The name "" stands for the process as a whole, serving once it is set up."""

    def __init__(self, health_servicer: health.aio.HealthServicer) -> None:
        self.stopping = asyncio.Event()
        """Set when the process begins to end: open calls may finish, nothing new should begin."""
        self.failed = asyncio.Event()
        self.failure: SlipstreamError | None = None
        self._health = health_servicer

    async def report(self, service: str, *, is_serving: bool) -> None:
        """Answers health checks for `service` so from now on, until the process ends."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(service, status)

    def fail(self, error: SlipstreamError) -> None:
        """Ends the process in good order, with this error's exit status."""
        self.failure = self.failure or error
        self.failed.set()


POLL_S = 1.0
MAX_MISSES = 2
"""Unanswered questions in a row before health says so: a busy machine may lose one."""


class HealthWatch:
    """Asks one thing again and again, and reports it as the health of one service name."""

    def __init__(self, name: str, service: str, ask: Callable[[], Awaitable[object]], lifecycle: Lifecycle) -> None:
        self.is_up = True
        """What the last question found; becomes False at once, before health does."""
        self._name = name
        self._service = service
        self._ask = ask
        self._lifecycle = lifecycle
        self._misses = 0

    def mark_down(self) -> None:
        """Somebody else found it gone: it is not up until the next question is answered."""
        self.is_up = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Asks once and reports."""
        try:
            await self._ask()
        except SlipstreamError as error:
            self.is_up = False
            self._misses += 1
            if self._misses == MAX_MISSES:
                get_logger().warning("health.lost", peer=self._name, reason=str(error))
        else:
            if self._misses >= MAX_MISSES:
                get_logger().info("health.regained", peer=self._name)
            self.is_up, self._misses = True, 0
        await self._lifecycle.report(self._service, is_serving=self._misses < MAX_MISSES)


# -- server -----------------------------------------------------------------------------------------------------------

PARENT_PID_VARIABLE = "SLIPSTREAM_PARENT_PID"
"""Set by whoever starts a service that must not outlive it."""
PARENT_CHECK_S = 0.5
DRAIN_S = 5.0
"""Of a service that has no `--drain-s`."""
ANSWER_S = 1.0
"""For callers to take the answer that ends their call."""
SETTLE_S = 5.0
MAX_PORT = 65_535
ConfigT = TypeVar("ConfigT")
Setup = Callable[[grpc.aio.Server, ConfigT, Lifecycle], Coroutine[Any, Any, Callable[[], Awaitable[None]]]]
"""Registers servicers on the server, makes the service ready, and returns what closes it."""


def run_service(name: str, config_type: type[ConfigT], setup: Setup[ConfigT], serves: Sequence[str] = ()) -> None:
    """The body of `python -m slipstream.services.<name>`: exits 0 after SIGTERM, 2 on a configuration that cannot work.
    `serves`: full names of its gRPC services, for reflection."""
    log_all_output()
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_failure)
    status = _run(name, config_type, setup, sys.argv[1:], os.environ, serves)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is closed; the interpreter would spend seconds on freeing what torch loaded


def _is_failure(record: logging.LogRecord) -> bool:
    """grpc.aio takes a caller who vanished while the answer was written for an error of the server."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


def _run(
    name: str,
    config_type: type[ConfigT],
    setup: Setup[ConfigT],
    argv: Sequence[str],
    environ: Mapping[str, str],
    serves: Sequence[str] = (),
) -> int:
    configure_logs(name)
    try:
        parent_pid = _parent_pid(environ)
        config = parse_config(config_type, name, argv, environ)
        configure_logs(name, getattr(config, "log_level", "info"))
        asyncio.run(_serve(config, setup, parent_pid, serves))
    except SlipstreamError as error:
        get_logger().error("service.failed", error=str(error))
        return error.exit_code
    return 0


def _parent_pid(environ: Mapping[str, str]) -> int | None:
    text = environ.get(PARENT_PID_VARIABLE, "")
    if text and not text.isdecimal():
        raise InvalidConfig(f"{PARENT_PID_VARIABLE}: {text!r} is no process id")
    return int(text) if text else None


async def _serve(config: Any, setup: Setup[Any], parent_pid: int | None, serves: Sequence[str]) -> None:
    stopping = _stop_on_signals()
    server, credentials, calls = make_server(config, serves)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    lifecycle = Lifecycle(health_servicer)
    await lifecycle.report("", is_serving=False)
    with bound(server, config.listen, credentials) as address, shown_at(getattr(config, "metrics", "")):
        end = asyncio.create_task(_wait_for_end(stopping, parent_pid, lifecycle))
        setting_up = asyncio.create_task(setup(server, config, lifecycle))
        await asyncio.wait({end, setting_up}, return_when=asyncio.FIRST_COMPLETED)
        if not setting_up.done():
            setting_up.cancel()
            return
        close = setting_up.result()
        await server.start()
        gc.collect()
        gc.freeze()  # what was loaded stays; collections need not look at it again and again
        await lifecycle.report("", is_serving=True)
        get_logger().info("service.ready", address=address, pid=os.getpid())
        await end
        lifecycle.stopping.set()
        await health_servicer.enter_graceful_shutdown()
        await _drain(server, calls, stopping, getattr(config, "drain_s", DRAIN_S))
        await close()
        await _settle()
    if lifecycle.failure is not None:
        raise lifecycle.failure
    get_logger().info("service.stopped")


def make_server(
    config: Any, serves: Sequence[str]
) -> tuple[grpc.aio.Server, grpc.ServerCredentials | None, AnswerErrors]:
    """A server as the configuration wants it, the credentials to bind it with, and what surrounds its calls. Raises
    `InvalidConfig`."""
    wire = config if isinstance(config, WireOptions) else WireOptions()
    credentials = wire.server_credentials()
    identify = make_identify(getattr(config, "tokens", ""), config.listen, has_tls=credentials is not None)
    calls = AnswerErrors(wire.stream_timeout_s)
    server = grpc.aio.server(
        options=SERVER_OPTIONS,
        interceptors=[calls, identify],
        maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
    )
    if wire.reflection:
        reflection.enable_server_reflection([*serves, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server, credentials, calls


def _stop_on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def _drain(server: grpc.aio.Server, calls: AnswerErrors, stopping: asyncio.Event, drain_s: float) -> None:
    """Lets open calls finish for a while, then ends them and says so; a second signal ends the wait."""
    stopping.clear()
    draining = asyncio.create_task(server.stop(drain_s + ANSWER_S))
    impatient = asyncio.create_task(stopping.wait())
    await asyncio.wait({draining, impatient}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    impatient.cancel()
    calls.end_calls()
    await server.stop(ANSWER_S)


async def _settle() -> None:
    """Lets gRPC's own tasks end: one that is cancelled with the loop prints its traceback."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while (others := asyncio.all_tasks() - {asyncio.current_task()}) and deadline > asyncio.get_running_loop().time():
        await asyncio.wait(others, timeout=deadline - asyncio.get_running_loop().time())


async def _wait_for_end(stopping: asyncio.Event, parent_pid: int | None, lifecycle: Lifecycle) -> None:
    """Returns after a signal, a failure, or when the parent that started this process is no more."""
    ends = [asyncio.create_task(event.wait()) for event in (stopping, lifecycle.failed)]
    try:
        while not any(end.done() for end in ends):
            timeout_s = PARENT_CHECK_S if parent_pid else None
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if parent_pid and os.getppid() != parent_pid:
                return
    finally:
        for end in ends:
            end.cancel()


@contextlib.contextmanager
def bound(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> Iterator[str]:
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
        if lock or credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except (RuntimeError, ValueError):
        raise InvalidConfig(f"cannot listen on {listen}: the address is in use or invalid") from None
    warn_of_plaintext(listen, credentials is not None)
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
