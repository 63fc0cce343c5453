"""Hints that come while a caption is made: what a page seems to say is known only when its prompt is being run."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import SlipstreamError
from slipstream.logs import get_logger
from slipstream.rpc.peers import RemoteTarget, TargetCall
from slipstream.session_messages import TargetStart

TIMEOUT_S = 60.0
"""For a target that tokenizes them while it runs its passes."""


@dataclass(frozen=True)
class LateHints:
    """The hints of one caption. Where it goes on at another target, that one is given them too."""

    texts: Sequence[asyncio.Future[tuple[str, ...]]]
    """Given one after the other; empty where none are to be had."""

    async def deliver(self, target: RemoteTarget, call: TargetCall, start: TargetStart) -> None:
        """Gives them to the session that was begun so, each as soon as they are there; to be cancelled when it ends.
        Whatever goes wrong here costs speed only."""
        for coming in self.texts:
            texts = await asyncio.shield(coming)
            if any(texts):
                await _give(texts, target, call, start)


async def _give(texts: tuple[str, ...], target: RemoteTarget, call: TargetCall, start: TargetStart) -> None:
    try:
        async with target.at(await call.guidance_address()) as holder:
            num_tokens = await holder.add_hints(start, texts, timeout_s=TIMEOUT_S)
        get_logger().info("hints.delivered", num_tokens=num_tokens)
    except SlipstreamError as error:
        get_logger().warning("hints.lost", reason=str(error))
    except Exception:
        get_logger().exception("hints.failed")
