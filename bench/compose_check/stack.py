"""The stack under compose: up, down, and one container at a time."""

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common import ROOT, say

SHOWN_LINES = 25
"""Of the output of a command that failed."""


class CheckFailed(Exception):
    """A step did not do what it should; the message says what to look at."""


class Steps:
    """What was done, in order, and how long each step took."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """Times a step. What is put into the row that it yields is reported with it."""
        say(f"{name} ...")
        row: dict[str, Any] = {"step": name, "ok": False}
        self.rows.append(row)
        started = time.monotonic()
        try:
            yield row
            row["ok"] = True
        finally:
            row["seconds"] = round(time.monotonic() - started, 1)
            say(f"{name}: {'done' if row['ok'] else 'FAILED'} after {row['seconds']} s")


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    merge: bool = False,
) -> str:
    """What the command printed; with `merge`, its errors too. Raises `CheckFailed` when it fails or takes longer than
    `timeout_s`; then all that it started is ended."""
    line, pipe = " ".join(command), subprocess.PIPE
    errors_to = subprocess.STDOUT if merge else pipe
    with subprocess.Popen(
        command,
        env={**os.environ, **(environ or {})},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=errors_to,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CheckFailed(f"{line[:300]} took longer than {timeout_s:g} s") from None
            raise
    if process.returncode:
        tail = (output + (errors or "")).splitlines()[-SHOWN_LINES:]
        raise CheckFailed("\n".join([f"{line[:300]} ended with {process.returncode}", *tail]))
    return output


def wait_until(what: str, is_so: Callable[[], bool], timeout_s: float, look_at: str, every_s: float = 0.5) -> float:
    """Seconds until `is_so`. Raises `CheckFailed`, which says what to look at, after `timeout_s`."""
    started = time.monotonic()
    while not is_so():
        if time.monotonic() - started > timeout_s:
            raise CheckFailed(f"waited {timeout_s:g} s until {what}; look at {look_at}")
        time.sleep(every_s)
    return time.monotonic() - started


PROJECT = "slipstream-check"
IMAGE = "slipstream-check"
SERVICES = ("redis", "target", "draft", "gateway")
START_TIMEOUT_S = 300
RETURN_TIMEOUT_S = 180
BUILD_TIMEOUT_S = 1800


class Stack:
    """The containers of one compose project. Nothing runs before `up`."""

    def __init__(self, videos: Path) -> None:
        self.port = _free_port()
        self.environ = {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "SLIPSTREAM_IMAGE": IMAGE,
            "SLIPSTREAM_VIDEOS": str(videos),
            "SLIPSTREAM_PORT": str(self.port),
            "SLIPSTREAM_THREADS": "1",
            "SLIPSTREAM_REDIS_PASSWORD": secrets.token_hex(16),
        }

    @property
    def address(self) -> str:
        """The gateway's."""
        return f"127.0.0.1:{self.port}"

    def compose(self, *words: str, timeout_s: float = 60) -> str:
        """`docker compose` with these words."""
        return run(["docker", "compose", *words], timeout_s=timeout_s, environ=self.environ, folder=ROOT)

    def can(self, service: str, line: str) -> bool:
        """Whether a shell's line in the service's container ends well."""
        try:
            self.compose("exec", "-T", service, "sh", "-c", line)
        except CheckFailed:
            return False
        return True

    def build(self) -> None:
        """The image, from the Dockerfile of the project."""
        self.compose("build", timeout_s=BUILD_TIMEOUT_S)

    def up(self, *services: str) -> None:
        """Starts services, or all, and waits until they are healthy."""
        try:
            wait = ("--wait", "--wait-timeout", str(START_TIMEOUT_S))
            self.compose("up", "-d", "--no-build", *wait, *services, timeout_s=START_TIMEOUT_S + 60)
        except CheckFailed as error:
            raise CheckFailed(f"{error}\n{self.logs()}") from None

    def down(self) -> None:
        """Removes containers, networks and volumes."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "15", timeout_s=120)

    def logs(self) -> str:
        """The last lines of every container."""
        return self.compose("logs", "--no-color", "--tail", "15", timeout_s=60)

    def inspect(self, service: str) -> dict[str, Any]:
        """All that Docker knows of the service's container."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        if not container:
            raise CheckFailed(f"{service} has no container; look at: docker compose ps --all")
        found = json.loads(run(["docker", "inspect", container], timeout_s=30, environ=self.environ))
        return dict(found[0])

    def count_logged(self, service: str, event: str) -> dict[str, int]:
        """How often each of the service's containers has logged the event."""
        containers = self.compose("ps", "--quiet", service).split()
        counts = {}
        for name in containers:
            log = run(["docker", "logs", name], timeout_s=30, environ=self.environ, merge=True)
            counts[name] = log.count(f'"event": "{event}"')
        return counts

    def is_healthy(self, service: str) -> bool:
        """Whether it runs and its health check has passed."""
        state = self.inspect(service)["State"]
        return bool(state["Running"] and state.get("Health", {}).get("Status") == "healthy")

    def kill(self, service: str) -> float:
        """SIGKILL to the service's process on this machine; seconds until its restart policy has it healthy again."""
        before = self.inspect(service)
        os.kill(before["State"]["Pid"], signal.SIGKILL)

        def is_back() -> bool:
            now = self.inspect(service)
            return bool(now["RestartCount"] > before["RestartCount"]) and self.is_healthy(service)

        return wait_until(f"{service} is back", is_back, RETURN_TIMEOUT_S, f"docker compose logs {service}")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
