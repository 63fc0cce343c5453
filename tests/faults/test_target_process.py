"""The target's process killed in the middle of captions: clients are told what they have, and the gateway goes on."""

import os
import signal

import grpc
import pytest

from tests.faults.conftest import FragileStack, Strike
from tests.support.gateway_client import Captioned

pytestmark = pytest.mark.asyncio(loop_scope="session")

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("method", ["parallel", "autoregressive"])
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

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await fragile.caption(on_event, method=method, request_id=f"orphan-{method}")
    assert failed.value.code() == UNAVAILABLE
    assert f"({len(seen.token_ids)} tokens were delivered)" in (failed.value.details() or "")
    assert "target is not reachable" in (failed.value.details() or "")
    if method == "parallel":
        await fragile.freed("orphan-parallel", "draft")

    if not target.is_serving:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fragile.caption(max_new_tokens=4)
        assert refused.value.code() == UNAVAILABLE
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
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await fragile.caption(freeze, request_id="frozen")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert failed.value.code() == UNAVAILABLE
    await fragile.freed("frozen", "target", "draft")
    await fragile.check(await fragile.caption(max_new_tokens=64))
    assert target.pid == pid
