"""The draft's lines on a tiny model: several at once, in packed passes, each as if it were alone."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from slipstream.engine import VideoLM, load_model
from slipstream.engine import line_writer as writer_module
from slipstream.engine import thread as threads
from slipstream.engine.batcher import step_each
from slipstream.engine.draft_engine import HEADROOM_TOKENS, DraftEngine, DraftLimits
from slipstream.engine.draft_session import DraftSession
from slipstream.engine.fused_runner import MOST_AHEAD
from slipstream.engine.thread import FairQueue, Lane, ModelThread
from slipstream.errors import LimitExceeded, Overloaded, ProtocolViolation
from slipstream.messages import Frames
from slipstream.sampling.params import SamplingParams
from slipstream.session_messages import DraftStart
from slipstream.speculation.protocol import AdvanceLine, JoinPoint, RestartLine
from tests.services.model_sessions import some_frames
from tests.support.held_memory import no_collection
from tests.support.tiny_checkpoint import write_tiny_llava

MIB = 1024 * 1024
NUM_TOKENS = 20
SHAPES = ("any shape", "static", "rows")
"""Of passes; or of a model whose rows are compiled."""
FROM_THE_START = JoinPoint(1, (), NUM_TOKENS, first_chunk=1)


def draft_model(folder: Path, shape: str) -> VideoLM:
    """A tiny draft that takes passes, static steps, or row after row."""
    hidden = 128 if shape == "rows" else 32
    model = load_model(str(write_tiny_llava(folder, seed=9, layers=2, max_context=2048, hidden=hidden)))
    if shape == "static":
        model.open_static_steps(64 * MIB)
    return model


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    return draft_model(tmp_path_factory.mktemp("draft"), request.param)


@asynccontextmanager
async def running(model: VideoLM, **limits: int) -> AsyncIterator[DraftEngine]:
    thread = ModelThread(1)
    settings = {"max_sessions": 16, "kv_budget_bytes": 64 * MIB} | limits
    try:
        yield DraftEngine(model, thread, DraftLimits(**settings))
    finally:
        await asyncio.to_thread(thread.close)


async def opened(
    engine: DraftEngine, num_frames: int, join: JoinPoint = FROM_THE_START, pruner: str = "uniform", **asked: Any
) -> DraftSession:
    request = DraftStart(
        session_id="s",
        prompt="Describe the video.",
        pruner=pruner,
        alpha=0.5,
        positions="original",
        guidance="scores",
        guidance_address="",
        seed=0,
        **asked,
    )
    return await engine.open(request, join, num_frames)


async def started(engine: DraftEngine, frames: Frames, **asked: Any) -> DraftSession:
    return await prepared(engine, await opened(engine, len(frames), **asked), frames)


async def prepared(engine: DraftEngine, session: DraftSession, frames: Frames) -> DraftSession:
    session.work.frames = frames
    embeddings, _ = await engine.encode(session)
    keep, _ = await engine.choose_tokens(session, embeddings, None)
    await engine.prefill(session, embeddings, keep)
    return session


@pytest.mark.parametrize("how", ["unread", "in encoding", "ready", "writing", "drawing", "in error"])
async def test_a_session_that_has_ended_is_gone_without_a_collection(model: VideoLM, how: str) -> None:
    async with running(model) as engine:
        with no_collection():
            session = await opened(engine, 4, sampling=SamplingParams(temperature=float(how == "drawing")))
            left = weakref.ref(session)
            if how == "in encoding":
                session.work.frames = some_frames(4, 1)
                encoding = asyncio.create_task(engine.encode(session))
                await asyncio.sleep(0)
                encoding.cancel()
                await asyncio.wait([encoding])
                del encoding
            elif how != "unread":
                await prepared(engine, session, some_frames(4, 1))
            if how in ("writing", "drawing"):
                await line(engine, session, 2)
            if how == "in error":
                engine.order(session, RestartLine(2, 99, (1,), NUM_TOKENS, 1))
                with contextlib.suppress(ProtocolViolation):
                    await line(engine, session, NUM_TOKENS, epoch=2)
            await engine.close(session)
            del session
            for lane in Lane:
                await engine.thread.run(lambda: None, lane, order=2**62)
            await asyncio.sleep(0)
            assert left() is None


async def line(engine: DraftEngine, session: DraftSession, num_tokens: int, epoch: int = 1) -> list[int]:
    """The next tokens of a line; what is left of earlier ones is skipped."""
    token_ids: list[int] = []
    async for chunk in engine.write(session):
        assert chunk.pass_s > 0
        if chunk.epoch == epoch:
            token_ids += chunk.token_ids
        if len(token_ids) >= num_tokens:
            return token_ids
    raise AssertionError("the line ended")


async def test_lines_written_together_are_those_written_alone(model: VideoLM) -> None:
    videos = [some_frames(1 + seed, seed) for seed in range(6)]
    async with running(model) as engine:
        alone = []
        for frames in videos:
            session = await started(engine, frames)
            alone.append(await line(engine, session, NUM_TOKENS))
            engine.close(session)
        sessions = [await started(engine, frames) for frames in videos]
        together = await asyncio.gather(*(line(engine, session, NUM_TOKENS) for session in sessions))
        assert together == alone
        for number, session in enumerate(sessions):
            engine.order(session, RestartLine(2, number, (7, 9), NUM_TOKENS, 1))
        lengths = [NUM_TOKENS - number - 2 for number in range(6)]
        again = await asyncio.gather(
            *(line(engine, session, length, epoch=2) for session, length in zip(sessions, lengths, strict=True))
        )
        for number, (session, tail) in enumerate(zip(sessions, again, strict=True)):
            assert session.line.output == [*alone[number][:number], 7, 9, *tail]


async def test_orders_are_carried_out_in_turn(model: VideoLM) -> None:
    async with running(model) as engine:
        session = await started(engine, some_frames())
        first = await line(engine, session, NUM_TOKENS)
        engine.order(session, RestartLine(2, 4, (7,), 6, 1))
        engine.order(session, AdvanceLine(2, 9))  # comes while the restart may still be waiting
        engine.order(session, AdvanceLine(1, 100))  # of a line that is dead
        assert len(await line(engine, session, 4, epoch=2)) == 4
        engine.order(session, RestartLine(3, 5, (8,), 12, 1))
        assert len(await line(engine, session, 6, epoch=3)) == 6
        assert session.line.output[:6] == [*first[:4], 7, 8] and len(session.line.output) == 12


async def test_an_impossible_order_ends_its_own_line_only(model: VideoLM) -> None:
    async with running(model) as engine:
        bad, good = [await started(engine, some_frames(seed=seed)) for seed in range(2)]
        await line(engine, bad, NUM_TOKENS)
        engine.order(bad, RestartLine(2, 99, (7,), 200, 1))
        with pytest.raises(ProtocolViolation, match="keeps 99 tokens, but the line has 20"):
            await line(engine, bad, 1, epoch=2)
        assert len(await line(engine, good, NUM_TOKENS)) == NUM_TOKENS


async def test_the_end_of_a_session_ends_its_line_and_frees_its_place(model: VideoLM) -> None:
    async with running(model) as engine:
        session, other = [await started(engine, some_frames(seed=seed)) for seed in range(2)]
        written = engine.write(session)
        await anext(written)
        await engine.close(session)
        async for _ in written:
            pass
        assert session.work.state.kv_bytes == 0
        assert engine.admission.num_admitted == 1
        assert len(await line(engine, other, NUM_TOKENS)) == NUM_TOKENS


@pytest.mark.parametrize("pruner", ["none", "all", "random"])
async def test_what_a_pruner_keeps_is_counted_whatever_share_is_asked(model: VideoLM, pruner: str) -> None:
    async with running(model) as engine:
        session = await started(engine, some_frames(64), pruner=pruner)
        assert session.work.state.kv_bytes == engine.admission.used_bytes


async def test_a_draft_that_joins_late_holds_what_was_counted_for_it(model: VideoLM) -> None:
    async with running(model) as engine:
        committed = tuple(5 + index % 200 for index in range(HEADROOM_TOKENS))
        session = await opened(engine, 2, join=JoinPoint(1, committed, HEADROOM_TOKENS + NUM_TOKENS, 1))
        await prepared(engine, session, some_frames())
        await line(engine, session, NUM_TOKENS)
        assert session.work.state.kv_bytes == engine.admission.used_bytes


async def test_a_long_answer_is_counted_from_the_start(model: VideoLM) -> None:
    num_tokens = HEADROOM_TOKENS + 200
    async with running(model) as engine:
        session = await opened(engine, 2, join=JoinPoint(1, (), num_tokens, 1), max_new_tokens=num_tokens)
        counted = engine.admission.used_bytes
        await prepared(engine, session, some_frames())
        assert len(await line(engine, session, num_tokens)) == num_tokens
        assert session.work.state.kv_bytes == engine.admission.used_bytes == counted


async def test_a_long_text_is_taken_in_piece_by_piece(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a draft joins, and where it goes on behind many tokens that it did not write; beside one that writes."""
    text = tuple(5 + index % 200 for index in range(300))
    most: list[int] = []

    def spy(step: Any, batch: Any) -> Any:
        most.append(max(len(window) for _, window in batch))
        return step_each(step, batch)

    monkeypatch.setattr(writer_module, "step_each", spy)

    async def written() -> tuple[list[int], list[int], list[int]]:
        async with running(model) as engine:
            other = await started(engine, some_frames(seed=1))
            joined = await opened(engine, 2, join=JoinPoint(1, text, len(text) + NUM_TOKENS, 1))
            await prepared(engine, joined, some_frames())
            beside = asyncio.create_task(line(engine, other, NUM_TOKENS))
            first = await line(engine, joined, NUM_TOKENS)
            engine.order(joined, RestartLine(2, 10, text, len(text) + 10 + NUM_TOKENS, 1))
            return first, await line(engine, joined, NUM_TOKENS, epoch=2), await beside

    in_pieces = await written()
    assert max(most) <= writer_module.CATCH_UP
    most.clear()
    monkeypatch.setattr(writer_module, "CATCH_UP", 10_000)
    assert await written() == in_pieces and max(most) >= len(text)


