"""The serving side: a process's main(), its gRPC server, health, errors answered in one place, and a clean end.

A service module gives `serve` a coroutine that registers its servicer; everything else is the same for all of them.
"""

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from slipstream.config import parse_config
from slipstream.errors import DeadlineExceeded, DeviceLost, InvalidConfig, SlipstreamError
from slipstream.logs import configure_logs, get_logger, log_all_output
from slipstream.metrics import PROCESS, shown_at
from slipstream.rpc.callers import Places
from slipstream.rpc.grpc_options import MAX_CONCURRENT_CALLS, MAX_WATCHERS, SERVER_OPTIONS, WATCH_S
from slipstream.rpc.guards import Admit, AnswerErrors, Guard
from slipstream.rpc.security import RequireNames, make_identify
from slipstream.rpc.tls import WireOptions, warn_of_plaintext
from slipstream.rpc.tracing import TraceCalls, traced
from slipstream.time_limits import within

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


class Health(health.aio.HealthServicer):
    """Answers every Check; those who watch are counted, and have to ask again after a while."""

    def __init__(self, watchers: Places, watch_s: float) -> None:
        super().__init__()
        self._watchers = watchers
        self._watch_s = watch_s

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        with self._watchers.held():
            async with within(self._watch_s, self._late):
                await super().Watch(request, context)

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"health is watched for {self._watch_s:g} s at most; watch again")


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


# -- file descriptors -------------------------------------------------------------------------------------------------

# Connections, videos and frames are descriptors. Without one left a service neither accepts nor opens anything.

MAX_DESCRIPTORS = 65_536
"""More than any service holds, where the system would grant a billion: others size tables by this limit."""
LOW_SHARE = 0.8
LOOK_S = 2.0


def raise_descriptor_limit() -> None:
    """Lets this process hold as many descriptors as the system grants it. A terminal grants 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Descriptors:
    """Those that this process holds; says so in the log before there are no more."""

    what = "descriptors"

    def __init__(self) -> None:
        self.used = 0
        self._is_low = False

    @property
    def limit(self) -> int:
        """May be changed from outside while the process runs."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look(_num_descriptors())
            await asyncio.sleep(LOOK_S)

    def look(self, used: int | None) -> None:
        """`used`: how many there are; None where there was not even one left for counting them."""
        self.used = self.limit if used is None else used
        is_low = self.used >= LOW_SHARE * self.limit
        if is_low and not self._is_low:
            get_logger().error("descriptors.low", used=self.used, limit=self.limit)
        elif self._is_low and not is_low:
            get_logger().info("descriptors.regained", used=self.used, limit=self.limit)
        self._is_low = is_low


def _num_descriptors() -> int | None:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


# -- server -----------------------------------------------------------------------------------------------------------

PARENT_PID_VARIABLE = "SLIPSTREAM_PARENT_PID"
"""Set by whoever starts a service that must not outlive it."""
PARENT_CHECK_S = 0.5
DRAIN_S = 5.0
"""Of a service that has no `--drain-s`."""
ANSWER_S = 1.0
"""For calls to end in, once they are told to."""
READ_S = 0.2
"""For callers to read why: one whose next write fails on a closed connection never does."""
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
        with traced(name, getattr(config, "otlp", "")) as tracing:
            guards = () if tracing is None else (TraceCalls(tracing),)
            asyncio.run(_serve(name, config, setup, parent_pid, serves, guards))
    except SlipstreamError as error:
        get_logger().error("service.failed", error=str(error))
        return error.exit_code
    return 0


def _parent_pid(environ: Mapping[str, str]) -> int | None:
    text = environ.get(PARENT_PID_VARIABLE, "")
    if text and not text.isdecimal():
        raise InvalidConfig(f"{PARENT_PID_VARIABLE}: {text!r} is no process id")
    return int(text) if text else None


