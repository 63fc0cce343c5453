"""The gateway's client: one caption as a stream of plain events."""

import asyncio
import io
import os
import re
import stat
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import grpc

from slipstream.client.connection import CONNECT_S, Connection, beside_loop, closing_told
from slipstream.config import check_text, own_number
from slipstream.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ProtocolViolation,
    ResumeMismatch,
    ServiceUnavailable,
    ServiceUnreachable,
    SlipstreamError,
    UnreadableVideo,
    VideoNotFound,
)
from slipstream.messages import Caption, CaptionEvent, CommittedText, CommittedToken, StageChange
from slipstream.options import CaptionOptions
from slipstream.rpc.calls import FirstStatus, as_slipstream_error, is_answer
from slipstream.rpc.codec import options_message, read_caption_event, read_gateway_info
from slipstream.rpc.grpc_options import UPLOAD_CHUNK_BYTES
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from slipstream.service_info import GatewayInfo

# -- videos -----------------------------------------------------------------------------------------------------------


class BinaryReader(Protocol):
    """What a video may be read from: a file opened in binary mode, or the like. It is read from where it stands."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""


@dataclass(frozen=True)
class RemotePath:
    """A video that the gateway opens itself: a path of its machine, or the address of an object, below its roots."""

    path: str


Video = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryReader | RemotePath
"""A file by its path, its bytes, something to read them from, or a file of the gateway's."""
_ADDRESS = re.compile("[a-z][a-z0-9+.-]+:/", re.ASCII | re.IGNORECASE)
"""As a path has it, which keeps one of two slashes."""
_IN_MEMORY = (bytes, bytearray, memoryview)
_NOT_BINARY = "the video's file must be opened in binary mode, as by open(path, 'rb')"


def check_video(video: Video) -> None:
    """Raises what is wrong with the video as far as that shows without reading it.

    Raises:
        InvalidRequest: it is none of what a video may be, or a path that cannot be sent.
        VideoNotFound: there is no such file.
        UnreadableVideo: it is empty, no regular file, or must not be read.
    """
    if isinstance(video, str | os.PathLike):
        path = os.fspath(video)
        if not isinstance(path, str):
            raise InvalidRequest(f"the path of a video must be text, not {path!r}")
        _check_file(Path(path))
    elif isinstance(video, _IN_MEMORY):
        if not len(video):
            raise UnreadableVideo("the video has no bytes")
    elif isinstance(video, RemotePath):
        check_text("path", video.path)
        if not video.path:  # which would ask for the upload of nothing
            raise InvalidRequest("the path of a file of the gateway's is empty")
    elif isinstance(video, io.TextIOBase):  # which would find bytes that are no text, and name those
        raise InvalidRequest(_NOT_BINARY)
    elif not callable(getattr(video, "read", None)):
        raise InvalidRequest(f"a video is a path, bytes or a binary file, not {type(video).__name__}")


def _check_file(source: Path) -> None:
    try:
        status = source.stat()
    except FileNotFoundError:
        what = "; an address is fetched by the HTTP front, and for the archive" if _ADDRESS.match(str(source)) else ""
        raise VideoNotFound(f"no such file{what}") from None
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


class Upload:
    """The messages of one call: `first`, and what `wrap` makes of chunks. `failure` says why they ended too early."""

    def __init__(self, video: Video, first: Any, wrap: Callable[[bytes], Any]) -> None:
        self.failure: SlipstreamError | None = None
        self.is_read = self.is_whole = False
        """Whether anything of a file has been read, and whether all was sent."""
        self._video = video
        self._first, self._wrap = first, wrap
        self._opened: list[BinaryIO] = []
        self._is_closed = False

    async def messages(self) -> AsyncIterator[Any]:
        """For gRPC, which would swallow what is raised here and cancel the call."""
        yield self._first
        try:
            async for chunk in self._chunks():
                yield self._wrap(chunk)
            self.is_whole = True
        except Exception as error:
            ours = error if isinstance(error, SlipstreamError) else None
            self.failure = ours or UnreadableVideo(f"the video cannot be read: {_reason(error)}")
            raise

    def close(self) -> None:
        """No file is read or stays open from now on. gRPC begins the messages late, and leaves them where they
        stand."""
        self._is_closed = True
        for file in self._opened:
            file.close()

    def _open(self, path: Path) -> BinaryIO:
        """On another thread, which may be done when nobody waits for it any more."""
        self._opened.append(path.open("rb"))
        if self._is_closed:
            self.close()
        return self._opened[-1]

    async def _chunks(self) -> AsyncIterator[bytes]:
        video = self._video
        if isinstance(video, RemotePath):
            return
        if isinstance(video, _IN_MEMORY):
            view = memoryview(video).cast("B")
            for start in range(0, len(view), UPLOAD_CHUNK_BYTES):
                yield bytes(view[start : start + UPLOAD_CHUNK_BYTES])
            return
        if isinstance(video, str | os.PathLike):
            video = await beside_loop(self._open, Path(video))
        while not self._is_closed and (chunk := await self._read(video)):
            if not isinstance(chunk, bytes):
                raise InvalidRequest(_NOT_BINARY)
            yield chunk

    async def _read(self, file: BinaryReader) -> bytes:
        self.is_read = True
        return await beside_loop(file.read, UPLOAD_CHUNK_BYTES)


