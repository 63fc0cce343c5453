"""What strangers can do to a server without being let in: watch its health, open calls and say nothing, be refused."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream import logs
from slipstream.errors import ServiceUnavailable
from slipstream.logs import LineBudget
from slipstream.metrics import REGISTRY
from slipstream.process_life import Descriptors
from slipstream.rpc import guards, server
from slipstream.rpc.calls import open_channel
from slipstream.rpc.grpc_options import SERVER_OPTIONS
from slipstream.rpc.guards import LEAVING, STOPPING, AnswerErrors
from slipstream.rpc.service_options import ServiceOptions
from slipstream.rpc.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.rpc.secured import WhoAmI, served

EXHAUSTED, DEADLINE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Listening(WhoAmI):
    """A session that answers every message."""

    async def Session(self, requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[target_pb2.TargetEvent]:
        async for _ in requests:
            yield target_pb2.TargetEvent()


async def is_well(address: str) -> bool:
    """Whether a newcomer gets a Check and a call through."""
    async with open_channel(address) as channel:
        check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        model = await target_pb2_grpc.TargetStub(channel).GetModel(common_pb2.GetModelRequest(), timeout=60)
    return check.status == SERVING and model.model_id.startswith("owner=")


@contextlib.asynccontextmanager
async def called(address: str, method: str, number: int) -> AsyncIterator[list[Any]]:
    """So many calls of a method with nothing sent on them; they are cancelled."""
    async with open_channel(address) as channel:
        calls = [channel.stream_stream(method)() for _ in range(number)]
        yield calls
        for call in calls:
            call.cancel()


def refusals(**labels: str) -> float:
    return REGISTRY.get_sample_value("slipstream_refusals_total", labels) or 0.0


async def watch(channel: grpc.aio.Channel) -> Any:
    """A watcher who has had the first answer, or was refused."""
    call: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.read()
    return call


def frame(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


HEADERS, SETTINGS, PING, ACK = 1, 4, 6, 1
NO_WINDOW = frame(SETTINGS, struct.pack(">HI", 4, 0))
"""The receiver says how much may be sent."""


def watch_request() -> bytes:
    said = {b":method": b"POST", b":scheme": b"http", b":authority": b"x", b":path": b"/grpc.health.v1.Health/Watch"}
    said |= {b"content-type": b"application/grpc", b"te": b"trailers"}
    fields = [bytes([0, len(key)]) + key + bytes([len(value)]) + value for key, value in said.items()]
    return frame(HEADERS, b"".join(fields), 4, 1) + frame(0, bytes(5), 1, 1)


@contextlib.asynccontextmanager
async def watching_idly(address: str) -> AsyncIterator[None]:
    """A watcher whose connection is alive, and who takes nothing that the server says."""
    is_open = asyncio.Event()
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))

    async def stay() -> None:
        while True:
            head = await reader.readexactly(9)
            payload, kind = await reader.readexactly(int.from_bytes(head[:3], "big")), head[3]
            if kind in (SETTINGS, PING) and not head[4] & ACK:
                writer.write(frame(kind, payload if kind == PING else b"", ACK))
            if kind == HEADERS:
                is_open.set()

    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + NO_WINDOW + watch_request())
    staying = asyncio.create_task(stay())
    try:
        async with asyncio.timeout(60):
            await is_open.wait()
        yield
    finally:
        staying.cancel()
        writer.close()
        await writer.wait_closed()


async def test_a_watcher_who_takes_nothing_keeps_nobody_waiting() -> None:
    async with served() as address, open_channel(address) as channel, watching_idly(address):
        async with asyncio.timeout(60):
            assert not (await watch(channel)).done()


async def test_the_service_by_its_full_name_is_as_well_as_the_process() -> None:
    making = grpc.aio.server(options=SERVER_OPTIONS)
    port = making.add_insecure_port("127.0.0.1:0")
    health = server.add_health(making, 1.0, "slipstream.rpc.v1.Gateway")
    await making.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="slipstream.rpc.v1.Gateway")
        watched = stub.Watch(asked)
        for status in (SERVING, NOT_SERVING):
            health.set("", status)
            assert (await watched.read()).status == (await stub.Check(asked)).status == status
        watched.cancel()
    await making.stop(None)


async def test_watchers_are_told_of_every_change_that_stays() -> None:
    making = grpc.aio.server(options=SERVER_OPTIONS)
    address, health = f"127.0.0.1:{making.add_insecure_port('127.0.0.1:0')}", server.add_health(making, 1.0)
    await making.start()
    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        told = stub.Watch(health_pb2.HealthCheckRequest(service="new"))
        said = [(await told.read()).status]
        for change in (
            lambda: health.set("new", SERVING),
            lambda: [health.set("new", status) for status in (NOT_SERVING, SERVING, NOT_SERVING)],
            lambda: health.set("new", SERVING),
            health.end,
        ):
            change()
            said.append((await told.read()).status)
        health.set("new", SERVING)
        assert said == [UNKNOWN, SERVING, NOT_SERVING, SERVING, NOT_SERVING]
        assert (await stub.Check(health_pb2.HealthCheckRequest(service="new"))).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        told.cancel()
    await making.stop(None)


async def test_any_number_of_watchers_leaves_room_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONCURRENT_CALLS", 100)
    before = refusals(status="RESOURCE_EXHAUSTED", reason="watchers")
    async with served() as address, open_channel(address) as channel:
        calls = await asyncio.gather(*(watch(channel) for _ in range(200)))
        refused = [call for call in calls if call.done()]
        assert len(refused) == 200 - server.MAX_WATCHERS
        assert {await call.code() for call in refused} == {EXHAUSTED}
        assert ("retry-after-ms", "1000") in tuple(await refused[0].trailing_metadata())
        assert await is_well(address)
        assert refusals(status="RESOURCE_EXHAUSTED", reason="watchers") == before + len(refused)
        assert REGISTRY.get_sample_value("slipstream_ceiling_used", {"ceiling": "watchers"}) == server.MAX_WATCHERS
        for call in calls:
            call.cancel()


async def test_one_watches_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WATCH_S", 0.1)
    async with served() as address, open_channel(address) as channel:
        call = await watch(channel)
        assert await call.code() is DEADLINE and "watch again" in (await call.details() or "")


@pytest.mark.parametrize("method", ["slipstream.rpc.v1.Target/Session", "grpc.health.v1.Health/Check"])
async def test_a_call_that_begins_with_silence_ends(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(guards, "FIRST_MESSAGE_S", 0.1)
    async with served(Listening()) as address, called(address, f"/{method}", 3) as calls:
        for call in calls:
            assert await call.code() is DEADLINE
            assert "nothing was sent on it" in (await call.details() or "")


async def test_one_that_has_begun_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "FIRST_MESSAGE_S", 1.0)
    async with served(Listening()) as address, open_channel(address) as channel:
        session = target_pb2_grpc.TargetStub(channel).Session()
        for pause_s in (1.3, 0):
            await session.write(target_pb2.TargetRequest())
            assert await session.read() == target_pb2.TargetEvent()
            await asyncio.sleep(pause_s)
        session.cancel()


async def test_the_oldest_silent_call_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "FIRST_MESSAGE_S", 3600.0)
    monkeypatch.setattr(guards, "MAX_SILENT_CALLS", 8)
    async with served(Listening()) as address, called(address, "/grpc.health.v1.Health/Check", 30) as calls:
        ended: set[Any] = set()
        waiting = {asyncio.ensure_future(call.code()) for call in calls}
        while len(ended) < 22:
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ended |= more
        assert {task.result() for task in ended} == {DEADLINE}
        assert len(waiting) == 8
        assert await is_well(address)
        for task in waiting:
            task.cancel()


async def test_calls_have_a_ceiling_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONCURRENT_CALLS", 2)
    async with served(Listening()) as address, open_channel(address) as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        sessions = [stub.Session() for _ in range(2)]
        for session in sessions:
            await session.write(target_pb2.TargetRequest())
            await session.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetModel(common_pb2.GetModelRequest())
        assert refused.value.code() is EXHAUSTED and "2 calls are open, as many" in (refused.value.details() or "")
        assert dict(refused.value.trailing_metadata() or ())["retry-after-ms"] == "1000"
        sessions[0].cancel()
        while (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status == SERVING:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.GetModel(common_pb2.GetModelRequest())
                break
        sessions[1].cancel()


@contextlib.asynccontextmanager
async def in_a_session(
    calls: AnswerErrors,
) -> AsyncIterator[tuple[grpc.aio.Server, grpc.aio.Channel, grpc.aio.StreamStreamCall[Any, Any]]]:
    """A server, a channel to it, and a session that has said one thing."""
    grpc_server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[calls])
    target_pb2_grpc.add_TargetServicer_to_server(Listening(), grpc_server)
    server.add_health(grpc_server, 1.0)
    address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    await grpc_server.start()
    async with open_channel(address) as channel:
        session = target_pb2_grpc.TargetStub(channel).Session()
        await session.write(target_pb2.TargetRequest())
        await session.read()
        yield grpc_server, channel, session
    await grpc_server.stop(0)


class LameDuck(ServiceOptions):
    lame_duck = True


async def refused_call(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await target_pb2_grpc.TargetStub(channel).GetModel(common_pb2.GetModelRequest())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    return refused.value


async def test_a_lame_duck_begins_nothing_and_ends_what_it_began() -> None:
    calls = AnswerErrors()
    async with in_a_session(calls) as (_, channel, session):
        calls.refuse_new()
        idle = asyncio.ensure_future(calls.wait_idle())
        refused = await refused_call(channel)
        assert refused.details() == LEAVING
        assert dict(refused.trailing_metadata() or ())["retry-after-ms"] == "1000"
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        await session.write(target_pb2.TargetRequest())
        assert await session.read() == target_pb2.TargetEvent() and not idle.done()
        await session.done_writing()
        assert await session.read() is grpc.aio.EOF
        await asyncio.wait_for(idle, 60)


async def test_who_is_ended_by_a_drain_can_still_write_while_it_reads_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails on a closed connection would hide what the server said."""
    monkeypatch.setattr(server, "READ_S", 60.0)
    calls, config = AnswerErrors(), LameDuck(listen="", drain_s=0.1)
    async with in_a_session(calls) as (grpc_server, channel, session):
        draining = asyncio.create_task(server._drain(grpc_server, calls, asyncio.Event(), config))
        assert (await session.code(), await session.details()) == (grpc.StatusCode.UNAVAILABLE, STOPPING)
        assert (await refused_call(channel)).details() == STOPPING, "the connection is still there"
        assert not draining.done()
        draining.cancel()


