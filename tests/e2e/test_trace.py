"""A request may ask what the models did and when; one that does not is told nothing of it."""

import hashlib
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.gateway_client import caption, until
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("method", ["autoregressive", "sd", "parallelvlm", "slipstream"])
async def test_a_trace_accounts_for_every_token(gateway: grpc.aio.Channel, world: World, method: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": 48, "trace": True}
    traced = await until(
        lambda one: method == "autoregressive" or any(trace.kind == "restart" for trace in one.traces),
        lambda: caption(gateway, world.clips[0], method=method, **asked),
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


@pytest.mark.parametrize("pruner", ["uv_spread", "all", "none"])
async def test_kept_tokens_are_those_of_the_digest(gateway: grpc.aio.Channel, world: World, pruner: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": 8, "want_kept": True}
    asked |= {"pruner": pruner, "gate": False}
    captioned = await until(
        lambda one: bool(one.summary.speculation.kept_digest), lambda: caption(gateway, world.clips[0], **asked)
    )
    (kept,), summary = captioned.kept, captioned.summary
    assert (kept.num_steps, kept.num_tokens) == (NUM_FRAMES, summary.video.video_tokens) and not captioned.traces
    assert kept.times_s == summary.video.timestamps_s and kept.num_rows == kept.num_columns
    bits = np.unpackbits(np.frombuffer(kept.bitmap, np.uint8), bitorder="little")[: kept.num_tokens]
    indices = np.flatnonzero(bits).astype("<i8")
    assert hashlib.sha256(indices.tobytes()).hexdigest() == summary.speculation.kept_digest
    assert kept.num_kept == len(indices) == summary.speculation.kept_tokens


async def test_who_does_not_ask_gets_no_trace(gateway: grpc.aio.Channel, world: World) -> None:
    plain = await caption(gateway, world.clips[0], prompt=PROMPT, num_frames=NUM_FRAMES, max_new_tokens=8)
    assert not plain.traces and not plain.kept
