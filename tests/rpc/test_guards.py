"""What surrounds every call, against a real server: its end in time, bytes that are no message, size, pings."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from slipstream.rpc import guards
from slipstream.rpc.calls import open_channel
from slipstream.rpc.grpc_options import MAX_MESSAGE_BYTES, SERVER_OPTIONS
from slipstream.rpc.guards import NO_MESSAGE, STOPPING, AnswerErrors
from slipstream.rpc.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.rpc.secured import WhoAmI, served

PREFIX = "/slipstream.rpc.v1.Target"


class Slow(WhoAmI):
    """Takes for ever."""

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ModelInfo:
        await asyncio.Event().wait()
        raise AssertionError("not reached")

    async def Session(self, requests: Any, context: grpc.aio.ServicerContext) -> Any:
        async for _ in requests:
            yield target_pb2.TargetEvent()


async def status(call: Any) -> tuple[grpc.StatusCode, str]:
    with contextlib.suppress(grpc.aio.AioRpcError):
        while hasattr(call, "read") and await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details() or ""


async def test_a_call_ends_although_its_caller_set_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "UNARY_TIMEOUT_S", 0.1)
    async with served(Slow(seconds=3600), stream_timeout_s=0.1) as address, open_channel(address) as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        silent = stub.Session()
        calls: list[Any] = [stub.GetModel(common_pb2.GetModelRequest()), silent]
        calls.append(stub.PullGuidance(target_pb2.PullGuidanceRequest()))
        for call in calls:
            code, details = await status(call)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "this server's limit of 0.1 s" in details


async def test_calls_that_are_ended_are_told_why() -> None:
    calls = AnswerErrors()
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[calls])
    target_pb2_grpc.add_TargetServicer_to_server(Slow(seconds=3600), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with open_channel(address) as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        session = stub.Session()
        await session.write(target_pb2.TargetRequest())
        assert await session.read() == target_pb2.TargetEvent()
        pull = stub.PullGuidance(target_pb2.PullGuidanceRequest())
        await asyncio.sleep(0.1)
        calls.end_calls()
        for call in (session, pull, stub.GetModel(common_pb2.GetModelRequest())):
            assert await status(call) == (grpc.StatusCode.UNAVAILABLE, STOPPING)
    await server.stop(0)


class Talkative(Slow):
    """Says so much that a caller who does not read makes it wait."""

    num_said = 0

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._event = target_pb2.TargetEvent(verdict=target_pb2.Verdict(pieces=["a" * num_bytes]))

    async def Session(self, requests: Any, context: grpc.aio.ServicerContext) -> Any:
        while True:
            self.num_said += 1
            yield self._event


@pytest.mark.parametrize("num_bytes", [100_000, 3 * MAX_MESSAGE_BYTES // 4], ids=["some time", "its first message"])
async def test_a_call_that_is_ended_while_it_writes_is_told_why(num_bytes: int) -> None:
    calls, servicer = AnswerErrors(), Talkative(num_bytes)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[calls])
    target_pb2_grpc.add_TargetServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with open_channel(address) as channel:
        session = target_pb2_grpc.TargetStub(channel).Session()
        num_said = -1
        while num_said != servicer.num_said:
            num_said = servicer.num_said
            await asyncio.sleep(0.5)
        calls.end_calls()
        await calls.wait_idle()
        assert await status(session) == (grpc.StatusCode.UNAVAILABLE, STOPPING)
    await server.stop(0)


@pytest.mark.parametrize("method", ["GetModel", "PullGuidance", "Session"])
async def test_bytes_that_are_no_message(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(Slow()) as address, open_channel(address) as channel:
        call = channel.stream_stream(f"{PREFIX}/{method}")
        assert await status(call(iter([b"\xff\xff"]))) == (grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
    logged = "".join(capsys.readouterr())
    assert "request.refused" in logged and "request.failed" not in logged and "Unexpected" not in logged


@pytest.mark.parametrize("method", ["GetModel", "PullGuidance"])
async def test_a_caller_who_sends_nothing_is_answered(method: str) -> None:
    async with served(Slow()) as address, open_channel(address) as channel:
        call = channel.stream_stream(f"{PREFIX}/{method}")
        assert (await status(call(iter([]), timeout=60)))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_that_is_too_large_when_unpacked() -> None:
    async with served(Slow()) as address, grpc.aio.insecure_channel(address) as channel:
        bomb = iter([bytes(MAX_MESSAGE_BYTES + 1)])
        call = channel.stream_stream(f"{PREFIX}/Session")(bomb, compression=grpc.Compression.Gzip)
        assert (await status(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_reflection_is_off_unless_asked_for() -> None:
    for wanted in (False, True):
        async with served(reflection=wanted) as address, open_channel(address) as channel:
            if not wanted:  # a call that writes into its end is told of that alone
                call = channel.unary_unary(f"/{reflection.SERVICE_NAME}/ServerReflectionInfo")(b"")
                assert (await status(call))[0] is grpc.StatusCode.UNIMPLEMENTED
                continue
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            (answer,) = [answer async for answer in call]
            names = {service.name for service in answer.list_services_response.service}
            assert {"slipstream.rpc.v1.Target", "grpc.health.v1.Health"} <= names


async def test_a_flood_of_pings_ends_the_connection() -> None:
    def frame(kind: int, payload: bytes, flags: int = 0) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + payload

    settings, ping = 4, 6
    async with served() as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings, b"") + 20 * frame(ping, bytes(8)))
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert b"too_many_pings" in answer
