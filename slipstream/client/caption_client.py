"""The gateway's client: uploads one video and yields the events of its caption. Knows no terminal."""

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from slipstream.errors import ProtocolViolation, ServiceUnavailable, UnreadableVideo, VideoNotFound
from slipstream.rpc.channels import WRITE_FAILED, as_slipstream_error
from slipstream.rpc.grpc_options import CHUNK_BYTES
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc

CAPTION_TIMEOUT_S = 600.0
INFO_TIMEOUT_S = 10.0
STATUS_GRACE_S = 0.2


def check_video(source: Path) -> None:
    """Raises what is wrong with the file as far as its directory entry tells."""
    try:
        status = source.stat()
    except FileNotFoundError:
        raise VideoNotFound("no such file") from None
    except OSError as error:
        raise UnreadableVideo(os.strerror(error.errno or 0)) from None
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableVideo("not a regular file")
    if status.st_size == 0:
        raise UnreadableVideo("the file is empty")
    if not os.access(source, os.R_OK):
        raise UnreadableVideo("not readable: permission denied")


async def caption(
    channel: grpc.aio.Channel,
    source: Path,
    options: gateway_pb2.CaptionOptions,
    timeout_s: float = CAPTION_TIMEOUT_S,
) -> AsyncGenerator[gateway_pb2.CaptionEvent, None]:
    """Uploads `source` and yields the events of its caption; the last one is the summary."""
    check_video(source)
    finished = False
    file = await asyncio.to_thread(source.open, "rb")
    stub = gateway_pb2_grpc.GatewayStub(channel)
    call = stub.Caption(_requests(file, options), timeout=timeout_s)
    first_status = FirstStatus(call)
    try:
        async for event in call:
            finished = event.HasField("summary")
            yield event
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise ServiceUnavailable(f"the gateway did not finish within {timeout_s:g} s") from error
        raise as_slipstream_error(await first_status.correct(error), "gateway") from error
    finally:
        call.cancel()
        file.close()
    if not finished:
        raise ProtocolViolation("the gateway ended the caption without a summary")


class FirstStatus:
    """Keeps what the gateway said when it refuses a video in the middle of its upload.

    grpc.aio (https://github.com/grpc/grpc/issues/36066) lets the write that then fails replace the status by
    "Internal error from Core", or precede it.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._status: tuple[grpc.StatusCode, str | None, grpc.aio.Metadata] | None = None
        call.add_done_callback(self._keep)

    async def correct(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """The error with the gateway's own status, where it had one."""
        if error.details() != WRITE_FAILED:
            return error
        if self._status is None or self._status[1] == WRITE_FAILED:
            await asyncio.sleep(STATUS_GRACE_S)
            self._status = (
                await self._call.code(),
                await self._call.details(),
                await self._call.trailing_metadata(),
            )
        code, details, trailing_metadata = self._status
        return grpc.aio.AioRpcError(code, error.initial_metadata(), trailing_metadata, details)

    def _keep(self, call: Any) -> None:
        asked = call.code(), call.details(), call.trailing_metadata()
        code, details, trailing_metadata = map(_result_of, asked)
        self._status = code, details, trailing_metadata


def _result_of(ready: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for."""
    try:
        ready.send(None)
    except StopIteration as finished:
        return finished.value
    raise AssertionError("the call has no status yet")


async def gateway_info(channel: grpc.aio.Channel) -> gateway_pb2.GatewayInfo:
    """What the gateway serves and its limits."""
    stub = gateway_pb2_grpc.GatewayStub(channel)
    try:
        info: gateway_pb2.GatewayInfo = await stub.GetGateway(gateway_pb2.GetGatewayRequest(), timeout=INFO_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise as_slipstream_error(error, "gateway") from error
    return info


async def _requests(file: BinaryIO, options: gateway_pb2.CaptionOptions) -> AsyncIterator[gateway_pb2.CaptionRequest]:
    yield gateway_pb2.CaptionRequest(options=options)
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield gateway_pb2.CaptionRequest(video=chunk)
