"""What the papers' methods ask of a target, on a tiny model: trees, drafting with its own cache, attention scores."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine import VideoLM, load_model
from slipstream.engine.sparse_drafter import SparseDrafter
from slipstream.engine.target_engine import TargetEngine, TargetLimits
from slipstream.engine.target_prefill import TargetSession
from slipstream.engine.thread import ModelThread
from slipstream.errors import InvalidRequest, LimitExceeded
from slipstream.pruning import Score
from slipstream.sampling.params import SamplingParams
from slipstream.session_messages import Judgement, JudgeRequest, TargetStart
from slipstream.speculation.protocol import ROOT, FinishReason, TokenTree
from tests.services.model_sessions import pulled, some_frames
from tests.support.tiny_checkpoint import write_tiny_llava

NUM_TOKENS = 40
FRAMES = some_frames(4, seed=1)
ENDLESS = frozenset({10_000})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    folder: Path = tmp_path_factory.mktemp("target")
    return load_model(str(write_tiny_llava(folder, seed=5, layers=5)))


@asynccontextmanager
async def running(model: VideoLM) -> AsyncIterator[TargetEngine]:
    thread = ModelThread(1)
    limits = TargetLimits(max_sessions=8, kv_budget_bytes=2**26, guidance_layer=2, prefix_cache_bytes=2**24)
    try:
        yield TargetEngine(model, thread, limits)
    finally:
        await asyncio.to_thread(thread.close)


async def started(engine: TargetEngine, name: str, **asked: Any) -> TargetSession:
    """A session whose first token is committed, and whose text no token ends."""
    request = TargetStart(name, "Describe.", NUM_TOKENS, with_guidance=True, **asked)
    session = await engine.open(request, len(FRAMES))
    session.rule = type(session.rule)(ENDLESS, NUM_TOKENS)
    session.work.frames = FRAMES
    async for _ in engine.prefill(session):
        pass
    await judged(engine, session, JudgeRequest())
    return session


async def judged(engine: TargetEngine, session: TargetSession, request: JudgeRequest) -> list[Judgement]:
    return [judgement async for judgement in engine.judge(session, request)]


async def plain_text(engine: TargetEngine, **asked: Any) -> list[int]:
    session = await started(engine, "plain", **asked)
    await judged(engine, session, JudgeRequest(num_passes=NUM_TOKENS))
    await engine.close(session)
    return session.committed


def grow(order: random.Random, right: list[int], vocab_size: int) -> TokenTree:
    """A random tree that holds a part of the right text somewhere."""
    tokens: list[int] = []
    parents: list[int] = []
    spine = -1
    for token in right[: order.randint(0, 6)]:
        for _ in range(order.randint(0, 2)):
            tokens.append(order.randrange(vocab_size))
            parents.append(order.randint(-1, len(tokens) - 2))
        tokens.append(token)
        parents.append(spine)
        spine = len(tokens) - 1
    return TokenTree(tuple(tokens) or (0,), tuple(parents) or (-1,))


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, seed=3)])
async def test_trees_commit_the_text_of_plain_decoding(model: VideoLM, sampling: SamplingParams) -> None:
    order = random.Random(1)
    async with running(model) as engine:
        expected = await plain_text(engine, sampling=sampling)
        session = await started(engine, "tree", sampling=sampling)
        num_accepted = 0
        while len(session.committed) < NUM_TOKENS:
            tree = grow(order, expected[len(session.committed) :], model.info.vocab_size)
            (judgement,) = await judged(engine, session, JudgeRequest(tree.token_ids, tree=tree))
            verdict = judgement.verdict
            assert tuple(session.committed[-len(verdict.committed(tree.token_ids)) :]) == verdict.committed(
                tree.token_ids
            )
            num_accepted += verdict.num_accepted
        assert session.committed == expected
        assert num_accepted > NUM_TOKENS / 4
        assert verdict.finish_reason is FinishReason.LENGTH


async def test_a_tree_deeper_than_the_text_may_become_is_cut(model: VideoLM) -> None:
    async with running(model) as engine:
        expected = await plain_text(engine)
        session = await started(engine, "tree")
        await judged(engine, session, JudgeRequest(num_passes=NUM_TOKENS - 3))
        assert len(session.committed) == NUM_TOKENS - 2
        wrong = (expected[-2] + 1) % model.info.vocab_size
        tree = TokenTree((wrong, expected[-2], 5, expected[-1], 7), (-1, -1, 0, 1, 3))
        (judgement,) = await judged(engine, session, JudgeRequest(tree.token_ids, tree=tree))
        assert judgement.verdict.path == (1,)
        assert session.committed == expected


async def test_a_tree_near_the_end_has_no_cache_grow(model: VideoLM) -> None:
    """A pass that is wider than what is left would have all rows of the video copied, and memory that nobody counted.
    As many of its first nodes are judged as there is room for."""
    async with running(model) as engine:
        expected = await plain_text(engine)
        session = await started(engine, "tree")
        await judged(engine, session, JudgeRequest(num_passes=NUM_TOKENS - 6))
        cache = session.work.state.cache
        capacity, num_wrong = cache.capacity, cache.capacity - cache.length
        wrong = (expected[-5] + 1) % model.info.vocab_size
        tree = TokenTree((*expected[-5:-3], *[wrong] * num_wrong), (ROOT, 0, *[ROOT] * num_wrong))
        (judgement,) = await judged(engine, session, JudgeRequest(tree.token_ids, tree=tree))
        assert judgement.verdict.path == (0, 1) and cache.capacity == capacity
        await judged(engine, session, JudgeRequest(num_passes=NUM_TOKENS))
        assert session.committed == expected


async def test_passes_of_a_strict_width_judge_the_first_path_of_a_tree(tmp_path: Path) -> None:
    """A caption whose draft branches would else fail in the middle, at the first window with a second candidate."""
    model = load_model(str(write_tiny_llava(tmp_path, seed=5, layers=5)), strict_width=4)
    async with running(model) as engine:
        expected = await plain_text(engine)
        session = await started(engine, "tree")
        right = expected[1:8]
        wrong = [(token + 1) % model.info.vocab_size for token in right]
        tree = TokenTree((right[0], wrong[0], *right[1:6], wrong[6]), (ROOT, ROOT, 0, 2, 3, 4, 5, 6))
        (judgement,) = await judged(engine, session, JudgeRequest(tree.token_ids, tree=tree))
        assert judgement.verdict.path == (0, 2, 3) and judgement.verdict.own_token == right[3]
        other = TokenTree((wrong[4], right[4]), (ROOT, ROOT))
        (judgement,) = await judged(engine, session, JudgeRequest(other.token_ids, tree=other))
        assert judgement.verdict.path == () and judgement.verdict.own_token == right[4]
        await judged(engine, session, JudgeRequest(num_passes=NUM_TOKENS))
        assert session.committed == expected


async def test_a_window_ends_where_the_context_ends(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of a long film are ahead of its tokens; a text that ends before they do is decoded to its end."""
    async with running(model) as engine:
        expected = await plain_text(engine)
        session = await started(engine, "window")
        left = 3
        info = replace(model.info, max_context=session.work.state.next_position + left)
        monkeypatch.setattr(model, "info", info)
        window = tuple(expected[1:9])
        (judgement,) = await judged(engine, session, JudgeRequest(window))
        assert judgement.verdict.num_accepted == left - 1 and session.committed == expected[: left + 1]
        with pytest.raises(LimitExceeded, match="end of the context"):
            await judged(engine, session, JudgeRequest(window))


