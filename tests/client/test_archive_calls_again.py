"""The archive's client where gateways are away for a while, and others stand in for them."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.archive.messages import BatchItem, BatchOptions, Submitted
from slipstream.client import archive_client
from slipstream.client.archive_client import PATIENCE_S, ArchiveClient
from slipstream.client.caption_client import caption_events, gateway_info
from slipstream.client.connection import Connection, GatewayAddress
from slipstream.errors import ServiceUnavailable, ServiceUnreachable, VideoNotFound
from slipstream.options import CaptionOptions
from slipstream.rpc.guards import ANSWERED, LEAVING
from tests.cli.fake_archive import FakeArchive

NOWHERE = "127.0.0.1:1"
ITEMS, STUCK = [BatchItem("a", "a.mp4")], [BatchItem("a", "stuck.mp4")]


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


async def test_a_cancelled_hand_in_makes_no_more_items(connection: Connection) -> None:
    made, is_making, go_on = list[int](), threading.Event(), threading.Event()

    def items() -> Iterator[BatchItem]:
        for number in range(3):
            made.append(number)
            is_making.set()
            assert go_on.wait(60)
            yield BatchItem(str(number), "a.mp4")

    work = asyncio.create_task(ArchiveClient(connection).submit_all(BatchOptions("k"), items()))
    assert await asyncio.to_thread(is_making.wait, 60)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()  # as `asyncio.run` does
    assert made == [0]


@pytest.mark.parametrize(
    ("num_items", "is_broken", "more"),
    [(1, False, [False]), (4, False, [True, False]), (5, False, [True, True, False]), (4, True, [True, True])],
)
async def test_each_piece_says_whether_more_follow(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, num_items: int, is_broken: bool, more: list[bool]
) -> None:
    """The last says that it is; where an item cannot be made, those before it are handed in, and none is the last."""
    said, client = list[bool](), ArchiveClient(connection)
    monkeypatch.setattr(archive_client, "PIECE_ITEMS", 2)

    async def submit(batch: BatchOptions, items: Sequence[BatchItem]) -> Submitted:
        said.append(batch.more_follows)
        return Submitted("id", num_added=len(items))

    def items() -> Iterator[BatchItem]:
        yield from (BatchItem(str(number), "a.mp4") for number in range(num_items))
        if is_broken:
            raise VideoNotFound("a line is torn")

    monkeypatch.setattr(client, "submit", submit)
    if is_broken:
        with pytest.raises(VideoNotFound):
            await client.submit_all(BatchOptions("k"), items())
    else:
        assert (await client.submit_all(BatchOptions("k"), items())).num_added == num_items
    assert said == more


async def test_every_call_finds_the_gateway_that_is_there(connection: Connection) -> None:
    lost = connection.channel
    client = ArchiveClient(connection)
    submitted = await client.submit(BatchOptions("k"), STUCK)
    assert submitted.num_added == 1 and connection.channel is not lost
    await check_calls(connection, lost)


async def check_calls(connection: Connection, left: grpc.aio.Channel) -> None:
    """Each is made at the gateway first that is to be left."""
    client = ArchiveClient(connection)
    for ask in (client.get, client.cancel, client.job_page):
        connection.turn_from(connection.channel)
        assert connection.channel is left
        await ask("k")
    connection.turn_from(connection.channel)
    assert [batch.state async for batch in client.watch("k")][-1].name == "CANCELLED"


async def test_information_comes_from_whoever_is_there(archive: FakeArchive) -> None:
    with archive:
        async with GatewayAddress(f"{NOWHERE}, {archive.address}", token="t").open() as connection:
            assert (await gateway_info(connection)).target_model


async def test_where_nobody_is_all_are_asked_once() -> None:
    async with GatewayAddress(f"{NOWHERE},127.0.0.1:2").open() as connection:
        lost = connection.channel
        with pytest.raises(ServiceUnreachable):
            await gateway_info(connection)
        assert connection.channel is lost, "each was turned from"


class _Stopping(grpc.GenericRpcHandler):
    """Ends every call as a gateway does that is about to stop."""

    num_calls = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self.num_calls += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, LEAVING, ANSWERED)

        return grpc.stream_stream_rpc_method_handler(refuse)


class StoppingGateway(FakeArchive):
    def register(self, server: grpc.aio.Server) -> None:
        self.handler = _Stopping()
        server.add_generic_rpc_handlers((self.handler,))


@pytest_asyncio.fixture
async def stopping(archive: FakeArchive, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connection]:
    """Its first gateway is about to stop."""
    monkeypatch.setattr(archive_client, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(archive_client, "PATIENCE_S", 1.0)
    with archive, StoppingGateway() as first:
        async with GatewayAddress(f"{first.address},{archive.address}").open() as opened:
            yield opened


async def test_a_gateway_that_stops_is_left_for_the_next(stopping: Connection) -> None:
    left, client = stopping.channel, ArchiveClient(stopping)
    assert (await client.submit_all(BatchOptions("k"), STUCK)).num_added == 1 and stopping.channel is not left
    await check_calls(stopping, left)
    stopping.turn_from(stopping.channel)
    assert stopping.channel is left and (await gateway_info(stopping)).target_model


async def test_where_all_stop_each_is_asked_once() -> None:
    with StoppingGateway() as first, StoppingGateway() as second:
        async with GatewayAddress(f"{first.address},{second.address}").open() as connection:
            client = ArchiveClient(connection)
            for ask in (client.get, lambda name: anext(client.watch(name))):
                with pytest.raises(ServiceUnavailable, match=LEAVING):
                    await ask("k")
        assert (first.handler.num_calls, second.handler.num_calls) == (2, 2)


async def test_a_gateway_that_goes_just_when_items_come_is_not_the_last_one(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one looked as if it were there."""
    monkeypatch.setattr(archive_client, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(Connection, "settle", lambda self: asyncio.sleep(0))
    submitted = await ArchiveClient(connection).submit_all(BatchOptions("k"), ITEMS)
    assert submitted.num_added == 1


async def test_calls_that_are_not_repeated_go_to_whoever_is_there(connection: Connection) -> None:
    lost = connection.channel
    await connection.others[0].channel_ready()  # for which a busy machine takes longer than is waited for here
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


class _Silent(grpc.GenericRpcHandler):
    """Answers no call."""

    def __init__(self) -> None:
        self.is_called = threading.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def wait(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self.is_called.set()
            await asyncio.Event().wait()

        return grpc.stream_stream_rpc_method_handler(wait)


class SilentGateway(FakeArchive):
    def register(self, server: grpc.aio.Server) -> None:
        self.handler = _Silent()
        server.add_generic_rpc_handlers((self.handler,))


Ask = Callable[[Connection], Awaitable[object]]
CALLS: dict[str, Ask] = {
    "info": gateway_info,
    "status": lambda connection: ArchiveClient(connection).get("k"),
    "jobs": lambda connection: ArchiveClient(connection).job_page("k"),
    "watch": lambda connection: anext(ArchiveClient(connection).watch("k")),
    "submit": lambda connection: ArchiveClient(connection).submit_all(BatchOptions("k"), ITEMS),
    "caption": lambda connection: anext(caption_events(connection, b"video", CaptionOptions())),
}


@pytest.mark.parametrize("ask", CALLS.values(), ids=CALLS)
async def test_who_waits_is_told_that_the_connection_was_closed(ask: Ask) -> None:
    with SilentGateway() as gateway:
        async with GatewayAddress(gateway.address).open() as connection:
            asking = asyncio.ensure_future(ask(connection))
            assert await asyncio.to_thread(gateway.handler.is_called.wait, 60)
            await connection.close()
            with pytest.raises(ServiceUnavailable, match="was closed"):
                await asking


async def test_who_is_cancelled_while_it_waits_is_told_nothing_else() -> None:
    with SilentGateway() as gateway:
        async with GatewayAddress(gateway.address).open() as connection:
            asking = asyncio.create_task(ArchiveClient(connection).get("k"))
            assert await asyncio.to_thread(gateway.handler.is_called.wait, 60)
            asking.cancel()
            await asyncio.wait({asking})
    assert asking.cancelled()


async def test_no_gateway_is_waited_for_behind_the_end_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with GatewayAddress(NOWHERE).open() as connection:

        async def close(_: float) -> None:
            await connection.close()

        with monkeypatch.context() as patches:
            patches.setattr(asyncio, "sleep", close)
            with pytest.raises(ServiceUnavailable, match="was closed"):
                await ArchiveClient(connection).job_page("k")
