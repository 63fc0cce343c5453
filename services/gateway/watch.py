"""Watches what the gateway cannot do without, and says so as its health. Knows no caption and no job."""

import asyncio
from collections.abc import Awaitable, Callable

from services.gateway.peers import Peers
from slipstream.errors import SlipstreamError
from slipstream.logs import get_logger
from slipstream.rpc.lifecycle import Lifecycle

POLL_S = 1.0
MAX_MISSES = 2
"""Unanswered questions in a row before health says so: a busy machine may lose one."""


class Watch:
    """Asks one thing again and again, and reports it as the health of one service name."""

    def __init__(self, name: str, service: str, ask: Callable[[], Awaitable[object]], lifecycle: Lifecycle) -> None:
        self.is_up = True
        """What the last question found; becomes False at once, before health does."""
        self._name = name
        self._service = service
        self._ask = ask
        self._lifecycle = lifecycle
        self._misses = 0

    def doubt(self) -> None:
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
            if self._misses == MAX_MISSES:
                get_logger().warning("health.lost", peer=self._name, reason=str(error))
        else:
            if self._misses >= MAX_MISSES:
                get_logger().info("health.regained", peer=self._name)
            self.is_up, self._misses = True, 0
        await self._lifecycle.report(self._service, is_serving=self._misses < MAX_MISSES)


def watch_target(peers: Peers, lifecycle: Lifecycle) -> Watch:
    """The gateway as a whole serves as long as its target answers."""
    return Watch("target", "", peers.target.ask, lifecycle)
