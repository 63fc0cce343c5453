"""A pair of one tokenizer whose logits are padded to different widths, as those of one family's sizes are."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from tests.support.gateway_client import caption, until
from tests.support.hub_forms import pad_vocabulary
from tests.support.processes import check_logs
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 48
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 10, "seed": 3}


@pytest.fixture(scope="module", params=["target", "draft"])
def wider(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def channel(
    wider: str, world: World, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[grpc.aio.Channel]:
    """A wider target would never write what is behind its tokenizer; a wider draft would do so all the time."""
    path = tmp_path_factory.mktemp(wider) / "model"
    shutil.copytree(getattr(world.pair, wider), path)
    pad_vocabulary(path, 336, scale=0.0 if wider == "target" else 3.0)
    options = replace(world.stack_options(), **{f"{wider}_model": path})
    async with Stack(options) as running, open_channel(running.gateway_address) as opened:
        yield opened
        check_logs(running)


async def run(channel: grpc.aio.Channel, world: World, **options: Any) -> list[int]:
    asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "pruner": "none", "gate": False}
    captioned = await until(
        lambda one: one.summary.speculation.accepted > 0,
        lambda: caption(channel, world.clips[0], **asked | options),
    )
    speculation = captioned.summary.speculation
    assert speculation.drafts_lost == 0 and speculation.accepted > 0
    return captioned.token_ids


async def test_the_likeliest_tokens(channel: grpc.aio.Channel, world: World) -> None:
    assert await run(channel, world) == world.answer(0, NUM_TOKENS)


async def test_coupled_sampling(channel: grpc.aio.Channel, world: World) -> None:
    texts = [await run(channel, world, **SAMPLING, max_window=width) for width in (1, 16)]
    plain = await caption(
        channel,
        world.clips[0],
        prompt=PROMPT,
        num_frames=NUM_FRAMES,
        max_new_tokens=NUM_TOKENS,
        method="autoregressive",
        **SAMPLING,
    )
    assert texts == [plain.token_ids] * 2


async def test_rejection_sampling(channel: grpc.aio.Channel, world: World) -> None:
    token_ids = await run(channel, world, sampling_rule="rejection", **SAMPLING)
    assert 0 < len(token_ids) <= NUM_TOKENS and max(token_ids) < 320
