"""Captions at the same time on one stack: each text is what it is alone."""

import asyncio

import grpc
import pytest

from slipstream.errors import InvalidRequest
from tests.support.gateway_client import Captioned, caption
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


async def test_an_id_that_is_in_use(gateway: grpc.aio.Channel, world: World) -> None:
    """The second of the same name is refused; the first does not notice."""
    rivals: list[asyncio.Task[Captioned]] = []

    def rival(run: Captioned) -> None:
        if len(run.token_ids) >= 3 and not rivals:
            rivals.append(asyncio.ensure_future(caption(gateway, world.clips[1], request_id="twins", num_frames=2)))

    first = await caption(
        gateway,
        world.clips[0],
        on_event=rival,
        prompt=PROMPT,
        num_frames=NUM_FRAMES,
        max_new_tokens=600,
        request_id="twins",
    )
    with pytest.raises(InvalidRequest, match="'twins' is open already"):
        await rivals[0]
    assert first.token_ids[:96] == world.answer(0)
