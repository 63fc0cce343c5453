"""Target and draft as their callers see them: what they are, sessions with them, and which of them there are."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError

from slipstream.errors import (
    DraftFault,
    FaultKind,
    ModelNotUsable,
    ServiceUnavailable,
    SlipstreamError,
    VersionMismatch,
)
from slipstream.logs import get_logger, heard
from slipstream.rpc import session_codec
from slipstream.rpc.calls import as_slipstream_error, is_too_large, open_channel, request_metadata
from slipstream.rpc.codec import read_model_info
from slipstream.rpc.grpc_options import (
    ADVERTISED_KEY,
    MAX_DRAFT_MESSAGE_BYTES,
    QUEUED_KEY,
)
from slipstream.rpc.tls import PeerSecurity
from slipstream.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from slipstream.sampling.params import Proposal
from slipstream.service_info import ModelInfo
from slipstream.session_messages import DraftEvent, DraftStart, PrefillStage, StageProgress, TargetEvent, TargetStart
from slipstream.speculation.lines import Standing
from slipstream.speculation.protocol import JoinPoint, JudgeWindow, LineAction

ASK_TIMEOUT_S = 2.0
RETRY_S = 0.2
SESSION = "/slipstream.rpc.v1.Draft/Session"
RequestT = TypeVar("RequestT", target_pb2.TargetRequest, draft_pb2.DraftRequest)


def check_protocol(role: str, model: ModelInfo, other_role: str, other: ModelInfo) -> None:
    """Raises `VersionMismatch` when one service is too old for the other; says which, and what each speaks."""
    for old, old_role, new, new_role in ((model, role, other, other_role), (other, other_role, model, role)):
        speaks = old.protocol_version or 1
        if speaks < new.least_protocol_version:
            raise VersionMismatch(
                f"the {old_role} speaks protocol version {speaks}, and the {new_role} needs at least version "
                f"{new.least_protocol_version}: upgrade the {old_role}"
            )


class RemoteModel:
    """One model service: its channel and what it said of itself last."""

    def __init__(self, role: str, address: str, stub_type: Any, channel: grpc.aio.Channel) -> None:
        self.role = role
        self.address = address
        self.model: ModelInfo | None = None
        self._channel = channel
        self._stub = stub_type(channel)

    async def ask(self, timeout_s: float = ASK_TIMEOUT_S, *, wait_for_ready: bool = False) -> ModelInfo:
        """What it serves now; it may have been restarted with another model. Raises when it is not reachable, at once
        or, with `wait_for_ready`, after `timeout_s`; and `VersionMismatch` for one of a release that this one cannot
        work with."""
        try:
            message = await self._stub.GetModel(
                common_pb2.GetModelRequest(), timeout=timeout_s, wait_for_ready=wait_for_ready
            )
        except grpc.aio.AioRpcError as error:
            raise as_slipstream_error(error, self.role) from None
        model = read_model_info(message)
        check_protocol(self.role, model, "gateway", ModelInfo())
        self.model = model
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
        super().__init__("target", address, target_pb2_grpc.TargetStub, open_channel(address, security))
        self._security = security

    @contextlib.asynccontextmanager
    async def at(self, address: str) -> AsyncIterator["RemoteTarget"]:
        """The one of several targets that is there: itself where it is at its own address."""
        if address == self.address:
            yield self
            return
        one = RemoteTarget(address, self._security)
        try:
            yield one
        finally:
            await one.close()

    async def add_hints(self, start: TargetStart, texts: Sequence[str], *, timeout_s: float = ASK_TIMEOUT_S) -> int:
        """Gives the session that was begun so more hints; how many tokens of them it took. Where several targets are
        behind one address, ask the one at `TargetCall.guidance_address`. Raises what the target says."""
        request = target_pb2.AddHintsRequest(
            session_id=start.session_id, texts=texts, capability=start.guidance_capability
        )
        try:
            answer = await self._stub.AddHints(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise as_slipstream_error(error, "target") from None
        return int(answer.num_tokens)

    def open(self, start: TargetStart, video: session_codec.HasFrames, *, timeout_s: float) -> "TargetCall":
        """Begins a session. The frames are read from their owner as they are sent."""

        def opening() -> Iterator[target_pb2.TargetRequest]:
            yield session_codec.target_start(start, video.frames)
            for chunk in session_codec.frame_chunks(video):
                yield target_pb2.TargetRequest(frames=chunk)

        return TargetCall(self, self._stub.Session, opening(), start.request_id, timeout_s)


class RemoteDraft(RemoteModel):
    """The draft service at an address."""

    def __init__(self, address: str, security: PeerSecurity | None = None) -> None:
        channel = open_channel(address, security, max_receive_bytes=MAX_DRAFT_MESSAGE_BYTES)
        super().__init__("draft", address, draft_pb2_grpc.DraftStub, channel)
        self._session = channel.stream_stream(SESSION, draft_pb2.DraftRequest.SerializeToString, _event_or_none)

    def open(
        self, start: DraftStart, join: JoinPoint, video: session_codec.HasFrames, *, timeout_s: float
    ) -> "DraftCall":
        """Begins a session whose first line starts at `join`. The frames are read from their owner as they are sent."""

        def opening() -> Iterator[draft_pb2.DraftRequest]:
            yield session_codec.draft_start(start, join, video.frames)
            for chunk in session_codec.frame_chunks(video):
                yield draft_pb2.DraftRequest(frames=chunk)

        return DraftCall(self, self._session, opening(), start.request_id, timeout_s)


def _event_or_none(data: bytes) -> draft_pb2.DraftEvent | None:
    """None for bytes that are no message. gRPC itself would write an error to the log for each, as many as come."""
    try:
        return draft_pb2.DraftEvent.FromString(data)
    except DecodeError:
        return None


class _Call(Generic[RequestT]):
    """A session's stream: what opens it, then what is sent, until it is ended or cancelled."""

    def __init__(
        self, peer: RemoteModel, method: Any, opening: Iterator[RequestT], request_id: str, timeout_s: float
    ) -> None:
        self._peer = peer
        self._outbox: asyncio.Queue[RequestT | None] = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall = method(
            self._requests(opening), timeout=timeout_s, metadata=request_metadata(request_id)
        )

    def cancel(self) -> None:
        """Ends the call from here; safe to repeat, also when it has ended."""
        self._call.cancel()
        self._outbox.put_nowait(None)  # grpc would wait for messages of a call that the peer has ended

    async def _requests(self, opening: Iterator[RequestT]) -> AsyncIterator[RequestT]:
        yield next(opening)
        if await self._has_place():
            for message in opening:
                yield message
        while (later := await self._outbox.get()) is not None:
            yield later

    async def _has_place(self) -> bool:
        """Waits until what follows the first message is wanted; False if it never will be. A draft is not waited for:
        it lets nobody queue for long, and what it says when it refuses is of no consequence."""
        return True


