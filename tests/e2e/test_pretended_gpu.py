"""The whole stack on a GPU that is not there: every method's text is that of plain transformers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch

from slipstream.rpc.calls import open_channel
from slipstream.speculation.methods import METHODS
from slipstream.stack.local import Stack
from tests.pretended_gpu.__main__ import environment
from tests.support.gateway_client import Captioned, caption, until
from tests.support.processes import logged
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="the pretended GPU takes torch's CPU build"),
]

NUM_TOKENS = 32


@dataclass
class OnGpu:
    """A running stack."""

    channel: grpc.aio.Channel
    world: World

    async def check(self, clip: int = 0, **options: Any) -> Captioned:
        asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False} | options
        captioned = await caption(self.channel, self.world.clips[clip], **asked)
        assert captioned.token_ids == self.world.answer(clip, NUM_TOKENS)
        return captioned


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def on_gpu(world: World) -> AsyncIterator[OnGpu]:
    options = world.stack_options()
    small = ("--dtype", "float32", "--kv-budget-mb", "8", "--device", "cuda:0")
    flags = {**options.extra_flags, "target": (*small, "--prefix-cache-mb", "2"), "draft": small}
    options = replace(options, extra_flags=flags, env={"PYTHONPATH": environment()["PYTHONPATH"]})
    async with Stack(options) as stack, open_channel(stack.gateway_address) as channel:
        for name in ("target", "draft"):
            assert logged(stack.processes[name].log_path, "static_steps.on")
        yield OnGpu(channel, world)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
async def test_methods(on_gpu: OnGpu, method: str) -> None:
    is_plain = method == "autoregressive"
    await until(
        lambda one: is_plain or one.summary.speculation.judged > 0, lambda: on_gpu.check(method=method, alpha=0.1)
    )


@pytest.mark.long
async def test_several_at_once_and_their_prefills_again(on_gpu: OnGpu) -> None:
    for _ in range(2):
        await asyncio.gather(*(on_gpu.check(clip) for clip in (0, 1, 0, 1, 0)))
    assert (await on_gpu.check(1)).summary.video.reused_tokens > 0
