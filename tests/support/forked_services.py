"""Services and commands are forked from a process that has imported what they need, in place of importing it each time.

A start of a model's service takes five seconds of a core, nine tenths of them for importing torch and transformers;
forked it takes half a second. Only these are forked, and only where the variables that imports read
are what they were when the imports were made. All else is started as always; so is everything in tests of how a process
starts and ends, which ask for `started_afresh`.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.process_life import PARENT_PID_VARIABLE
from slipstream.stack import process
from tests.support.fork_server import NUMBER, READY, Start

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    ("slipstream.services.target", "slipstream.services.draft"),
    (
        *("slipstream.services.gateway", "slipstream.services.reader", "slipstream.services.front"),
        *("tests.cli.fake_service", "slipstream.cli"),
    ),
)
"""With torch and without: the light ones are not given what they must not need."""
SEEN_BY_IMPORTS = ("CUDA_", "HF_", "HUGGINGFACE_", "OMP_", "PYTHON", "TORCH_", "TRANSFORMERS_")
"""Beginnings of the names of variables that are read when what a service needs is imported. Of the others some are set
by libraries while tests run, and all are read by a service when it runs, or by none."""
START_AFRESH = process.start_child
"""What it is outside tests."""


class ForkServer:
    """One process that forks services; it is started with the first and ends with `close`."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._environ = dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """None before the first start."""
        return self._process.pid if self._process else None

    def forks(self, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
        """Whether a process of this command line and environment would be what this one forks."""
        names = {*self._modules, *(module.removeprefix("slipstream.") for module in self._modules)}  # `services/target`
        is_ours = list(argv[:2]) == [sys.executable, "-m"] and argv[2] in names
        return is_ours and _seen_by_imports(environ) == _seen_by_imports(self._environ)

    async def start(self, argv: Sequence[str], environ: Mapping[str, str], output: int, errors: int) -> "ForkedChild":
        """Raises `ConnectionError` when the server could not import what it should; its own output says why."""
        connection = await self._connected()
        start = Start(argv[2], list(argv[3:]), self._bound(environ), os.getcwd())
        reading, writing = os.pipe()
        try:
            socket.send_fds(connection, [json.dumps(asdict(start)).encode()], [output, errors, writing])
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return ForkedChild(reading)

    def close(self) -> None:
        """Ends the server and all that it has forked."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()

    def _bound(self, environ: Mapping[str, str]) -> dict[str, str]:
        """A service that must not outlive this process must not outlive the server, which ends with this process."""
        is_bound = environ.get(PARENT_PID_VARIABLE) == str(os.getpid())
        return {**environ, PARENT_PID_VARIABLE: str(self.pid)} if is_bound else dict(environ)

    async def _connected(self) -> socket.socket:
        connection = self._socket = self._socket or self._open()
        if not self._is_ready:
            await _readable(connection.fileno())
            if not self._is_ready and connection.recv(len(READY)) != READY:
                raise ConnectionError("the process that services are forked from has ended")
            self._is_ready = True
        return connection

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), *self._modules],
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        return ours


class ForkedChild:
    """What `asyncio.subprocess.Process` is to a child, for one that the fork server waits for."""

    def __init__(self, told: int) -> None:
        self._told = told
        """A pipe's end, on which the server says the id and the exit status."""
        self._status: int | None = None
        self.pid = self._read()
        if self.pid < 0:
            raise ConnectionError("the process that services are forked from has ended")
        os.set_blocking(told, False)

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self._status is None:
            with contextlib.suppress(BlockingIOError):
                self._status = self._read()
                os.close(self._told)
        return self._status

    async def wait(self) -> int:
        while (status := self.returncode) is None:
            await _readable(self._told)
        return status

    def terminate(self) -> None:
        """Raises `ProcessLookupError` when it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGTERM)

    def _read(self) -> int:
        """The next number. Without a server nobody knows how its children ended: it kills them."""
        data = os.read(self._told, NUMBER.size)
        return int(NUMBER.unpack(data)[0]) if data else -signal.SIGKILL


_servers: list[ForkServer] = []


@contextlib.contextmanager
def services_forked() -> Iterator[None]:
    """Within, services are forked where they can be."""
    _servers[:] = [ForkServer(modules) for modules in MODULES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start_child", _start_child)
        try:
            yield
        finally:
            for server in _servers:
                server.close()
            _servers.clear()


def fork_server_pids() -> set[int]:
    """Of those that run."""
    return {server.pid for server in _servers if server.pid is not None}


async def _start_child(argv: Sequence[str], environ: Mapping[str, str], log: int) -> Any:
    for server in _servers:
        if server.forks(argv, environ):
            return await server.start(argv, environ, log, log)
    return await START_AFRESH(argv, environ, log)


@dataclass(frozen=True)
class Ended:
    """A command line that has."""

    status: int
    output: str
    errors: str


async def command(*words: str, **environ: str) -> Ended:
    """Runs `slipstream` with these words, and with these variables beside those that there are."""
    argv, environment = [sys.executable, "-m", "slipstream.cli", *words], {**os.environ, **environ}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        told = output.fileno(), errors.fileno()
        server = next((each for each in _servers if each.forks(argv, environment)), None)
        if server is not None:
            child: Any = await server.start(argv, environment, *told)
        else:
            child = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=told[0], stderr=told[1])
        status = await child.wait()
        output.seek(0)
        errors.seek(0)
        return Ended(status, output.read().decode(), errors.read().decode())


def _seen_by_imports(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(SEEN_BY_IMPORTS)}


async def _readable(descriptor: int) -> None:
    """Returns when there is something to read, or nothing will ever be. Several may wait."""
    readable = asyncio.Event()
    own = os.dup(descriptor)
    loop = asyncio.get_running_loop()
    try:
        loop.add_reader(own, readable.set)
        await readable.wait()
    finally:
        loop.remove_reader(own)
        os.close(own)
