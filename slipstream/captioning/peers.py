"""The gateway's two peers: their channels, what they serve, whether they fit each other, and whether they are up."""

import asyncio
from collections.abc import Awaitable, Callable

from slipstream.errors import ModelNotUsable, SlipstreamError
from slipstream.logs import get_logger
from slipstream.rpc.remote_models import ASK_TIMEOUT_S, RemoteDraft, RemoteTarget
from slipstream.rpc.security import PeerSecurity
from slipstream.rpc.server import Lifecycle


class Peers:
    """Target and draft. The draft may be absent, unreachable or replaced at any time; the target may not."""

    def __init__(self, target: str, draft: str, security: PeerSecurity | None = None) -> None:
        self.target = RemoteTarget(target, security)
        self.draft = RemoteDraft(draft, security) if draft else None

    async def find_draft(self, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Raises `ServiceUnavailable` when no draft answers, and `ModelNotUsable` when it does not fit the target."""
        assert self.draft is not None
        try:
            await self.draft.ask(timeout_s)
        except SlipstreamError:
            self.draft.model = None
            raise
        self.check_pair()

    def check_pair(self) -> None:
        """Raises `ModelNotUsable` when the two models that answered last do not fit each other."""
        target, draft = self.target.model, self.draft.model if self.draft else None
        if target is None or draft is None:
            return
        if target.tokenizer_digest != draft.tokenizer_digest:
            raise ModelNotUsable(
                f"target {target.model_id!r} and draft {draft.model_id!r} have different tokenizers; "
                "take a draft of the same family, or ask for method 'autoregressive'"
            )
        if target.tokens_per_frame != draft.tokens_per_frame:
            raise ModelNotUsable(
                f"the target makes {target.tokens_per_frame} tokens of a frame and the draft {draft.tokens_per_frame}; "
                "guidance needs them equal"
            )

    async def close(self) -> None:
        """Closes both channels."""
        for peer in (self.target, self.draft):
            if peer is not None:
                await peer.close()


# -- health -----------------------------------------------------------------------------------------------------------

POLL_S = 1.0
MAX_MISSES = 2
"""Unanswered questions in a row before health says so: a busy machine may lose one."""


class HealthWatch:
    """Asks one thing again and again, and reports it as the health of one service name."""

    def __init__(self, name: str, service: str, ask: Callable[[], Awaitable[object]], lifecycle: Lifecycle) -> None:
        self.is_up = True
        """What the last question found; becomes False at once, before health does."""
        self._name = name
        self._service = service
        self._ask = ask
        self._lifecycle = lifecycle
        self._misses = 0

    def mark_down(self) -> None:
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


def watch_target(peers: Peers, lifecycle: Lifecycle) -> HealthWatch:
    """The gateway as a whole serves as long as its target answers."""
    return HealthWatch("target", "", peers.target.ask, lifecycle)
