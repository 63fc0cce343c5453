"""A stack of real processes that many tests share. It and its users live on the session's event loop."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from tests.support.processes import check_logs
from tests.support.world import World, make_world


def pytest_configure() -> None:
    """A shell starts what runs in its background with Ctrl-C ignored, and processes of the tests would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


WITH_SERVICES = ("archive", "cli", "client", "e2e", "examples", "faults", "services")
"""Folders whose tests run services. `make test` gives them one worker, where they share stacks, all others another."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.relative_to(Path(__file__).parent).parts[0] in WITH_SERVICES:
        item.add_marker(pytest.mark.xdist_group("services"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(world: World) -> AsyncIterator[Stack]:
    """Target, draft and gateway; whoever harms one of them starts a stack of their own."""
    async with Stack(world.stack_options()) as running:
        yield running
        check_logs(running)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateway(stack: Stack) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(stack.gateway_address) as channel:
        yield channel
