"""Films in a bucket through a real gateway: the text of the local file, few of its bytes, and stores that fail."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from tests.support.gateway_client import caption
from tests.support.object_store import ObjectServer, object_server
from tests.support.processes import running
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 6, "max_new_tokens": 24}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def objects() -> AsyncIterator[ObjectServer]:
    async with object_server() as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def door(
    stack: Stack, objects: ObjectServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[grpc.aio.Channel]:
    """A gateway that opens objects of one folder of the bucket."""
    folder = tmp_path_factory.mktemp("objects")
    models = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    flags = (*models, "--object-roots", "s3://films/shown", "--object-timeout-s", "5")
    gateway = running("gateway", folder, *flags, **objects.environment)
    async with gateway as process, open_channel(process.address) as channel:
        yield channel


async def test_a_clip_in_a_bucket_has_the_text_of_the_uploaded_one(
    door: grpc.aio.Channel, objects: ObjectServer, world: World
) -> None:
    uploaded = await caption(door, world.clips[0], **SMALL)
    found = await caption(door, path=objects.put("shown/0.mp4", world.clips[0]), **SMALL)
    assert found.token_ids == uploaded.token_ids and found.text
