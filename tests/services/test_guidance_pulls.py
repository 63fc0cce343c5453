"""A pull of guidance ends, whatever the draft does that asked for it. Payloads are larger than what gRPC holds for a
caller who does not read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from slipstream.engine.session_work import MAX_OPEN_PULLS
from slipstream.engine.target_prefill import TargetSession
from slipstream.pruning import Guidance
from slipstream.rpc.v1 import target_pb2, target_pb2_grpc
from slipstream.services.target import servicer as target_servicer
from slipstream.services.target.servicer import TargetServicer
from slipstream.session_messages import TargetStart
from tests.services.model_sessions import CAPABILITY, served
from tests.services.test_target_engine import make_engine

NUM_TOKENS, HIDDEN = 2**13, 2**11
NUM_BYTES = 2 * 2 * NUM_TOKENS * HIDDEN + 2 * 4 * HIDDEN
TIMEOUT_S = 120.0


class World:
    """A target with one session whose guidance is there, and how many pulls it serves."""

    def __init__(self) -> None:
        self.engine = make_engine()
        self._guidance = self.engine.guidance
        self.engine.guidance = self._counted  # type: ignore[method-assign]
        self._num_served = 0
        self._changed = asyncio.Condition()

    async def open(self) -> TargetSession:
        request = TargetStart("s", "?", 9, with_guidance=True, guidance_capability=CAPABILITY)
        session = await self.engine.open(request, 1)
        states = torch.zeros(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
        session.guidance.set_result(Guidance(video_states=(states, states), text_sums=(torch.zeros(HIDDEN),) * 2))
        return session

    async def serves(self, num_pulls: int) -> None:
        """Returns once it does."""
        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(lambda: self._num_served == num_pulls)

    @asynccontextmanager
    async def _counted(self, *asked: Any, **more: Any) -> AsyncIterator[Guidance]:
        async with self._guidance(*asked, **more) as guidance:
            await self._count(1)
            try:
                yield guidance
            finally:
                await self._count(-1)

    async def _count(self, more: int) -> None:
        async with self._changed:
            self._num_served += more
            self._changed.notify_all()


@asynccontextmanager
async def serving(world: World, folder: Path) -> AsyncIterator[target_pb2_grpc.TargetStub]:
    async with served(TargetServicer(world.engine, idle_timeout_s=TIMEOUT_S), folder) as channel:
        yield target_pb2_grpc.TargetStub(channel)


def pull(target: target_pb2_grpc.TargetStub) -> Any:
    kind = target_pb2.GUIDANCE_KIND_HIDDEN_STATES
    request = target_pb2.PullGuidanceRequest(session_id="s", kind=kind, capability=CAPABILITY)
    return target.PullGuidance(request, timeout=TIMEOUT_S)


async def begun(target: target_pb2_grpc.TargetStub) -> Any:
    """A pull of which the header was read."""
    call = pull(target)
    assert (await call.read()).header.video_tokens == NUM_TOKENS
    return call


async def rest_of(call: Any) -> int:
    """Bytes up to its end. Raises `AioRpcError` where that is a bad one."""
    num_bytes = 0
    while (chunk := await call.read()) is not grpc.aio.EOF:
        num_bytes += len(chunk.data)
    return num_bytes


async def test_a_pull_ends_when_nothing_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_servicer, "PULL_IDLE_S", 0.2)
    world = World()
    async with serving(world, tmp_path) as target:
        await world.open()
        stuck = await begun(target)
        await world.serves(0)
        with pytest.raises(grpc.aio.AioRpcError, match=r"nothing was taken for 0\.2 s") as ended:
            await rest_of(stuck)
        assert ended.value.code() is grpc.StatusCode.ABORTED


async def test_a_pull_ends_with_its_session(tmp_path: Path) -> None:
    world = World()
    async with serving(world, tmp_path) as target:
        session = await world.open()
        stuck = await begun(target)
        await world.serves(1)
        world.engine.close(session)
        await world.serves(0)
        with pytest.raises(grpc.aio.AioRpcError, match="session 's' has ended") as ended:
            await rest_of(stuck)
        assert ended.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_session_has_few_pulls_at_once(tmp_path: Path) -> None:
    world = World()
    async with serving(world, tmp_path) as target:
        await world.open()
        stuck = [await begun(target) for _ in range(MAX_OPEN_PULLS)]
        with pytest.raises(grpc.aio.AioRpcError, match=f"being pulled {MAX_OPEN_PULLS} times") as refused:
            await pull(target).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stuck.pop().cancel()
        await world.serves(MAX_OPEN_PULLS - 1)
        assert await rest_of(await begun(target)) == NUM_BYTES, "a draft that reads has all of it"
