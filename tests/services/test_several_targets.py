"""One address that leads to several targets: calls are spread, and each draft pulls guidance where its session is."""

import contextlib
import socket
from pathlib import Path

from slipstream.rpc.client import open_channel
from tests.support.gateway_client import caption
from tests.support.processes import logged, model_flags, running
from tests.support.world import PROMPT, World

NUM_CAPTIONS = 4


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as exits:
        sockets = [exits.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


async def test_guidance_comes_from_the_target_that_has_the_session(world: World, tmp_path: Path) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    async with contextlib.AsyncExitStack() as exits:
        logs = []
        for number, address in enumerate(addresses):
            flags = model_flags(world.pair.target, "--advertise", address)
            service = await exits.enter_async_context(running("target", tmp_path / str(number), *flags, listen=address))
            logs.append(service.log_path)
        draft = await exits.enter_async_context(running("draft", tmp_path, *model_flags(world.pair.draft)))
        several = f"ipv4:{','.join(addresses)}"
        gateway = await exits.enter_async_context(
            running("gateway", tmp_path, "--target", several, "--draft", draft.address)
        )
        channel = await exits.enter_async_context(open_channel(gateway.address))
        for _ in range(NUM_CAPTIONS):
            captioned = await caption(
                channel, world.clips[0], prompt=PROMPT, num_frames=4, max_new_tokens=8, pruner="uv", gate=False
            )
            assert "draft_ready" in captioned.stage_names, captioned.stages
        sessions = [len(logged(log, "session.opened")) for log in logs]
    assert sum(sessions) == NUM_CAPTIONS and min(sessions) > 0
