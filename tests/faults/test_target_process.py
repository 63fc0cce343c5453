"""The target's process killed or frozen in the middle of captions, which go on as if nothing had happened."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ServiceUnavailable
from slipstream.rpc.calls import open_channel
from tests.faults.conftest import FragileStack, Strike
from tests.support.gateway_client import Captioned, caption
from tests.support.processes import eventually, logged, running
from tests.support.world import NUM_FRAMES, PROMPT

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 160
KINDS: dict[str, dict[str, Any]] = {
    "slipstream": {},
    "autoregressive": {"method": "autoregressive"},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "sampled plainly": {"temperature": 0.9, "seed": 11, "method": "autoregressive"},
    "tree": {"method": "sd_tree"},
    "drafts itself": {"method": "std"},
    "lossy": {"method": "autoregressive", "lossy": "fastv"},
    "repetitions": {"repetition_penalty": 1.2, "stop": ["never to be written"]},
}


def outcome(captioned: Captioned) -> tuple[object, ...]:
    """What an undisturbed caption must have alike."""
    summary = captioned.summary
    assert summary.text == captioned.text and summary.num_tokens == len(captioned.token_ids)
    pieces = [token.piece for token in captioned.tokens]
    return captioned.token_ids, pieces, summary.finish_reason, summary.num_tokens, summary.text


def kill(fragile: FragileStack, *names: str) -> None:
    for name in names:
        os.kill(fragile.process(name).pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", KINDS)
async def test_killed_during_a_caption(fragile: FragileStack, kind: str) -> None:
    options = KINDS[kind] | {"max_new_tokens": NUM_TOKENS}
    undisturbed = await fragile.caption(**options)
    gateway_pid = fragile.process("gateway").pid
    strike = Strike(lambda c: len(c.token_ids) >= 20, lambda: kill(fragile, "target"))
    captioned = await fragile.caption(strike, **options)
    assert strike.num_tokens is not None and strike.num_tokens < NUM_TOKENS
    assert outcome(captioned) == outcome(undisturbed)
    assert captioned.summary.timings.resumptions == 1 and captioned.summary.timings.resume_s > 0
    assert [stage.stage for stage in captioned.stages if stage.stage.startswith("resume")] == ["resume", "resumed"]
    assert fragile.process("gateway").pid == gateway_pid


async def test_killed_again_and_again_with_its_draft(fragile: FragileStack) -> None:
    undisturbed = await fragile.caption(max_new_tokens=NUM_TOKENS)
    seen = [0]

    def on_event(captioned: Captioned) -> None:
        """Once more whenever a target has brought new tokens since the last one was killed."""
        if len(captioned.token_ids) >= seen[-1] + 20 and len(seen) <= 2:
            seen.append(len(captioned.token_ids))
            kill(fragile, "target", "draft")

    captioned = await fragile.caption(on_event, max_new_tokens=NUM_TOKENS)
    assert outcome(captioned) == outcome(undisturbed)
    assert captioned.summary.timings.resumptions == 2


async def test_killed_in_the_prefill(fragile: FragileStack) -> None:
    strike = Strike(lambda c: "prefill" in c.stage_names, lambda: kill(fragile, "target"))
    captioned = await fragile.caption(strike, max_new_tokens=32)
    assert captioned.token_ids == fragile.world.answer(0)[:32]
    assert captioned.summary.timings.resumptions == 1


async def test_a_text_that_depends_on_its_draft_ends(fragile: FragileStack) -> None:
    seen = Captioned()
    strike = Strike(lambda c: len(c.token_ids) >= 20, lambda: kill(fragile, "target"))

    def on_event(captioned: Captioned) -> None:
        nonlocal seen
        seen = captioned
        strike(captioned)

    with pytest.raises(ServiceUnavailable) as failed:
        await fragile.caption(on_event, temperature=1.0, sampling_rule="rejection", request_id="orphan")
    assert f"({len(seen.token_ids)} tokens were delivered)" in str(failed.value)
    assert "target is not reachable" in str(failed.value)
    await fragile.freed("orphan", "draft")


async def test_nobody_waits_longer_than_was_said(fragile: FragileStack, tmp_path: Path) -> None:
    """A target of its own gateway that does not come back."""
    target = fragile.process("target")
    async with running("gateway", tmp_path, "--target", target.address, "--resume-wait-s", "0.5") as gateway:
        pid, video = target.pid, fragile.world.clips[0]
        freeze = Strike(lambda c: len(c.token_ids) >= 4, lambda: os.kill(pid, signal.SIGSTOP))
        try:
            async with open_channel(gateway.address) as channel:
                with pytest.raises(ServiceUnavailable, match="tokens were delivered"):
                    await caption(
                        channel, video, on_event=freeze, prompt=PROMPT, num_frames=NUM_FRAMES, max_new_tokens=500
                    )
        finally:
            os.kill(pid, signal.SIGCONT)
        await eventually(lambda: logged(gateway.log_path, "caption.resume"))


async def test_frozen_during_a_caption(fragile: FragileStack) -> None:
    """A frozen target is as good as dead; the caption goes on when it is thawed, in a session of its own."""
    target = fragile.process("target")
    pid = target.pid
    freeze = Strike(lambda c: len(c.token_ids) >= 20, lambda: os.kill(pid, signal.SIGSTOP))
    thaw = Strike(lambda c: "resume" in c.stage_names, lambda: os.kill(pid, signal.SIGCONT))

    def on_event(captioned: Captioned) -> None:
        freeze(captioned)
        thaw(captioned)

    try:
        captioned = await fragile.caption(on_event, max_new_tokens=NUM_TOKENS, request_id="frozen")
    finally:
        os.kill(pid, signal.SIGCONT)
    await fragile.freed("frozen", "target", "draft")
    await fragile.freed("frozen+1", "target", "draft")
    await fragile.check(captioned)
    assert captioned.summary.timings.resumptions == 1 and target.pid == pid
