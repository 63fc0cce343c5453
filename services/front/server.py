"""uvicorn within our process: bound before it serves, patient with nobody, and ended in good order."""

import asyncio
import contextlib
import logging
import math
import re
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.errors import InvalidConfig
from slipstream.logs import LineBudget
from slipstream.rpc.callers import is_local
from slipstream.rpc.tls import https_context, warn_of_plaintext
from slipstream.services.front.config import FrontConfig

MAX_HEAD_BYTES = 32 * 1024
BACKLOG = 1024
_ABSOLUTE_TARGET = re.compile(rb"https?://([^/]+)(/.*)?", re.IGNORECASE | re.DOTALL)
TELL_OF_STRANGERS = ("uvicorn.error", "python_multipart.multipart")
"""Loggers of libraries: that somebody speaks no HTTP, or sends a form that is none."""
TELL_S = 1.0
"""For requests that are cancelled to say so."""
LEAVE_S = 1.0
"""For what was sent of an answer that has no end to be read: uvicorn itself waits for its reader for ever."""


class PatientProtocol(H11Protocol):
    """A connection that may be silent for `head_s`, and no longer: uvicorn itself waits for a head for ever. One beyond
    `max_connections` is closed at once, and one whose answer has no end soon after it."""

    head_s = 15.0
    max_connections = 4096

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self.app = self._answered
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # ours covers the time until the next head is whole
        self._await_head()

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self.cycle
        try:
            await self.config.loaded_app(_in_origin_form(scope), receive, send)
        finally:
            if not cycle.response_complete:
                self.loop.call_later(LEAVE_S, self.transport.abort)

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head_timer = self.loop.call_later(self.head_s, self._end_waiting)

    def _end_waiting(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _in_origin_form(scope: Scope) -> Scope:
    """A request whose target names the host, too, as those to a proxy do, is one whose target does not: a server must
    take both (RFC 9112, 3.2.2), and that host counts."""
    found = _ABSOLUTE_TARGET.fullmatch(scope["raw_path"])
    if found is None:
        return scope
    host, path = found[1], found[2] or b"/"
    headers = [(b"host", host), *(header for header in scope["headers"] if header[0] != b"host")]
    return {**scope, "path": unquote(path.decode("ascii")), "raw_path": path, "headers": headers}


class _FewLines(logging.Filter):
    """Leaves out what libraries say of strangers beyond what one caller may cause."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = LineBudget()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or self._lines.spend("") is not None


class _Server(uvicorn.Server):
    """Without uvicorn's own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def bound_socket(config: FrontConfig) -> socket.socket:
    """A listening socket. Raises `InvalidConfig` where it cannot listen, or where others could read tokens."""
    host, _, port = config.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise InvalidConfig(f"--listen: {config.listen!r} is not HOST:PORT")
    if bool(config.tls_cert) != bool(config.tls_key):
        raise InvalidConfig("--tls-cert and --tls-key must be given together")
    if config.tokens and not config.tls_cert and not is_local(config.listen):
        raise InvalidConfig(
            f"--tokens on {config.listen} needs --tls-cert: on a plaintext wire anyone on the way could read the tokens"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host.strip("[]"), int(port)))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise InvalidConfig(f"cannot listen on {config.listen}: {error.strerror}") from None
    warn_of_plaintext(config.listen, bool(config.tls_cert))
    return listening


def address_of(listening: socket.socket) -> str:
    """HOST:PORT as it is called; a number of IPv6 is in brackets."""
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if listening.family == socket.AF_INET6 else f"{host}:{port}"


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, config: FrontConfig, listening: socket.socket, stopping: asyncio.Event, hurry: asyncio.Event
) -> AsyncIterator[None]:
    """Serves within. At its end `stopping` is set, and open requests have `drain_s` to finish, or until `hurry` is set;
    then they are cancelled, and tell their clients. Raises `InvalidConfig` for TLS files that cannot be used."""
    protocol = type(
        "Protocol", (PatientProtocol,), {"head_s": config.head_s, "max_connections": config.max_connections}
    )
    server = _Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(config.head_s) + 1,
            timeout_graceful_shutdown=math.ceil(config.drain_s + TELL_S),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
    )
    server.config.load()
    if config.tls_cert:
        server.config.ssl = https_context(config.tls_cert, config.tls_key)
    few_lines, loggers = _FewLines(), [logging.getLogger(name) for name in TELL_OF_STRANGERS]
    for logger in loggers:
        logger.addFilter(few_lines)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.started and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # uvicorn tells nobody
        yield
    finally:
        stopping.set()
        server.should_exit = True
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({running, hurried}, timeout=config.drain_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for task in set(server.server_state.tasks):
            task.cancel()
        await running
        for logger in loggers:
            logger.removeFilter(few_lines)
