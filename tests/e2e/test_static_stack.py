"""Target and draft with static steps, through the whole stack: every method's text is that of plain transformers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.speculation.methods import METHODS
from slipstream.stack.local import Stack
from tests.support.gateway_client import Captioned, caption, until
from tests.support.processes import logged
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 64
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 5}


@dataclass
class Static:
    """A running stack."""

    channel: grpc.aio.Channel
    world: World

    async def caption(self, clip: int = 0, **options: Any) -> Captioned:
        asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False} | options
        return await caption(self.channel, self.world.clips[clip], **asked)

    async def check(self, clip: int = 0, **options: Any) -> Captioned:
        captioned = await self.caption(clip, **options)
        assert captioned.token_ids == self.world.answer(clip, NUM_TOKENS)
        return captioned


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def static(world: World) -> AsyncIterator[Static]:
    options = world.stack_options()
    on = ("--static-steps", "on", "--kv-budget-mb", "256")
    flags = {**options.extra_flags, "target": (*on, "--prefix-cache-mb", "64"), "draft": on}
    async with Stack(replace(options, extra_flags=flags)) as stack, open_channel(stack.gateway_address) as channel:
        for name in ("target", "draft"):
            assert logged(stack.processes[name].log_path, "static_steps.on")
        yield Static(channel, world)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
async def test_methods(static: Static, method: str) -> None:
    is_plain = method == "autoregressive"
    await until(
        lambda one: is_plain or one.summary.speculation.judged > 0, lambda: static.check(method=method, alpha=0.1)
    )


async def test_several_at_once_and_their_prefills_again(static: Static) -> None:
    for _ in range(2):
        await asyncio.gather(*(static.check(clip) for clip in (0, 1, 0, 1, 0)))
    assert (await static.check(1)).summary.video.reused_tokens > 0


async def test_sampled_text_is_that_of_other_steps(static: Static, gateway: grpc.aio.Channel) -> None:
    asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, **SAMPLED}
    alone = await caption(gateway, static.world.clips[0], **asked, method="autoregressive")
    for method in ("slipstream", "sd_tree", "autoregressive"):
        assert (await static.caption(**SAMPLED, method=method)).token_ids == alone.token_ids
