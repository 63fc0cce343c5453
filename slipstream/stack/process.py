"""A child process of the local stack: start, readiness, what its log says of its end, stop. And the private folder of a
stack, with the logs and sockets of all."""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.errors import InvalidConfig, ServiceUnavailable, SlipstreamError
from slipstream.rpc.calls import uri_of
from slipstream.rpc.grpc_options import NO_PROXY

# -- process ----------------------------------------------------------------------------------------------------------

POLL_S = 0.05
PROBE_TIMEOUT_S = 2.0
LOG_TAIL_BYTES = 64 * 1024

_PROBE_OPTIONS = (NO_PROXY, *((f"grpc.{bound}_reconnect_backoff_ms", 100) for bound in ("initial", "min", "max")))
_PACKAGE = Path(__file__).resolve().parents[1]


async def start_child(argv: Sequence[str], env: Mapping[str, str], log: int) -> asyncio.subprocess.Process:
    """A child that a terminal's Ctrl-C does not reach. `log`: a descriptor."""
    return await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=env, **_apart()
    )


def _apart() -> dict[str, Any]:
    """Keywords that give a child its own process group. The loops of uvloop, on which a captioner may run, know only
    sessions of their own; Linux weighs those against each other (autogroup), so that decoders are nice for nothing."""
    if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
        return {"process_group": 0}
    return {"start_new_session": True}


