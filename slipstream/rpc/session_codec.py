"""Sessions with the models on the wire: every message of target.proto and draft.proto to and from plain types."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import DraftFault, InvalidRequest, LimitExceeded, ProtocolViolation, VersionMismatch
from slipstream.messages import Frames
from slipstream.rpc.codec import (
    finish_reason_number,
    from_message,
    proposal_messages,
    read_finish_reason,
    read_proposals,
    read_sampling,
    to_message,
)
from slipstream.rpc.grpc_options import CHUNK_BYTES
from slipstream.rpc.v1 import common_pb2, draft_pb2, target_pb2
from slipstream.sampling.params import Proposal
from slipstream.session_messages import (
    DraftEvent,
    DraftReady,
    DraftStart,
    DraftTokens,
    Judgement,
    JudgeRequest,
    PassFacts,
    Prefilled,
    PrefillStage,
    StageProgress,
    TargetEvent,
    TargetStart,
)
from slipstream.speculation.company import Company
from slipstream.speculation.hints.tolerance import Hints, Tolerance
from slipstream.speculation.lines import MAX_NODES
from slipstream.speculation.methods import GuidanceKind, Lossy
from slipstream.speculation.protocol import (
    AdvanceLine,
    JoinPoint,
    JudgeWindow,
    LineAction,
    MoveLine,
    RestartLine,
    TokenTree,
    Verdict,
)

MAX_FRAMES_BYTES = 2 * 1024**3
"""Most pixels that one video may have: they are held in memory."""
MIN_CAPABILITY_BYTES = 16
MAX_PROPOSED_TOKENS = 8 * 1024
"""In the proposals of one message, of 7 bytes each, so that it has at most 64 KiB. A proposal itself counts as 3."""
MAX_PASSES, MAX_SELF_DRAFT = 1_000_000, 1024

_STAGES: dict[PrefillStage, Any] = {stage: target_pb2.Stage.Value(f"STAGE_{stage.name}") for stage in PrefillStage}
_STAGE_NAMES = {number: name for name, number in _STAGES.items()}
_GUIDANCE: dict[GuidanceKind, Any] = {
    kind: target_pb2.GuidanceKind.Value(f"GUIDANCE_KIND_{kind.name}") for kind in GuidanceKind
}
_GUIDANCE_NAMES = {number: name for name, number in _GUIDANCE.items()}

# -- frames -----------------------------------------------------------------------------------------------------------


def chunked(buffers: Iterable[memoryview]) -> Iterator[bytes]:
    """Cuts buffers into messages of CHUNK_BYTES."""
    for buffer in buffers:
        for start in range(0, len(buffer), CHUNK_BYTES):
            yield bytes(buffer[start : start + CHUNK_BYTES])


def frames_header(
    frames: Frames, seconds_per_frame: float | None = None, times_s: Sequence[float] = ()
) -> common_pb2.FramesHeader:
    """The header that announces the frames."""
    num_frames, height, width, _ = frames.shape
    header = common_pb2.FramesHeader(num_frames=num_frames, height=height, width=width, times_s=times_s)
    header.seconds_per_frame = seconds_per_frame or 0.0
    return header


class HasFrames(Protocol):
    """Whoever owns frames. They may end at any time, so that nobody else is to keep them."""

    @property
    def frames(self) -> Frames: ...


def frame_chunks(owner: HasFrames) -> Iterator[common_pb2.FrameChunk]:
    """The pixels, cut into messages. Between two of them nothing here holds the frames."""
    for start in range(0, owner.frames.nbytes, CHUNK_BYTES):
        yield common_pb2.FrameChunk(data=owner.frames.reshape(-1)[start : start + CHUNK_BYTES].tobytes())


def frames_shape(header: common_pb2.FramesHeader, max_frames: int) -> tuple[int, int, int]:
    """Number, height and width of the frames that are announced. Raises for what is not accepted."""
    num_frames, height, width = header.num_frames, header.height, header.width
    if not 0 < num_frames <= max_frames:
        raise InvalidRequest(f"a video must have 1 to {max_frames} frames here, not {num_frames}")
    if not (0 < width <= 8192 and 0 < height <= 8192):
        raise InvalidRequest(f"frames of {width} x {height} pixels are not accepted")
    if num_frames * height * width * 3 > MAX_FRAMES_BYTES:
        raise LimitExceeded(f"{num_frames} frames of {width} x {height} have more than {MAX_FRAMES_BYTES} bytes")
    return num_frames, height, width


async def read_frames(
    header: common_pb2.FramesHeader,
    requests: AsyncIterator[target_pb2.TargetRequest | draft_pb2.DraftRequest],
    max_frames: int,
) -> Frames:
    """Collects the pixels that the header announced; raises when more, fewer or other messages come."""
    frames = np.empty((*frames_shape(header, max_frames), 3), dtype=np.uint8)
    try:
        await _fill(frames.reshape(-1), requests)
    except BaseException:
        del frames  # a traceback would keep them
        raise
    return frames


async def _fill(
    pixels: NDArray[np.uint8], requests: AsyncIterator[target_pb2.TargetRequest | draft_pb2.DraftRequest]
) -> None:
    num_bytes, received = pixels.size, 0
    try:
        while received < num_bytes:
            message = await anext(requests, None)
            if message is None:
                raise ProtocolViolation("the stream ended before the last frame")
            data = message.frames.data if message.WhichOneof("message") == "frames" else b""
            if not data or received + len(data) > num_bytes:
                raise ProtocolViolation("the frames do not match their header")
            pixels[received : received + len(data)] = np.frombuffer(data, dtype=np.uint8)
            received += len(data)
    finally:
        del pixels  # a traceback would keep them


# -- to and from the target -------------------------------------------------------------------------------------------


def target_start(start: TargetStart, frames: Frames) -> target_pb2.TargetRequest:
    """Opens a session at the target; without `has_video` nothing is said of frames."""
    message = to_message(
        start,
        target_pb2.TargetStart,
        frames=frames_header(frames, start.seconds_per_frame, start.times_s) if start.has_video else None,
        self_draft=_self_draft(start),
        hints=_hints_message(start.hints) if start.hints else None,
    )
    return target_pb2.TargetRequest(start=message)


def read_target_start(message: target_pb2.TargetStart) -> TargetStart:
    """What was asked of the target."""
    if not message.session_id or message.max_new_tokens < 1:
        raise InvalidRequest("a session needs an id and at least one token to write")
    if message.with_guidance and len(message.guidance_capability) < MIN_CAPABILITY_BYTES:
        raise VersionMismatch(
            f"a session with guidance needs a capability of {MIN_CAPABILITY_BYTES} bytes; this gateway's release does "
            "not send one: upgrade the gateway"
        )
    return from_message(
        message,
        TargetStart,
        sampling=read_sampling(message.sampling),
        seconds_per_frame=message.frames.seconds_per_frame or None,
        times_s=tuple(message.frames.times_s),
        has_video=message.HasField("frames"),
        lossy=Lossy(message.lossy.method, message.lossy.keep).check() if message.HasField("lossy") else None,
        local_drafter=message.self_draft.drafter,
        self_draft_kept=message.self_draft.num_kept,
        hints=_read_hints(message.hints) if message.HasField("hints") else None,
    )


def _self_draft(start: TargetStart) -> target_pb2.SelfDraft | None:
    if not start.local_drafter:
        return None
    return target_pb2.SelfDraft(drafter=start.local_drafter, num_kept=start.self_draft_kept)


def _hints_message(hints: Hints) -> target_pb2.Hints:
    tolerance = hints.tolerance
    return to_message(hints, target_pb2.Hints, tolerance=tolerance.tau, tolerance_rule=tolerance.rule)


def _read_hints(message: target_pb2.Hints) -> Hints:
    """Raises `InvalidRequest` for a tolerance that there is not. Larger trees than any are taken for the largest."""
    tolerance = Tolerance(message.tolerance or 1.0, message.tolerance_rule or Tolerance.rule).check()
    return Hints(tuple(message.texts), min(message.max_rows, MAX_NODES), tolerance)


def judge_message(action: JudgeWindow, proposals: Sequence[Proposal] = ()) -> target_pb2.TargetRequest:
    """Asks for passes."""
    judge = target_pb2.Judge(
        window=action.window,
        num_passes=action.num_passes,
        proposals=proposal_messages(proposals),
        parents=action.parents,
        self_draft=action.self_draft,
    )
    return target_pb2.TargetRequest(judge=judge)


def read_judge(message: target_pb2.Judge) -> JudgeRequest:
    """What was asked for. Raises `ProtocolViolation` for what no target could do."""
    if not 0 < message.num_passes <= MAX_PASSES:
        raise ProtocolViolation(f"a request asks for 1 to {MAX_PASSES} passes, not {message.num_passes}")
    if message.self_draft > MAX_SELF_DRAFT or (message.self_draft and message.parents):
        raise ProtocolViolation(f"self-drafting takes no tree, and at most {MAX_SELF_DRAFT} tokens")
    tree = None
    if message.parents:
        if len(message.window) > MAX_NODES:
            raise ProtocolViolation(f"a tree of {len(message.window)} nodes; at most {MAX_NODES} are judged")
        try:
            tree = TokenTree(tuple(message.window), tuple(message.parents))
        except ValueError as error:
            raise ProtocolViolation(f"the window is no tree: {error}") from None
    proposals = read_proposals(message.proposals)
    return JudgeRequest(tuple(message.window), message.num_passes, proposals, tree, message.self_draft)


def target_event(event: TargetEvent) -> target_pb2.TargetEvent:
    """What the target says, for the wire."""
    match event:
        case StageProgress(stage, done, total):
            return target_pb2.TargetEvent(progress=target_pb2.Progress(stage=_STAGES[stage], done=done, total=total))
        case Prefilled():
            return target_pb2.TargetEvent(prefilled=to_message(event, target_pb2.Prefilled))
        case Judgement():
            return target_pb2.TargetEvent(verdict=_verdict_message(event))


def read_target_event(message: target_pb2.TargetEvent) -> TargetEvent:
    """What the target says. Raises `ProtocolViolation` for what says nothing."""
    kind = message.WhichOneof("message")
    if kind == "progress":
        progress = message.progress
        return StageProgress(_STAGE_NAMES.get(progress.stage, PrefillStage.QUEUED), progress.done, progress.total)
    if kind == "prefilled":
        return from_message(message.prefilled, Prefilled)
    if kind == "verdict":
        return _read_judgement(message.verdict)
    raise ProtocolViolation("the target sent an empty message")


def _verdict_message(judgement: Judgement) -> target_pb2.Verdict:
    verdict, facts = judgement.verdict, judgement.facts
    return to_message(
        judgement,
        target_pb2.Verdict,
        num_accepted=verdict.num_accepted,
        own_token=verdict.own_token,
        pass_s=facts.pass_s,
        num_drafted=facts.num_drafted,
        draft_s=facts.draft_s,
        company=to_message(facts.company, target_pb2.Company),
        kept_s=facts.kept_s,
        finish_reason=finish_reason_number(verdict.finish_reason),
        stop_string=verdict.stop_string,
        path=verdict.path,
        drafted=verdict.drafted,
    )


def _read_judgement(message: target_pb2.Verdict) -> Judgement:
    """Raises `ProtocolViolation` for a path or drafted tokens of another number."""
    if not {len(message.path), len(message.drafted)} <= {0, message.num_accepted}:
        raise ProtocolViolation("the target accepted another number of tokens than it names")
    verdict = Verdict(
        message.num_accepted,
        message.own_token if message.HasField("own_token") else None,
        read_finish_reason(message.finish_reason),
        message.stop_string,
        tuple(message.path),
        tuple(message.drafted),
    )
    facts = from_message(message, PassFacts, company=from_message(message.company, Company).believed)
    return from_message(message, Judgement, verdict=verdict, facts=facts)


# -- to and from the draft --------------------------------------------------------------------------------------------


def guidance_request(start: DraftStart, score: str) -> target_pb2.PullGuidanceRequest:
    """Asks a target for the guidance of a draft's session."""
    return target_pb2.PullGuidanceRequest(
        session_id=start.session_id,
        kind=_GUIDANCE[start.guidance],
        score=score,
        capability=start.guidance_capability,
    )


