"""Captions at the same time on one stack: each text is what it is alone."""

import asyncio

import grpc
import pytest

from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import target_pb2_grpc
from slipstream.stack.local import Stack
from tests.services.model_sessions import open_session, target_end, target_start
from tests.support.gateway_client import Captioned, caption
from tests.support.processes import eventually, logged
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def captioned(gateway: grpc.aio.Channel, world: World, clip: int, num_frames: int, method: str) -> Captioned:
    return await caption(
        gateway,
        world.clips[clip],
        prompt=PROMPT,
        num_frames=num_frames,
        max_new_tokens=64,
        method=method,
        alpha=0.2,
    )


@pytest.mark.parametrize(
    "methods", [("slipstream", "slipstream"), ("slipstream", "autoregressive"), ("autoregressive", "autoregressive")]
)
async def test_two_videos_at_once(gateway: grpc.aio.Channel, world: World, methods: tuple[str, str]) -> None:
    both = await asyncio.gather(
        *(captioned(gateway, world, clip, NUM_FRAMES, method) for clip, method in enumerate(methods))
    )
    assert [one.token_ids for one in both] == [world.answer(0, 64), world.answer(1, 64)]
    assert both[0].summary.request_id != both[1].summary.request_id


async def test_six_at_once_of_different_length(gateway: grpc.aio.Channel, world: World) -> None:
    asked = [(clip, num_frames) for clip in range(3) for num_frames in (2, NUM_FRAMES)]
    runs = await asyncio.gather(*(captioned(gateway, world, *one, "slipstream") for one in asked))
    for (clip, num_frames), run in zip(asked, runs, strict=True):
        assert run.token_ids == world.answer(clip, 64, num_frames=num_frames)


async def test_the_same_video_twice_at_once(gateway: grpc.aio.Channel, world: World) -> None:
    runs = await asyncio.gather(*(captioned(gateway, world, 1, NUM_FRAMES, "slipstream") for _ in range(2)))
    assert runs[0].token_ids == runs[1].token_ids == world.answer(1, 64)


async def test_two_captions_of_one_id(stack: Stack, gateway: grpc.aio.Channel, world: World) -> None:
    """A request's id is the caller's word for the logs: nobody keeps another from using it, nor learns of them."""
    runs = await asyncio.gather(
        *(
            caption(
                gateway, world.clips[clip], prompt=PROMPT, num_frames=NUM_FRAMES, max_new_tokens=64, request_id="twins"
            )
            for clip in (0, 1)
        )
    )
    assert [run.token_ids for run in runs] == [world.answer(0, 64), world.answer(1, 64)]
    assert {run.summary.request_id for run in runs} == {"twins"}
    for name in ("target", "draft"):
        path = stack.processes[name].log_path
        await eventually(lambda: len(logged(path, "session.closed", request_id="twins")) == 2)  # noqa: B023


async def test_a_session_that_is_named_like_a_request(stack: Stack, gateway: grpc.aio.Channel, world: World) -> None:
    """As a caller with a certificate might open one at the target, to make somebody's computable job fail."""
    async with open_channel(stack.processes["target"].address) as channel:
        squatter = open_session(target_pb2_grpc.TargetStub(channel), "squatted")
        await squatter.send(*target_start("squatted"))
        await squatter.read_until("verdict")
        captioned = await caption(gateway, world.clips[2], prompt=PROMPT, num_frames=NUM_FRAMES, request_id="squatted")
        assert captioned.token_ids == world.answer(2)
        await squatter.send(target_end())
