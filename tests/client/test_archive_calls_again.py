"""The archive's client where gateways are away for a while, and others stand in for them."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace

import pytest
import pytest_asyncio

from slipstream.archive.messages import BatchItem, BatchOptions
from slipstream.client import archive_client
from slipstream.client.archive_client import PATIENCE_S, ArchiveClient
from slipstream.client.caption_client import gateway_info
from slipstream.client.connection import Connection, GatewayAddress
from slipstream.errors import ServiceUnavailable, ServiceUnreachable
from tests.cli.fake_archive import FakeArchive

NOWHERE = "127.0.0.1:1"
ITEMS = [BatchItem("a", "a.mp4")]


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> FakeArchive:
    monkeypatch.setattr("slipstream.client.connection.CONNECT_S", 0.2)
    monkeypatch.setattr(archive_client, "PAUSE_S", 0.01)
    return FakeArchive()


@pytest_asyncio.fixture
async def connection(archive: FakeArchive) -> AsyncIterator[Connection]:
    """Its first gateway is not there."""
    with archive:
        async with GatewayAddress(f"{NOWHERE},{archive.address}").open() as opened:
            yield opened


async def test_every_call_finds_the_gateway_that_is_there(connection: Connection) -> None:
    lost = connection.channel
    client = ArchiveClient(connection)
    submitted = await client.submit(BatchOptions("k"), ITEMS)
    assert submitted.num_added == 1 and connection.channel is not lost
    for ask in (client.get, client.cancel, client.job_page):
        connection.turn_from(connection.channel)
        assert connection.channel is lost
        await ask("k")
    connection.turn_from(connection.channel)
    assert [batch.state async for batch in client.watch("k")][-1].name == "CANCELLED"


async def test_information_comes_from_whoever_is_there(connection: Connection) -> None:
    assert (await gateway_info(connection)).target_model


async def test_where_nobody_is_all_are_asked_once() -> None:
    async with GatewayAddress(f"{NOWHERE},127.0.0.1:2").open() as connection:
        lost = connection.channel
        with pytest.raises(ServiceUnreachable):
            await gateway_info(connection)
        assert connection.channel is lost, "each was turned from"


async def test_calls_that_are_not_repeated_go_to_whoever_is_there(connection: Connection) -> None:
    lost = connection.channel
    await connection.settle()
    assert connection.channel is not lost
    there = connection.channel
    await connection.settle()
    assert connection.channel is there


async def test_a_batch_that_was_quiet_for_long_is_watched_through_a_restart(
    connection: Connection, archive: FakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience begins when the gateway is lost, not when something last changed."""
    client = ArchiveClient(connection)
    await client.submit(BatchOptions("k"), ITEMS)
    archive.lost_watches, now = 2, 0.0
    monkeypatch.setattr(archive_client, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + now))
    states = []
    async with aclosing(client.watch("k")) as snapshots:
        async for snapshot in snapshots:
            states.append(snapshot.state.name)
            now += 2 * PATIENCE_S
    assert states == ["IN_PROGRESS"] * 3 + ["COMPLETED"]


async def test_a_gateway_that_stays_away_is_not_watched_for_ever(
    archive: FakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.__enter__()
    async with GatewayAddress(archive.address).open() as connection:
        client = ArchiveClient(connection)
        await client.submit(BatchOptions("k"), [BatchItem("a", "stuck.mp4")])
        ticks = itertools.count(step=PATIENCE_S)
        monkeypatch.setattr(archive_client, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
        async with aclosing(client.watch("k")) as snapshots:
            await anext(snapshots)
            await asyncio.to_thread(archive.__exit__)
            with pytest.raises(ServiceUnavailable):
                await anext(snapshots)
