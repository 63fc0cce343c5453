"""A caller that falls silent does not keep its place at a model."""

import asyncio
from pathlib import Path

import grpc
import pytest

from slipstream.engine import load_model
from slipstream.engine.draft_engine import DraftEngine, DraftLimits
from slipstream.engine.target_engine import TargetEngine, TargetLimits
from slipstream.engine.thread import ModelThread
from slipstream.rpc.v1 import draft_pb2_grpc, target_pb2_grpc
from slipstream.services.draft import servicer as draft_servicer
from slipstream.services.draft.servicer import DraftServicer, Targets
from slipstream.services.target.servicer import TargetServicer
from tests.services.model_sessions import draft_start, open_session, served, target_start
from tests.support.processes import eventually
from tests.support.tiny_checkpoint import write_tiny_llava


async def test_a_silent_session_is_ended_and_the_next_one_served(tmp_path: Path) -> None:
    thread = ModelThread(1)
    model = load_model(str(write_tiny_llava(tmp_path / "model", seed=3)))
    limits = TargetLimits(max_sessions=1, kv_budget_bytes=2**24, max_queued=1, queue_timeout_s=60)
    engine = TargetEngine(model, thread, limits)
    try:
        async with served(TargetServicer(engine, idle_timeout_s=2.0), tmp_path) as channel:
            stub = target_pb2_grpc.TargetStub(channel)
            for num_messages in (0, 1, None):
                silent = open_session(stub)
                await silent.send(*target_start()[:num_messages])
                status, message = await silent.refusal()
                assert status is grpc.StatusCode.ABORTED
                assert "nothing was said for 2 s" in message and "--idle-timeout-s" in message
            assert [event.WhichOneof("message") for event in silent.events][-1] == "verdict", "it had its place"
            follows = open_session(stub)
            await follows.send(*target_start(max_new_tokens=1))
            await follows.read_until("verdict")
            assert await follows.read() is None
    finally:
        await asyncio.to_thread(thread.close)


async def test_frames_that_stop_coming_keep_no_room_at_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_servicer, "FRAMES_IDLE_S", 0.3)
    thread = ModelThread(1)
    engine = DraftEngine(
        load_model(str(write_tiny_llava(tmp_path / "model", seed=3))),
        thread,
        DraftLimits(max_sessions=1, kv_budget_bytes=2**24),
    )
    try:
        async with served(DraftServicer(engine, Targets()), tmp_path) as channel:
            silent = open_session(draft_pb2_grpc.DraftStub(channel))
            await silent.send(*draft_start()[:1])
            status, message = await silent.refusal()
            assert status is grpc.StatusCode.ABORTED and "send them without a pause" in message
            assert engine.frames.used_bytes == 0
            await eventually(lambda: engine.admission.num_admitted == 0)  # once the model's thread has freed its memory
    finally:
        await asyncio.to_thread(thread.close)
