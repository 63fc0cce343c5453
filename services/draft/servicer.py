"""The draft's gRPC face: prepares a session while pulling guidance, then reads restarts while the line is written."""

import asyncio
import hashlib
import math
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc
import numpy as np
import torch

from slipstream.engine.draft_engine import DraftEngine
from slipstream.engine.draft_session import DraftSession
from slipstream.engine.video_lm import PromptPlan
from slipstream.errors import InvalidRequest, ProtocolViolation, ServiceUnavailable
from slipstream.frame_size import FrameSize
from slipstream.logs import bound_request_id, get_logger, heard
from slipstream.messages import KeptTokens
from slipstream.pruning import Guidance, get_pruner
from slipstream.rpc import session_codec
from slipstream.rpc.calls import open_channel, request_metadata
from slipstream.rpc.codec import model_info_message
from slipstream.rpc.message_limits import IdleLimit, first_of
from slipstream.rpc.tls import PeerSecurity
from slipstream.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from slipstream.session_messages import MAX_KEPT_BYTES, DraftReady, DraftStart
from slipstream.speculation.methods import Score

T = TypeVar("T")
FRAMES_IDLE_S = 60.0
"""Longest pause between two messages with frames, whose room nobody else has."""
FRAMES_STOPPED = "the room for the frames was given to others; send them without a pause"

# -- targets ----------------------------------------------------------------------------------------------------------

# The targets that this draft pulls guidance from: which are allowed, and their channels.

GUIDANCE_TIMEOUT_S = 600.0
LOOKUP_S = 5.0
MAX_IDLE_CHANNELS = 16
"""A caller names the address, so there may be any number of them over time."""
MAX_ADDRESS_CHARS = 512


