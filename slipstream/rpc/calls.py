"""The calling side: channels, gRPC failures as our errors, and sessions with the models in plain types."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc

from slipstream.errors import (
    DraftFault,
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    ModelNotUsable,
    Overloaded,
    PermissionDenied,
    ServiceUnavailable,
    ServiceUnreachable,
    SessionExists,
    SlipstreamError,
    Unauthenticated,
    VideoNotFound,
)
from slipstream.messages import DraftEvent, DraftStart, Frames, ModelInfo, TargetEvent, TargetStart
from slipstream.rpc import session_codec
from slipstream.rpc.grpc_options import ADVERTISED_KEY, ANSWERED_KEY, CHANNEL_OPTIONS, REQUEST_ID_KEY, RETRY_AFTER_KEY
from slipstream.rpc.security import AUTHORIZATION_KEY, MAX_TOKEN_CHARS, SCHEME, PeerSecurity, is_local
from slipstream.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from slipstream.sampling.params import Proposal
from slipstream.speculation.protocol import AdvanceLine, JoinPoint, JudgeWindow, RestartLine

# -- channels ---------------------------------------------------------------------------------------------------------

# The calling side of a connection: channels with our options, and gRPC failures as our errors.

# -- client -----------------------------------------------------------------------------------------------------------

WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says when a message could not be sent because the peer is gone: https://github.com/grpc/grpc/issues/36066."""
_ERRORS: dict[grpc.StatusCode, type[SlipstreamError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: LimitExceeded,
    grpc.StatusCode.NOT_FOUND: VideoNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidConfig,
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: ServiceUnavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.ALREADY_EXISTS: SessionExists,
}


def open_channel(address: str, security: PeerSecurity | None = None) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:/path`. Connects when first used and reconnects by itself.

    With `security` it is TLS, except over a unix socket, which is always plaintext.
    """
    if security is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    return grpc.aio.secure_channel(address, security.credentials, options=options)


def request_metadata(request_id: str) -> grpc.aio.Metadata:
    """Metadata that names the request at the called service."""
    return grpc.aio.Metadata((REQUEST_ID_KEY, request_id))


def as_slipstream_error(error: grpc.aio.AioRpcError, peer: str) -> SlipstreamError:
    """What a failed call means for a request: the peer's own complaint, or that the peer is not to be had."""
    code = error.code()
    is_gone = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) and not _is_answer(error)
    if is_gone or error.details() == WRITE_FAILED:
        return ServiceUnreachable(f"the {peer} is not reachable ({code.name.lower()}); try again when it is up")
    details = error.details() or f"the {peer} failed with {code.name}"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(details, retry_after_s=_retry_after_s(error))
    return _ERRORS.get(code, SlipstreamError)(details)


def _is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Whether the peer said so itself: one that is up may be without its own store, or stopping."""
    return any(key == ANSWERED_KEY for key, _ in error.trailing_metadata() or ())


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """The peer's hint, if it gave one that makes sense."""
    hints = [str(value) for key, value in error.trailing_metadata() or () if key == RETRY_AFTER_KEY]
    return int(hints[0]) / 1000 if hints and hints[0].isdecimal() else None


# -- tokens -----------------------------------------------------------------------------------------------------------

# Plain metadata rather than gRPC's call credentials, which exist on TLS only: a gateway on loopback or a unix socket
# may ask for tokens too.


def token_metadata(address: str, security: PeerSecurity | None, token: str) -> grpc.aio.Metadata:
    """Metadata that says who calls; empty without a token.

    Raises:
        InvalidConfig: a token that is malformed, or that others on the way to `address` could read.
    """
    if not token:
        return grpc.aio.Metadata()
    if len(token) > MAX_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidConfig(f"a token has at most {MAX_TOKEN_CHARS} printable characters and no space")
    if security is None and not is_local(address):
        raise InvalidConfig(
            f"no token is sent to {address} in plaintext, where others could read it: use TLS, with `ca`"
        )
    return grpc.aio.Metadata((AUTHORIZATION_KEY, SCHEME + token))


# -- models as their callers see them ---------------------------------------------------------------------------------

ASK_TIMEOUT_S = 2.0
RETRY_S = 0.2
RequestT = TypeVar("RequestT", target_pb2.TargetRequest, draft_pb2.DraftRequest)


class RemoteModel:
    """One model service: its channel and what it said of itself last."""

    def __init__(self, role: str, address: str, stub_type: Any, security: PeerSecurity | None) -> None:
        self.role = role
        self.address = address
        self.model: ModelInfo | None = None
        self._channel = open_channel(address, security)
        self._stub = stub_type(self._channel)

    async def ask(self, timeout_s: float = ASK_TIMEOUT_S, *, wait_for_ready: bool = False) -> ModelInfo:
        """What it serves now; it may have been restarted with another model. Raises when it is not reachable, at once
        or, with `wait_for_ready`, after `timeout_s`."""
        try:
            message = await self._stub.GetModel(
                common_pb2.GetModelRequest(), timeout=timeout_s, wait_for_ready=wait_for_ready
            )
        except grpc.aio.AioRpcError as error:
            raise as_slipstream_error(error, self.role) from None
        self.model = session_codec.read_model_info(message)
        return self.model

    async def wait(self, timeout_s: float) -> ModelInfo:
        """Asks until it answers. Raises `ServiceUnavailable` after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return await self.ask()
            except ServiceUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    message = f"the {self.role} at {self.address} did not answer within {timeout_s:g} s"
                    raise ServiceUnavailable(message) from None
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


class RemoteTarget(RemoteModel):
    """The target service at an address."""

    def __init__(self, address: str, security: PeerSecurity | None = None) -> None:
        super().__init__("target", address, target_pb2_grpc.TargetStub, security)

    def open(self, start: TargetStart, frames: Frames, *, timeout_s: float) -> "TargetCall":
        """Begins a session."""

        def opening() -> Iterator[target_pb2.TargetRequest]:
            yield session_codec.target_start(start, frames)
            for chunk in session_codec.frame_chunks(frames):
                yield target_pb2.TargetRequest(frames=chunk)

        return TargetCall(self, self._stub.Session, opening(), start.session_id, timeout_s)


class RemoteDraft(RemoteModel):
    """The draft service at an address."""

    def __init__(self, address: str, security: PeerSecurity | None = None) -> None:
        super().__init__("draft", address, draft_pb2_grpc.DraftStub, security)

    def open(self, start: DraftStart, join: JoinPoint, frames: Frames, *, timeout_s: float) -> "DraftCall":
        """Begins a session whose first line starts at `join`."""

        def opening() -> Iterator[draft_pb2.DraftRequest]:
            yield session_codec.draft_start(start, join, frames)
            for chunk in session_codec.frame_chunks(frames):
                yield draft_pb2.DraftRequest(frames=chunk)

        return DraftCall(self, self._stub.Session, opening(), start.session_id, timeout_s)


class _Call(Generic[RequestT]):
    """A session's stream: what opens it, then what is sent, until it is ended or cancelled."""

    def __init__(
        self, peer: RemoteModel, method: Any, opening: Iterator[RequestT], session_id: str, timeout_s: float
    ) -> None:
        self._peer = peer
        self._outbox: asyncio.Queue[RequestT | None] = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall = method(
            self._requests(opening), timeout=timeout_s, metadata=request_metadata(session_id)
        )

    def cancel(self) -> None:
        """Ends the call from here; safe to repeat, also when it has ended."""
        self._call.cancel()
        self._outbox.put_nowait(None)  # grpc would wait for messages of a call that the peer has ended

    async def _requests(self, opening: Iterator[RequestT]) -> AsyncIterator[RequestT]:
        for message in opening:
            yield message
        while (later := await self._outbox.get()) is not None:
            yield later


class TargetCall(_Call[target_pb2.TargetRequest]):
    """One session at the target."""

    def judge(self, action: JudgeWindow, proposals: Sequence[Proposal] = ()) -> None:
        """Asks for passes."""
        self._outbox.put_nowait(session_codec.judge_message(action, proposals))

    def end(self) -> None:
        """Nothing more will be asked."""
        self._outbox.put_nowait(target_pb2.TargetRequest(end=common_pb2.End()))
        self._outbox.put_nowait(None)

    async def guidance_address(self) -> str:
        """Where the draft pulls this session's guidance. Known once the target has taken the call: where there are
        several behind one address, only this one has it. Raises what ended the call."""
        try:
            said = dict(await self._call.initial_metadata() or ())
        except grpc.aio.AioRpcError as error:
            raise as_slipstream_error(error, "target") from None
        return str(said.get(ADVERTISED_KEY) or self._peer.address)

    async def events(self) -> AsyncIterator[TargetEvent]:
        """What the target says, to the end. Raises its failure as one of our errors, and `ProtocolViolation` for what
        cannot be read."""
        try:
            async for message in self._call:
                yield session_codec.read_target_event(message)
        except grpc.aio.AioRpcError as error:
            raise as_slipstream_error(error, "target") from None


class DraftCall(_Call[draft_pb2.DraftRequest]):
    """One session at the draft."""

    def send(self, action: RestartLine | AdvanceLine) -> None:
        """Tells the draft about its line."""
        self._outbox.put_nowait(session_codec.line_message(action))

    async def events(self, silence_s: float, owes: Callable[[], bool]) -> AsyncIterator[DraftEvent]:
        """What the draft says, to the end. Raises its failure as one of our errors, and `DraftFault` for what cannot be
        read, or when it owes tokens and nothing has come for `silence_s`.

        A pending read must not be cancelled, as that would cancel the call; so it is waited for with a limit.
        """
        while True:
            reading = asyncio.ensure_future(self._call.read())
            try:
                while not (await asyncio.wait({reading}, timeout=silence_s))[0]:
                    if owes():
                        raise DraftFault(f"the draft was silent for {silence_s:g} s")
                message = reading.result()
            except grpc.aio.AioRpcError as error:
                raise as_slipstream_error(error, "draft") from None
            finally:
                if not reading.done():
                    reading.cancel()
                    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                        await reading
            if message is grpc.aio.EOF:
                return
            assert isinstance(message, draft_pb2.DraftEvent)
            yield session_codec.read_draft_event(message)


class Peers:
    """Target and draft. The draft may be absent, unreachable or replaced at any time; the target may not."""

    def __init__(self, target: str, draft: str, security: PeerSecurity | None = None) -> None:
        self.target = RemoteTarget(target, security)
        self.draft = RemoteDraft(draft, security) if draft else None

    async def find_draft(self, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Raises `ServiceUnavailable` when no draft answers, and `ModelNotUsable` when it does not fit the target."""
        assert self.draft is not None
        try:
            await self.draft.ask(timeout_s)
        except SlipstreamError:
            self.draft.model = None
            raise
        self.check_pair()

    def check_pair(self) -> None:
        """Raises `ModelNotUsable` when the two models that answered last do not fit each other."""
        target, draft = self.target.model, self.draft.model if self.draft else None
        if target is None or draft is None:
            return
        if target.tokenizer_digest != draft.tokenizer_digest:
            raise ModelNotUsable(
                f"target {target.model_id!r} and draft {draft.model_id!r} have different tokenizers; "
                "take a draft of the same family, or ask for method 'autoregressive'"
            )
        if target.tokens_per_frame != draft.tokens_per_frame:
            raise ModelNotUsable(
                f"the target makes {target.tokens_per_frame} tokens of a frame and the draft {draft.tokens_per_frame}; "
                "guidance needs them equal"
            )

    async def close(self) -> None:
        """Closes both channels."""
        for peer in (self.target, self.draft):
            if peer is not None:
                await peer.close()
