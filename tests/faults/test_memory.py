"""Memory ends with the caption, in every service, whether it was finished or its caller hung up."""

import grpc
import pytest

from slipstream.stack.local import Stack
from tests.support.held_memory import MOMENTS, finish_and_hang_up, look, rested, write_clip
from tests.support.world import World

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_FRAMES = 64
SOON_S = 10.0
"""Longer than memory takes to be freed, for the sake of busy machines; `make faults` allows one second."""


async def test_nothing_of_a_caption_is_left(stack: Stack, gateway: grpc.aio.Channel, world: World) -> None:
    clip = write_clip(world.folder, NUM_FRAMES + 2 * len(MOMENTS))
    # Each its own number of frames, so that what is kept of known videos does not stand in for the work.
    warm_up = range(NUM_FRAMES + len(MOMENTS), NUM_FRAMES + 2 * len(MOMENTS))
    await finish_and_hang_up(gateway, clip, warm_up[:2])
    before = look(stack.processes)
    await finish_and_hang_up(gateway, clip, range(NUM_FRAMES, NUM_FRAMES + len(MOMENTS)))
    after = await rested(stack.processes, before, SOON_S)
    assert after.is_like(before), (after.grown(before), after)
