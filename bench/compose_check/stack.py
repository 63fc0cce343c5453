"""The stack under compose: up, down, and one container at a time. Knows no caption."""

import json
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.compose_check.steps import CheckFailed, run, wait_until

PROJECT = "slipstream-check"
IMAGE = "slipstream-check"
SERVICES = ("redis", "target", "draft", "gateway")
START_TIMEOUT_S = 300
RETURN_TIMEOUT_S = 180


class Stack:
    """The containers of one compose project; `folder` has the files. Nothing runs before `up`."""

    def __init__(self, folder: Path, videos: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.port = _free_port()
        self.environ = {
            **environ,
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
        return run(["docker", "compose", *words], timeout_s=timeout_s, environ=self.environ, folder=self.folder)

    def can(self, service: str, line: str) -> bool:
        """Whether a shell's line in the service's container ends well."""
        try:
            self.compose("exec", "-T", service, "sh", "-c", line)
        except CheckFailed:
            return False
        return True

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
