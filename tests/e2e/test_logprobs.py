"""How likely the target found each token, through the running stack: as transformers' logits say, whoever drafts."""

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.errors import ProtocolViolation
from slipstream.messages import TokenLogprob
from slipstream.rpc.calls import open_channel
from slipstream.session_messages import Judgement, PassFacts
from slipstream.speculation.protocol import Verdict
from slipstream.stack.local import Stack
from tests.faults.conftest import Strike
from tests.support.clips import sample_clip
from tests.support.gateway_client import MOST_TRIES, Captioned, caption
from tests.support.world import NUM_FRAMES, PROMPT, World, make_endless_world

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 40
TOLERANCE = 1e-4
"""Rows of a window and of one pass over all are fp32 sums in other orders."""
WAYS: tuple[dict[str, Any], ...] = (
    {"method": "autoregressive"},
    {"method": "slipstream", "pruner": "none"},
    {"method": "slipstream_tree", "pruner": "none"},
    {"method": "slipstream_branches", "pruner": "none"},
    {"method": "sd_tree", "pruner": "none"},
    {"method": "std"},
    {"method": "prompt_lookup"},
    {"method": "hints", "prediction": ["It is a tale of two cities."]},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 5, "sampling_rule": "rejection", "policy": "fixed"},
    {"temperature": 0.5, "top_p": 0.8, "repetition_penalty": 1.2, "seed": 6},
    {"regex": "[a-z]+( [a-z]+){9,}"},
    {"stop": ["e"]},
)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_endless_world(tmp_path_factory.mktemp("logprobs"), extra_layers=4)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(endless: World) -> AsyncIterator[Stack]:
    async with Stack(endless.stack_options("--resume-wait-s", "60", restart=True)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def channel(stack: Stack) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(stack.gateway_address) as channel:
        yield channel


async def run(channel: grpc.aio.Channel, world: World, **options: Any) -> Captioned:
    asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False} | options
    return await caption(channel, world.clips[0], logprobs=True, **asked)


def expected(world: World, token_ids: list[int]) -> Any:
    chances = world.reference.chances(sample_clip(world.clips[0], NUM_FRAMES), PROMPT, token_ids)
    told = chances[range(len(token_ids)), token_ids]
    return pytest.approx(told.tolist(), rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("way", WAYS)
async def test_they_are_those_of_transformers(channel: grpc.aio.Channel, endless: World, way: dict[str, Any]) -> None:
    captioned = await run(channel, endless, **way)
    assert captioned.tokens and [token.logprob for token in captioned.tokens] == expected(endless, captioned.token_ids)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[8]])
async def test_the_likeliest_are_those_of_transformers(
    channel: grpc.aio.Channel, endless: World, way: dict[str, Any]
) -> None:
    captioned = await run(channel, endless, top_logprobs=3, **way)
    video = sample_clip(endless.clips[0], NUM_FRAMES)
    for token, chances in zip(
        captioned.tokens, endless.reference.chances(video, PROMPT, captioned.token_ids), strict=True
    ):
        best = chances.topk(3).values.tolist()
        assert [one.logprob for one in token.top_logprobs] == pytest.approx(best, rel=TOLERANCE, abs=TOLERANCE)
        for one in token.top_logprobs:
            assert one.logprob == pytest.approx(float(chances[one.token_id]), rel=TOLERANCE, abs=TOLERANCE)
            assert one.piece == endless.reference.text([one.token_id])


async def test_nobody_is_told_unasked(channel: grpc.aio.Channel, endless: World) -> None:
    captioned = await caption(channel, endless.clips[0], prompt=PROMPT, num_frames=NUM_FRAMES, max_new_tokens=4)
    assert [token.logprob for token in captioned.tokens] == [None] * 4


async def test_a_target_that_dies_takes_none_with_it(stack: Stack, channel: grpc.aio.Channel, endless: World) -> None:
    """Those that were told stay, and the target that goes on tells the others."""
    target = stack.processes["target"]
    for _ in range(MOST_TRIES):  # all may be written before this process hears of the first words
        strike = Strike(lambda one: len(one.tokens) >= 8, lambda: os.kill(target.pid, signal.SIGKILL))
        starts = target.starts
        captioned = await run(channel, endless, on_event=strike, max_new_tokens=96)
        await stack.wait_started("target", starts + 1)
        assert [token.logprob for token in captioned.tokens] == expected(endless, captioned.token_ids)
        if captioned.summary.timings.resumptions:
            return
    raise AssertionError("no caption was resumed")


TOP = tuple(TokenLogprob(token, f"t{token}", -float(token)) for token in range(1, 5))
VERDICT = Judgement(Verdict(1, 7), ("a", "b"), PassFacts(0.1), (-0.5, -1.0))


async def test_what_a_target_tells_is_of_its_tokens() -> None:
    tokens = VERDICT.tokens((3, 7), num_from_draft=1)
    assert [(one.token_id, one.piece, one.from_draft, one.logprob) for one in tokens] == [
        (3, "a", True, -0.5), (7, "b", False, -1.0),
    ]  # fmt: skip
    assert [one.logprob for one in replace(VERDICT, logprobs=()).tokens((3, 7))] == [None, None]
    told = replace(VERDICT, top_logprobs=TOP)
    assert [one.top_logprobs for one in told.tokens((3, 7))] == [TOP[:2], TOP[2:]]
    (left,) = told.behind(1, VERDICT.verdict).tokens((7,))
    assert (left.piece, left.logprob, left.top_logprobs) == ("b", -1.0, TOP[2:])
    assert told.behind(2, VERDICT.verdict).tokens(()) == ()


@pytest.mark.parametrize(
    "told",
    [
        {"pieces": ("a",)},
        {"logprobs": (-0.5,)},
        {"logprobs": (-0.5, float("nan"))},
        {"logprobs": (-1.0,) * 3},
        {"top_logprobs": TOP[:3]},
        {"top_logprobs": (*TOP[:3], TokenLogprob(3, "c", float("inf")))},
    ],
)
async def test_a_target_that_tells_nonsense_is_not_believed(told: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation):
        replace(VERDICT, **told).tokens((3, 7))
