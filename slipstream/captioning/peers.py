"""The gateway's two peers: their channels, what they serve, whether they fit each other, and whether they are up."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from slipstream.errors import ModelNotUsable, ServiceUnavailable, SlipstreamError
from slipstream.logs import get_logger
from slipstream.rpc.channels import as_slipstream_error, open_channel
from slipstream.rpc.security import PeerSecurity
from slipstream.rpc.server import Lifecycle
from slipstream.rpc.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc

# -- peers ------------------------------------------------------------------------------------------------------------

ASK_TIMEOUT_S = 2.0
RETRY_S = 0.2


class Peer:
    """One model service: its channel and what it said of itself last."""

    def __init__(self, role: str, address: str, stub_type: Any, security: PeerSecurity | None = None) -> None:
        self.role = role
        self.address = address
        self.model: common_pb2.ModelInfo | None = None
        self._channel = open_channel(address, security)
        self.stub = stub_type(self._channel)

    async def ask(self, timeout_s: float = ASK_TIMEOUT_S, *, wait_for_ready: bool = False) -> common_pb2.ModelInfo:
        """What it serves now; it may have been restarted with another model. Raises when it is not reachable, at once
        or, with `wait_for_ready`, after `timeout_s`."""
        try:
            self.model = await self.stub.GetModel(
                common_pb2.GetModelRequest(), timeout=timeout_s, wait_for_ready=wait_for_ready
            )
        except grpc.aio.AioRpcError as error:
            raise as_slipstream_error(error, self.role) from None
        return self.model

    async def wait(self, timeout_s: float) -> common_pb2.ModelInfo:
        """Asks until it answers. Raises `ServiceUnavailable` after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return await self.ask()
            except ServiceUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    message = f"the {self.role} at {self.address} did not answer within {timeout_s:g} s"
                    raise ServiceUnavailable(message) from None
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        await self._channel.close()


class Peers:
    """Target and draft. The draft may be absent, unreachable or replaced at any time; the target may not."""

    def __init__(self, target: str, draft: str, security: PeerSecurity | None = None) -> None:
        self.target = Peer("target", target, target_pb2_grpc.TargetStub, security)
        self.draft = Peer("draft", draft, draft_pb2_grpc.DraftStub, security) if draft else None

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

# Watches what the gateway cannot do without, and says so as its health.

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