@pytest.mark.parametrize("num_kept", [1, 8, 100])
async def test_drafting_for_itself_commits_the_text_of_plain_decoding(model: VideoLM, num_kept: int) -> None:
    async with running(model) as engine:
        expected = await plain_text(engine)
        session = await started(engine, "own", local_drafter="std", self_draft_kept=num_kept)
        judgements = await judged(engine, session, JudgeRequest(num_passes=NUM_TOKENS, self_draft=4))
        assert session.committed == expected
        assert judgements[0].facts.num_drafted == 4, "less only where the text could not become so long"
        for judgement in judgements:
            assert len(judgement.verdict.drafted) == judgement.verdict.num_accepted
        assert judgements[0].facts.draft_s > 0
        if num_kept == 100:  # more than there are: the draft is the model itself
            assert [judgement.verdict.num_accepted for judgement in judgements[:-1]] == [4] * (len(judgements) - 1)
        drafter = session.drafter
        assert isinstance(drafter, SparseDrafter)
        assert engine.admission.used_bytes >= session.work.state.kv_bytes + drafter.state.kv_bytes
        await engine.close(session)
        assert drafter.state.kv_bytes == 0


async def test_a_strict_target_that_drafts_for_itself_has_no_cache_grow(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Its sparse cache has room for what fills up the last step, as others have."""
    folder = write_tiny_llava(tmp_path_factory.mktemp("strict"), seed=5, layers=3)
    async with running(load_model(str(folder), strict_width=128)) as engine:
        session = await started(engine, "own", local_drafter="std", self_draft_kept=4)
        await judged(engine, session, JudgeRequest(self_draft=4))
        drafter = session.drafter
        assert isinstance(drafter, SparseDrafter)
        capacity = drafter.state.cache.capacity
        await judged(engine, session, JudgeRequest(num_passes=NUM_TOKENS, self_draft=4))
        assert len(session.committed) == NUM_TOKENS and drafter.state.cache.capacity == capacity


async def test_a_session_without_a_drafter_does_not_draft(model: VideoLM) -> None:
    async with running(model) as engine:
        session = await started(engine, "plain")
        with pytest.raises(InvalidRequest, match="drafter of its own"):
            await judged(engine, session, JudgeRequest(self_draft=4))


@pytest.mark.parametrize("reused", [False, True])
async def test_guidance_of_attention(model: VideoLM, reused: bool) -> None:
    async with running(model) as engine:
        if reused:
            await engine.close(await started(engine, "before"))
        session = await started(engine, "attentive", with_attention=True)
        attention = session.attention
        assert attention is not None
        whole = await pulled(engine, "attentive", "scores", Score.ATTENTION)
        growth = await pulled(engine, "attentive", "scores", Score.ATTENTION_VARIATION)
        similarity = await pulled(engine, "attentive", "scores", Score.SIMILARITY)
        assert whole.scores is not None and growth.scores is not None and similarity.scores is not None
        assert torch.equal(whole.scores, attention.mean())
        assert torch.equal(growth.scores, attention.mean([1]) - attention.mean([0]))
        assert len(whole.scores) == len(similarity.scores) == session.plan.num_video_tokens


async def test_scores_come_to_the_host_on_the_models_thread(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from a GPU waits for all that was launched before it, and with the event loop every caption would."""
    async with running(model) as engine:
        await started(engine, "attentive", with_attention=True)
        copied, cpu = list[str](), torch.Tensor.cpu

        def noting(each: torch.Tensor) -> torch.Tensor:
            copied.append(threading.current_thread().name)
            return cpu(each)

        monkeypatch.setattr(torch.Tensor, "cpu", noting)
        for score in (Score.ATTENTION, Score.ATTENTION_VARIATION, Score.SIMILARITY):
            await pulled(engine, "attentive", "scores", score)
        assert copied == ["model"] * 3


async def test_attention_that_nobody_recorded(model: VideoLM) -> None:
    async with running(model) as engine:
        await started(engine, "plain")
        with pytest.raises(InvalidRequest, match="opened with attention"):
            await pulled(engine, "plain", "scores", Score.ATTENTION)
        await started(engine, "attentive", with_attention=True)
        with pytest.raises(InvalidRequest, match="comes as scores"):
            await pulled(engine, "attentive", "hidden_states", Score.ATTENTION)