async def _places(address: str) -> frozenset[tuple[str, int]]:
    """Numeric hosts and port that `host:port` leads to now; none where it leads nowhere, or is a socket's path."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        return frozenset()
    looking = asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    try:
        found = await asyncio.wait_for(looking, LOOKUP_S)
    except (OSError, UnicodeError, OverflowError):  # a timeout is an OSError
        return frozenset()
    return frozenset((str(place[0]), int(port)) for *_, place in found)


@dataclass(eq=False)
class _Connection:
    channel: grpc.aio.Channel
    num_users: int = 0


class Targets:
    """Pulls guidance. `allowed`: the only addresses that are called, or other names of the same machines, since each
    of several targets tells its own; empty: any that a caller names."""

    def __init__(self, allowed: frozenset[str] = frozenset(), security: PeerSecurity | None = None) -> None:
        self._allowed = allowed
        self._security = security
        self._connections: OrderedDict[str, _Connection] = OrderedDict()

    async def check(self, address: str) -> None:
        """Raises `InvalidRequest` for an address that this draft does not call."""
        is_one = 0 < len(address) <= MAX_ADDRESS_CHARS
        if is_one and self._allowed and address not in self._allowed:
            places = await _places(address)
            is_one = bool(places) and any([places <= await _places(allowed) for allowed in self._allowed])
        if not is_one:
            raise InvalidRequest("this draft pulls no guidance from that address; see its --guidance-targets")

    async def pull(self, start: DraftStart, score: Score = Score.SIMILARITY_VARIATION) -> tuple[Guidance, int]:
        """The guidance of the target's session of that name, and the bytes of its payload.

        Raises:
            InvalidRequest: this draft does not call that address.
            ServiceUnavailable: no target answers there, or it has no such session.
        """
        address = start.guidance_address
        await self.check(address)
        request = session_codec.guidance_request(start, score)
        await self._make_room()
        with self._using(address) as channel:
            stub = target_pb2_grpc.TargetStub(channel)
            call: AsyncIterator[target_pb2.GuidanceChunk] = aiter(
                stub.PullGuidance(request, timeout=GUIDANCE_TIMEOUT_S, metadata=request_metadata(start.request_id))
            )
            try:
                return await read_guidance(call)
            except grpc.aio.AioRpcError as error:
                raise ServiceUnavailable(f"no guidance from the target: {error.details()}") from None

    async def close(self) -> None:
        """Closes all connections."""
        for connection in self._connections.values():
            await connection.channel.close()

    @contextmanager
    def _using(self, address: str) -> Iterator[grpc.aio.Channel]:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(open_channel(address, self._security))
        self._connections.move_to_end(address)
        connection.num_users += 1
        try:
            yield connection.channel
        finally:
            connection.num_users -= 1

    async def _make_room(self) -> None:
        """Closes those that were not used for longest, where there are too many."""
        idle = [address for address, connection in self._connections.items() if not connection.num_users]
        closing = [self._connections.pop(address) for address in idle[: max(0, len(idle) - MAX_IDLE_CHANNELS)]]
        for connection in closing:
            await connection.channel.close()


# -- servicer ---------------------------------------------------------------------------------------------------------


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """Implements `proto/slipstream/rpc/v1/draft.proto`."""

    def __init__(self, engine: DraftEngine, targets: Targets) -> None:
        self.engine = engine
        self._targets = targets

    def register(self, server: grpc.aio.Server) -> None:
        """Serves from now on."""
        draft_pb2_grpc.add_DraftServicer_to_server(self, server)

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ModelInfo:
        return model_info_message(self.engine.model.info, self.engine.admission.load)

    async def Session(
        self, requests: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[draft_pb2.DraftEvent]:
        first = await first_of(requests, "start", "a session")
        request, join = session_codec.read_draft_start(first.start)
        request = replace(request, request_id=bound_request_id())
        if request.has_video and get_pruner(request.pruner).score is not None:
            await self._targets.check(request.guidance_address)
        announced, max_frames = first.start.frames, self.engine.model.info.max_frames
        shape = session_codec.frames_shape(announced, max_frames) if request.has_video else (0, 0, 0)
        num_frames, height, width = shape
        session = await self.engine.open(request, join, num_frames, (height, width))
        get_logger().info("session.opened", num_frames=num_frames, num_committed=len(join.committed))
        try:
            await self.engine.admit(session)
            if request.has_video:
                session.work.frames = await session_codec.read_frames(
                    announced, IdleLimit(requests, FRAMES_IDLE_S, FRAMES_STOPPED), max_frames
                )
                ready = await self._prepare(session)
            else:
                ready = DraftReady(prefill_s=await self.engine.prefill_text(session))
            for event in session_codec.draft_events(ready):
                yield event
            reading = heard(asyncio.create_task(self._read(session, requests)))
            try:
                async for chunk in self.engine.write(session):
                    for event in session_codec.draft_events(chunk):
                        yield event
            finally:
                reading.cancel()
            await reading
        finally:
            self.engine.close(session)
            get_logger().info("session.closed", num_written=len(session.line.output))

    async def close(self) -> None:
        """Closes the connections to targets."""
        await self._targets.close()

    async def _prepare(self, session: DraftSession) -> DraftReady:
        """Encodes while the guidance is on its way, prunes and prefills."""
        try:
            async with asyncio.TaskGroup() as group:  # of which one that fails ends the other
                encoding = group.create_task(_with_end(self.engine.encode(session)))
                pulling = group.create_task(_with_end(self._pull_guidance(session)))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        (embeddings, encode_s), encoded_at = encoding.result()
        (guidance, guidance_bytes), guided_at = pulling.result()
        keep, prune_s = await self.engine.choose_tokens(session, embeddings, guidance)
        prefill_s = await self.engine.prefill(session, embeddings, keep)
        get_logger().info("draft.ready", kept_tokens=len(keep), guidance_bytes=guidance_bytes)
        return DraftReady(
            kept_tokens=len(keep),
            video_tokens=session.plan.num_video_tokens,
            encode_s=encode_s,
            guidance_s=max(guided_at - encoded_at, 0.0),
            prune_s=prune_s,
            prefill_s=prefill_s,
            guidance_bytes=guidance_bytes,
            kept_digest=_digest(keep),
            kept=kept_tokens(keep, session.plan, self.engine.model.info.frame_size)
            if session.request.want_kept
            else None,
        )

    async def _pull_guidance(self, session: DraftSession) -> tuple[Guidance | None, int]:
        score = get_pruner(session.request.pruner).score
        return (None, 0) if score is None else await self._targets.pull(session.request, score)

    async def _read(self, session: DraftSession, requests: AsyncIterator[draft_pb2.DraftRequest]) -> None:
        """Hands restarts and advances to the engine until `end` or the end of the stream."""
        try:
            async for message in requests:
                action = session_codec.read_line(message)
                if action is None:
                    return
                self.engine.order(session, action)
        finally:
            self.engine.close(session)


async def _with_end(work: Awaitable[T]) -> tuple[T, float]:
    """What it brings, and when it had, by the event loop's clock."""
    return await work, asyncio.get_running_loop().time()