def call_failure(error: grpc.aio.AioRpcError, timeout_s: float) -> SlipstreamError:
    """What the failure of a call means that had so long; what the gateway itself says of a time limit is passed on."""
    if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
        return as_slipstream_error(error, "gateway")
    if is_answer(error):
        return DeadlineExceeded(error.details() or "the gateway ran out of time")
    return ServiceUnavailable(f"the gateway did not finish within {timeout_s:g} s")


# -- captions ---------------------------------------------------------------------------------------------------------

CAPTION_TIMEOUT_S = 600.0
MAX_TIMEOUT_S = 1e8
"""Three years: gRPC takes a deadline that is much further away for one that has passed."""
INFO_TIMEOUT_S = 10.0
MAX_RESUMPTIONS = 5
RESUME_WAIT_S = 30.0
"""How long to wait for a gateway that was lost, each time."""
FIRST_PAUSE_S = 0.25


def check_seconds(name: str, value: float) -> float:
    """The time limit, at most `MAX_TIMEOUT_S`. Raises `InvalidRequest` for what is none."""
    seconds = own_number(value)
    if not isinstance(seconds, int | float) or seconds != seconds:
        raise InvalidRequest(f"{name} must be a number of seconds, not {value!r}; math.inf is no limit")
    return min(seconds, MAX_TIMEOUT_S)


@dataclass
class _Received:
    """What came so far of one caption, from one gateway after the other."""

    tokens: list[CommittedToken] = field(default_factory=list)
    num_events: int = 0
    num_resumptions: int = 0
    is_confirmed: bool = True
    """The gateway has found the tokens again that came from another."""
    is_finished: bool = False
    first_text_s: float = 0.0
    """When the first text came, by this process' clock; 0: none yet."""
    last_text_s: float = 0.0

    def add(self, event: CaptionEvent) -> CaptionEvent:
        """The event itself; a caption gets the tokens that came before it."""
        self.num_events += 1
        self.is_confirmed |= isinstance(event, StageChange) and event.stage == "resumed"
        if isinstance(event, CommittedText | Caption) and not self.is_confirmed:
            raise ProtocolViolation("this gateway is of a release that resumes no captions; ask for the caption anew")
        if isinstance(event, CommittedText):
            self.tokens += event.tokens
            self.last_text_s = time.monotonic()
            self.first_text_s = self.first_text_s or self.last_text_s
        return self._whole(event) if isinstance(event, Caption) else event

    def _whole(self, caption: Caption) -> Caption:
        self.is_finished = True
        if self.num_resumptions and caption.text != "".join(token.piece for token in self.tokens):
            raise ResumeMismatch("the resumed caption has another text than what was delivered; ask for it anew")
        timings = caption.timings
        if self.num_resumptions:  # the gateway that ended it knows of its own part alone
            writing_s = self.last_text_s - self.first_text_s
            resumptions = timings.resumptions + self.num_resumptions
            timings = replace(timings, resumptions=resumptions, generate_s=writing_s)
        return replace(caption, tokens=tuple(self.tokens), timings=timings)

    def failure(self, error: grpc.aio.AioRpcError, timeout_s: float) -> SlipstreamError:
        """What the call's failure means for a caption of which so much has come."""
        failure = call_failure(error, timeout_s)
        if isinstance(failure, ServiceUnreachable) and self.num_events:
            return ServiceUnavailable(f"the gateway was lost ({len(self.tokens)} tokens were delivered); ask it again")
        return failure


