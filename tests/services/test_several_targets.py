"""One address that leads to several targets: calls are spread, and each draft pulls guidance where its session is."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack, gateway_address
from tests.support.gateway_client import caption, has_draft
from tests.support.processes import all_running, logged, model_flags, running
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

MOST_CAPTIONS = 40
"""Where one of the targets takes long to connect to, the other has the first of them. Each is of frames that nobody has
seen: who knows a video keeps it."""


async def test_guidance_comes_from_the_target_that_has_the_session(stack: Stack, world: World, tmp_path: Path) -> None:
    addresses = [gateway_address(None), gateway_address(None)]
    starts = (
        running(
            "target", tmp_path / str(number), *model_flags(world.pair.target, "--advertise", address), listen=address
        )
        for number, address in enumerate(addresses)
    )
    peers = ("--target", f"ipv4:{','.join(addresses)}", "--draft", stack.processes["draft"].address)
    async with (
        all_running(*starts) as targets,
        running("gateway", tmp_path, *peers) as gateway,
        open_channel(gateway.address) as channel,
    ):
        sessions = [0, 0]
        asked: dict[str, Any] = {"max_new_tokens": 1000, "pruner": "uv", "gate": False}
        while min(sessions) == 0 and sum(sessions) < MOST_CAPTIONS:
            asked["num_frames"] = 4 + sum(sessions)
            captioned = await caption(channel, world.clips[0], prompt=PROMPT, on_event=has_draft, **asked)
            assert "draft_ready" in captioned.stage_names, captioned.stages
            sessions = [len(logged(target.log_path, "session.opened")) for target in targets]
    assert min(sessions) > 0