class ServiceProcess:
    """A service that runs as a child process and can be started again after it ended."""

    def __init__(self, name: str, argv: Sequence[str], address: str, log_path: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.address = address
        self.log_path = log_path
        self.starts = 0
        self._env = {**env, **_safe_path()}
        self._log_start = 0
        self._child: asyncio.subprocess.Process | None = None
        self._serving_since: float | None = None
        self._has_served = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of the latest start."""
        assert self._child is not None, f"{self.name} was never started"
        return self._child.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs, negative for a signal."""
        return self._child.returncode if self._child else None

    @property
    def is_serving(self) -> bool:
        """Whether it runs and has reported itself ready since its latest start."""
        return self._serving_since is not None and self.exit_status is None

    @property
    def served_s(self) -> float:
        """Seconds since the latest start reported itself ready; 0 if it never did."""
        return 0.0 if self._serving_since is None else time.monotonic() - self._serving_since

    async def start(self) -> None:
        self._serving_since = None
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._log_start = os.fstat(log).st_size
            self._child = await start_child(self.argv, self._env, log)
        finally:
            os.close(log)
        self.starts += 1

    async def wait_serving(self, timeout_s: float) -> None:
        """Returns when the service's health is SERVING; raises when it ends or takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_healthy()
        except TimeoutError:
            raise ServiceUnavailable(
                f"{self.name} was not ready after {timeout_s:.0f} s; its log: {self.log_path}"
            ) from None
        self._serving_since = time.monotonic()
        self._has_served.set()

    async def _wait_healthy(self) -> None:
        async with grpc.aio.insecure_channel(uri_of(self.address), options=_PROBE_OPTIONS) as channel:
            await self._poll(lambda: _is_healthy(health_pb2_grpc.HealthStub(channel)))

    async def _poll(self, is_healthy: Callable[[], Awaitable[bool]]) -> None:
        while not await is_healthy():
            if self.exit_status is not None:
                raise self.exit_error()
            await asyncio.sleep(POLL_S)

    async def wait_exit(self) -> int:
        """Exit status of the latest start, once it ended."""
        assert self._child is not None, f"{self.name} was never started"
        return await self._child.wait()

    async def wait_lost(self) -> NoReturn:
        """Raises why it ended, once it has served."""
        await self._has_served.wait()
        await self.wait_exit()
        raise self.exit_error()

    def exit_error(self) -> SlipstreamError:
        """What to tell a user of a child that ended without being asked to."""
        status = self.exit_status or 0
        reason = last_error(self.log_path, self._log_start) or "no error in its log"
        message = f"{self.name} {ended_by(status)}: {reason} (log: {self.log_path})"
        return InvalidConfig(message) if status == InvalidConfig.exit_code else ServiceUnavailable(message)

    async def stop(self, grace_s: float) -> None:
        """Ends the child: SIGTERM, and SIGKILL to its process group if that takes longer than `grace_s`."""
        if self._child is None or self._child.returncode is not None:
            return
        try:
            self._child.terminate()
            await asyncio.wait_for(self._child.wait(), grace_s)
        except (TimeoutError, ProcessLookupError):
            pass
        finally:  # also when this coroutine is cancelled: a second Ctrl-C must leave nothing behind
            self.kill()
        await self._child.wait()

    def kill(self) -> None:
        """SIGKILL to the child and what it started, if it still runs."""
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)


def _safe_path() -> dict[str, str]:
    """`python -m` looks for modules in the folder that it is started in first: a `queue.py` of the user's would be
    taken for Python's own. A checkout that is not installed is found nowhere else."""
    here = Path(_PACKAGE.name)
    return {} if here.exists() and here.samefile(_PACKAGE) else {"PYTHONSAFEPATH": "1"}


class HttpProcess(ServiceProcess):
    """A service that speaks HTTP and says at /health that it serves; its address is `HOST:PORT`."""

    async def _wait_healthy(self) -> None:
        await self._poll(self._answers)

    async def _answers(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    return (await reader.readline()).split()[1:2] == [b"200"]
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False


async def start_behind(needed: ServiceProcess, starting: Coroutine[Any, Any, None]) -> None:
    """Starts it and those that wait for it. Raises what is wrong with the first that does not start, and why the one
    that is needed has ended meanwhile: the others would wait for it in vain, and seem to be at fault."""
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(needed.wait_lost())
            await starting
            watching.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def ended_by(status: int) -> str:
    """How a child of this exit status (negative for a signal) ended."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


async def _is_healthy(stub: Any) -> bool:
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=PROBE_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def last_error(log_path: Path, start: int = 0) -> str:
    """The last error in the JSON lines from byte `start`; else the last line if it is plain text, as of a traceback."""
    size = log_path.stat().st_size  # less than `start`: the log was begun anew meanwhile
    with log_path.open("rb") as log:
        log.seek(max(start if start <= size else 0, size - LOG_TAIL_BYTES))
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    for line in reversed(lines):
        entry = _parse_entry(line)
        if entry.get("level") in ("error", "critical"):
            return " ".join(str(entry.get("error") or entry.get("event") or line).split())
    return lines[-1].strip() if lines and not _parse_entry(lines[-1]) else ""


def _parse_entry(line: str) -> dict[str, object]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


# -- folder -----------------------------------------------------------------------------------------------------------

# Where a local stack keeps its sockets and logs: it goes with the stack, also with one that was killed.

PREFIX = "slipstream-"
LOCK = "lock"
LONGEST_SOCKET_PATH = 107
"""Bytes that the kernel takes as the path of a unix socket."""
BETWEEN_ADDRESSES = ","
"""Is in no address: gRPC takes what is behind it for another one."""
KEPT_S = 7 * 86_400.0
"""How long the logs of a stack that failed are kept for whom its error message told where they are."""
MAX_LOG_BYTES = 16 * 1024**2
"""A log that has grown beyond becomes `<name>.1`, in place of the one before."""


class RunFolder:
    """A private folder (mode 0700) in the temporary folder, whose sockets have paths that gRPC and the kernel take.

    This process holds its lock. Making one sweeps those whose lock is free: their process was killed. Raises
    `InvalidConfig` where none can be made.
    """

    def __init__(self) -> None:
        try:
            given = tempfile.gettempdir()
            is_usable = len(os.fsencode(given)) < LONGEST_SOCKET_PATH - 40 and BETWEEN_ADDRESSES not in given
            parent = Path(given if is_usable else "/tmp")
            sweep(parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:  # as in a container whose root is read-only
            reason = f"no folder for sockets and logs can be made: {error.strerror}"
            raise InvalidConfig(f"{reason}; set TMPDIR to a folder of a short path that takes files") from None
        fresh = self.path / f"{LOCK}.new"
        self._lock: int | None = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / LOCK)  # it has its name once it is locked: no sweep sees it free

    def close(self, told: str = "") -> None:
        """Removes it, but for the logs whose paths are in `told`, the message of what failed: they stay for a week.

        May be called again.
        """
        if self._lock is None:
            return
        kept = {path for path in self.path.rglob("*.log") if str(path) in told}
        if kept:
            os.write(self._lock, b"kept\n")
            for path in sorted(self.path.rglob("*"), reverse=True):  # what is in a folder before the folder
                if path not in kept | {self.path / LOCK}:
                    with contextlib.suppress(OSError):  # a folder that holds a log
                        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def sweep(parent: Path) -> None:
    """Removes the folders below that nobody uses any more. A folder without a lock is none of ours, or of an older
    release, and is left alone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, gone meanwhile, or not a folder
            _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_kept = os.read(lock, 1) and time.time() - os.fstat(lock).st_mtime < KEPT_S
        if not is_kept:
            shutil.rmtree(folder)
    finally:
        os.close(lock)


def bound_log(path: Path) -> None:
    """Starts a log anew that has grown too large. Whoever writes it appends, and goes on; a line that comes in between
    is lost."""
    with contextlib.suppress(OSError):  # there is none yet, or its disk has a fault: it is looked at again
        if path.stat().st_size > MAX_LOG_BYTES:
            with contextlib.suppress(OSError):  # a full disk has as much as fits: what stayed would keep it full
                shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)