@dataclass
class _Asking:
    """One caption, asked for at one gateway after the other until it is whole."""

    connection: Connection
    video: Video
    first: gateway_pb2.CaptionOptions
    timeout_s: float
    resume_wait_s: float
    received: _Received = field(default_factory=_Received)
    failure: SlipstreamError | None = None
    """Of the last call, where the caption may go on."""

    def __post_init__(self) -> None:
        self._deadline = asyncio.get_running_loop().time() + self.timeout_s
        self._start = _position(self.video)
        self._untried = len(self.connection.others)

    async def events(self) -> AsyncGenerator[CaptionEvent, None]:
        """Those of one call, which goes on where the last one was lost."""
        received, self.failure = self.received, None
        after = [token.token_id for token in received.tokens]
        received.is_confirmed = not after
        request = gateway_pb2.CaptionRequest
        upload = Upload(self.video, request(options=self.first, resume_after=after), lambda data: request(video=data))
        channel, left_s = self.connection.channel, self._deadline - asyncio.get_running_loop().time()
        stub = gateway_pb2_grpc.GatewayStub(channel)
        call = stub.Caption(upload.messages(), timeout=max(left_s, 0.0), metadata=self.connection.metadata)
        first_status = FirstStatus(call)
        try:
            with closing_told(lambda: upload.failure):
                async for message in call:
                    yield received.add(read_caption_event(message))
        except grpc.aio.AioRpcError as error:
            error = await first_status.correct(error)
            self.failure = received.failure(error, self.timeout_s)
            if not self._may_resume(error, upload):
                raise self.failure from error
            self.connection.turn_from(channel)
        finally:
            call.cancel()
            upload.close()

    async def prepare(self) -> None:
        """Waits for a gateway, and puts the video back to where it began. Raises the failure where none comes."""
        assert self.failure is not None
        if self.received.num_events:
            await asyncio.sleep(FIRST_PAUSE_S * 2**self.received.num_resumptions)
            self.received.num_resumptions += 1
            if not await self._connected():
                raise self.failure
        if self._start is not None:
            await beside_loop(cast(Any, self.video).seek, self._start)

    def _may_resume(self, error: grpc.aio.AioRpcError, upload: Upload) -> bool:
        """Only what is not to be had now is asked for again, and only a video that can be sent again."""
        received, failure = self.received, as_slipstream_error(error, "gateway")
        is_away = isinstance(failure, ServiceUnavailable) and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        can_repeat = upload.is_whole and self._start is not None
        can_send = not hasattr(self.video, "read") or not upload.is_read or can_repeat
        if not is_away or not can_send:
            return False
        if not received.num_events:  # nobody was there: so are the others asked, once each
            self._untried -= 1
            return self._untried >= 0
        is_lost = bool(received.tokens) or isinstance(failure, ServiceUnreachable)
        has_others = bool(self.connection.others)  # who need not be about to stop where this one has said that it is
        return (is_lost or has_others) and received.num_resumptions < MAX_RESUMPTIONS and self.resume_wait_s > 0

    async def _connected(self) -> bool:
        """Whether a gateway can be reached in time; turns to it."""
        loop, connection = asyncio.get_running_loop(), self.connection
        deadline = min(loop.time() + self.resume_wait_s, self._deadline)
        while (left_s := deadline - loop.time()) > 0:
            try:
                if await connection.is_ready(min(left_s, CONNECT_S)):
                    return True
            except ServiceUnavailable:  # closed on this side
                return False
        return False


def _position(video: Video) -> int | None:
    """Where a file stands that can be put back there; None for all else."""
    reader = cast(Any, video)
    try:
        return reader.tell() if hasattr(video, "read") and reader.seekable() else None
    except (AttributeError, OSError, ValueError):  # no file, or a closed one, which reading will complain of
        return None


async def caption_events(
    connection: Connection,
    video: Video,
    options: CaptionOptions,
    *,
    request_id: str = "",
    timeout_s: float = CAPTION_TIMEOUT_S,
    resume_wait_s: float = RESUME_WAIT_S,
) -> AsyncGenerator[CaptionEvent, None]:
    """Asks for a caption and yields its events; the last one is the `Caption`. Closing it ends the caption.

    A caption whose gateway is lost goes on after the tokens that came, at the same one or the next of the addresses,
    within `resume_wait_s` (0: never), if the video can be sent again. The text is that of an undisturbed call.

    Raises:
        SlipstreamError: what is wrong with the video, or what the gateway says.
        ServiceUnavailable: the gateway is not there, was lost for good, or took longer than `timeout_s` seconds in all.
        ResumeMismatch: the text would not go on as it began.
    """
    check_video(video)
    path = video.path if isinstance(video, RemotePath) else ""
    first = options_message(options, path=path, request_id=request_id)
    asking = _Asking(connection, video, first, timeout_s, check_seconds("resume_wait_s", resume_wait_s))
    while True:
        async with aclosing(asking.events()) as events:
            async for event in events:
                yield event
        if asking.failure is None:
            break
        if asking.received.num_events:
            done = asking.received.num_resumptions + 1
            yield StageChange("resume", done, MAX_RESUMPTIONS, str(asking.failure))
        await asking.prepare()
    if not asking.received.is_finished:
        raise ProtocolViolation("the gateway ended the caption without a summary")


async def gateway_info(connection: Connection) -> GatewayInfo:
    """What the gateway serves and its limits. Raises `ServiceUnavailable`, or what the gateway says."""

    async def ask(channel: grpc.aio.Channel) -> gateway_pb2.GatewayInfo:
        stub, request = gateway_pb2_grpc.GatewayStub(channel), gateway_pb2.GetGatewayRequest()
        try:
            with closing_told():
                info: gateway_pb2.GatewayInfo = await stub.GetGateway(
                    request, timeout=INFO_TIMEOUT_S, metadata=connection.metadata
                )
            return info
        except grpc.aio.AioRpcError as error:
            raise as_slipstream_error(error, "gateway") from error

    return read_gateway_info(await connection.ask(ask))
