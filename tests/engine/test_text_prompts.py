"""Prompts about no video, in every family: the chat and the answer are those of plain transformers."""

from dataclasses import replace
from typing import Any

import pytest

from slipstream.engine import VideoLM, load_model
from slipstream.engine.draft_engine import DraftEngine, DraftLimits
from slipstream.engine.sparse_drafter import SparseDrafter
from slipstream.engine.target_engine import TargetEngine, TargetLimits
from slipstream.engine.thread import ModelThread
from slipstream.errors import InvalidRequest, LimitExceeded
from slipstream.families.prompts import ChatTemplate
from slipstream.session_messages import DraftStart, JudgeRequest, Prefilled, TargetStart
from slipstream.speculation.methods import GuidanceKind, Lossy
from slipstream.speculation.protocol import FinishReason, JoinPoint
from tests.engine.test_families import FAMILIES
from tests.engine.test_qwen2_5_vl import greedy
from tests.support.reference import Reference
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.variants import one_in

PROMPT = "Sum up, Résume:\n[00:00:00] a red square 🎬\n[00:00:10] <video> a <|im_end|> circle"
PLAIN = "Sum up, Résume:\n[00:00:00] a red square 🎬\n[00:00:10] a circle"
NUM_TOKENS = 20


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[VideoLM, Reference]:
    path = FAMILIES[request.param](tmp_path_factory.mktemp(request.param), seed=5, max_context=2048)
    reference = Reference(path)
    reference.model.generation_config.eos_token_id = None
    return load_model(str(path)), reference


@one_in(4, "family")
def test_prompt_and_answer_are_those_of_transformers(family: tuple[VideoLM, Reference]) -> None:
    ours, theirs = family
    plan = ours.plan_text(PLAIN)
    assert plan.is_text and list(plan.token_ids) == theirs.text_prompt_ids(PLAIN)
    assert (plan.num_video_tokens, plan.num_text_tokens) == (0, plan.num_tokens)
    assert greedy(ours, *ours.start_text(plan).finish(), NUM_TOKENS) == theirs.text_answer(PLAIN, NUM_TOKENS)


def test_nothing_in_a_text_acts_as_a_special_token(family: tuple[VideoLM, Reference]) -> None:
    ours, _ = family
    empty, words = ours.plan_text("x"), ours.plan_text(PROMPT)
    specials = {token for token in ours.plan_text("y").token_ids if not ours.text_stream()._decoder.has_text(token)}
    counted = [sum(token in specials for token in plan.token_ids) for plan in (empty, words)]
    assert counted[0] == counted[1]


@one_in(4, "family")
async def test_all_sessions_with_and_without_a_local_drafter_say_the_same(family: tuple[VideoLM, Reference]) -> None:
    """At the target's engine, block by block; std drafts with all there is, as there is no video to leave out, where
    all layers attend."""
    ours, theirs = family
    expected = theirs.text_answer(PLAIN, NUM_TOKENS)
    thread = ModelThread(1)
    try:
        engine = TargetEngine(
            ours, thread, TargetLimits(max_sessions=4, kv_budget_bytes=2**28, prefix_cache_bytes=2**24)
        )
        for drafter in ("", "prompt_lookup", "hints", *(() if ours.runner.recurs else ("std",))):
            request = TargetStart(drafter or "plain", PLAIN, NUM_TOKENS, False, local_drafter=drafter, has_video=False)
            assert await answered(engine, request, self_draft=3 if drafter else 0) == expected, drafter
        assert len(engine.prefixes._lru) == 0, "there is no video whose prefill could be of use again"
    finally:
        thread.close()


async def answered(engine: TargetEngine, request: TargetStart, *, self_draft: int) -> list[int]:
    session = await engine.open(request, 0, (0, 0))
    session.rule = replace(session.rule, eos_token_ids=frozenset())
    async for _ in engine.admit(session):
        pass
    facts = [event async for event in engine.prefill(session) if isinstance(event, Prefilled)]
    assert (facts[0].video_tokens, facts[0].encode_s) == (0, 0)
    asked = JudgeRequest()
    while True:
        (judgement,) = [one async for one in engine.judge(session, asked)]
        if judgement.verdict.finish_reason is FinishReason.LENGTH:
            break
        asked = JudgeRequest(self_draft=self_draft)
    if request.local_drafter == "std":
        assert isinstance(session.drafter, SparseDrafter)
    await engine.close(session)
    return session.committed


async def test_a_draft_writes_on_without_a_video(family: tuple[VideoLM, Reference]) -> None:
    ours, theirs = family
    expected = theirs.text_answer(PLAIN, NUM_TOKENS)
    thread = ModelThread(1)
    try:
        engine = DraftEngine(ours, thread, DraftLimits(max_sessions=1, kv_budget_bytes=2**28))
        request = DraftStart("s", PLAIN, "uv_spread", 0.9, "original", GuidanceKind.SCORES, "unix:/nowhere", 0)
        session = await engine.open(replace(request, has_video=False), JoinPoint(1, (), NUM_TOKENS, 1), 0, (0, 0))
        await engine.admit(session)
        await engine.prefill_text(session)
        written: list[int] = []
        async for chunk in engine.write(session):
            written += chunk.token_ids
            if len(written) >= NUM_TOKENS:
                break
        await engine.close(session)
    finally:
        thread.close()
    assert written == expected


async def test_what_a_text_cannot_have(family: tuple[VideoLM, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = family
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        ours.plan_text(" ")
    with pytest.raises(LimitExceeded, match="send a shorter one"):
        ours.plan_text("?" * 9000)
    thread = ModelThread(1)
    try:
        engine = TargetEngine(ours, thread, TargetLimits(max_sessions=4, kv_budget_bytes=2**28))
        wanted: list[dict[str, Any]] = [
            {"with_guidance": True},
            {"with_guidance": False, "with_attention": True},
            {"with_guidance": False, "lossy": Lossy("fastv", 0.5)},
        ]
        for asked in wanted:
            with pytest.raises(InvalidRequest, match="no video tokens to prune"):
                await engine.open(TargetStart("s", PLAIN, 4, has_video=False, **asked), 0)
    finally:
        thread.close()
    monkeypatch.setattr(ours, "_text_template", None)
    with pytest.raises(InvalidRequest, match="takes no text without a video"):
        ours.plan_text(PLAIN)


def test_a_template_that_needs_a_video_is_no_obstacle_to_loading() -> None:
    class Has:
        def chat_template(self) -> str:
            return "{{ raise_exception('only videos') }}"

    assert ChatTemplate.for_text(tiny_tokenizer(), Has()) is None  # type: ignore[arg-type]
