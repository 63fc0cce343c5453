"""One caption, from sampled frames to the last token: the only I/O around the protocol's state machine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from slipstream.captioning.draft_link import DraftLink, Proposals
from slipstream.captioning.options import CaptionOptions
from slipstream.captioning.peers import Peers
from slipstream.captioning.stats import Ledger, Tracer
from slipstream.errors import DraftFault, Overloaded, ProtocolViolation, ServiceUnavailable, SlipstreamError
from slipstream.rpc import codec, windows
from slipstream.rpc.channels import as_slipstream_error, request_metadata
from slipstream.rpc.grpc_options import ADVERTISED_KEY
from slipstream.rpc.v1 import common_pb2, draft_pb2, gateway_pb2, target_pb2
from slipstream.speculation.actions import (
    Action,
    AdvanceLine,
    Commit,
    Finish,
    JoinPoint,
    JudgeWindow,
    RestartLine,
)
from slipstream.speculation.gate import Gate
from slipstream.speculation.methods import SPARSE_GAMMA, Shape
from slipstream.speculation.pacing import CostModel, get_policy
from slipstream.speculation.pipeline import SOLO_PASSES, DraftPhase, Pipeline
from slipstream.video.decode import SampledVideo

# -- hold timer -------------------------------------------------------------------------------------------------------

# Bounds how long the target is held for the draft, and measures it.


class HoldTimer:
    """One hold after the other. `watch` it after every event."""

    def __init__(self, on_expired: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_expired = on_expired
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._held_s = 0.0

    def watch(self, holding: bool, longest_s: float) -> None:
        """A hold that begins may last `longest_s`; one that goes on keeps its limit; one that ended is counted."""
        if holding and self._timer is None:
            self._since = self._loop.time()
            self._timer = self._loop.call_later(longest_s, self._on_expired)
        elif not holding and self._timer is not None:
            self._held_s += self._loop.time() - self._since
            self.cancel()

    def take_held_s(self) -> float:
        """Seconds held since this was asked last."""
        held_s, self._held_s = self._held_s, 0.0
        return held_s

    def cancel(self) -> None:
        """Nothing expires any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# -- requests ---------------------------------------------------------------------------------------------------------

# What a caption's options ask of the two model services.


def target_request(options: CaptionOptions, video: SampledVideo, tokens_per_frame: int) -> codec.TargetRequest:
    """To the target. The share `alpha` of the video is also what a target that drafts for itself leaves out."""
    num_kept = max(round((1 - options.alpha) * len(video.frames) * tokens_per_frame), 1)
    return codec.TargetRequest(
        session_id=options.request_id,
        prompt=options.prompt,
        max_new_tokens=options.max_new_tokens,
        with_guidance=options.speculative,
        sampling=options.sampling,
        seconds_per_frame=_seconds_per_frame(video),
        with_attention=options.with_attention,
        lossy=options.lossy,
        local_drafter=options.method if options.drafts_itself else "",
        self_draft_kept=num_kept if options.drafts_itself else 0,
    )


def draft_request(options: CaptionOptions, video: SampledVideo, guidance_address: str) -> codec.DraftRequest:
    """To the draft, which pulls guidance at that address."""
    return codec.DraftRequest(
        session_id=options.request_id,
        prompt=options.prompt,
        pruner=options.pruner,
        alpha=options.alpha,
        positions=options.positions,
        guidance=options.guidance,
        guidance_address=guidance_address,
        seed=options.seed,
        sampling=options.sampling,
        seconds_per_frame=_seconds_per_frame(video),
        tree=options.shape is Shape.TREE,
    )


def _seconds_per_frame(video: SampledVideo) -> float:
    """Frames are sampled evenly over the clip's duration."""
    return video.duration_s / len(video.frames)


# -- caption ----------------------------------------------------------------------------------------------------------

SHORTEST_PASS_S, LONGEST_PASS_S = 1e-6, 1e3
"""What a draft may claim of its speed: pacing divides by it."""
_STAGE_NAMES = {
    target_pb2.STAGE_QUEUED: "queued",
    target_pb2.STAGE_ENCODE: "encode",
    target_pb2.STAGE_PREFILL: "prefill",
}
Emit = Callable[[gateway_pb2.CaptionEvent], None]


