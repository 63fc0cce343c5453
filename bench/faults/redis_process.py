"""The queue's store as a process that can be harmed and started again like the services. Knows no queue."""

import time
from pathlib import Path

from slipstream.stack.process import ServiceProcess
from slipstream.stack.redis_server import EmbeddedServer


class RedisProcess(ServiceProcess):
    """The embedded server. It serves as soon as it is started, with all that was acknowledged before."""

    def __init__(self, folder: Path) -> None:
        self._server = EmbeddedServer(folder)
        super().__init__("redis", (), self._server.url, self._server.log_path, {})
        self._status: int | None = None

    @property
    def url(self) -> str:
        """What gateways are given."""
        return self._server.url

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def exit_status(self) -> int | None:
        return None if self._server.is_running else self._status

    @property
    def is_serving(self) -> bool:
        return self._serving_since is not None and self._server.is_running

    async def start(self) -> None:
        self._serving_since = None
        await self._server.start()
        self.starts += 1
        self._serving_since = time.monotonic()

    async def wait_serving(self, timeout_s: float) -> None:
        """It does since `start` returned."""

    async def wait_exit(self) -> int:
        self._status = await self._server.wait_exit()
        return self._status

    async def stop(self, grace_s: float) -> None:
        await self._server.stop()

    def kill(self) -> None:
        """Nothing to do: `stop` kills what does not end."""