async def test_a_drain_without_calls_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_S", 3600.0)
    calls, config = AnswerErrors(), LameDuck(listen="", drain_s=3600.0)
    async with in_a_session(calls) as (grpc_server, _, session):
        await session.done_writing()
        assert await session.read() is grpc.aio.EOF
        await asyncio.wait_for(server._drain(grpc_server, calls, asyncio.Event(), config), 60)


# -- descriptors ------------------------------------------------------------------------------------------------------


def test_an_alarm_before_descriptors_run_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slipstream.process_life.resource.getrlimit", lambda kind: (100, 100))
    structlog.reset_defaults()
    descriptors = Descriptors()
    seen = []
    for used in (79, 80, 90, None, 79, 10, 81):
        descriptors.look(used)
        seen += ["".join(capsys.readouterr())]
    assert [("descriptors.low" in text, "descriptors.regained" in text) for text in seen] == [
        *[(False, False), (True, False), (False, False), (False, False)],
        *[(False, True), (False, False), (True, False)],
    ]
    assert (descriptors.used, descriptors.limit) == (81, 100)


# -- what is logged ---------------------------------------------------------------------------------------------------


def test_strangers_do_not_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    budget = LineBudget()
    spent = [budget.spend("10.0.0.1") for _ in range(1000)]
    assert spent.count(0) == logs.MAX_LINES_OF_ONE and spent.count(None) == 1000 - logs.MAX_LINES_OF_ONE
    assert budget.spend("10.0.0.2") == 1000 - logs.MAX_LINES_OF_ONE
    assert sum(budget.spend(f"10.0.1.{number}") is not None for number in range(200)) < logs.MAX_LINES
    now = logs.LOG_WINDOW_S
    assert budget.spend("10.0.0.1")
    assert budget.spend("10.0.0.1") == 0


async def test_refusals_name_the_peer_and_stop_filling_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusing(WhoAmI):
        async def GetModel(
            self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
        ) -> common_pb2.ModelInfo:
            raise ServiceUnavailable("not today")

    async with served(Refusing()) as address, open_channel(address) as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        for _ in range(logs.MAX_LINES_OF_ONE + 20):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetModel(common_pb2.GetModelRequest())
    logged = [line for line in "".join(capsys.readouterr()).splitlines() if "request.refused" in line]
    assert len(logged) == logs.MAX_LINES_OF_ONE and all("127.0.0.1" in line for line in logged)
