"""The target's engine on a tiny model: a video that was seen is not prefilled again, and nothing else changes."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine import Prefill, VideoLM, load_model
from slipstream.engine.target_engine import TargetEngine, TargetLimits
from slipstream.engine.target_prefill import TargetSession
from slipstream.engine.thread import Lane, ModelThread
from slipstream.errors import LimitExceeded, Overloaded
from slipstream.messages import Frames
from slipstream.session_messages import JudgeRequest, Prefilled, StageProgress, TargetStart
from tests.services.model_sessions import some_frames
from tests.support.held_memory import no_collection
from tests.support.processes import eventually
from tests.support.tiny_checkpoint import write_tiny_llava

MIB = 1024 * 1024
NUM_TOKENS = 24
PROMPTS = ("Describe the video.", "What is happening here?", "?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    folder: Path = tmp_path_factory.mktemp("target")
    return load_model(str(write_tiny_llava(folder, seed=5, layers=5)))


@asynccontextmanager
async def running(model: VideoLM, prefix_cache_bytes: int = 64 * MIB, **limits: float) -> AsyncIterator[TargetEngine]:
    thread = ModelThread(1)
    settings: dict[str, float] = {"max_sessions": 8, "kv_budget_bytes": 64 * MIB, "guidance_layer": 2} | limits
    try:
        yield TargetEngine(model, thread, TargetLimits(prefix_cache_bytes=prefix_cache_bytes, **settings))  # type: ignore[arg-type]
    finally:
        await asyncio.to_thread(thread.close)


async def opened(engine: TargetEngine, name: str, prompt: str, num_frames: int = 4) -> TargetSession:
    return await engine.open(TargetStart(name, prompt, NUM_TOKENS, with_guidance=True), num_frames)


async def prefilled(engine: TargetEngine, session: TargetSession, frames: Frames) -> Prefilled:
    session.work.frames = frames
    *_, facts = [event async for event in engine.prefill(session)]
    assert isinstance(facts, Prefilled)
    return facts


async def decoded(engine: TargetEngine, session: TargetSession) -> list[int]:
    async for _ in engine.judge(session, JudgeRequest()):
        pass
    async for _ in engine.judge(session, JudgeRequest(num_passes=NUM_TOKENS)):
        pass
    return session.committed


async def captioned(engine: TargetEngine, name: str, prompt: str, frames: Frames) -> tuple[TargetSession, int]:
    """To the end of its text; the session is left open. Also the tokens that were reused."""
    session = await opened(engine, name, prompt, len(frames))
    facts = await prefilled(engine, session, frames)
    await decoded(engine, session)
    return session, facts.reused_tokens


@pytest.mark.parametrize("ends_first", [True, False])
async def test_a_second_prompt_reuses_the_video(model: VideoLM, ends_first: bool) -> None:
    frames = some_frames(4, seed=1)
    async with running(model, prefix_cache_bytes=0) as fresh:
        expected = [await captioned(fresh, prompt, prompt, frames) for prompt in PROMPTS]
        assert [reused for _, reused in expected] == [0, 0, 0]
    async with running(model) as engine:
        for number, (prompt, (reference, _)) in enumerate(zip(PROMPTS, expected, strict=True)):
            session, num_reused = await captioned(engine, prompt, prompt, frames)
            assert num_reused == (session.plan.text_start if number else 0)
            assert session.committed == reference.committed
            ours, theirs = session.guidance.result(), reference.guidance.result()
            assert ours.video_states and theirs.video_states and ours.text_sums and theirs.text_sums
            assert all(map(torch.equal, ours.video_states, theirs.video_states))
            for our_sum, their_sum in zip(ours.text_sums, theirs.text_sums, strict=True):
                torch.testing.assert_close(our_sum, their_sum, rtol=1e-4, atol=1e-4)
            if ends_first:
                await engine.close(session)


async def test_other_frames_are_another_video(model: VideoLM) -> None:
    async with running(model) as engine:
        for number, frames in enumerate((some_frames(4, 1), some_frames(4, 2), some_frames(3, 1), some_frames(4, 1))):
            _, num_reused = await captioned(engine, str(number), "?", frames)
            assert (num_reused > 0) == (number == 3)


async def test_a_copy_goes_on_when_its_source_ends_and_is_evicted(model: VideoLM) -> None:
    frames = some_frames(4, seed=1)
    async with running(model, prefix_cache_bytes=0) as fresh:
        expected = (await captioned(fresh, "a", PROMPTS[1], frames))[0].committed
    async with running(model, prefix_cache_bytes=3 * model.kv_bytes(64) // 2) as engine:
        source, _ = await captioned(engine, "source", PROMPTS[0], frames)
        copy = await opened(engine, "copy", PROMPTS[1])
        assert (await prefilled(engine, copy, frames)).reused_tokens
        await engine.close(source)
        other, _ = await captioned(engine, "other", "?", some_frames(4, seed=2))
        await engine.close(other)
        assert await decoded(engine, copy) == expected
        assert (await captioned(engine, "again", "?", frames))[1] == 0


async def test_memory_is_that_of_the_kept_prefixes(model: VideoLM) -> None:
    states_bytes = 2 * 2 * 32 * 16  # two of bf16, width 32, four frames of four tokens
    a_prefix = model.kv_bytes(64) + states_bytes
    async with running(model, prefix_cache_bytes=2 * a_prefix) as engine:
        sessions = [(await captioned(engine, str(seed), "?", some_frames(4, seed)))[0] for seed in range(4)]
        assert engine.admission.used_bytes == sum(session.work.state.kv_bytes for session in sessions)
        for session in sessions:
            await engine.close(session)
        assert engine.prefixes.num_bytes == 2 * a_prefix
        assert [session.work.state.kv_bytes for session in sessions] == [0] * 4
        assert engine.admission.used_bytes == 0


async def test_states_of_the_prompt_do_not_outlive_the_prefill(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Prefill]] = []
    for name in ("start_prefill", "resume_prefill"):
        start = getattr(VideoLM, name)

        def spy(*args: Any, start: Any = start, **options: Any) -> Prefill:
            prefill: Prefill = start(*args, **options)
            made.append(weakref.ref(prefill))
            return prefill

        monkeypatch.setattr(VideoLM, name, spy)
    async with running(model) as engine:
        sessions = [await opened(engine, name, "?") for name in ("fresh", "resumed")]
        for session in sessions:
            await prefilled(engine, session, some_frames(4, 1))
        await engine.thread.run(gc.collect)
        assert [prefill() for prefill in made] == [None, None]
        assert all(session.work.state.kv_bytes for session in sessions)


@pytest.mark.parametrize("how", ["unread", "abandoned", "captioned", "drafted for itself", "in error"])
async def test_a_session_that_has_ended_is_gone_without_a_collection(model: VideoLM, how: str) -> None:
    async with running(model, prefix_cache_bytes=0) as engine:
        with no_collection():
            session = await ended(engine, how)
            left = weakref.ref(session)
            await engine.close(session)
            del session
            for lane in Lane:
                await engine.thread.run(lambda: None, lane, order=2**62)
            await eventually(lambda: left() is None)


async def ended(engine: TargetEngine, how: str) -> TargetSession:
    """A session that came as far as it did."""
    drafter = "std" if how == "drafted for itself" else ""
    session = await engine.open(
        TargetStart("s", "?", NUM_TOKENS, with_guidance=True, local_drafter=drafter, self_draft_kept=4), 4
    )
    if how == "unread":
        return session
    session.work.frames = some_frames(4, 1)
    prefilling = engine.prefill(session)
    if how == "abandoned":
        await anext(prefilling)
        await prefilling.aclose()  # type: ignore[attr-defined]
        return session
    async for _ in prefilling:
        pass
    async for _ in engine.judge(session, JudgeRequest()):
        pass
    if how == "in error":
        engine.model._run_step = _fail  # type: ignore[method-assign]
        with contextlib.suppress(ValueError):
            async for _ in engine.judge(session, JudgeRequest()):
                pass
        del engine.model._run_step  # type: ignore[method-assign]
    async for _ in engine.judge(session, JudgeRequest(num_passes=3, self_draft=2 if drafter else 0)):
        pass
    return session


def _fail(batch: object) -> list[torch.Tensor]:
    raise ValueError(batch)


async def test_many_at_once_write_what_each_writes_alone(model: VideoLM) -> None:
    asked = [(prompt, some_frames(2 + seed, seed)) for seed in range(3) for prompt in PROMPTS]
    async with running(model, prefix_cache_bytes=0, max_sessions=16) as engine:
        alone = []
        for number, (prompt, frames) in enumerate(asked):
            session, _ = await captioned(engine, f"alone {number}", prompt, frames)
            alone.append(session.committed)
            engine.close(session)
        together = await asyncio.gather(
            *(captioned(engine, f"together {number}", *one) for number, one in enumerate(asked))
        )
        assert [session.committed for session, _ in together] == alone


async def test_one_that_ends_among_many_is_not_missed(model: VideoLM) -> None:
    async with running(model) as engine:
        sessions = [await opened(engine, str(number), "?") for number in range(3)]
        for session in sessions:
            await prefilled(engine, session, some_frames(4, 1))
        decoding = [asyncio.create_task(decoded(engine, session)) for session in sessions]
        engine.close(sessions[1])
        outcomes = await asyncio.gather(*decoding, return_exceptions=True)
        assert outcomes[0] == outcomes[2] and len(sessions[0].committed) == NUM_TOKENS
        assert isinstance(outcomes[1], Exception)


async def test_a_place_is_waited_for_and_told_so(model: VideoLM) -> None:
    frames = some_frames(4, 1)
    async with running(model, max_sessions=1, max_queued=1, queue_timeout_s=600) as engine:
        first, _ = await captioned(engine, "first", "?", frames)
        second = await opened(engine, "second", "?")
        with pytest.raises(Overloaded) as refused:
            await opened(engine, "third", "?")
        assert refused.value.retry_after_s
        waiting = engine.admit(second)
        assert await anext(waiting) == StageProgress("queued", 0, 0)
        engine.close(first)
        assert [event async for event in waiting] == []
        assert (await prefilled(engine, second, frames)).reused_tokens


async def test_a_session_that_leaves_the_queue(model: VideoLM) -> None:
    async with running(model, max_sessions=1, max_queued=1, queue_timeout_s=600) as engine:
        first = await opened(engine, "first", "?")
        second = await opened(engine, "second", "?")
        await engine.close(second)
        assert engine.admission.num_queued == 0
        await engine.close(first)
        assert (engine.admission.num_admitted, engine.admission.used_bytes) == (0, 0)


async def test_more_than_the_budget_is_refused_at_once(model: VideoLM) -> None:
    async with running(model, kv_budget_bytes=model.kv_bytes(64) - 1) as engine:
        with pytest.raises(LimitExceeded, match="--kv-budget-mb"):
            await opened(engine, "large", "?")
