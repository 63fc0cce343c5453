"""The target's process killed in the middle of captions: clients are told what they have, and the gateway goes on."""

import os
import signal

import pytest

from slipstream.errors import ServiceUnavailable
from tests.faults.conftest import FragileStack, Strike
from tests.support.gateway_client import Captioned

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("method", ["slipstream", "autoregressive"])
async def test_killed_during_a_caption(fragile: FragileStack, method: str) -> None:
    target, gateway_pid, seen = fragile.process("target"), fragile.process("gateway").pid, Captioned()
    starts = target.starts

    def joined(captioned: Captioned) -> bool:
        return method == "autoregressive" or "draft_ready" in captioned.stage_names

    kill = Strike(lambda c: len(c.token_ids) >= 20 and joined(c), lambda: os.kill(target.pid, signal.SIGKILL))

    def on_event(captioned: Captioned) -> None:
        nonlocal seen
        seen = captioned
        kill(captioned)

    with pytest.raises(ServiceUnavailable) as failed:
        await fragile.caption(on_event, method=method, request_id=f"orphan-{method}")
    assert f"({len(seen.token_ids)} tokens were delivered)" in str(failed.value)
    assert "target is not reachable" in str(failed.value)
    if method == "slipstream":
        await fragile.freed("orphan-slipstream", "draft")

    if not target.is_serving:
        with pytest.raises(ServiceUnavailable):
            await fragile.caption(max_new_tokens=4)
    await fragile.stack.wait_started("target", starts + 1)
    captioned = await fragile.caption(max_new_tokens=64, method=method)
    await fragile.check(captioned)
    assert fragile.process("gateway").pid == gateway_pid


async def test_frozen_during_a_caption(fragile: FragileStack) -> None:
    """A frozen target is as good as dead, and serves again when it is thawed."""
    target = fragile.process("target")
    pid = target.pid

    def joined(captioned: Captioned) -> bool:
        return bool(captioned.token_ids) and "draft_ready" in captioned.stage_names

    freeze = Strike(joined, lambda: os.kill(pid, signal.SIGSTOP))
    try:
        with pytest.raises(ServiceUnavailable):
            await fragile.caption(freeze, request_id="frozen")
    finally:
        os.kill(pid, signal.SIGCONT)
    await fragile.freed("frozen", "target", "draft")
    await fragile.check(await fragile.caption(max_new_tokens=64))
    assert target.pid == pid
