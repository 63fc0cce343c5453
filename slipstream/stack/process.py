"""One child process of the local stack: start, readiness, what its log says of its end, stop."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.errors import InvalidConfig, ServiceUnavailable, SlipstreamError

POLL_S = 0.05
PROBE_TIMEOUT_S = 2.0
LOG_TAIL_BYTES = 64 * 1024

_PROBE_OPTIONS = tuple((f"grpc.{bound}_reconnect_backoff_ms", 100) for bound in ("initial", "min", "max"))


class ServiceProcess:
    """A service that runs as a child process and can be started again after it ended."""

    def __init__(self, name: str, argv: Sequence[str], address: str, log_path: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.address = address
        self.log_path = log_path
        self.starts = 0
        self._env = dict(env)
        self._log_start = 0
        self._child: asyncio.subprocess.Process | None = None
        self._serving_since: float | None = None

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
        """Starts the child in its own process group, so that a terminal's Ctrl-C reaches only the parent."""
        self._serving_since = None
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._log_start = os.fstat(log).st_size
            self._child = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                process_group=0,
            )
        finally:
            os.close(log)
        self.starts += 1

    async def wait_serving(self, timeout_s: float) -> None:
        """Returns when the service's health is SERVING; raises when it ends or takes too long."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                grpc.aio.insecure_channel(self.address, options=_PROBE_OPTIONS) as channel,
            ):
                stub = health_pb2_grpc.HealthStub(channel)
                while not await _is_healthy(stub):
                    if self.exit_status is not None:
                        raise self.exit_error()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ServiceUnavailable(
                f"{self.name} was not ready after {timeout_s:.0f} s; its log: {self.log_path}"
            ) from None
        self._serving_since = time.monotonic()

    async def wait_exit(self) -> int:
        """Exit status of the latest start, once it ended."""
        assert self._child is not None, f"{self.name} was never started"
        return await self._child.wait()

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
