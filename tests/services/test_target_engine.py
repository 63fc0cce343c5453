"""What the target engine does without a model pass."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from slipstream.engine import target_engine as engine_module
from slipstream.engine.target_engine import TargetEngine, TargetLimits, default_guidance_layer
from slipstream.engine.target_prefill import TargetSession
from slipstream.errors import InvalidConfig, InvalidRequest, LimitExceeded, Overloaded, SessionGone
from slipstream.session_messages import PrefillStage, StageProgress, TargetStart
from slipstream.speculation.hints.tolerance import Hints, Tolerance
from tests.services.model_sessions import pulled


def make_engine(num_layers: int = 8, guidance_layer: int = 0, max_queued: int = 1) -> TargetEngine:
    info = SimpleNamespace(num_layers=num_layers, max_context=100, eos_token_ids=(1,), vocab_size=10)
    plan = SimpleNamespace(num_tokens=40, token_ids=(3,) * 40, is_text=False)
    text = SimpleNamespace(tokenizer=None)
    model: Any = SimpleNamespace(info=info, text=text, text_stream=lambda: None, strict_width=0)
    model.plan_prompt = lambda prompt, num_frames, **facts: plan
    model.plan_text = lambda prompt: SimpleNamespace(num_tokens=40, token_ids=(3,) * 40, is_text=True)
    model.kv_bytes = lambda num_tokens: num_tokens
    thread: Any = SimpleNamespace(run=AsyncMock())
    limits = TargetLimits(
        guidance_layer=guidance_layer, max_sessions=2, kv_budget_bytes=1000, max_queued=max_queued, queue_timeout_s=60
    )
    return TargetEngine(model, thread, limits)


def test_the_guidance_layer_is_20_or_a_quarter() -> None:
    assert [default_guidance_layer(num_layers) for num_layers in (1, 4, 12, 28, 80, 200)] == [1, 1, 3, 7, 20, 20]
    assert make_engine(12).guidance_layer == 3
    assert make_engine(12, guidance_layer=12).guidance_layer == 12


def test_a_guidance_layer_that_is_not_there() -> None:
    with pytest.raises(InvalidConfig, match="--guidance-layer 13: the model has 12 layers"):
        make_engine(12, guidance_layer=13)


async def test_guidance_of_a_session_that_never_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SESSION_WAIT_S", 0.01)
    with pytest.raises(SessionGone, match="no session 'nobody' is open here"):
        await pulled(make_engine(), "nobody", "scores")


async def test_guidance_of_a_session_that_ends_first() -> None:
    engine = make_engine()
    pulling = [asyncio.create_task(pulled(engine, "early", kind)) for kind in ("scores", "hidden_states")]
    await asyncio.sleep(0)
    session = await engine.open(TargetStart("early", "?", 9, with_guidance=True), 1)
    pulling.append(asyncio.create_task(pulled(engine, "early", "scores")))
    await asyncio.sleep(0.01)
    engine.close(session)
    for pull in pulling:
        with pytest.raises(SessionGone, match="session 'early' has ended"):
            await pull


async def test_guidance_of_a_session_that_ends_before_its_pull_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SESSION_WAIT_S", 0.1)
    engine = make_engine()
    pulling = asyncio.create_task(pulled(engine, "brief", "scores"))
    await asyncio.sleep(0)
    session = await engine.open(TargetStart("brief", "?", 9, with_guidance=True), 1)
    engine.close(session)
    with pytest.raises(SessionGone, match="session 'brief'"):
        await asyncio.wait_for(pulling, 60)


async def test_frames_wait_for_room_until_others_are_encoded() -> None:
    engine = make_engine()
    engine.frames.budget_bytes = 300
    first, second = [
        await engine.open(TargetStart(name, "?", 9, with_guidance=False), 1, (10, 9)) for name in ("a", "b")
    ]
    assert [event async for event in engine.admit(first)] == []
    waiting = engine.admit(second)
    assert await anext(waiting) == StageProgress(PrefillStage.QUEUED, 0, 0)
    first.work.free_frames()
    assert [event async for event in waiting] == []
    with pytest.raises(LimitExceeded, match="of frames, but the target has"):
        await engine.open(TargetStart("c", "?", 9, with_guidance=False), 2, (10, 9))
    engine.close(second)
    assert (engine.frames.used_bytes, engine.frames.num_admitted) == (0, 0)


async def test_a_question_about_no_video_waits_for_no_room_for_frames() -> None:
    engine = make_engine()
    engine.admission._max_sessions, engine.frames.budget_bytes = 3, 300
    first, second = [
        await engine.open(TargetStart(name, "?", 9, with_guidance=False), 1, (10, 9)) for name in ("a", "b")
    ]
    text = await engine.open(TargetStart("text", "?", 9, with_guidance=False, has_video=False), 0, (0, 0))
    assert first.has_place and not second.has_place and text.has_place
    assert [event async for event in engine.admit(text)] == []


async def test_who_waits_for_its_place_holds_no_room_for_frames_that_others_wait_for() -> None:
    """One that waits for a place with room for frames, and those that have the places and wait for that room, would
    wait for each other: a small clip that comes late goes first in one of the queues."""
    engine = make_engine(max_queued=2)
    engine.frames.budget_bytes = 270
    engine.frames._turns.observe(1, 1.0)

    async def opened(name: str, height: int) -> TargetSession:
        return await engine.open(TargetStart(name, "?", 9, with_guidance=False), 1, (height, 9))

    async def served(session: TargetSession) -> None:
        async for _ in engine.admit(session):
            pass
        session.work.free_frames()
        session.place.release()

    served_now, has_place, *waiting = [await opened(f"long{number}", 10) for number in range(3)]
    small = await opened("small", 1)
    assert served_now.has_place and not has_place.has_place and has_place.place.admitted_at is not None
    assert engine.admission.num_queued == 2 and engine.frames.num_queued == 1
    async with asyncio.timeout(60):
        await asyncio.gather(*(served(session) for session in (has_place, *waiting, small, served_now)))


async def test_sessions_that_do_not_fit() -> None:
    engine = make_engine()
    with pytest.raises(LimitExceeded, match=r"40 prompt tokens \(3 frames\) and 61 new ones exceed"):
        await engine.open(TargetStart("a", "?", 61, with_guidance=False), 3)
    await engine.open(TargetStart("a", "?", 60, with_guidance=False), 3)
    with pytest.raises(InvalidRequest, match="'a' is open already"):
        await engine.open(TargetStart("a", "?", 9, with_guidance=False), 3)
    second = await engine.open(TargetStart("b", "?", 9, with_guidance=False), 3)
    third = await engine.open(TargetStart("c", "?", 9, with_guidance=False), 3)
    with pytest.raises(Overloaded, match="2 of at most 2 captions are served"):
        await engine.open(TargetStart("d", "?", 9, with_guidance=False), 3)
    engine.close(second)
    assert [num_ahead async for num_ahead in third.place.wait()] == [0]
    assert engine.admission.num_admitted == 2


async def test_a_prompt_is_planned_beside_the_event_loop() -> None:
    """Positions of a long video take tens of milliseconds, which other captions would wait."""
    engine = make_engine()
    plan, threads = engine.model.plan_prompt, []

    def planned(*args: Any, **facts: Any) -> Any:
        threads.append(threading.current_thread())
        return plan(*args, **facts)

    engine.model.plan_prompt = planned  # type: ignore[method-assign]
    await engine.open(TargetStart("a", "?", 9, with_guidance=False), 1)
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


async def test_of_two_sessions_of_one_name_at_once_one_is_opened() -> None:
    engine = make_engine()
    engine.model.tokenize = lambda text: [1]  # type: ignore[method-assign]
    request = TargetStart("a", "?", 9, with_guidance=False, local_drafter="hints", hints=Hints(("b",), 4))
    opened = await asyncio.gather(engine.open(request, 1), engine.open(request, 1), return_exceptions=True)
    assert sorted(type(each).__name__ for each in opened) == ["SessionExists", "TargetSession"]


async def test_a_tolerance_needs_trees() -> None:
    engine = make_engine()
    engine.model.strict_width = 8
    hints = Hints(("b",), 4, Tolerance(0.5))
    with pytest.raises(InvalidRequest, match="strict width"):
        await engine.open(TargetStart("a", "?", 9, with_guidance=False, local_drafter="hsd", hints=hints), 1)
