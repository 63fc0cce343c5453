"""The archive's queue server as one more child of the local stack. Knows how to keep it, not what it holds."""

import contextlib
import os
import signal
import time
from pathlib import Path

from slipstream.cli.process import ended_by
from slipstream.errors import InvalidConfig, ServiceUnavailable, SlipstreamError
from slipstream.jobs.embedded import EmbeddedServer


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
        """Ends it; how long that may take is its own affair: its data is to be safe."""
        await self.server.__aexit__(None, None, None)

    def kill(self) -> None:
        """SIGKILL, if it still runs; nothing that it acknowledged is lost."""
        if self.server.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.server.pid, signal.SIGKILL)
