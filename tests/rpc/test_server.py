"""The serving side in this process: every failure has its status, is logged once, and tells strangers nothing."""

import asyncio
import contextlib
import errno
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health, health_pb2_grpc

from slipstream import errors, process_life
from slipstream.errors import SlipstreamError
from slipstream.rpc.calls import as_slipstream_error, open_channel, request_metadata
from slipstream.rpc.grpc_options import SERVER_OPTIONS
from slipstream.rpc.guards import MAX_DETAILS_CHARS, AnswerErrors
from slipstream.rpc.message_limits import write
from slipstream.rpc.server import Lifecycle, _run, bound
from slipstream.rpc.service_options import ServiceOptions
from slipstream.rpc.v1 import common_pb2, target_pb2, target_pb2_grpc
from slipstream.stack.process import ServiceProcess

ROOT = Path(__file__).resolve().parents[2]

ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SlipstreamError)]
LogEntry = dict[str, Any]


class Troubled(target_pb2_grpc.TargetServicer):
    """Does in every call what it was told to."""

    def __init__(self) -> None:
        self.trouble: Callable[[], None] = lambda: None
        self.closed = asyncio.Event()

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ModelInfo:
        self.trouble()
        return common_pb2.ModelInfo(model_id="well")

    async def PullGuidance(
        self, request: target_pb2.PullGuidanceRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.GuidanceChunk]:
        yield target_pb2.GuidanceChunk(data=b"first")
        self.trouble()
        yield target_pb2.GuidanceChunk(data=b"last")

    async def Session(
        self, requests: AsyncIterator[target_pb2.TargetRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.TargetEvent]:
        try:
            while True:
                yield target_pb2.TargetEvent()
        finally:
            structlog.get_logger().info("session.closed")
            self.closed.set()


@contextlib.asynccontextmanager
async def serving(servicer: Troubled, folder: Path) -> AsyncIterator[target_pb2_grpc.TargetStub]:
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[AnswerErrors()])
    target_pb2_grpc.add_TargetServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{folder / 's.sock'}")
    await server.start()
    async with open_channel(f"unix:{folder / 's.sock'}") as channel:
        yield target_pb2_grpc.TargetStub(channel)
    await server.stop(0)


async def test_any_path_of_a_socket(tmp_path: Path) -> None:
    """gRPC takes it for that of a URI: one with a `#` was called in vain, and one with `%41` was another file's."""
    (folder := tmp_path / "a #1?%41ü").mkdir()
    address, server = f"unix:{folder / 's.sock'}", grpc.aio.server(options=SERVER_OPTIONS)
    target_pb2_grpc.add_TargetServicer_to_server(Troubled(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    with bound(server, address, None) as listening:
        await server.start()
        assert {path.name for path in folder.iterdir()} == {"s.sock", "s.sock.lock"}
        async with open_channel(listening) as channel:
            answer = await target_pb2_grpc.TargetStub(channel).GetModel(common_pb2.GetModelRequest(), timeout=5)
        assert answer.model_id == "well"
        await ServiceProcess("target", (), listening, folder / "log", {}).wait_serving(5)
        await server.stop(0)


@pytest.fixture
def log() -> Iterator[list[LogEntry]]:
    """What is logged, with what is bound to each request."""
    entries: list[LogEntry] = []

    def keep(_: Any, level: str, entry: Any) -> Any:
        entries.append(dict(entry) | {"level": level})
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.contextvars.merge_contextvars, keep], cache_logger_on_first_use=False)
    yield entries
    structlog.reset_defaults()


def fail(error: Exception) -> Callable[[], None]:
    def trouble() -> None:
        raise error

    return trouble


