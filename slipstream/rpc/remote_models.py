"""Target and draft services as their callers see them: what they serve, and one session as a call in plain types."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc

from slipstream.errors import DraftFault, ServiceUnavailable
from slipstream.messages import DraftEvent, DraftStart, Frames, ModelInfo, TargetEvent, TargetStart
from slipstream.rpc import codec
from slipstream.rpc.channels import as_slipstream_error, open_channel, request_metadata
from slipstream.rpc.grpc_options import ADVERTISED_KEY
from slipstream.rpc.security import PeerSecurity
from slipstream.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from slipstream.sampling.params import Proposal
from slipstream.speculation.actions import AdvanceLine, JoinPoint, JudgeWindow, RestartLine

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
        self.model = codec.read_model_info(message)
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
            yield codec.target_start(start, frames)
            for chunk in codec.frame_chunks(frames):
                yield target_pb2.TargetRequest(frames=chunk)

        return TargetCall(self, self._stub.Session, opening(), start.session_id, timeout_s)


class RemoteDraft(RemoteModel):
    """The draft service at an address."""

    def __init__(self, address: str, security: PeerSecurity | None = None) -> None:
        super().__init__("draft", address, draft_pb2_grpc.DraftStub, security)

    def open(self, start: DraftStart, join: JoinPoint, frames: Frames, *, timeout_s: float) -> "DraftCall":
        """Begins a session whose first line starts at `join`."""

        def opening() -> Iterator[draft_pb2.DraftRequest]:
            yield codec.draft_start(start, join, frames)
            for chunk in codec.frame_chunks(frames):
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
        self._outbox.put_nowait(codec.judge_message(action, proposals))

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
                yield codec.read_target_event(message)
        except grpc.aio.AioRpcError as error:
            raise as_slipstream_error(error, "target") from None


class DraftCall(_Call[draft_pb2.DraftRequest]):
    """One session at the draft."""

    def send(self, action: RestartLine | AdvanceLine) -> None:
        """Tells the draft about its line."""
        self._outbox.put_nowait(codec.line_message(action))

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
            yield codec.read_draft_event(message)
