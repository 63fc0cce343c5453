"""The target's gRPC face: reads a session's messages in order, calls the engine, writes its answers and guidance."""

import sys
from collections.abc import AsyncIterator, Iterator

import grpc
import torch
from torch import Tensor

from slipstream.engine.target_engine import TargetEngine
from slipstream.engine.target_prefill import TargetSession
from slipstream.errors import ProtocolViolation
from slipstream.logs import get_logger
from slipstream.pruning import Guidance
from slipstream.rpc import session_codec
from slipstream.rpc.codec import model_info_message
from slipstream.rpc.grpc_options import ADVERTISED_KEY, QUEUED_KEY
from slipstream.rpc.message_limits import IdleLimit, first_of, send_headers, write_steadily
from slipstream.rpc.v1 import common_pb2, target_pb2, target_pb2_grpc
from slipstream.session_messages import JudgeRequest, PrefillStage, StageProgress, TargetEvent
from slipstream.speculation.methods import Score

PULL_IDLE_S = 60.0
"""How long a chunk of guidance may wait until the draft takes it: one so slow brings nothing to its caption."""


class TargetServicer(target_pb2_grpc.TargetServicer):
    """Implements `proto/slipstream/rpc/v1/target.proto`."""

    def __init__(self, engine: TargetEngine, address: str = "", *, idle_timeout_s: float) -> None:
        """`address`: where this very process is reached, for callers whose address leads to several. A session whose
        caller is awaited for `idle_timeout_s` is ended."""
        self.engine = engine
        self._idle_timeout_s = idle_timeout_s
        self._metadata = ((ADVERTISED_KEY, address),) if address else ()

    def register(self, server: grpc.aio.Server) -> None:
        """Serves from now on."""
        target_pb2_grpc.add_TargetServicer_to_server(self, server)

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ModelInfo:
        return model_info_message(self.engine.model.info, self.engine.admission.load)

    async def Session(
        self, requests: AsyncIterator[target_pb2.TargetRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.TargetEvent]:
        requests = IdleLimit(requests, self._idle_timeout_s)
        first = await first_of(requests, "start", "a session")
        request = session_codec.read_target_start(first.start)
        announced, max_frames = first.start.frames, self.engine.model.info.max_frames
        shape = session_codec.frames_shape(announced, max_frames) if request.has_video else (0, 0, 0)
        num_frames, height, width = shape
        session = await self.engine.open(request, num_frames, (height, width))
        get_logger().info("session.opened", num_frames=num_frames, prompt_tokens=session.plan.num_tokens)
        if request.lossy is not None:
            get_logger().info("session.lossy", method=request.lossy.method, keep=request.lossy.keep)
        if request.hints is not None and request.hints.tolerance.is_lossy:
            get_logger().info("session.lossy", method=request.local_drafter, tolerance=request.hints.tolerance.tau)
        try:
            queued = () if session.has_place else ((QUEUED_KEY, "1"),)
            await send_headers(context, (*self._metadata, *queued))  # at once: the draft's session waits for it
            async for waiting in self.engine.admit(session):
                yield session_codec.target_event(waiting)
            if queued:
                yield session_codec.target_event(StageProgress(PrefillStage.ENCODE, 0, num_frames))
            if request.has_video:
                session.work.frames = await session_codec.read_frames(announced, requests, max_frames)
            async for progress in self.engine.prefill(session):
                yield session_codec.target_event(progress)
            if session.carried_share:
                get_logger().info("session.rode", share=round(session.carried_share, 3))
            async for judgement in self._judge_all(session, requests):
                yield session_codec.target_event(judgement)
        finally:
            self.engine.close(session)
            get_logger().info("session.closed", num_tokens=len(session.committed))

    async def _judge_all(
        self, session: TargetSession, requests: AsyncIterator[target_pb2.TargetRequest]
    ) -> AsyncIterator[TargetEvent]:
        """The prefill's own token first, then what is asked, until the text ends or the caller has enough."""
        request = JudgeRequest()
        while True:
            async for judgement in self.engine.judge(session, request):
                yield judgement
            message = await anext(requests, None) if judgement.verdict.finish_reason is None else None
            kind = message.WhichOneof("message") if message is not None else "end"
            if message is None or kind == "end":
                return
            if kind != "judge":
                raise ProtocolViolation("after the prefill a session takes `judge` or `end`")
            request = session_codec.read_judge(message.judge)

    async def PullGuidance(self, request: target_pb2.PullGuidanceRequest, context: grpc.aio.ServicerContext) -> None:
        kind = session_codec.read_guidance_kind(request.kind)
        score = _read_score(request.score)
        async with self.engine.guidance(request.session_id, kind, score, capability=request.capability) as guidance:
            await write_steadily(context, guidance_chunks(guidance, self.engine.guidance_layer), PULL_IDLE_S)

    async def AddHints(
        self, request: target_pb2.AddHintsRequest, context: grpc.aio.ServicerContext
    ) -> target_pb2.AddHintsResponse:
        texts = tuple(request.texts)
        num_tokens = await self.engine.add_hints(request.session_id, texts, capability=request.capability)
        return target_pb2.AddHintsResponse(num_tokens=num_tokens)


def _read_score(name: str) -> Score:
    if name not in ("", *Score):
        raise ProtocolViolation(f"score {name!r} is unknown; known: {', '.join(Score)}")
    return Score(name or Score.SIMILARITY_VARIATION)


# -- guidance on the wire ---------------------------------------------------------------------------------------------

# Tensors as raw bytes in chunks; the draft's servicer reads them.

if sys.byteorder != "little":  # the wire is little-endian, and tensors are sent as they lie in memory
    raise ImportError("slipstream needs a little-endian machine")


def guidance_chunks(guidance: Guidance, layer: int) -> Iterator[target_pb2.GuidanceChunk]:
    """Header and payload, as `GuidanceHeader` describes them."""
    if guidance.scores is not None:
        kind, payload = target_pb2.GUIDANCE_KIND_SCORES, [guidance.scores]
        video_tokens, hidden_size = len(guidance.scores), 0
    else:
        assert guidance.video_states is not None and guidance.text_sums is not None
        kind, payload = target_pb2.GUIDANCE_KIND_HIDDEN_STATES, [*guidance.video_states, *guidance.text_sums]
        video_tokens, hidden_size = guidance.video_states[0].shape
    header = target_pb2.GuidanceHeader(kind=kind, video_tokens=video_tokens, hidden_size=hidden_size, layer=layer)
    yield target_pb2.GuidanceChunk(header=header)
    for data in session_codec.chunked(_as_bytes(tensor) for tensor in payload):
        yield target_pb2.GuidanceChunk(data=data)


def _as_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
