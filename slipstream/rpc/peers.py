"""Target and draft as their callers see them: what they are, sessions with them, and which of them there are."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError

from slipstream.errors import DraftFault, FaultKind, ServiceUnavailable, SlipstreamError
from slipstream.logs import get_logger, heard
from slipstream.rpc import session_codec
from slipstream.rpc.calls import as_slipstream_error, is_too_large, open_channel, request_metadata
from slipstream.rpc.codec import read_load, read_model_info
from slipstream.rpc.grpc_options import (
    ADVERTISED_KEY,
    MAX_DRAFT_MESSAGE_BYTES,
    QUEUED_KEY,
)
from slipstream.rpc.pools import ASK_TIMEOUT_S, one_or_pool, until_answered
from slipstream.rpc.tls import PeerSecurity
from slipstream.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from slipstream.sampling.params import Proposal
from slipstream.service_info import ModelInfo, ServiceLoad, check_pair, check_protocol, take_turns
from slipstream.session_messages import DraftEvent, DraftStart, PrefillStage, StageProgress, TargetEvent, TargetStart
from slipstream.speculation.lines import Standing
from slipstream.speculation.placement import choose_draft, choose_target
from slipstream.speculation.protocol import JoinPoint, JudgeWindow, LineAction

SESSION = "/slipstream.rpc.v1.Draft/Session"
SILENCE_LOOKS = 10
"""How often, in the time after which a draft is held for frozen, it is asked whether it owes anything."""
WATCH_S = 5.0
ONE_GPU_FIX = "target and draft take turns on one GPU, so a draft may make captions slower: give it another, or run MPS"
RequestT = TypeVar("RequestT", target_pb2.TargetRequest, draft_pb2.DraftRequest)


class RemoteModel:
    """One model service: its channel and what it said of itself last."""

    def __init__(self, role: str, address: str, stub_type: Any, channel: grpc.aio.Channel) -> None:
        self.role = role
        self.address = address
        self.model: ModelInfo | None = None
        self.load = ServiceLoad()
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
        if message is None:
            raise ServiceUnavailable(f"the {self.role} sent bytes that are no message")
        model = read_model_info(message)
        check_protocol(self.role, model, "gateway", ModelInfo())
        self.model, self.load = model, read_load(message)
        return self.model

    async def wait(self, timeout_s: float) -> ModelInfo:
        """Asks until it answers. Raises `ServiceUnavailable` after `timeout_s`."""
        return await until_answered(self.ask, self.role, f"the {self.role} at {self.address}", timeout_s)

    async def close(self, grace_s: float = 0.0) -> None:
        """Closes the channel; its calls have `grace_s` to end."""
        await self._channel.close(grace_s or None)


class RemoteTarget(RemoteModel):
    """The target service at an address."""

    def __init__(self, address: str, security: PeerSecurity | None = None) -> None:
        super().__init__("target", address, target_pb2_grpc.TargetStub, open_channel(address, security))
        self._security = security

    async def choose(self, video: session_codec.HasFrames) -> "RemoteTarget":
        """Returns itself: a single target leaves nothing to choose."""
        return self

    @contextlib.asynccontextmanager
    async def at(self, address: str) -> AsyncIterator["RemoteTarget"]:
        """The target at `address`: this one where that is its own, else one for as long as the context lasts."""
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
    """The draft service at an address.

    `fits` raises for a model that cannot draft here. One that broke the protocol three times is left alone for
    `away_s`; `on_fault` is told the kind of every fault.
    """

    def __init__(
        self,
        address: str,
        security: PeerSecurity | None = None,
        *,
        fits: Callable[[ModelInfo], None] = lambda model: None,
        away_s: float = 60.0,
        on_fault: Callable[[FaultKind], None] = lambda kind: None,
    ) -> None:
        channel = open_channel(address, security, max_receive_bytes=MAX_DRAFT_MESSAGE_BYTES)
        super().__init__("draft", address, draft_pb2_grpc.DraftStub, channel)
        self._session = channel.stream_stream(SESSION, draft_pb2.DraftRequest.SerializeToString, _event_or_none)
        self._fits = fits
        self._standing = Standing(away_s, time.monotonic)
        self._on_fault = on_fault

    async def ask(self, timeout_s: float = ASK_TIMEOUT_S, *, wait_for_ready: bool = False) -> ModelInfo:
        """As of any model. Raises `ServiceUnavailable` also while it is left alone, and what `fits` raises."""
        if left_s := self._standing.left_s:
            raise ServiceUnavailable(f"the draft broke the protocol too often; it is left alone for {left_s:.0f} s")
        model = await super().ask(timeout_s, wait_for_ready=wait_for_ready)
        self._fits(model)
        return model

    async def choose(self) -> "RemoteDraft":
        """The one that takes part in the next caption: where there is one, it is that, if it answers; see `ask`."""
        await self.ask()
        return self

    def faulted(self, fault: DraftFault) -> None:
        """It broke the protocol, or was silent, which is not held against it."""
        self._on_fault(fault.kind)
        if fault.kind is FaultKind.SILENT:
            return
        was_away = self._standing.left_s > 0
        self._standing.fault()
        if not was_away and (left_s := self._standing.left_s):
            get_logger().error("draft.left_alone", seconds=left_s, kind=fault.kind, reason=str(fault))

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
        """Frames are sent when the target has room for them. While it refuses them, grpc would tell of the broken
        sending, and not of the refusal."""
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
        read, or when it has owed tokens for `silence_s` and nothing has come.

        A pending read must not be cancelled, as that would cancel the call; so it is waited for with a limit, and asked
        again and again what is owed: a draft that has waited for the target for long is not silent the moment that it
        is told to go on.
        """
        while True:
            reading = heard(asyncio.ensure_future(self._call.read()))
            owed_looks = 0
            try:
                while not (await asyncio.wait({reading}, timeout=silence_s / SILENCE_LOOKS))[0]:
                    owed_looks = owed_looks + 1 if owes() else 0
                    if owed_looks > SILENCE_LOOKS:
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
                    await asyncio.wait({reading})  # what cancels us meanwhile is not taken for its end
            if message is grpc.aio.EOF:
                return
            if message is None:
                raise DraftFault("the draft sent bytes that are no message")
            assert isinstance(message, draft_pb2.DraftEvent)
            yield session_codec.read_draft_event(message)


