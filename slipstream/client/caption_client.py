"""The gateway's client: how to reach it, a connection, and one caption as a stream of plain events."""

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast

import grpc

from slipstream.errors import (
    InvalidRequest,
    ProtocolViolation,
    ServiceUnavailable,
    ServiceUnreachable,
    SlipstreamError,
    UnreadableVideo,
    VideoNotFound,
)
from slipstream.messages import Caption, CaptionEvent, CommittedText, CommittedToken, GatewayInfo
from slipstream.options import CaptionOptions
from slipstream.rpc.calls import WRITE_FAILED, as_slipstream_error, open_channel, token_metadata
from slipstream.rpc.codec import options_message, read_caption_event, read_gateway_info
from slipstream.rpc.grpc_options import UPLOAD_CHUNK_BYTES
from slipstream.rpc.tls import make_peer_security
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc

# -- connection -------------------------------------------------------------------------------------------------------

# The connection to a gateway: its address, what proves who calls, an open channel, and why a call failed.

# -- connection -------------------------------------------------------------------------------------------------------

FilePath = str | os.PathLike[str]


@dataclass(frozen=True)
class GatewayAddress:
    """Where a gateway is, and how to call it."""

    address: str
    """`host:port`, or `unix:PATH`."""
    token: str = field(default="", repr=False)
    ca: FilePath | None = None
    """PEM file of the authority of the gateway's certificate; None: plaintext."""
    cert: FilePath | None = None
    """PEM file of the certificate to show, where the gateway asks for one, and in `key` its private key."""
    key: FilePath | None = None
    option_prefix: str = ""
    """What its user writes before `ca`, `cert` and `key`, for complaints: "--" on a command line."""

    def open(self) -> "Connection":
        """The connection, which connects when it is first used. Needs a running event loop.

        Raises:
            InvalidConfig: a file that cannot be used, or a token that is malformed or would travel in plaintext.
        """
        security = None
        if self.ca or self.cert or self.key:
            security = make_peer_security(
                self._named("ca", self.ca), self._named("cert", self.cert), self._named("key", self.key)
            )
        metadata = token_metadata(self.address, security, self.token)
        return Connection(open_channel(self.address, security), metadata)

    def _named(self, name: str, path: FilePath | None) -> tuple[str, str]:
        return self.option_prefix + name, os.fspath(path or "")


