"""One durable server for all tests of the folder that do not harm it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from slipstream.jobs.embedded import EmbeddedServer
from tests.jobs.worlds import World, memory_world, redis_world


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with EmbeddedServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest_asyncio.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[World]:
    made = memory_world() if request.param == "memory" else redis_world(redis_url)
    yield made
    await made.queue.close()
    if made.redis is not None:
        await made.redis.aclose()
