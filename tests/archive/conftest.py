"""One durable server for all tests of the folder that do not harm it, and one for each that does."""

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.spilled import Spill
from tests.archive.worlds import World, memory_world, redis_world


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_url() -> AsyncIterator[str]:
    """Its folder is in memory where there is one: thousands of writes, none of which need to survive."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        async with EmbeddedServer(Path(folder)) as server:
            yield server.url


@pytest_asyncio.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[World]:
    made = memory_world() if request.param == "memory" else redis_world(redis_url)
    yield made
    await made.queue.close()
    if made.redis is not None:
        await made.redis.aclose()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(tmp_path / "data") as running:
        yield running


@pytest.fixture
async def spill(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Spill]:
    made = Spill(redis_url, f"file://{tmp_path}", request.node.name)
    yield made
    await made.queue.close()
