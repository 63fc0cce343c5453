"""One address that leads to several targets: calls are spread, and each draft pulls guidance where its session is."""

import contextlib
import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import gateway_pb2_grpc
from slipstream.stack.addresses import gateway_address
from slipstream.stack.local import Stack
from tests.support.gateway_client import caption, has_draft, options_message, upload_messages
from tests.support.processes import all_running, eventually, logged, model_flags, running
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

MOST_CAPTIONS = 40
"""Where one of the targets takes long to connect to, the other has the first of them. Each is of frames that nobody has
seen: who knows a video keeps it."""


def receives_video(pid: int) -> bool:
    """Whether this gateway has begun to keep an upload, for which it has asked its target before."""
    with contextlib.suppress(OSError):
        return any("memfd:video" in os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


async def test_a_target_that_is_away_when_a_video_is_whole_is_waited_for(world: World, tmp_path: Path) -> None:
    """It was there when the caption came, so no session has been lost: none could be opened. A name may lead to others,
    so who is called is chosen then."""
    address = gateway_address(None)
    asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": 24}
    async with (
        running("target", tmp_path, *model_flags(world.pair.target), listen=address) as target,
        running("gateway", tmp_path, "--target", f"localhost:{address.rpartition(':')[2]}") as gateway,
        open_channel(gateway.address) as channel,
    ):
        call = gateway_pb2_grpc.GatewayStub(channel).Caption(timeout=240)
        await call.write(options_message(**asked))
        await eventually(lambda: receives_video(gateway.pid))
        target.kill()
        await target.wait_exit()
        for message in upload_messages(world.clips[0]):
            await call.write(message)
        await call.done_writing()
        token_ids: list[int] = []
        stages = list[str]()
        while (event := await call.read()) is not grpc.aio.EOF:
            token_ids += [token.token_id for token in event.text.tokens]
            if event.stage.stage == "resume" and "resume" not in stages:
                await target.start()
            stages.append(event.stage.stage)
        assert "resume" in stages and token_ids == world.answer(0, 24)


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
