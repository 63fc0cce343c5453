"""The target's gRPC face: reads a session's messages in order, calls the engine, writes its answers."""

from collections.abc import AsyncIterator

import grpc

from slipstream.engine.target_engine import TargetEngine
from slipstream.engine.target_session import Judgement, PrefillFacts, StageProgress, TargetSession
from slipstream.errors import ProtocolViolation
from slipstream.logs import get_logger
from slipstream.rpc import codec
from slipstream.rpc.grpc_options import ADVERTISED_KEY
from slipstream.rpc.guards import Patient
from slipstream.rpc.guidance import guidance_chunks
from slipstream.rpc.v1 import common_pb2, target_pb2, target_pb2_grpc
from slipstream.rpc.windows import JudgeRequest, read_judge, verdict_message
from slipstream.speculation.methods import GuidanceKind, Score

_GUIDANCE_NAMES = {number: name for name, number in codec.GUIDANCE_KINDS.items()}


class TargetServicer(target_pb2_grpc.TargetServicer):
    """Implements `proto/slipstream/rpc/v1/target.proto`."""

    def __init__(self, engine: TargetEngine, address: str = "", *, idle_timeout_s: float) -> None:
        """`address`: where this very process is reached, for callers whose address leads to several. A session whose
        caller is awaited for `idle_timeout_s` is ended."""
        self.engine = engine
        self._idle_timeout_s = idle_timeout_s
        self._metadata = ((ADVERTISED_KEY, address),) if address else ()

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ModelInfo:
        return codec.model_info_message(self.engine.model.info)

    async def Session(
        self, requests: AsyncIterator[target_pb2.TargetRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.TargetEvent]:
        requests = Patient(requests, self._idle_timeout_s)
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "start":
            raise ProtocolViolation("a session begins with `start`")
        request = codec.read_target_start(first.start)
        await context.send_initial_metadata(self._metadata)  # at once: the draft's session waits for it
        frames = await codec.read_frames(first.start.frames, requests, self.engine.model.info.max_frames)
        session = await self.engine.open(request, len(frames), frames.shape[1:3])
        get_logger().info("session.opened", num_frames=len(frames), prompt_tokens=session.plan.num_tokens)
        if request.lossy is not None:
            get_logger().info("session.lossy", method=request.lossy.method, keep=request.lossy.keep)
        try:
            async for progress in self.engine.prefill(session, frames):
                yield _prefill_event(progress)
            del frames
            async for judgement in self.engine.judge(session, JudgeRequest()):
                yield _verdict_event(judgement)
            if judgement.verdict.finish_reason is None:
                async for event in self._judge_windows(session, requests):
                    yield event
        finally:
            self.engine.close(session)
            get_logger().info("session.closed", num_tokens=len(session.committed))

    async def _judge_windows(
        self, session: TargetSession, requests: AsyncIterator[target_pb2.TargetRequest]
    ) -> AsyncIterator[target_pb2.TargetEvent]:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "end":
                return
            if kind != "judge":
                raise ProtocolViolation("after the prefill a session takes `judge` or `end`")
            async for judgement in self.engine.judge(session, read_judge(message.judge)):
                yield _verdict_event(judgement)
            if judgement.verdict.finish_reason is not None:
                return

    async def PullGuidance(
        self, request: target_pb2.PullGuidanceRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.GuidanceChunk]:
        kind = _GUIDANCE_NAMES.get(request.kind)
        if kind is None:
            raise ProtocolViolation(f"guidance is of kind {' or '.join(GuidanceKind)}")
        score = _read_score(request.score)
        guidance = await self.engine.guidance(request.session_id, kind, score)
        for chunk in guidance_chunks(guidance, self.engine.guidance_layer):
            yield chunk


def _prefill_event(progress: StageProgress | PrefillFacts) -> target_pb2.TargetEvent:
    if isinstance(progress, StageProgress):
        stage = f"STAGE_{progress.stage.name}"
        return target_pb2.TargetEvent(
            progress=target_pb2.Progress(stage=stage, done=progress.done, total=progress.total)
        )
    prefilled = target_pb2.Prefilled(
        prompt_tokens=progress.prompt_tokens,
        video_tokens=progress.video_tokens,
        encode_s=progress.encode_s,
        prefill_until_guidance_s=progress.until_guidance_s,
        prefill_after_guidance_s=progress.after_guidance_s,
        kv_bytes=progress.kv_bytes,
        reused_tokens=progress.reused_tokens,
    )
    return target_pb2.TargetEvent(prefilled=prefilled)


def _verdict_event(judgement: Judgement) -> target_pb2.TargetEvent:
    return verdict_message(judgement.verdict, judgement.pieces, judgement.facts)


def _read_score(name: str) -> Score:
    if name not in ("", *Score):
        raise ProtocolViolation(f"score {name!r} is unknown; known: {', '.join(Score)}")
    return Score(name or Score.SIMILARITY_VARIATION)