def read_guidance_kind(number: int) -> GuidanceKind:
    """Raises `InvalidRequest` for a number that names none."""
    name = _GUIDANCE_NAMES.get(number)
    if name is None:
        raise InvalidRequest(f"guidance must be {' or '.join(GuidanceKind)}")
    return name


def draft_start(start: DraftStart, join: JoinPoint, frames: Frames) -> draft_pb2.DraftRequest:
    """Opens a session at the draft."""
    message = to_message(
        start,
        draft_pb2.DraftStart,
        frames=frames_header(frames, start.seconds_per_frame, start.times_s) if start.has_video else None,
        guidance=_GUIDANCE[start.guidance],
        committed=join.committed,
        write_until=join.write_until,
        first_chunk=join.first_chunk,
        epoch=join.epoch,
    )
    return draft_pb2.DraftRequest(start=message)


def read_draft_start(message: draft_pb2.DraftStart) -> tuple[DraftStart, JoinPoint]:
    """What was asked of the draft."""
    start = from_message(
        message,
        DraftStart,
        guidance=read_guidance_kind(message.guidance),
        sampling=read_sampling(message.sampling),
        seconds_per_frame=message.frames.seconds_per_frame or None,
        times_s=tuple(message.frames.times_s),
        has_video=message.HasField("frames"),
    )
    return start, JoinPoint(message.epoch, tuple(message.committed), message.write_until, message.first_chunk)