class TargetCall(_Call[target_pb2.TargetRequest]):
    """One session at the target."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._place = asyncio.Event()

    def cancel(self) -> None:
        super().cancel()
        self._place.set()

    async def _has_place(self) -> bool:
        """Frames are sent when the target has room for them. A refusal that they crossed on the way would be lost, too:
        grpc tells of the broken sending instead."""
        if QUEUED_KEY in dict(await self._call.initial_metadata() or ()):
            await self._place.wait()
        return not self._call.done()

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
                event = session_codec.read_target_event(message)
                if not (isinstance(event, StageProgress) and event.stage is PrefillStage.QUEUED):
                    self._place.set()
                yield event
        except grpc.aio.AioRpcError as error:
            raise as_slipstream_error(error, "target") from None


class DraftCall(_Call[draft_pb2.DraftRequest]):
    """One session at the draft."""

    def send(self, action: LineAction) -> None:
        """Tells the draft about its line."""
        self._outbox.put_nowait(session_codec.line_message(action))

    async def events(self, silence_s: float, owes: Callable[[], bool]) -> AsyncIterator[DraftEvent]:
        """What the draft says, to the end. Raises its failure as one of our errors, and `DraftFault` for what cannot be
        read, or when it owes tokens and nothing has come for `silence_s`.

        A pending read must not be cancelled, as that would cancel the call; so it is waited for with a limit.
        """
        while True:
            reading = heard(asyncio.ensure_future(self._call.read()))
            try:
                while not (await asyncio.wait({reading}, timeout=silence_s))[0]:
                    if owes():
                        raise DraftFault(f"the draft was silent for {silence_s:g} s", FaultKind.SILENT)
                message = reading.result()
            except grpc.aio.AioRpcError as error:
                if is_too_large(error):
                    words = f"the draft sent a message of more than {MAX_DRAFT_MESSAGE_BYTES} bytes"
                    raise DraftFault(words, FaultKind.SIZE) from None
                raise as_slipstream_error(error, "draft") from None
            finally:
                if not reading.done():
                    reading.cancel()
                    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                        await reading
            if message is grpc.aio.EOF:
                return
            if message is None:
                raise DraftFault("the draft sent bytes that are no message")
            assert isinstance(message, draft_pb2.DraftEvent)
            yield session_codec.read_draft_event(message)


class Peers:
    """Target and draft. The draft may be absent, unreachable or replaced at any time; the target may not.

    A draft that broke the protocol three times is left alone for `draft_away_s`, by all captions. `on_draft_fault` is
    told the kind of every fault.
    """

    def __init__(
        self,
        target: str,
        draft: str,
        security: PeerSecurity | None = None,
        *,
        draft_away_s: float = 60.0,
        on_draft_fault: Callable[[FaultKind], None] = lambda kind: None,
    ) -> None:
        self.target = RemoteTarget(target, security)
        self.draft = RemoteDraft(draft, security) if draft else None
        self._standing = Standing(draft_away_s, time.monotonic)
        self._on_draft_fault = on_draft_fault

    async def find_draft(self, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Raises `ServiceUnavailable` when no draft answers or this one is left alone, and `ModelNotUsable` or
        `VersionMismatch` when it does not fit the target."""
        assert self.draft is not None
        try:
            if left_s := self._standing.left_s:
                raise ServiceUnavailable(f"the draft broke the protocol too often; it is left alone for {left_s:.0f} s")
            await self.draft.ask(timeout_s)
            self.check_pair()
        except SlipstreamError:
            self.draft.model = None
            raise

    def draft_faulted(self, fault: DraftFault) -> None:
        """The draft broke the protocol, or was silent, which is not held against it."""
        self._on_draft_fault(fault.kind)
        if fault.kind is FaultKind.SILENT:
            return
        was_away = self._standing.left_s > 0
        self._standing.fault()
        if not was_away and (left_s := self._standing.left_s):
            get_logger().error("draft.left_alone", seconds=left_s, kind=fault.kind, reason=str(fault))

    def check_pair(self) -> None:
        """Raises `ModelNotUsable` or `VersionMismatch` when the two that answered last do not fit each other."""
        target, draft = self.target.model, self.draft.model if self.draft else None
        if target is None or draft is None:
            return
        check_protocol("draft", draft, "target", target)
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
        if target.frame_size.is_known and draft.frame_size.is_known and target.frame_size != draft.frame_size:
            raise ModelNotUsable(
                f"target {target.model_id!r} and draft {draft.model_id!r} want frames of different sizes; give both the"
                " same settings of the video processor"
            )

    async def close(self) -> None:
        """Closes both channels."""
        for peer in (self.target, self.draft):
            if peer is not None:
                await peer.close()