async def refusal(stub: target_pb2_grpc.TargetStub, *, streamed: bool) -> tuple[grpc.StatusCode, str]:
    metadata = request_metadata("r1")
    call: Any
    if streamed:
        call = stub.PullGuidance(target_pb2.PullGuidanceRequest(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            [chunk async for chunk in call]
    else:
        call = stub.GetModel(common_pb2.GetModelRequest(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    return await call.code(), await call.details() or ""


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_error_has_its_status(tmp_path: Path, log: list[LogEntry], streamed: bool) -> None:
    servicer = Troubled()
    async with serving(servicer, tmp_path) as stub:
        for kind in ERRORS:
            servicer.trouble = fail(kind("what is wrong: é\n"))
            assert await refusal(stub, streamed=streamed) == (grpc.StatusCode[kind.status], "what is wrong: é\n")
    log = [entry for entry in log if entry["event"] != "audit"]
    assert [entry["event"] for entry in log] == ["request.refused"] * len(ERRORS)
    assert all(entry["request_id"] == "r1" and entry["method"].startswith("/slipstream.rpc.v1.") for entry in log)
    assert [entry["status"] for entry in log] == [kind.status for kind in ERRORS]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_bug_is_logged_and_not_told(tmp_path: Path, log: list[LogEntry], streamed: bool) -> None:
    servicer = Troubled()
    servicer.trouble = fail(ValueError("the secret"))
    async with serving(servicer, tmp_path) as stub:
        code, details = await refusal(stub, streamed=streamed)
    assert code == grpc.StatusCode.INTERNAL and "secret" not in details
    assert [(entry["event"], entry["level"]) for entry in log] == [("request.failed", "error")]


@pytest.mark.parametrize("lack", [OSError(errno.EMFILE, "no descriptor"), RuntimeError("can't start new thread")])
async def test_what_the_machine_lacks_for_now_is_no_bug(tmp_path: Path, log: list[LogEntry], lack: Exception) -> None:
    servicer = Troubled()
    servicer.trouble = fail(lack)
    async with serving(servicer, tmp_path) as stub:
        code, details = await refusal(stub, streamed=True)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "this server has no room now" in details
    assert [entry["event"] for entry in log] == ["request.refused"]


async def test_a_long_complaint_arrives_as_itself(tmp_path: Path) -> None:
    servicer = Troubled()
    servicer.trouble = fail(errors.InvalidRequest("x" * 1_000_000))
    async with serving(servicer, tmp_path) as stub:
        code, details = await refusal(stub, streamed=True)
    assert code == grpc.StatusCode.INVALID_ARGUMENT and details == "x" * MAX_DETAILS_CHARS


@pytest.mark.parametrize("kind", ERRORS)
async def test_that_media_cannot_be_read_is_told_on(tmp_path: Path, kind: type[SlipstreamError]) -> None:
    """And of no other error, whatever its status."""
    servicer = Troubled()
    servicer.trouble = fail(kind("what is wrong"))
    async with serving(servicer, tmp_path) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetModel(common_pb2.GetModelRequest())
    told = as_slipstream_error(refused.value, "gateway")
    assert isinstance(told, errors.UnreadableMedia) == issubclass(kind, errors.UnreadableMedia)


async def test_a_stream_is_closed_under_its_own_id(tmp_path: Path, log: list[LogEntry]) -> None:
    servicer = Troubled()
    async with serving(servicer, tmp_path) as stub:
        call = stub.Session(metadata=request_metadata("r2"))
        await call.read()
        call.cancel()
        await asyncio.wait_for(servicer.closed.wait(), 60)
        assert (await stub.GetModel(common_pb2.GetModelRequest())).model_id == "well"
    assert [(entry["event"], entry["request_id"]) for entry in log] == [("session.closed", "r2")]


async def test_a_caller_that_dies_while_it_is_answered_has_ended_its_call() -> None:
    class Gone:
        async def write(self, response: object) -> None:
            raise grpc.aio.InternalError('Failed "execute_batch"')

    context: Any = Gone()
    with pytest.raises(asyncio.CancelledError):
        await write(context, common_pb2.ModelInfo())


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [({}, "--listen"), ({"SLIPSTREAM_PARENT_PID": "-1"}, "SLIPSTREAM_PARENT_PID: '-1' is no process id")],
)
def test_a_configuration_that_cannot_work(
    environ: dict[str, str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def setup(server: grpc.aio.Server, config: ServiceOptions, lifecycle: Lifecycle) -> Callable[[], Any]:
        raise AssertionError("not reached")

    assert _run("tool", ServiceOptions, setup, [], environ) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in json.loads(line)["error"]


def test_every_server_has_our_options() -> None:
    """gRPC's own end a connection after three pings of a caller who does not read, which a test may not notice."""
    without = [
        f"{path}:{number}"
        for folder in ("slipstream", "services", "bench", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "grpc.aio.server(" in line and "options=SERVER_OPTIONS" not in line and path != Path(__file__)
    ]
    assert not without


@pytest.mark.usefixtures("log")
def test_names_that_nobody_answers_take_no_thread_from_a_service_and_do_not_keep_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answered, asked = threading.Event(), []

    def look_up(host: str, *others: Any) -> Any:
        asked.append(host)
        answered.wait()
        raise socket.gaierror("no server of names")

    async def setup(
        server: grpc.aio.Server, config: ServiceOptions, lifecycle: Lifecycle
    ) -> Callable[[], Awaitable[None]]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(loop.getaddrinfo("target", 50051), 0.001)
        await asyncio.wait_for(asyncio.to_thread(list), 20.0)
        monkeypatch.setattr(process_life, "MOST_LOOKUPS", 1)
        with pytest.raises(socket.gaierror, match="1 other names wait"):
            await loop.getaddrinfo("another", 50051)
        raise errors.InvalidConfig("that was all")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        assert _run("tool", ServiceOptions, setup, ["--listen", f"unix:{tmp_path}/s.sock"], {}) == 2
    finally:
        answered.set()
    assert asked == ["target"], "what is being looked up is not looked up again"
