"""Lossy baselines on a target: what is dropped is what the originals would drop, and nothing of it is shared."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine import VideoLM, load_model
from slipstream.engine.target_engine import TargetEngine, TargetLimits
from slipstream.engine.target_prefill import TargetSession
from slipstream.engine.thread import ModelThread
from slipstream.errors import InvalidRequest, SlipstreamError
from slipstream.session_messages import JudgeRequest, Prefilled, TargetStart
from slipstream.speculation.methods import LOSSY_METHODS, Lossy
from tests.engine.conftest import load_pair
from tests.engine.test_dropped_video import masked_logits
from tests.engine.test_text_attention import eager_llava, expected_attention
from tests.services.model_sessions import pulled, some_frames
from tests.support.tiny_checkpoint import write_tiny_llava, write_tiny_qwen

FRAMES = some_frames(100, seed=1)
PROMPT = "What happens?"
NUM_TOKENS = 24
KEEP = 0.5


@pytest.fixture(scope="module", params=["llava", "qwen"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    folder: Path = tmp_path_factory.mktemp("target")
    write = write_tiny_llava if request.param == "llava" else write_tiny_qwen
    return load_model(str(write(folder, seed=5, layers=6, max_context=1024)))


@asynccontextmanager
async def running(model: VideoLM) -> AsyncIterator[TargetEngine]:
    thread = ModelThread(1)
    limits = TargetLimits(max_sessions=8, kv_budget_bytes=2**26, guidance_layer=2, prefix_cache_bytes=2**24)
    try:
        yield TargetEngine(model, thread, limits)
    finally:
        await asyncio.to_thread(thread.close)


async def answered(engine: TargetEngine, lossy: Lossy | None = None) -> tuple[TargetSession, Prefilled]:
    request = TargetStart("s", PROMPT, NUM_TOKENS, with_guidance=False, lossy=lossy)
    session = await engine.open(request, len(FRAMES), FRAMES.shape[1:3])
    session.rule = type(session.rule)(frozenset({10_000}), NUM_TOKENS)
    session.work.frames = FRAMES
    facts = [event async for event in engine.prefill(session) if isinstance(event, Prefilled)]
    for asked in (JudgeRequest(), JudgeRequest(num_passes=NUM_TOKENS)):
        async for _ in engine.judge(session, asked):
            pass
    return session, facts[0]


async def answer(engine: TargetEngine, lossy: Lossy | None = None) -> tuple[list[int], Prefilled]:
    session, facts = await answered(engine, lossy)
    await engine.close(session)
    return session.committed, facts


async def test_what_is_kept_takes_the_memory(model: VideoLM) -> None:
    async with running(model) as engine:
        plain, whole = await answer(engine)
        texts = [plain]
        for method in LOSSY_METHODS:
            text, facts = await answer(engine, Lossy(method, 1.0))
            assert text == plain and facts.kv_bytes == whole.kv_bytes
            text, facts = await answer(engine, Lossy(method, KEEP))
            assert facts.kv_bytes < whole.kv_bytes
            assert facts.video_tokens == whole.video_tokens
            texts.append(text)
        assert len({tuple(text) for text in texts}) == len(texts), "every method drops other tokens"


@pytest.mark.parametrize("method", LOSSY_METHODS)
async def test_the_layers_have_what_the_schedule_says(model: VideoLM, method: str) -> None:
    async with running(model) as engine:
        session, _ = await answered(engine, Lossy(method, KEEP))
        cache, schedule = session.work.state.cache, session.lossy
        assert schedule is not None
        num_video, num_layers = session.plan.num_video_tokens, model.info.num_layers
        missing = [cache.num_missing(layer) for layer in range(num_layers)]
        assert num_video - sum(missing) / num_layers == pytest.approx(KEEP * num_video, abs=1)
        begun = [[stage for stage in schedule.stages if stage.after_layer <= layer] for layer in range(num_layers)]
        assert missing == [num_video - stages[-1].num_keep if stages else 0 for stages in begun]
        assert missing == sorted(missing)


async def test_nothing_is_shared(model: VideoLM) -> None:
    async with running(model) as engine:
        plain, _ = await answer(engine)
        alone, facts = await answer(engine, Lossy("fastv", KEEP))
        assert facts.reused_tokens == 0, "it would need the video's rows"
        again, facts = await answer(engine)
        assert again == plain and facts.reused_tokens > 0
    async with running(model) as engine:
        first, _ = await answer(engine, Lossy("fastv", KEEP))
        assert first == alone
        after, facts = await answer(engine)
        assert after == plain and facts.reused_tokens == 0, "it gives no rows either"


@pytest.mark.parametrize("more", [{"with_guidance": True}, {"with_attention": True}, {"local_drafter": "std"}])
async def test_it_takes_part_in_no_speculation(model: VideoLM, more: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"with_guidance": False} | more
    async with running(model) as engine:
        with pytest.raises(InvalidRequest, match="baseline of plain decoding"):
            await engine.open(TargetStart("s", PROMPT, 8, lossy=Lossy("fastv", KEEP), **asked), 4)
        with pytest.raises(InvalidRequest, match="lossy_keep"):
            await engine.open(TargetStart("s", PROMPT, 8, with_guidance=False, lossy=Lossy("fastv", 0.1)), 4)
        assert engine.admission.num_admitted == 0
        session = await engine.open(TargetStart("s", PROMPT, 8, with_guidance=False, lossy=Lossy("fastv", KEEP)), 4)
        with pytest.raises(SlipstreamError, match="without guidance"):
            await pulled(engine, "s", "scores")
        await engine.close(session)


async def test_fastv_is_its_definition(tmp_path: Path) -> None:
    """The last token's attention in layer 2 by transformers, and attention to the rest masked from layer 3 on."""
    pair = load_pair(write_tiny_llava(tmp_path, seed=6, layers=6, max_context=1024))
    model, reference = pair.ours, load_model(str(pair.path), attention="sdpa")
    plan = model.plan_prompt(PROMPT, len(FRAMES))
    async with running(model) as engine:
        committed, _ = await answer(engine, Lossy("fastv", KEEP))
    by_layer = expected_attention(eager_llava(pair.path, pair, plan, FRAMES), plan, 2, slice(-1, None))
    scores: Tensor = by_layer[1].sum(dim=0)
    num_keep = round((KEEP * 6 - 2) / 4 * plan.num_video_tokens)
    kept = scores.argsort(descending=True, stable=True)[:num_keep].sort().values
    logits = masked_logits(reference, plan, model.encode_frames(FRAMES), {2: kept.tolist()}, committed[:-1])
    assert torch.equal(logits.argmax(dim=-1), torch.tensor(committed))
