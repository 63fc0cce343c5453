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
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import IO, Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_reflection.v1alpha import reflection

from slipstream.config import parse_config
from slipstream.errors import DeadlineExceeded, DeviceLost, InvalidConfig, SlipstreamError
from slipstream.logs import configure_logs, get_logger, log_all_output
from slipstream.metrics import PROCESS, shown_at
from slipstream.process_life import Descriptors, ServiceLoop, parent_pid, raise_descriptor_limit, wait_for_end
from slipstream.rpc.callers import Places
from slipstream.rpc.calls import uri_of
from slipstream.rpc.grpc_options import MAX_CONCURRENT_CALLS, MAX_WATCHERS, SERVER_OPTIONS, WATCH_S
from slipstream.rpc.guards import Admit, AnswerErrors, Guard
from slipstream.rpc.message_limits import write_all
from slipstream.rpc.security import RequireNames, make_identify
from slipstream.rpc.service_options import ServiceOptions
from slipstream.rpc.tls import warn_of_plaintext
from slipstream.rpc.tracing import TraceCalls, traced
from slipstream.time_limits import within

# -- lifecycle and health ----------------------------------------------------------------------------------------------

# What a service's parts learn of the process's life, and say about it: health, the beginning of its end, failure.


class Lifecycle:
    """Handed to a service's `setup`. The name "" stands for the process as a whole, serving once it is set up."""

    def __init__(self, health: "Health") -> None:
        self.stopping = asyncio.Event()
        """Set when the process begins to end: open calls may finish, nothing new should begin."""
        self.hurried = asyncio.Event()
        """Set by a signal from then on: nothing is to be waited for any more."""
        self.failed = asyncio.Event()
        self.failure: SlipstreamError | None = None
        self._health = health

    def report(self, service: str, *, is_serving: bool) -> None:
        """Answers health checks for `service` so from now on, until the process ends."""
        self._health.set(service, HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING)

    def fail(self, error: SlipstreamError) -> None:
        """Ends the process in good order, with this error's exit status."""
        self.failure = self.failure or error
        self.failed.set()