@dataclass(frozen=True)
class Connection:
    """An open channel to a gateway, and what every call on it carries. An async context manager."""

    channel: grpc.aio.Channel
    metadata: grpc.aio.Metadata = field(default_factory=grpc.aio.Metadata, repr=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what runs on it."""
        await self.channel.close()


@contextmanager
def our_errors() -> Iterator[None]:
    """What the gateway says to a call in this block, as one of our errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise as_slipstream_error(error, "gateway") from error


# -- first status -----------------------------------------------------------------------------------------------------

STATUS_GRACE_S = 0.2


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


# -- caption client ---------------------------------------------------------------------------------------------------

CAPTION_TIMEOUT_S = 600.0
INFO_TIMEOUT_S = 10.0

# -- videos -----------------------------------------------------------------------------------------------------------


class BinaryReader(Protocol):
    """What a video may be read from: a file opened in binary mode, or the like. It is read from where it stands."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""


@dataclass(frozen=True)
class RemotePath:
    """A video that the gateway opens itself, at this path on its machine, below one of its `--video-roots`."""

    path: str


Video = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryReader | RemotePath
"""A file by its path, its bytes, something to read them from, or a file of the gateway's."""
_IN_MEMORY = (bytes, bytearray, memoryview)


def check_video(video: Video) -> None:
    """Raises what is wrong with the video as far as that shows without reading it.

    Raises:
        InvalidRequest: it is none of what a video may be.
        VideoNotFound: there is no such file.
        UnreadableVideo: it is empty, no regular file, or must not be read.
    """
    if isinstance(video, str | os.PathLike):
        _check_file(Path(video))
    elif isinstance(video, _IN_MEMORY):
        if not len(video):
            raise UnreadableVideo("the video has no bytes")
    elif not isinstance(video, RemotePath) and not callable(getattr(video, "read", None)):
        raise InvalidRequest(f"a video is a path, bytes or a binary file, not {type(video).__name__}")


def _check_file(source: Path) -> None:
    try:
        status = source.stat()
    except FileNotFoundError:
        raise VideoNotFound("no such file") from None
    except (OSError, ValueError) as error:
        raise UnreadableVideo(_reason(error)) from None
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableVideo("not a regular file")
    if status.st_size == 0:
        raise UnreadableVideo("the file is empty")
    if not os.access(source, os.R_OK):
        raise UnreadableVideo("not readable: permission denied")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class _Upload:
    """The messages of one caption. `failure` says why they ended too early."""

    def __init__(self, video: Video, first: gateway_pb2.CaptionOptions) -> None:
        self.failure: SlipstreamError | None = None
        self._video = video
        self._first = first

    async def messages(self) -> AsyncIterator[gateway_pb2.CaptionRequest]:
        """For gRPC, which would swallow what is raised here and cancel the call."""
        yield gateway_pb2.CaptionRequest(options=self._first)
        if isinstance(self._video, RemotePath):
            return
        try:
            async with AsyncExitStack() as exits:
                async for chunk in _chunks(self._video, exits):
                    yield gateway_pb2.CaptionRequest(video=chunk)
        except Exception as error:
            ours = error if isinstance(error, SlipstreamError) else None
            self.failure = ours or UnreadableVideo(f"the video cannot be read: {_reason(error)}")
            raise


async def _chunks(video: Video, exits: AsyncExitStack) -> AsyncIterator[bytes]:
    if isinstance(video, _IN_MEMORY):
        view = memoryview(video).cast("B")
        for start in range(0, len(view), UPLOAD_CHUNK_BYTES):
            yield bytes(view[start : start + UPLOAD_CHUNK_BYTES])
        return
    if isinstance(video, str | os.PathLike):
        video = exits.enter_context(await asyncio.to_thread(Path(video).open, "rb"))
    reader = cast(BinaryReader, video)
    while chunk := await asyncio.to_thread(reader.read, UPLOAD_CHUNK_BYTES):
        if not isinstance(chunk, bytes):
            raise InvalidRequest("the video's file must be opened in binary mode, as by open(path, 'rb')")
        yield chunk


# -- captions ---------------------------------------------------------------------------------------------------------


@dataclass
class _Received:
    """What came so far of one caption."""

    tokens: list[CommittedToken] = field(default_factory=list)
    num_events: int = 0
    is_finished: bool = False

    def add(self, event: CaptionEvent) -> CaptionEvent:
        """The event itself; a caption gets the tokens that came before it."""
        self.num_events += 1
        self.is_finished = isinstance(event, Caption)
        if isinstance(event, CommittedText):
            self.tokens += event.tokens
        return replace(event, tokens=tuple(self.tokens)) if isinstance(event, Caption) else event

    def failure(self, error: grpc.aio.AioRpcError, timeout_s: float) -> SlipstreamError:
        """What the call's failure means for a caption of which so much has come."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ServiceUnavailable(f"the gateway did not finish within {timeout_s:g} s")
        failure = as_slipstream_error(error, "gateway")
        if isinstance(failure, ServiceUnreachable) and self.num_events:
            return ServiceUnavailable(
                f"the gateway was lost ({len(self.tokens)} tokens were delivered); ask again when it is up"
            )
        return failure


async def caption_events(
    connection: Connection,
    video: Video,
    options: CaptionOptions,
    *,
    request_id: str = "",
    timeout_s: float = CAPTION_TIMEOUT_S,
) -> AsyncGenerator[CaptionEvent, None]:
    """Asks for a caption and yields its events; the last one is the `Caption`. Closing it ends the caption.

    Raises:
        SlipstreamError: what is wrong with the video, or what the gateway says.
        ServiceUnavailable: the gateway is not there, was lost, or took longer than `timeout_s` seconds in all.
    """
    check_video(video)
    path = video.path if isinstance(video, RemotePath) else ""
    upload = _Upload(video, options_message(options, path=path, request_id=request_id))
    received = _Received()
    stub = gateway_pb2_grpc.GatewayStub(connection.channel)
    call = stub.Caption(upload.messages(), timeout=timeout_s, metadata=connection.metadata)
    first_status = FirstStatus(call)
    try:
        async for message in call:
            yield received.add(read_caption_event(message))
    except grpc.aio.AioRpcError as error:
        raise received.failure(await first_status.correct(error), timeout_s) from error
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        raise upload.failure or ServiceUnavailable("the connection to the gateway was closed") from error
    finally:
        call.cancel()
    if not received.is_finished:
        raise ProtocolViolation("the gateway ended the caption without a summary")


def _is_cancelled() -> bool:
    """Whether somebody cancelled this task. Else gRPC says so of its call, which ended on this side."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def gateway_info(connection: Connection) -> GatewayInfo:
    """What the gateway serves and its limits. Raises `ServiceUnavailable`, or what the gateway says."""
    stub = gateway_pb2_grpc.GatewayStub(connection.channel)
    request = gateway_pb2.GetGatewayRequest()
    with our_errors():
        message = await stub.GetGateway(request, timeout=INFO_TIMEOUT_S, metadata=connection.metadata)
    return read_gateway_info(message)