async def test_a_long_line_is_charged_pass_by_pass(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "FLUSH_S", 0.0)
    charged: list[Lane] = []
    charge = FairQueue.charge

    def spy(queue: FairQueue[object], lane: Lane, *seconds: float) -> None:
        charged.append(lane)
        charge(queue, lane, *seconds)

    monkeypatch.setattr(FairQueue, "charge", spy)
    async with running(model) as engine:
        session = await started(engine, some_frames())
        charged.clear()
        await line(engine, session, NUM_TOKENS)
        await engine.close(session)
    assert charged.count(Lane.DECODE) >= NUM_TOKENS // MOST_AHEAD


async def test_no_room_is_said_at_once(model: VideoLM) -> None:
    async with running(model, max_sessions=1) as engine:
        await opened(engine, 2)
        with pytest.raises(Overloaded, match="the draft has no room: 1 of at most 1 captions") as refused:
            await opened(engine, 2)
        assert refused.value.retry_after_s
    async with running(model, kv_budget_bytes=1000) as engine:
        with pytest.raises(LimitExceeded, match="the draft has 0 MiB"):
            await opened(engine, 2)


async def test_embeddings_of_a_known_video_are_not_computed_again(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = VideoLM.encode
    monkeypatch.setattr(
        VideoLM, "encode", lambda *args: encoded.append(sum(pixels.num_frames for pixels in args[1])) or encode(*args)
    )
    async with running(model, embedding_cache_bytes=MIB) as engine:
        lines = [await line(engine, await started(engine, some_frames(5, seed)), NUM_TOKENS) for seed in (1, 1, 2)]
    assert lines[0] == lines[1] != lines[2]
    assert encoded == [5, 5]


async def test_a_device_that_is_lost_while_a_line_is_written_is_told(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the process would live on until the next caption."""
    lost, told = RuntimeError("CUDA error: an illegal memory access was encountered"), list[BaseException]()

    def fail(*_: Any) -> None:
        raise lost

    async with running(model) as engine:
        engine.thread.on_device_lost = told.append
        session = await started(engine, some_frames(4, 1))
        for way in ("write_ahead", "read_nodes", "step"):
            monkeypatch.setattr(model, way, fail)
        monkeypatch.setattr(threads, "device_answers", lambda: False)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await line(engine, session, NUM_TOKENS)
    assert told and {*told} == {lost}


async def test_tokens_ahead_that_always_fail_are_told_once(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is what it is, by passes, and whoever wonders why it is slow finds a line in the log."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    async with running(model) as engine:
        expected = await line(engine, await started(engine, some_frames(4, 1)), NUM_TOKENS)
        for way in ("write_ahead", "read_nodes"):
            monkeypatch.setattr(model, way, fail)
        with capture_logs() as logs:
            assert await line(engine, await started(engine, some_frames(4, 1)), NUM_TOKENS) == expected
    events = [entry["event"] for entry in logs if entry["event"].endswith("_failed")]
    assert set(events) >= {"draft.rows_failed"} and len(events) == len(set(events))


async def test_sessions_take_turns_where_rows_are_read_sooner_than_passes(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few do; more share passes."""
    together: list[int] = []
    run_pass = writer_module.LineWriter._pass

    def spy(writer: writer_module.LineWriter, sessions: Any) -> None:
        together.append(len(sessions))
        run_pass(writer, sessions)

    monkeypatch.setattr(writer_module.LineWriter, "_pass", spy)
    for num_sessions in (3, max(model.most_nodes, 1) + 1):
        together.clear()
        async with running(model) as engine:
            sessions = [await started(engine, some_frames(1 + seed, seed)) for seed in range(num_sessions)]
            lines = await asyncio.gather(*(line(engine, session, NUM_TOKENS) for session in sessions))
        assert len(set(map(tuple, lines))) == num_sessions
        assert (max(together) == 1) == (num_sessions <= model.most_nodes)
