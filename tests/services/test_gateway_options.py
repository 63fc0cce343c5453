"""What a request's sampling options become, without any service."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import numpy as np
import pytest

from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.plan import (
    CaptionPlan,
    draft_start,
    make_pipeline,
    make_plan,
    new_costs,
    target_start,
)
from slipstream.errors import InvalidRequest, LimitExceeded
from slipstream.options import MAX_PREDICTION_BYTES, CaptionOptions
from slipstream.sampling.params import SamplingDefaults, SamplingParams
from slipstream.service_info import ModelInfo
from slipstream.session_messages import SessionKey
from slipstream.speculation.caption_book import Kind, Opening, Start
from slipstream.speculation.methods import METHODS, Lossy
from slipstream.speculation.protocol import ROOT
from slipstream.video.messages import SampledVideo

CONFIG = GatewayConfig(listen="", target="t:1", draft="d:1")


def plan_of(**asked: Any) -> CaptionPlan:
    return make_plan(CaptionOptions(**asked), CONFIG)


def test_what_is_left_out_is_greedy_and_gated() -> None:
    plan = plan_of()
    assert plan.sampling == SamplingParams()
    assert plan.method.gate and plan.options.seed == 0


def test_everything_that_is_given_arrives() -> None:
    plan = plan_of(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=1.25,
        min_new_tokens=9,
        sampling_rule="rejection",
        seed=2**63 - 1,
        stop=("the end", "\n"),
        gate=False,
    )
    drawn = SamplingParams(0.5, 7, 0.25, 1.5, 2**63 - 1, "rejection", ("the end", "\n"), min_p=0.125)
    assert plan.sampling == replace(drawn, presence_penalty=-2.0, frequency_penalty=1.25, min_new_tokens=9)
    assert plan.options.seed == 2**63 - 1 and not plan.method.gate


def test_a_models_own_sampling_is_taken_where_the_request_says_nothing() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, min_p=0.1)
    settled = plan_of(top_k=3, seed=9).with_defaults(defaults)
    assert settled.sampling == SamplingParams(0.7, 3, 0.8, 1.05, seed=9, min_p=0.1)
    assert settled.options.top_p == 0.8 and settled.options.top_k == 3, "a receipt says what was done"
    assert settled.with_defaults(SamplingDefaults(temperature=0.2)).sampling.temperature == 0.2, "another target's"
    greedy = plan_of(temperature=0.0).with_defaults(defaults).sampling
    assert greedy.greedy and greedy.repetition_penalty == 1.05
    plain = plan_of()
    assert plain.with_defaults(SamplingDefaults()) == plain
    with pytest.raises(InvalidRequest, match="top_p"):
        plan_of().with_defaults(SamplingDefaults(top_p=7.0))


async def test_frames_that_nobody_asked_for_leave_room_for_the_answer() -> None:
    """As of LLaVA-NeXT-Video: 4,096 tokens of context, and 144 of a frame."""
    target = ModelInfo(max_context=4096, tokens_per_frame=144, max_frames=28)
    asked = SimpleNamespace(ask=AsyncMock(return_value=target))
    captioner = GatewayCaptioner(CONFIG, cast(Any, SimpleNamespace(target=asked)), cast(Any, None))

    async def frames_of(plan: CaptionPlan) -> int:
        return captioner.settled(plan, await captioner.check(plan)).options.num_frames

    assert await frames_of(plan_of()) == 24, "with 512 tokens of an answer"
    assert await frames_of(plan_of(max_new_tokens=1400)) == 18
    assert await frames_of(plan_of(max_new_tokens=2048, prompt="why? " * 1000)) == 1
    assert await frames_of(plan_of(num_frames=28)) == 28, "what is asked for is left alone"
    with pytest.raises(LimitExceeded, match="num_frames 29 is more than the target's limit of 28"):
        await captioner.check(plan_of(num_frames=29))
    asked.ask.return_value = ModelInfo(max_context=128_000, tokens_per_frame=128, max_frames=998)
    assert await frames_of(plan_of()) == CONFIG.default_frames


async def test_long_questions_cost_frames_by_their_tokens_and_not_by_their_letters() -> None:
    """As of SmolVLM2: 8,192 tokens of context, 81 of a frame and some words beside it."""
    target = ModelInfo(max_context=8192, tokens_per_frame=81, max_frames=86)
    captioner = GatewayCaptioner(CONFIG, cast(Any, None), cast(Any, None))

    def frames_of(prompt: str) -> int:
        return captioner.settled(plan_of(prompt=prompt), target).options.num_frames

    words = "Say what people do, and where each of them stands. "
    assert frames_of(60 * words) == CONFIG.default_frames, "some 720 tokens, for which there is room beside 64 frames"
    assert frames_of(120 * words) >= 48
    assert frames_of(3060 * "是") == frames_of(3060 * "7") == 41, "which may be a token each"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "autoregressive"])
def test_a_lossy_baseline_is_of_plain_decoding(method: str) -> None:
    with pytest.raises(InvalidRequest, match="ask for method 'autoregressive'"):
        plan_of(method=method, lossy="fastv")
    plan = plan_of(method="autoregressive", lossy="fastv")
    assert plan.lossy == Lossy("fastv", 0.5)
    for keep in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(InvalidRequest, match="lossy_keep"):
            plan_of(method="autoregressive", lossy="fastv", lossy_keep=keep)


@pytest.mark.parametrize(
    ("alone", "of"),
    [
        ({"lossy_keep": 0.5}, {"lossy": "fastv", "method": "autoregressive"}),
        ({"tolerance_rule": "log_ratio"}, {"tolerance": 1.0}),
        ({"summary_prompt": "Sum up."}, {"summary": True, "segments": "fixed:1s"}),
    ],
)
def test_what_would_change_nothing_is_not_ignored(alone: dict[str, Any], of: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(alone))} is for {next(iter(of))}: give that, too"):
        plan_of(**alone)
    assert plan_of(**alone, **of).asked == {*alone, *of}
    assert plan_of(summary=False, summary_prompt="Sum up.").asked, "a program that says whether"


def test_a_conversation_reaches_both_models() -> None:
    said: dict[str, Any] = {"prompt": "Where?", "system": "Be short.", "turns": ("What?", "A cat.")}
    plan, video = plan_of(**said), SampledVideo(np.zeros((1, 2, 2, 3), np.uint8), (0.0,), 1.0, 2, 2, "h264", 0, ())
    key = SessionKey()
    for start in (target_start(plan, key, video, 4), draft_start(plan, key, video, "t:1", 320)):
        assert (start.prompt, start.system, start.turns) == tuple(said.values())
    for wrong, why in (
        ({"turns": ("What?",)}, "questions and their answers"),
        ({"turns": "What?"}, "turns must be texts"),
        ({"turns": ("a", "b"), "segments": "fixed:1s"}, "leave out turns, or segments"),
        ({"system": 5}, "system must be text"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            plan_of(**wrong)
    for long in ({"system": "x" * 9000}, {"turns": ("x" * 9000, "a")}, {"turns": ("a",) * 66}):
        with pytest.raises(LimitExceeded):
            plan_of(**long)


def test_a_question_that_was_left_out_was_the_default_one() -> None:
    turns = plan_of(turns=("", "A cat.", "Where?", "", "", "")).options.turns
    assert turns == (plan_of().options.prompt, "A cat.", "Where?", "", plan_of().options.prompt, "")


def test_an_answer_may_be_longer_than_a_prompt() -> None:
    """As one of a gateway's own may be."""
    answer = "word " * 4000
    assert plan_of(turns=("What?", answer)).options.turns[1] == answer
    with pytest.raises(LimitExceeded, match=r"turns has .* at most 1048576"):
        plan_of(turns=("What?", answer * 60))
    with pytest.raises(LimitExceeded, match=r"^system has 9000 characters"):
        plan_of(system="x" * 9000)


