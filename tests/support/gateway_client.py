"""A client of the gateway for tests: one call captions one video and keeps every event."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from slipstream.client.caption_client import RemotePath, caption_events
from slipstream.client.connection import Connection
from slipstream.messages import Caption, CaptionEvent, CommittedText, CommittedToken, KeptTokens, StageChange, Trace
from slipstream.options import CaptionOptions
from slipstream.rpc.calls import FirstStatus
from slipstream.rpc.codec import read_caption_event
from slipstream.rpc.grpc_options import CHUNK_BYTES
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc

TIMEOUT_S = 120.0
MOST_TRIES = 5
OnEvent = Callable[["Captioned"], bool | None]
"""Called after every event; True ends the call from this side."""


@dataclass
class Captioned:
    """All that the gateway has said of one caption so far."""

    stages: list[StageChange] = field(default_factory=list)
    tokens_at: list[int] = field(default_factory=list)
    """For every stage, the tokens there were before it."""
    commits: list[list[CommittedToken]] = field(default_factory=list)
    summaries: list[Caption] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    kept: list[KeptTokens] = field(default_factory=list)

    def add(self, event: CaptionEvent) -> None:
        match event:
            case StageChange():
                self.stages.append(event)
                self.tokens_at.append(len(self.tokens))
            case CommittedText():
                self.commits.append(list(event.tokens))
            case Trace():
                self.traces.append(event)
            case KeptTokens():
                self.kept.append(event)
            case Caption():
                self.summaries.append(event)

    @property
    def tokens(self) -> list[CommittedToken]:
        return [token for commit in self.commits for token in commit]

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.piece for token in self.tokens)

    @property
    def stage_names(self) -> list[str]:
        return [stage.stage for stage in self.stages]

    @property
    def summary(self) -> Caption:
        """The one caption that ends all."""
        (summary,) = self.summaries
        return summary


async def caption(
    channel: grpc.aio.Channel,
    video: bytes = b"",
    *,
    path: str = "",
    request_id: str = "",
    on_event: OnEvent | None = None,
    **options: Any,
) -> Captioned:
    """Captions an upload, or a path of the gateway's. Raises our errors."""
    captioned = Captioned()
    source = RemotePath(path) if path else video
    asked = CaptionOptions.from_mapping(options)
    events = caption_events(
        Connection(channel), source, asked, request_id=request_id, timeout_s=TIMEOUT_S, resume_wait_s=0
    )
    try:
        async for event in events:
            captioned.add(event)
            if on_event is not None and on_event(captioned):
                break
    finally:
        await events.aclose()
    return captioned


def has_draft(captioned: Captioned) -> bool:
    """A draft has joined."""
    return "draft_ready" in captioned.stage_names


async def until(
    holds: Callable[[Captioned], object], ask: Callable[[], Awaitable[Captioned]], tries: int = MOST_TRIES
) -> Captioned:
    """The first caption of which that holds, of at most `tries`, or the last: nobody waits for a draft, and on a
    busy machine a short text may be over before one was heard."""
    for _ in range(tries):
        captioned = await ask()
        if holds(captioned):
            break
    return captioned


# -- the wire itself, for what no client of ours would send -----------------------------------------------------------


def options_message(**options: Any) -> gateway_pb2.CaptionRequest:
    """The first message of a caption."""
    return gateway_pb2.CaptionRequest(options=gateway_pb2.CaptionOptions(**options))


def upload_messages(video: bytes) -> list[gateway_pb2.CaptionRequest]:
    """The file, in chunks."""
    starts = range(0, len(video), CHUNK_BYTES)
    return [gateway_pb2.CaptionRequest(video=video[start : start + CHUNK_BYTES]) for start in starts]


async def send(channel: grpc.aio.Channel, requests: Iterable[gateway_pb2.CaptionRequest]) -> Captioned:
    """Sends the messages, half-closes and collects the events. Raises AioRpcError."""
    captioned = Captioned()
    call = gateway_pb2_grpc.GatewayStub(channel).Caption(_stream(requests), timeout=TIMEOUT_S)
    first_status = FirstStatus(call)
    try:
        async for message in call:
            captioned.add(read_caption_event(message))
    except grpc.aio.AioRpcError as error:
        raise await first_status.correct(error) from None
    finally:
        call.cancel()
    return captioned


async def refusal(
    channel: grpc.aio.Channel, requests: Iterable[gateway_pb2.CaptionRequest]
) -> tuple[grpc.StatusCode, str]:
    """Status and message that the gateway ends these requests with."""
    try:
        captioned = await send(channel, requests)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"accepted: {captioned.stage_names}")


async def _stream(requests: Iterable[gateway_pb2.CaptionRequest]) -> AsyncIterator[gateway_pb2.CaptionRequest]:
    for request in requests:
        yield request
