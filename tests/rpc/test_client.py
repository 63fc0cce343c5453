"""The calling side: what a failed call means, and bulk data in chunks."""

import socket

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import errors
from slipstream.errors import ServiceUnavailable, ServiceUnreachable, SlipstreamError
from slipstream.rpc.calls import WRITE_FAILED, as_slipstream_error, open_channel, request_metadata
from slipstream.rpc.grpc_options import CHUNK_BYTES, NO_PROXY
from slipstream.rpc.guards import ANSWERED
from slipstream.rpc.session_codec import chunked
from slipstream.rpc.v1 import common_pb2, target_pb2_grpc


def failure(code: grpc.StatusCode, details: str | None, *trailing: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


@pytest.mark.parametrize(
    "kind",
    [errors.InvalidRequest, errors.LimitExceeded, errors.VideoNotFound, errors.InvalidConfig, errors.Overloaded],
)
def test_a_peers_complaint_keeps_its_class_and_words(kind: type[SlipstreamError]) -> None:
    error = as_slipstream_error(failure(grpc.StatusCode[kind.status], "too much of it"), "target")
    assert type(error) is kind and str(error) == "too much of it"


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Connection refused"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ""),
        (grpc.StatusCode.INTERNAL, WRITE_FAILED),
    ],
)
def test_a_peer_that_is_gone(code: grpc.StatusCode, details: str) -> None:
    error = as_slipstream_error(failure(code, details), "target")
    assert isinstance(error, ServiceUnreachable) and str(error).startswith("the target is not reachable")
    assert not hasattr(error, "__notes__"), "nothing is known of where it was looked for"


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        *(("10.1.2.3:1", True), ("[fd00::2]:1", True), ("0.0.0.0:1", True), ("[::]:1", True), ("localhost:1", True)),
        *(("10.1.2.4:1", False), ("[fd00::3]:1", False), ("gateway.example:1", False), ("198.51.100.7:1", False)),
    ],
)
def test_a_proxy_is_for_other_machines(address: str, is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has the addresses 10.1.2.3 and fd00::2, and no way to 198.51.100.7."""

    class Way(socket.socket):
        def connect(self, place: tuple[str, int]) -> None:
            if place[0] == "198.51.100.7":
                raise OSError("no route")
            self.ends_here = place[0] in ("0.0.0.0", "::")

        def getsockname(self) -> tuple[str, int]:
            own, loopback = ("fd00::2", "::1") if self.family == socket.AF_INET6 else ("10.1.2.3", "127.0.0.1")
            return loopback if self.ends_here else own, 1

    monkeypatch.setattr("socket.socket", Way)
    given: list[tuple[str, int | str]] = []
    monkeypatch.setattr("grpc.aio.insecure_channel", lambda address, options: given.extend(options))
    open_channel(address)
    assert (NO_PROXY in given) is is_own


@pytest.mark.parametrize("address", ["127.0.0.1:9", "unix:/none/there.sock"])
async def test_where_a_peer_is_not_is_in_a_note_and_not_in_the_message(address: str) -> None:
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary("/a/b")(b"", timeout=10)
    error = as_slipstream_error(failed.value, "target")
    assert str(error) == "the target is not reachable (unavailable); try again when it is up"
    assert address in error.__notes__[0] and "last error" not in error.__notes__[0]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_a_peer_that_is_up_says_itself_what_is_away(code: grpc.StatusCode) -> None:
    error = as_slipstream_error(failure(code, "the queue is away", *ANSWERED), "gateway")
    assert type(error) is ServiceUnavailable and str(error) == "the queue is away"


def test_anything_else() -> None:
    error = as_slipstream_error(failure(grpc.StatusCode.DATA_LOSS, None), "draft")
    assert type(error) is SlipstreamError and str(error) == "the draft failed with DATA_LOSS"


async def test_nobody_listens() -> None:
    async with open_channel("unix:/nowhere/s.sock") as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.GetModel(common_pb2.GetModelRequest(), metadata=request_metadata("r1"))
    assert isinstance(as_slipstream_error(failed.value, "target"), ServiceUnavailable)


@given(st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=3))
def test_chunks_are_the_buffers_again(sizes: list[int]) -> None:
    buffers = [bytes([index]) * size for index, size in enumerate(sizes)]
    parts = list(chunked(memoryview(buffer) for buffer in buffers))
    assert b"".join(parts) == b"".join(buffers)
    assert all(0 < len(part) <= CHUNK_BYTES for part in parts)
