"""A draft that lies in every way the protocol allows to express: the caption completes, and its text is the same."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import common_pb2, draft_pb2_grpc
from slipstream.speculation.protocol import FinishReason
from slipstream.stack.local import Stack
from tests.faults.fake_draft import Behaviour, Event, FakeDraft, floods, ready, says, silent, tokens, writes
from tests.support.gateway_client import Captioned, caption
from tests.support.processes import read_log, running
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SILENCE_S = 0.3


@dataclass(frozen=True)
class Liar:
    """A gateway whose draft is ours to misbehave."""

    draft: FakeDraft
    gateway: grpc.aio.Channel
    world: World

    async def check(self, behaviour: Behaviour, *, clip: int = 0, num_tokens: int = 40, **options: Any) -> Captioned:
        """Captions with that draft and compares with the reference."""
        self.draft.behaviour = behaviour
        asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": num_tokens} | options
        captioned = await caption(self.gateway, self.world.clips[clip], **asked)
        expected = self.world.answer(clip, num_tokens)
        assert captioned.token_ids == expected
        assert captioned.text == captioned.summary.text == self.world.reference.text(expected)
        return captioned


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def liar(stack: Stack, world: World, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Liar]:
    folder = tmp_path_factory.mktemp("liar")
    async with open_channel(stack.processes["draft"].address) as channel:
        model = await draft_pb2_grpc.DraftStub(channel).GetModel(common_pb2.GetModelRequest())
    async with FakeDraft(folder, model) as draft:
        flags = ("--target", stack.processes["target"].address, "--draft", draft.address)
        async with running("gateway", folder, *flags, "--draft-timeout-s", str(SILENCE_S)) as process:
            async with open_channel(process.address) as gateway:
                yield Liar(draft, gateway, world)
            assert not [entry for entry in read_log(process.log_path) if entry["level"] == "error"]


def reasons(captioned: Captioned) -> str:
    return "; ".join(stage.detail for stage in captioned.stages if stage.stage == "draft_lost")


# -- a draft that is right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9, 16, 17, 40])
async def test_a_prophet_and_the_limit(liar: Liar, num_tokens: int, policy: str) -> None:
    answer = liar.world.answer(0)
    captioned = await liar.check(writes(lambda at: answer[at % 96]), num_tokens=num_tokens, policy=policy)
    assert captioned.summary.speculation.accepted >= captioned.summary.speculation.judged - 1
    assert captioned.summary.finish_reason == FinishReason.LENGTH
    assert "draft_lost" not in captioned.stage_names


@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
@pytest.mark.parametrize("max_window", [1, 3, 16, 64])
async def test_a_prophet_and_the_end_token(liar: Liar, max_window: int, policy: str) -> None:
    answer = liar.world.answer(2)
    behaviour = writes(lambda at: answer[at] if at < len(answer) else 7)
    captioned = await liar.check(behaviour, clip=2, num_tokens=96, max_window=max_window, policy=policy)
    assert captioned.summary.finish_reason == FinishReason.STOP
    assert max(cost.window for cost in captioned.summary.speculation.pass_costs) <= max_window


async def test_right_half_of_the_time(liar: Liar) -> None:
    answer = liar.world.answer(0)
    captioned = await liar.check(writes(lambda at: answer[at % 96] if at // 3 % 2 else 7), gate=False)
    assert captioned.summary.speculation.restarts > 0
    assert captioned.summary.speculation.drafts_lost == 0


# -- lies that are noticed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (says(lambda at: tokens(at.epoch + 7, at.known, [5])), "never started"),
        (says(lambda at: tokens(at.epoch, at.known + 1, [5])), "was next"),
        (says(lambda at: tokens(at.epoch, 2**32 - 1, [5])), "was next"),
        (says(lambda at: tokens(at.epoch, at.known, [5] * 5000)), "past output position"),
        (says(lambda at: tokens(at.epoch, at.known, [320])), "outside the vocabulary of 320"),
        (says(lambda at: tokens(at.epoch, at.known, [2**32 - 1])), "outside the vocabulary of 320"),
        (says(lambda at: tokens(at.epoch, at.known, [])), "without tokens"),
        (says(lambda at: tokens(0, 0, [])), "without tokens"),
        (says(lambda at: tokens(at.epoch, at.known, [5], math.nan)), "took nan s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], math.inf)), "took inf s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], -1.0)), "took -1.0 s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], 0.0)), "took 0.0 s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], 5e-324)), "took 5e-324 s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], 1e300)), "took 1e+300 s"),
        (says(lambda at: Event()), "empty message"),
        (says(), "silent for 0.3 s"),
        (says(stays=False), "ended the session"),
        (floods(lambda at: tokens(at.epoch, at.known, [5])), "was next"),
    ],
)
@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
async def test_lies_that_are_noticed(liar: Liar, behaviour: Behaviour, reason: str, policy: str) -> None:
    captioned = await liar.check(behaviour, policy=policy, num_tokens=90, gate=False)
    assert reason in reasons(captioned)
    assert captioned.summary.speculation.drafts_lost >= 1


async def test_a_draft_that_fails(liar: Liar) -> None:
    async def behave(orders: object) -> AsyncIterator[Event]:
        yield ready()
        raise RuntimeError("on purpose")

    captioned = await liar.check(behave)
    assert captioned.summary.speculation.drafts_lost >= 1


# -- lies that cost nothing but speed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
@pytest.mark.parametrize(
    "behaviour",
    [
        silent,
        writes(lambda at: 7),
        writes(lambda at: at % 320),
        writes(lambda at: 7, pause_s=0.2, pass_s=0.2),
        writes(lambda at: 7, pass_s=999.0),
        writes(lambda at: 7, pass_s=1e-6),
        floods(lambda at: tokens(0, 0, [5])),
        floods(lambda at: ready()),
        says(lambda at: ready(kept_tokens=2**32 - 1, video_tokens=0, guidance_bytes=2**64 - 1, encode_s=math.nan)),
    ],
    ids=["never ready", "garbage", "counting", "slow", "claims slow", "claims fast", "stale", "readies", "kept"],
)
async def test_lies_that_cost_speed_only(liar: Liar, behaviour: Behaviour, policy: str) -> None:
    await liar.check(behaviour, policy=policy, num_tokens=24)


@pytest.mark.parametrize("behaviour", [writes(lambda at: 7), says()], ids=["garbage", "mute"])
async def test_a_bad_draft_and_the_gate(liar: Liar, behaviour: Behaviour) -> None:
    """Whether and when it closes is a matter of seconds; the text and the account of it are not."""
    for gate in (True, False):
        speculation = (await liar.check(behaviour, num_tokens=96, gate=gate)).summary.speculation
        assert (speculation.gated_tokens > 0) <= (speculation.gate_closings > 0) <= gate
        assert speculation.gated_tokens <= sum(cost.count for cost in speculation.pass_costs if not cost.window)


async def test_tokens_before_it_is_ready(liar: Liar) -> None:
    async def behave(orders: object) -> AsyncIterator[Event]:
        yield tokens(1, 0, [5, 6])
        yield ready()
        await asyncio.Event().wait()

    await liar.check(behave)


async def test_lies_are_not_remembered(liar: Liar) -> None:
    """The running averages of this gateway have seen all of the above, and still make sense."""
    answer = liar.world.answer(0)
    for policy in ("self_clocked", "fixed"):
        captioned = await liar.check(writes(lambda at: answer[at % 96]), num_tokens=96, policy=policy, gate=False)
        assert captioned.summary.speculation.windows > 0
