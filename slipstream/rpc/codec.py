"""Between wire messages and our dataclasses. Imports no torch: the gateway reads these messages too."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipstream.errors import InvalidRequest, LimitExceeded, ProtocolViolation
from slipstream.rpc.channels import chunked
from slipstream.rpc.v1 import common_pb2, draft_pb2, target_pb2
from slipstream.rpc.windows import read_sampling, sampling_message
from slipstream.sampling.params import GREEDY, SamplingParams
from slipstream.speculation.methods import Lossy
from slipstream.speculation.pipeline import AdvanceLine, JoinPoint, RestartLine

if TYPE_CHECKING:
    from slipstream.engine.video_lm import ModelInfo

Frames = np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]]
"""RGB frames [n, height, width, 3]."""
MAX_FRAMES_BYTES = 2 * 1024**3
"""Most pixels that one video may have: they are held in memory."""

GUIDANCE_KINDS = {
    "hidden_states": target_pb2.GUIDANCE_KIND_HIDDEN_STATES,
    "scores": target_pb2.GUIDANCE_KIND_SCORES,
}


@dataclass(frozen=True)
class TargetRequest:
    """What a caption asks of the target before any token."""

    session_id: str
    prompt: str
    max_new_tokens: int
    with_guidance: bool
    sampling: SamplingParams = GREEDY
    seconds_per_frame: float | None = None
    """None: not known."""
    with_attention: bool = False
    """Record the attention of the text to the video."""
    lossy: Lossy | None = None
    local_drafter: str = ""
    """The method whose drafter drafts at the target, for this session; empty: none does."""
    self_draft_kept: int = 0
    """Video tokens that this drafter sees, where it sees a part of them."""


@dataclass(frozen=True)
class DraftRequest:
    """What a caption asks of the draft before any token."""

    session_id: str
    prompt: str
    pruner: str
    alpha: float
    positions: str
    guidance: str
    guidance_address: str
    seed: int
    sampling: SamplingParams = GREEDY
    seconds_per_frame: float | None = None
    tree: bool = False
    """Every line is one tree of candidates."""


def model_info_message(info: "ModelInfo") -> common_pb2.ModelInfo:
    """What a model service serves, for the wire."""
    names = [field.name for field in common_pb2.ModelInfo.DESCRIPTOR.fields]
    return common_pb2.ModelInfo(**{name: getattr(info, name) for name in names})


# -- frames -----------------------------------------------------------------------------------------------------------


def frames_header(frames: Frames, seconds_per_frame: float | None = None) -> common_pb2.FramesHeader:
    """The header that announces the frames."""
    num_frames, height, width, _ = frames.shape
    return common_pb2.FramesHeader(
        num_frames=num_frames, height=height, width=width, seconds_per_frame=seconds_per_frame or 0.0
    )


def frame_chunks(frames: Frames) -> Iterator[common_pb2.FrameChunk]:
    """The pixels, cut into messages."""
    for data in chunked([np.ascontiguousarray(frames).data.cast("B")]):
        yield common_pb2.FrameChunk(data=data)


async def read_frames(
    header: common_pb2.FramesHeader,
    requests: AsyncIterator[target_pb2.TargetRequest | draft_pb2.DraftRequest],
    max_frames: int,
) -> Frames:
    """Collects the pixels that the header announced; raises when more, fewer or other messages come."""
    num_frames, height, width = header.num_frames, header.height, header.width
    if not 0 < num_frames <= max_frames:
        raise InvalidRequest(f"a video must have 1 to {max_frames} frames here, not {num_frames}")
    if not (0 < width <= 8192 and 0 < height <= 8192):
        raise InvalidRequest(f"frames of {width} x {height} pixels are not accepted")
    if num_frames * height * width * 3 > MAX_FRAMES_BYTES:
        raise LimitExceeded(f"{num_frames} frames of {width} x {height} have more than {MAX_FRAMES_BYTES} bytes")
    frames = np.empty((num_frames, height, width, 3), dtype=np.uint8)
    flat = frames.reshape(-1)
    received = 0
    while received < flat.size:
        try:
            message = await anext(requests)
        except StopAsyncIteration:
            raise ProtocolViolation("the stream ended before the last frame") from None
        data = message.frames.data if message.WhichOneof("message") == "frames" else b""
        if not data or received + len(data) > flat.size:
            raise ProtocolViolation("the frames do not match their header")
        flat[received : received + len(data)] = np.frombuffer(data, dtype=np.uint8)
        received += len(data)
    return frames


# -- target -----------------------------------------------------------------------------------------------------------


def target_start(request: TargetRequest, frames: Frames) -> target_pb2.TargetRequest:
    """Opens a session at the target."""
    start = target_pb2.TargetStart(
        session_id=request.session_id,
        prompt=request.prompt,
        frames=frames_header(frames, request.seconds_per_frame),
        max_new_tokens=request.max_new_tokens,
        with_guidance=request.with_guidance,
        sampling=sampling_message(request.sampling),
        with_attention=request.with_attention,
        lossy=target_pb2.Lossy(method=request.lossy.method, keep=request.lossy.keep) if request.lossy else None,
        self_draft=_self_draft(request),
    )
    return target_pb2.TargetRequest(start=start)


def _self_draft(request: TargetRequest) -> target_pb2.SelfDraft | None:
    if not request.local_drafter:
        return None
    return target_pb2.SelfDraft(drafter=request.local_drafter, num_kept=request.self_draft_kept)


def read_target_start(message: target_pb2.TargetStart) -> TargetRequest:
    """What was asked of the target."""
    if not message.session_id or message.max_new_tokens < 1:
        raise InvalidRequest("a session needs an id and at least one token to write")
    return TargetRequest(
        session_id=message.session_id,
        prompt=message.prompt,
        max_new_tokens=message.max_new_tokens,
        with_guidance=message.with_guidance,
        sampling=read_sampling(message.sampling),
        seconds_per_frame=message.frames.seconds_per_frame or None,
        with_attention=message.with_attention,
        lossy=Lossy(message.lossy.method, message.lossy.keep).check() if message.HasField("lossy") else None,
        local_drafter=message.self_draft.drafter,
        self_draft_kept=message.self_draft.num_kept,
    )


# -- draft ------------------------------------------------------------------------------------------------------------


def draft_start(request: DraftRequest, join: JoinPoint, frames: Frames) -> draft_pb2.DraftRequest:
    """Opens a session at the draft."""
    start = draft_pb2.DraftStart(
        session_id=request.session_id,
        prompt=request.prompt,
        frames=frames_header(frames, request.seconds_per_frame),
        pruner=request.pruner,
        alpha=request.alpha,
        positions=request.positions,
        guidance=GUIDANCE_KINDS[request.guidance],
        guidance_address=request.guidance_address,
        seed=request.seed,
        committed=join.committed,
        write_until=join.write_until,
        first_chunk=join.first_chunk,
        epoch=join.epoch,
        sampling=sampling_message(request.sampling),
        tree=request.tree,
    )
    return draft_pb2.DraftRequest(start=start)


def read_draft_start(message: draft_pb2.DraftStart) -> tuple[DraftRequest, JoinPoint]:
    """What was asked of the draft."""
    guidance = {number: name for name, number in GUIDANCE_KINDS.items()}.get(message.guidance)
    if guidance is None:
        raise InvalidRequest("guidance must be hidden_states or scores")
    request = DraftRequest(
        session_id=message.session_id,
        prompt=message.prompt,
        pruner=message.pruner,
        alpha=message.alpha,
        positions=message.positions,
        guidance=guidance,
        guidance_address=message.guidance_address,
        seed=message.seed,
        sampling=read_sampling(message.sampling),
        seconds_per_frame=message.frames.seconds_per_frame or None,
        tree=message.tree,
    )
    join = JoinPoint(message.epoch, tuple(message.committed), message.write_until, message.first_chunk)
    return request, join


def restart_message(action: RestartLine) -> draft_pb2.DraftRequest:
    """Starts a new line."""
    restart = draft_pb2.Restart(
        epoch=action.epoch,
        keep=action.keep,
        suffix=action.suffix,
        write_until=action.write_until,
        first_chunk=action.first_chunk,
    )
    return draft_pb2.DraftRequest(restart=restart)


def read_restart(message: draft_pb2.Restart) -> RestartLine:
    """The line to start."""
    suffix = tuple(message.suffix)
    if not suffix:
        raise ProtocolViolation("a restart needs at least one token to go on from")
    return RestartLine(message.epoch, message.keep, suffix, message.write_until, message.first_chunk)


def advance_message(action: AdvanceLine) -> draft_pb2.DraftRequest:
    """Lets the line go on."""
    return draft_pb2.DraftRequest(advance=draft_pb2.Advance(epoch=action.epoch, write_until=action.write_until))


def read_advance(message: draft_pb2.Advance) -> AdvanceLine:
    """How far the line may go."""
    return AdvanceLine(message.epoch, message.write_until)