class Health(health_pb2_grpc.HealthServicer):
    """Answers every Check; those who watch are counted, and have to ask again after a while. In place of gRPC's own,
    where a watcher who takes nothing holds the lock that whoever reports waits for, and so does the process's end."""

    def __init__(self, watchers: Places, watch_s: float, itself: str = "") -> None:
        """`itself`: the full name of the gRPC service whose health is that of the process."""
        self._itself = itself
        self._watchers = watchers
        self._watch_s = watch_s
        self._statuses: dict[str, int] = {"": HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()
        """Set with the next change of any of them, and then replaced."""
        self._is_ending = False

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> HealthCheckResponse:
        service = self._known_as(request.service)
        if service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return HealthCheckResponse(status=self._statuses[service])

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        service = self._known_as(request.service)
        with self._watchers.held():
            async with within(self._watch_s, self._late), aclosing(self._changes(service)) as changes:
                await write_all(context, changes)

    def set(self, service: str, status: int) -> None:
        """Tells it from now on, until the end."""
        if not self._is_ending:
            self._statuses[service] = status
            self._note_change()

    def end(self) -> None:
        """Nothing is served any more."""
        self._is_ending = True
        self._statuses = dict.fromkeys(self._statuses, HealthCheckResponse.NOT_SERVING)
        self._note_change()

    async def _changes(self, service: str) -> AsyncGenerator[HealthCheckResponse, None]:
        """The status now and whenever it is another one than was taken last."""
        last: int | None = None
        while True:
            changed, status = self._changed, self._statuses.get(service, HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                last = status
                yield HealthCheckResponse(status=status)
            await changed.wait()

    def _known_as(self, service: str) -> str:
        return "" if service == self._itself else service

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

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
        self.reason, self.since_s = "", 0.0
        """Why it is not, and since when (unix time)."""
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
            self.reason, self.since_s = str(error), self.since_s if self.reason else time.time()
            if self._misses == MAX_MISSES:
                get_logger().warning("health.lost", peer=self._name, reason=str(error))
        else:
            if self._misses >= MAX_MISSES:
                get_logger().info("health.regained", peer=self._name)
            self.is_up, self._misses, self.reason = True, 0, ""
        self._lifecycle.report(self._service, is_serving=self._misses < MAX_MISSES)


# -- server -----------------------------------------------------------------------------------------------------------

ANSWER_S = 1.0
"""How long calls have to end, once they are told to."""
READ_S = 0.2
"""How long connections stay open then, so that a caller that is still writing reads why it was ended."""
SETTLE_S = 5.0
MAX_PORT = 65_535
ConfigT = TypeVar("ConfigT", bound=ServiceOptions)
Setup = Callable[[grpc.aio.Server, ConfigT, Lifecycle], Coroutine[Any, Any, Callable[[], Awaitable[None]]]]
"""Registers servicers on the server, makes the service ready, and returns what closes it."""


def run_service(name: str, config_type: type[ConfigT], setup: Setup[ConfigT], serves: Sequence[str] = ()) -> None:
    """The body of `python -m slipstream.services.<name>`: exits 0 after SIGTERM, 2 on a configuration that cannot work.
    `serves`: full names of its gRPC services, for reflection; the health of the first is that of the process."""
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
        parent = parent_pid(environ)
        config = parse_config(config_type, name, argv, environ)
        configure_logs(name, config.log_level)
        with traced(name, config.otlp) as tracing, asyncio.Runner(loop_factory=ServiceLoop) as runner:
            guards = () if tracing is None else (TraceCalls(tracing),)
            runner.run(_serve(name, config, setup, parent, serves, guards))
    except SlipstreamError as error:
        get_logger().error("service.failed", error=str(error))
        return error.exit_code
    return 0


async def _serve(
    name: str,
    config: ConfigT,
    setup: Setup[ConfigT],
    parent: int | None,
    serves: Sequence[str],
    guards: Sequence[Guard],
) -> None:
    raise_descriptor_limit()
    descriptors = Descriptors()
    PROCESS.watch(descriptors)
    server, credentials, calls = make_server(config, serves, guards)
    health = add_health(server, config.callers.share, *serves[:1])
    lifecycle = Lifecycle(health)
    signalled = _on_signals(lifecycle)
    lifecycle.report("", is_serving=False)
    expiries = config.expiries  # as the files are before what calls others reads them, once
    with bound(server, config.listen, credentials) as address, shown_at(config.metrics):
        end = asyncio.create_task(wait_for_end([signalled, lifecycle.failed], parent))
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
        lifecycle.report("", is_serving=True)
        watching = asyncio.create_task(descriptors.run())
        PROCESS.started(name, expiries)
        get_logger().info("service.ready", address=address, pid=os.getpid(), max_descriptors=descriptors.limit)
        await end
        lifecycle.stopping.set()
        health.end()
        await _drain(server, calls, lifecycle.hurried, config, can_finish=not isinstance(lifecycle.failure, DeviceLost))
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
    config: ServiceOptions, serves: Sequence[str], more_guards: Sequence[Guard] = ()
) -> tuple[grpc.aio.Server, grpc.ServerCredentials | None, AnswerErrors]:
    """A server as configured, the credentials to bind it with, and what surrounds its calls. Raises `InvalidConfig`."""
    credentials = config.server_credentials()
    places = Places("calls", MAX_CONCURRENT_CALLS, config.callers.share)
    PROCESS.watch(places)
    guards = (*caller_guards(config), *more_guards, Admit(places))
    calls = AnswerErrors(config.stream_timeout_s, *guards, on_refused=PROCESS.refused)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[calls])
    if config.reflection:
        reflection.enable_server_reflection([*serves, HEALTH_NAME, reflection.SERVICE_NAME], server)
    return server, credentials, calls


def caller_guards(config: ServiceOptions) -> list[Guard]:
    """What lets in those who may call. Raises `InvalidConfig`."""
    guards: list[Guard] = [make_identify(config.callers.tokens, config.listen, has_tls=bool(config.tls_cert))]
    if config.client_names:
        if config.listen.startswith("unix:"):
            raise InvalidConfig("--tls-client-names: a unix socket carries no TLS; its folder says who may call")
        guards.append(RequireNames(config.client_names))
    return guards


def add_health(server: grpc.aio.Server, share: float, itself: str = "") -> Health:
    """Health of its own ceiling, of which one caller may have a `share`: what others do to the service, or it does for
    them, leaves it alone. `itself`: as `Health` has it."""
    watchers = Places("watchers", MAX_WATCHERS, share, are="watch health")
    PROCESS.watch(watchers)
    servicer = Health(watchers, WATCH_S, itself)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def _on_signals(lifecycle: Lifecycle) -> asyncio.Event:
    """Set by the first signal; one that comes while the process ends hurries it."""
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: (lifecycle.hurried if lifecycle.stopping.is_set() else signalled).set()
        )
    return signalled


async def _drain(
    server: grpc.aio.Server,
    calls: AnswerErrors,
    hurried: asyncio.Event,
    config: ServiceOptions,
    *,
    can_finish: bool = True,
) -> None:
    """Lets open calls finish for a while, if they can and nobody is hurried, then ends them and says so."""
    drain_s = config.drain_s if can_finish else 0.0
    if config.lame_duck:
        calls.refuse_new()
        draining = asyncio.create_task(calls.wait_idle())
    else:
        draining = asyncio.create_task(server.stop(drain_s + ANSWER_S))
    impatient = asyncio.create_task(hurried.wait())
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
            port = server.add_insecure_port(uri_of(listen))
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
