"""A request may ask what the models did and when; one that does not is told nothing of it."""

import grpc
import pytest

from tests.support.gateway_client import caption
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("method", ["autoregressive", "sd", "parallelvlm", "slipstream"])
async def test_a_trace_accounts_for_every_token(gateway: grpc.aio.Channel, world: World, method: str) -> None:
    traced = await caption(
        gateway, world.clips[0], prompt=PROMPT, num_frames=NUM_FRAMES, max_new_tokens=48, method=method, trace=True
    )
    summary = traced.summary
    first, *passes = [trace for trace in traced.traces if trace.kind == "pass"]
    assert first.tokens == 0  # the prefill's own token
    assert len(passes) == summary.speculation.passes
    assert sum(trace.accepted for trace in passes) == sum(token.from_draft for token in traced.tokens)
    assert all(trace.pass_s > 0 and trace.asked_s <= trace.at_s for trace in passes)
    drafted = [trace for trace in traced.traces if trace.kind == "draft"]
    assert sum(trace.tokens for trace in drafted) >= sum(trace.accepted for trace in passes)
    restarts = sum(trace.kind == "restart" for trace in traced.traces)
    assert (restarts > 0) == (method != "autoregressive")


async def test_who_does_not_ask_gets_no_trace(gateway: grpc.aio.Channel, world: World) -> None:
    plain = await caption(gateway, world.clips[0], prompt=PROMPT, num_frames=NUM_FRAMES, max_new_tokens=8)
    assert not plain.traces