def _digest(keep: torch.Tensor) -> str:
    return hashlib.sha256(keep.to("cpu", torch.int64).numpy().astype("<i8").tobytes()).hexdigest()


def kept_tokens(keep: torch.Tensor, plan: PromptPlan, frame_size: FrameSize) -> KeptTokens | None:
    """Where the tokens that are kept, ascending int64 [n], lie over the frames. None where tokens lie in no grid, or
    are too many to tell."""
    num_tokens = plan.num_video_tokens
    side = math.isqrt(num_tokens // plan.num_steps)
    rows, columns = (plan.grid.num_rows, plan.grid.num_columns) if plan.grid else (side, side)
    if plan.num_steps * rows * columns != num_tokens or num_tokens > 8 * MAX_KEPT_BYTES:
        return None
    bits = np.zeros(num_tokens, np.bool_)
    bits[keep.cpu().numpy()] = True
    bitmap = np.packbits(bits, bitorder="little").tobytes()
    return KeptTokens(bitmap, plan.num_steps, rows, columns, middle_square=frame_size.shortest_edge > 0)


# -- guidance on the wire ---------------------------------------------------------------------------------------------

# Tensors as raw bytes in chunks, as the target's servicer writes them.

MAX_GUIDANCE_BYTES = 4 * 1024**3
_KINDS = (target_pb2.GUIDANCE_KIND_HIDDEN_STATES, target_pb2.GUIDANCE_KIND_SCORES)


async def read_guidance(chunks: AsyncIterator[target_pb2.GuidanceChunk]) -> tuple[Guidance, int]:
    """The guidance, and the bytes of its payload. Raises `ProtocolViolation` on anything but header and payload."""
    first = await anext(chunks, None)
    if first is None or first.WhichOneof("message") != "header":
        raise ProtocolViolation("guidance must begin with its header")
    header = first.header
    if header.kind not in _KINDS:
        raise ProtocolViolation(f"guidance is of no known kind: {header.kind}")
    scores_only = header.kind == target_pb2.GUIDANCE_KIND_SCORES
    num_values = 2 * header.video_tokens * header.hidden_size  # of the states behind no layer and behind layer L
    num_bytes = 4 * header.video_tokens if scores_only else 2 * num_values + 8 * header.hidden_size
    if not 0 < num_bytes <= MAX_GUIDANCE_BYTES:
        raise ProtocolViolation(f"guidance of {num_bytes} bytes is not accepted")
    payload = bytearray(num_bytes)
    received = 0
    async for chunk in chunks:
        data = chunk.data
        if received + len(data) > num_bytes:
            raise ProtocolViolation("guidance is longer than its header says")
        payload[received : received + len(data)] = data
        received += len(data)
    if received < num_bytes:
        raise ProtocolViolation("guidance is shorter than its header says")
    if scores_only:
        return Guidance(scores=torch.frombuffer(payload, dtype=torch.float32)), num_bytes
    states = torch.frombuffer(payload, dtype=torch.bfloat16, count=num_values)
    states = states.view(2, header.video_tokens, header.hidden_size)
    sums = torch.frombuffer(payload, dtype=torch.float32, offset=2 * num_values).view(2, header.hidden_size)
    return Guidance(video_states=(states[0], states[1]), text_sums=(sums[0], sums[1])), num_bytes