class Caption:
    """Drives one caption. Reads both model streams, feeds the pipeline and carries out its actions at once.

    Everything happens on the event loop and nothing in an event handler awaits, so the order of events is the order
    of actions; messages leave through queues.
    """

    def __init__(
        self,
        options: CaptionOptions,
        video: SampledVideo,
        peers: Peers,
        costs: CostModel,
        ledger: Ledger,
        emit: Emit,
        *,
        draft_silence_s: float,
        timeout_s: float,
    ) -> None:
        target_model = peers.target.model
        assert target_model is not None, "the target has been asked"
        self._options = options
        self._tokens_per_frame = target_model.tokens_per_frame
        self._video = video
        self._peers = peers
        self._ledger = ledger
        self._emit = emit
        self._trace = Tracer(emit, is_on=options.trace)
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._pipeline = Pipeline(
            get_policy(options.policy, options.gamma),
            costs,
            max_window=options.max_window,
            vocab_size=target_model.vocab_size,
            gate=Gate(costs) if options.gate and options.speculative else None,
            solo_passes=SOLO_PASSES if options.speculative else options.max_new_tokens,
            shape=options.shape,
            self_draft=options.gamma or SPARSE_GAMMA if options.drafts_itself else 0,
        )
        self._to_target: asyncio.Queue[target_pb2.TargetRequest | None] = asyncio.Queue()
        self._draft_silence_s = draft_silence_s
        self._call: grpc.aio.StreamStreamCall | None = None
        self._draft_link: DraftLink | None = None
        self._drafting: asyncio.Task[None] | None = None
        self._proposals = Proposals(required=options.sends_proposals, vocab_size=target_model.vocab_size)
        self._hold = HoldTimer(self._on_hold_expired)
        self._window_len = 0
        self._pass_started = 0.0
        self._restarted_at: float | None = None

    async def run(self) -> gateway_pb2.Summary:
        """To the end of the text. Cancelled, it stops both services."""
        call = self._call = self._peers.target.stub.Session(
            self._target_messages(), timeout=self._timeout_s, metadata=request_metadata(self._options.request_id)
        )
        self._seek_draft()
        try:
            async for event in call:
                self._on_target_event(event)
        except grpc.aio.AioRpcError as error:
            if self._pipeline.finish_reason is None:  # else our `end` has only crossed the target's own
                raise self._target_failure(error) from None
        except ProtocolViolation as error:
            raise SlipstreamError(f"the target broke the protocol: {error}") from error
        finally:
            self._hold.cancel()
            if self._drafting:
                self._drafting.cancel()
            call.cancel()
            self._to_target.put_nowait(None)  # grpc would wait for messages of a call that the target has ended
        if self._pipeline.finish_reason is None:
            raise ServiceUnavailable("the target ended the session before the text was complete")
        return self._ledger.summary(self._options, self._video, self._pipeline, self._pipeline.finish_reason)

    # -- what the draft says (DraftListener) --------------------------------------------------------------------------

    def draft_joining(self) -> JoinPoint:
        return self._pipeline.on_draft_joining()

    def draft_ready(self, num_known: int, ready: draft_pb2.DraftReady) -> None:
        self._ledger.joined(self._loop.time(), ready)
        self._emit_stage("draft_ready", ready.kept_tokens, ready.video_tokens)
        self._carry_out(self._pipeline.on_draft_ready(num_known))

    def draft_wrote(self, tokens: draft_pb2.DraftTokens) -> None:
        costs, num_tokens = self._pipeline.costs, len(tokens.token_ids)
        if not num_tokens:
            raise DraftFault("the draft sent a chunk without tokens")
        if not SHORTEST_PASS_S <= tokens.pass_s <= LONGEST_PASS_S:
            raise DraftFault(f"the draft says that a pass took {tokens.pass_s} s")
        self._proposals.check(tokens)
        costs.draft_pass_s.observe(tokens.pass_s)
        if self._restarted_at is not None and tokens.epoch == self._pipeline.epoch:
            waited_s = self._loop.time() - self._restarted_at
            costs.restart_s.observe(max(waited_s - num_tokens * tokens.pass_s, 0.0))
            self._restarted_at = None
        self._ledger.drafted(tokens)
        self._trace.drafted(self._loop.time(), tokens, stale=tokens.epoch != self._pipeline.epoch)
        actions = self._pipeline.on_draft_tokens(tokens.epoch, tokens.position, tokens.token_ids, tokens.parents)
        if self._pipeline.draft_phase is DraftPhase.WRITING and tokens.epoch == self._pipeline.epoch:
            self._proposals.remember(tokens)
        self._carry_out(actions)

    def draft_lost(self, reason: str) -> None:
        self._ledger.drafts_lost += 1
        self._proposals.forget()
        self._emit_stage("draft_lost", detail=reason)
        self._carry_out(self._pipeline.on_draft_lost())

    def draft_missing(self, reason: str) -> None:
        self._emit_stage("draft_missing", detail=reason)

    @property
    def draft_owes(self) -> bool:
        return self._pipeline.draft_owes

    # -- what the target says -----------------------------------------------------------------------------------------

    def _on_target_event(self, event: target_pb2.TargetEvent) -> None:
        kind = event.WhichOneof("message")
        if kind == "progress":
            progress = event.progress
            if progress.stage == target_pb2.STAGE_QUEUED:
                self._leave_draft()
            else:
                self._seek_draft()
            self._emit_stage(_STAGE_NAMES.get(progress.stage, "queued"), progress.done, progress.total)
        elif kind == "prefilled":
            self._ledger.prefilled = event.prefilled
            self._emit_stage("generate")
        elif kind == "verdict":
            self._on_verdict(event.verdict)
        else:
            raise ProtocolViolation("the target sent an empty message")

    def _on_verdict(self, message: target_pb2.Verdict) -> None:
        now = self._loop.time()
        round_s, held_s = now - self._pass_started, self._hold.take_held_s()
        self._trace.passed(now, self._pass_started, self._window_len or message.num_drafted, message)
        if self._pipeline.committed:
            window_len = self._window_len or message.num_drafted
            self._pipeline.costs.target_pass_s.observe(window_len, round_s)
            self._ledger.passed(window_len, message.pass_s, round_s, held_s)
            self._ledger.self_drafted(message)
        self._pass_started, self._window_len = now, 0
        self._ledger.stop_string = message.stop_string
        actions = self._pipeline.on_verdict(windows.read_verdict(message), round_s, held_s)
        self._carry_out(actions, message.pieces)

    # -- actions ------------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action], pieces: Sequence[str] = ()) -> None:
        for action in actions:
            match action:
                case JudgeWindow():
                    proposals = self._proposals.take(len(self._pipeline.committed), action.window)
                    self._to_target.put_nowait(windows.judge_message(action, proposals))
                    self._window_len, self._pass_started = len(action.window), self._loop.time()
                case RestartLine() | AdvanceLine():
                    assert self._draft_link is not None
                    self._draft_link.send(action)
                    if isinstance(action, RestartLine):
                        self._proposals.forget()
                        self._trace.restarted(self._loop.time())
                        self._restarted_at = self._loop.time() if action.may_write else None
                case Commit():
                    self._commit(action, pieces)
                case Finish():
                    self._to_target.put_nowait(None)
        self._hold.watch(self._pipeline.holding, self._pipeline.longest_hold_s)

    def _commit(self, action: Commit, pieces: Sequence[str]) -> None:
        if len(pieces) != len(action.tokens):
            raise ProtocolViolation("the target sent a verdict without the text of its tokens")
        self._ledger.committed(self._loop.time(), list(pieces))
        tokens = [
            gateway_pb2.CommittedToken(token_id=token, piece=piece, from_draft=index < action.num_from_draft)
            for index, (token, piece) in enumerate(zip(action.tokens, pieces, strict=True))
        ]
        self._emit(gateway_pb2.CaptionEvent(text=gateway_pb2.CommittedText(tokens=tokens)))

    def _on_hold_expired(self) -> None:
        self._carry_out(self._pipeline.on_hold_expired())

    # -- the streams --------------------------------------------------------------------------------------------------

    async def _target_messages(self) -> AsyncIterator[target_pb2.TargetRequest]:
        frames = self._video.frames
        request = target_request(self._options, self._video, self._tokens_per_frame)
        yield codec.target_start(request, frames)
        for chunk in codec.frame_chunks(frames):
            yield target_pb2.TargetRequest(frames=chunk)
        while (message := await self._to_target.get()) is not None:
            yield message
        yield target_pb2.TargetRequest(end=common_pb2.End())

    def _seek_draft(self) -> None:
        """Has a draft take part. The link is always a new one, as the last may still be ending."""
        if self._drafting is None and self._options.speculative:
            self._draft_link = DraftLink(
                self._peers,
                self._draft_request,
                self._video.frames,
                self,
                silence_s=self._draft_silence_s,
                timeout_s=self._timeout_s,
            )
            self._drafting = asyncio.create_task(self._draft_link.run())

    async def _draft_request(self) -> codec.DraftRequest:
        """Known once the target has taken the call: where there are several, only this one has the guidance."""
        assert self._call is not None, "the target is called before the draft"
        said = dict(await self._call.initial_metadata() or ())
        address = str(said.get(ADVERTISED_KEY) or self._peers.target.address)
        return draft_request(self._options, self._video, address)

    def _leave_draft(self) -> None:
        """While this caption waits for the target, one that is served needs the draft's place more."""
        if self._drafting is not None:
            self._drafting.cancel()
            self._drafting = None
            self._carry_out(self._pipeline.on_draft_lost())

    def _target_failure(self, error: grpc.aio.AioRpcError) -> Exception:
        failure = as_slipstream_error(error, "target")
        emitted = len(self._pipeline.committed)
        if isinstance(failure, Overloaded):  # refused before it began, perhaps with a hint when to try again
            return failure
        return type(failure)(f"{failure} ({emitted} tokens were delivered)") if emitted else failure

    def _emit_stage(self, stage: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        change = gateway_pb2.StageChange(stage=stage, done=done, total=total, detail=detail)
        self._emit(gateway_pb2.CaptionEvent(stage=change))