def line_message(action: LineAction) -> draft_pb2.DraftRequest:
    """Starts a new line, or lets the line go on."""
    match action:
        case AdvanceLine():
            return draft_pb2.DraftRequest(advance=to_message(action, draft_pb2.Advance))
        case MoveLine():
            return draft_pb2.DraftRequest(move=to_message(action, draft_pb2.Move))
        case RestartLine():
            return draft_pb2.DraftRequest(restart=to_message(action, draft_pb2.Restart))


def read_line(message: draft_pb2.DraftRequest) -> LineAction | None:
    """What the line is to do; None: it has ended. Raises `ProtocolViolation`."""
    kind = message.WhichOneof("message")
    if kind == "advance":
        return from_message(message.advance, AdvanceLine)
    if kind == "move":
        return from_message(message.move, MoveLine)
    if kind == "restart":
        if not message.restart.suffix:
            raise ProtocolViolation("a restart needs at least one token to go on from")
        return from_message(message.restart, RestartLine)
    if kind == "end":
        return None
    raise ProtocolViolation("a line takes `restart`, `advance`, `move` or `end`")


def draft_events(event: DraftEvent) -> Iterator[draft_pb2.DraftEvent]:
    """What the draft says, for the wire: tokens with proposals in several messages, as each must stay small."""
    if isinstance(event, DraftReady):
        yield draft_pb2.DraftEvent(ready=to_message(event, draft_pb2.DraftReady))
        return
    first = size = 0
    for index, proposal in enumerate(event.proposals):
        size += len(proposal.token_ids) + 3
        if size > MAX_PROPOSED_TOKENS and index > first:
            yield _tokens_event(_part(event, first, index))
            first, size = index, len(proposal.token_ids) + 3
    yield _tokens_event(_part(event, first, len(event.token_ids)))


def _part(tokens: DraftTokens, first: int, end: int) -> DraftTokens:
    """Some of the tokens of a chain, in the place where they stand; all of them as they are."""
    if end - first == len(tokens.token_ids):
        return tokens
    token_ids, proposals = tokens.token_ids[first:end], tokens.proposals[first:end]
    return replace(tokens, position=tokens.position + first, token_ids=token_ids, proposals=proposals)


def _tokens_event(event: DraftTokens) -> draft_pb2.DraftEvent:
    proposals = proposal_messages(event.proposals)
    return draft_pb2.DraftEvent(tokens=to_message(event, draft_pb2.DraftTokens, proposals=proposals))


def read_draft_event(message: draft_pb2.DraftEvent) -> DraftEvent:
    """What the draft says. Raises `DraftFault` for what says nothing."""
    kind = message.WhichOneof("message")
    if kind == "ready":
        return from_message(message.ready, DraftReady)
    if kind != "tokens":
        raise DraftFault("the draft sent an empty message")
    return from_message(message.tokens, DraftTokens, proposals=read_proposals(message.tokens.proposals))