async def _serve(
    name: str, config: Any, setup: Setup[Any], parent_pid: int | None, serves: Sequence[str], guards: Sequence[Guard]
) -> None:
    stopping = _stop_on_signals()
    raise_descriptor_limit()
    descriptors = Descriptors()
    PROCESS.watch(descriptors)
    server, credentials, calls = make_server(config, serves, guards)
    health_servicer = add_health(server, config)
    lifecycle = Lifecycle(health_servicer)
    await lifecycle.report("", is_serving=False)
    with bound(server, config.listen, credentials) as address, shown_at(getattr(config, "metrics", "")):
        end = asyncio.create_task(_wait_for_end(stopping, parent_pid, lifecycle))
        setting_up = asyncio.create_task(setup(server, config, lifecycle))
        await asyncio.wait({end, setting_up}, return_when=asyncio.FIRST_COMPLETED)
        if not setting_up.done():
            setting_up.cancel()
            if lifecycle.failure is not None:
                raise lifecycle.failure
            return
        close = setting_up.result()
        await server.start()
        gc.collect()
        gc.freeze()  # what was loaded stays; collections need not look at it again and again
        await lifecycle.report("", is_serving=True)
        watching = asyncio.create_task(descriptors.run())
        PROCESS.started(name, getattr(config, "expiries", {}))
        get_logger().info("service.ready", address=address, pid=os.getpid(), max_descriptors=descriptors.limit)
        await end
        lifecycle.stopping.set()
        await health_servicer.enter_graceful_shutdown()
        await _drain(server, calls, stopping, config, can_finish=not isinstance(lifecycle.failure, DeviceLost))
        if isinstance(lifecycle.failure, DeviceLost):  # what waits for it, or for a rank, may never end
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
        else:
            await close()
        watching.cancel()
        await _settle()
    if lifecycle.failure is not None:
        raise lifecycle.failure
    get_logger().info("service.stopped")


def make_server(
    config: Any, serves: Sequence[str], more_guards: Sequence[Guard] = ()
) -> tuple[grpc.aio.Server, grpc.ServerCredentials | None, AnswerErrors]:
    """A server as configured, the credentials to bind it with, and what surrounds its calls. Raises `InvalidConfig`."""
    wire = config if isinstance(config, WireOptions) else WireOptions()
    credentials = wire.server_credentials()
    guards: list[Guard] = [make_identify(getattr(config, "tokens", ""), config.listen, has_tls=credentials is not None)]
    if wire.client_names:
        if config.listen.startswith("unix:"):
            raise InvalidConfig("--tls-client-names: a unix socket carries no TLS; its folder says who may call")
        guards.append(RequireNames(wire.client_names))
    places = Places("calls", MAX_CONCURRENT_CALLS, _share(config))
    PROCESS.watch(places)
    calls = AnswerErrors(wire.stream_timeout_s, *guards, *more_guards, Admit(places), on_refused=PROCESS.refused)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[calls])
    if wire.reflection:
        reflection.enable_server_reflection([*serves, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server, credentials, calls


def add_health(server: grpc.aio.Server, config: Any) -> Health:
    """Health of its own ceiling: what others do to the service, or it does for them, leaves it alone."""
    watchers = Places("watchers", MAX_WATCHERS, _share(config), are="watch health")
    PROCESS.watch(watchers)
    servicer = Health(watchers, WATCH_S)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def _share(config: Any) -> float:
    """Of one caller. Services that only a gateway calls have no such option: it may have all."""
    return float(getattr(config, "owner_share", 1.0))


def _stop_on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def _drain(
    server: grpc.aio.Server, calls: AnswerErrors, stopping: asyncio.Event, config: Any, *, can_finish: bool = True
) -> None:
    """Lets open calls finish for a while, if they can, then ends them and says so; a second signal ends the wait."""
    drain_s = getattr(config, "drain_s", DRAIN_S) if can_finish else 0.0
    stopping.clear()
    if getattr(config, "lame_duck", False):
        calls.refuse_new()
        draining = asyncio.create_task(calls.wait_idle())
    else:
        draining = asyncio.create_task(server.stop(drain_s + ANSWER_S))
    impatient = asyncio.create_task(stopping.wait())
    await asyncio.wait({draining, impatient}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    impatient.cancel()
    all_ended = draining.done()
    calls.end_calls()
    if not all_ended:
        await asyncio.wait({asyncio.create_task(calls.wait_idle())}, timeout=ANSWER_S)
        await asyncio.sleep(READ_S)
    await server.stop(READ_S)


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
    """Binds the address, or says that it is taken. A lock keeps a second server from stealing a unix socket's path."""
    lock = _open_lock(listen) if listen.startswith("unix:") else None
    if lock:
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