def test_a_given_zero_is_not_a_default() -> None:
    for name, least in (("top_p", "above 0"), ("repetition_penalty", "between 0.001")):
        with pytest.raises(InvalidRequest, match=f"{name} must be {least}"):
            plan_of(**{name: 0.0})


def test_hints_of_the_gateways_own_never_make_a_request_too_large() -> None:
    given = "g" * (MAX_PREDICTION_BYTES - 10)
    plan = plan_of(prediction=(given,)).hinted(["\u00e9" * 6, "four", "\u00e9" * 3, "x"])
    assert plan.options.prediction == (given, "four", "\u00e9" * 3)


@pytest.mark.parametrize(("temperature", "rests"), [(0.0, True), (1.0, False)])
@pytest.mark.parametrize("method", ["slipstream_branches", "slipstream_tree"])
def test_a_draft_may_rest_where_what_it_says_is_what_its_candidates_are_worth(
    method: str, temperature: float, rests: bool
) -> None:
    """Of sampled text it says how likely it holds a token, and not that the target draws the same one."""
    plan = plan_of(method=method, temperature=temperature, gate=False)
    video = SampledVideo(np.zeros((1, 2, 2, 3), np.uint8), (0.0,), 1.0, 2, 2, "h264", 0, ())
    told = draft_start(plan, SessionKey(), video, "", vocab_size=9).least_chance
    assert (told > 0) == rests
    pipeline = make_pipeline(plan, Opening(Kind("", "", 1, ""), Start.ALONE, "", new_costs(plan)), vocab_size=9)
    pipeline.on_draft_joining()
    pipeline.on_draft_ready(0)
    pipeline.on_draft_tokens(pipeline.epoch, 0, (5, 6), (ROOT, ROOT), chances=(told + 0.03, 0.01))
    assert pipeline.draft_owes
    pipeline.on_draft_tokens(pipeline.epoch, 2, (5, 6), (0, 0), chances=(0.1, 0.1))
    assert pipeline.draft_owes != rests
