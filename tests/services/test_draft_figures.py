"""What a draft says of its preparation: hashing counts as encoding, and waiting for guidance is that alone."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch

from slipstream.engine import VideoLM, draft_engine, load_model
from slipstream.engine.draft_engine import DraftEngine, DraftLimits
from slipstream.engine.thread import ModelThread
from slipstream.errors import LimitExceeded
from slipstream.pruning import Guidance
from slipstream.rpc.v1 import draft_pb2, draft_pb2_grpc
from slipstream.services.draft.servicer import DraftServicer, Targets
from tests.services.model_sessions import PROMPT, draft_end, draft_start, open_session, served, some_frames
from tests.support.tiny_checkpoint import write_tiny_llava

MIB = 1024 * 1024


class FakeTargets:
    """Have the guidance once they `may_answer`."""

    def __init__(self, num_tokens: int) -> None:
        self.may_answer = asyncio.Event()
        self.has_answered = threading.Event()
        self._guidance = Guidance(scores=torch.ones(num_tokens))

    async def check(self, address: str) -> None:
        pass

    async def pull(self, *asked: Any) -> tuple[Guidance, int]:
        await self.may_answer.wait()
        self.has_answered.set()
        return self._guidance, 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    return load_model(str(write_tiny_llava(tmp_path_factory.mktemp("draft"), seed=3)))


@asynccontextmanager
async def serving(engine: DraftEngine, targets: FakeTargets, folder: Path) -> AsyncIterator[draft_pb2_grpc.DraftStub]:
    try:
        async with served(DraftServicer(engine, cast(Targets, targets)), folder) as channel:
            yield draft_pb2_grpc.DraftStub(channel)
    finally:
        await asyncio.to_thread(engine.thread.close)


def engine_of(model: VideoLM) -> DraftEngine:
    return DraftEngine(
        model, ModelThread(1), DraftLimits(max_sessions=2, kv_budget_bytes=64 * MIB, embedding_cache_bytes=MIB)
    )


async def ready(draft: draft_pb2_grpc.DraftStub) -> draft_pb2.DraftReady:
    session = open_session(draft)
    await session.send(*draft_start(pruner="uv"))
    told = await session.read_until("ready")
    await session.send(draft_end())
    while await session.read() is not None:
        pass
    return cast(draft_pb2.DraftReady, told)


async def test_guidance_that_comes_before_the_frames_are_hashed_is_not_waited_for(
    model: VideoLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = FakeTargets(model.plan_prompt(PROMPT, len(some_frames())).num_video_tokens)
    hash_frames = draft_engine.frames_digest

    def hash_late(frames: Any) -> bytes:
        assert targets.has_answered.wait(60)
        return hash_frames(frames)

    monkeypatch.setattr(draft_engine, "frames_digest", hash_late)
    targets.may_answer.set()
    async with serving(engine_of(model), targets, tmp_path) as draft:
        told = [await ready(draft) for _ in range(2)]
    assert [each.guidance_s for each in told] == [0, 0]
    assert all(each.encode_s > 0 for each in told), "also of frames that are known by their digest"


async def test_guidance_that_comes_late_is_waited_for(model: VideoLM, tmp_path: Path) -> None:
    targets = FakeTargets(model.plan_prompt(PROMPT, len(some_frames())).num_video_tokens)
    engine = engine_of(model)
    encode = engine.encode

    async def encode_first(session: Any) -> Any:
        encoded = await encode(session)
        targets.may_answer.set()
        return encoded

    engine.encode = encode_first  # type: ignore[method-assign]
    async with serving(engine, targets, tmp_path) as draft:
        assert (await ready(draft)).guidance_s > 0


async def test_who_cannot_encode_pulls_no_longer(
    model: VideoLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target counts what is pulled from it, and the gateway comes again at once."""
    targets, answer, has_ended = FakeTargets(8), asyncio.Event(), asyncio.Event()

    async def pull(*asked: Any) -> tuple[Guidance, int]:
        try:
            await answer.wait()
        finally:
            has_ended.set()
        raise AssertionError("not reached")

    async def encode(*_: Any) -> Any:
        raise LimitExceeded("there is no room")

    monkeypatch.setattr(targets, "pull", pull)
    engine = engine_of(model)
    monkeypatch.setattr(engine, "encode", encode)
    async with serving(engine, targets, tmp_path) as draft:
        with pytest.raises(grpc.aio.AioRpcError, match="there is no room"):
            await ready(draft)
        await asyncio.wait_for(has_ended.wait(), 30)