class Peers:
    """Targets and drafts of a gateway, one or several of each. Drafts may be absent, unreachable or replaced at any
    time; a target must be there.

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
        def connect_target(address: str, name: str) -> RemoteTarget:
            return RemoteTarget(address, _expecting(security, name))

        def connect_draft(address: str, name: str) -> RemoteDraft:
            named = _expecting(security, name)
            return RemoteDraft(address, named, fits=self.check_draft, away_s=draft_away_s, on_fault=on_draft_fault)

        self.target = one_or_pool("target", target, connect_target, choose_target)
        self.draft = one_or_pool("draft", draft, connect_draft, choose_draft) if draft else None
        self._take_turns: list[ModelInfo] = []

    async def find_draft(self, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Raises `ServiceUnavailable` when no draft answers or this one is left alone, and `ModelNotUsable` or
        `VersionMismatch` when it does not fit the target."""
        assert self.draft is not None
        with self._noting_absence():
            await self.draft.ask(timeout_s)

    async def watch_draft(self, every_s: float = WATCH_S) -> None:
        """Asks again and again, until cancelled: what is told of drafts holds also while no caption wants one."""
        while self.draft is not None:
            with contextlib.suppress(SlipstreamError):
                await self.find_draft()
            await asyncio.sleep(every_s)

    async def choose_draft(self) -> RemoteDraft:
        """The one that takes part in the next caption. Raises what `find_draft` does."""
        assert self.draft is not None
        with self._noting_absence():
            return await self.draft.choose()

    @contextlib.contextmanager
    def _noting_absence(self) -> Iterator[None]:
        try:
            yield
        except SlipstreamError:
            assert self.draft is not None
            self.draft.model = None
            raise

    def check_draft(self, draft: ModelInfo) -> None:
        """Raises `ModelNotUsable` or `VersionMismatch` for one that does not fit the target that answered last."""
        if self.target.model is None:
            return
        check_pair(self.target.model, draft)
        if take_turns(self.target.model, draft) and draft not in self._take_turns:
            self._take_turns.append(draft)
            get_logger().warning("peers.one_gpu", gpus=draft.gpu_uuids, fix=ONE_GPU_FIX)

    async def close(self) -> None:
        """Closes all channels."""
        for peer in (self.target, self.draft):
            if peer is not None:
                await peer.close()


def models_of(peers: Peers) -> tuple[ModelInfo, ModelInfo | None]:
    """What the target serves, which has been asked, and the draft, where one has answered."""
    assert peers.target.model is not None, "the target has been asked"
    return peers.target.model, peers.draft.model if peers.draft else None


def _expecting(security: PeerSecurity | None, name: str) -> PeerSecurity | None:
    """The certificate of an address that a name led to has that name, unless it was said otherwise."""
    if security is None or not name or security.server_name:
        return security
    return security._replace(server_name=name)
