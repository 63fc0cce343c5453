"""One caption, from sampled frames to the last token: the only I/O around the protocol's state machine."""

import asyncio
from collections.abc import Callable, Sequence

from slipstream.captioning.draft_link import DraftLink, Proposals
from slipstream.captioning.plan import CaptionPlan
from slipstream.captioning.stats import CaptionStats, Tracer
from slipstream.errors import DraftFault, Overloaded, ProtocolViolation, ServiceUnavailable, SlipstreamError
from slipstream.messages import (
    Caption,
    CaptionEvent,
    CommittedText,
    CommittedToken,
    DraftReady,
    DraftStart,
    DraftTokens,
    Judgement,
    Prefilled,
    StageChange,
    StageProgress,
    TargetEvent,
    TargetStart,
)
from slipstream.rpc.calls import Peers, TargetCall
from slipstream.speculation.methods import SPARSE_GAMMA, Shape
from slipstream.speculation.pacing import CostModel, Gate, get_policy
from slipstream.speculation.pipeline import UNDRAFTED_PASSES, DraftPhase, Pipeline
from slipstream.speculation.protocol import Action, AdvanceLine, Commit, Finish, JoinPoint, JudgeWindow, RestartLine
from slipstream.video.messages import SampledVideo

SHORTEST_PASS_S, LONGEST_PASS_S = 1e-6, 1e3
"""What a draft may claim of its speed: pacing divides by it."""
Emit = Callable[[CaptionEvent], None]


# -- hold timer --------------------------------------------------------------------------------------------------------


class HoldTimer:
    """One hold after the other. `watch` it after every event."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._held_s = 0.0

    def watch(self, holding: bool, longest_s: float, on_expired: Callable[[], None]) -> None:
        """A hold that begins may last `longest_s`; one that goes on keeps its limit; one that ended is counted.
        `on_expired` is known only while one lasts: it leads back to the caption, which is to end with its last user."""
        if holding and self._timer is None:
            self._since = self._loop.time()
            self._timer = self._loop.call_later(longest_s, on_expired)
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


# -- what a plan asks of the models -----------------------------------------------------------------------------------


def target_start(plan: CaptionPlan, video: SampledVideo, tokens_per_frame: int) -> TargetStart:
    """To the target. The share `alpha` of the video is also what a target that drafts for itself leaves out."""
    num_kept = max(round((1 - plan.options.alpha) * len(video.frames) * tokens_per_frame), 1)
    return TargetStart(
        session_id=plan.request_id,
        with_guidance=plan.speculative,
        sampling=plan.sampling,
        seconds_per_frame=_seconds_per_frame(video),
        with_attention=plan.with_attention,
        lossy=plan.lossy,
        local_drafter=plan.method.name if plan.drafts_itself else "",
        self_draft_kept=num_kept if plan.drafts_itself else 0,
        **plan.options.sent_to("target"),
    )


def draft_start(plan: CaptionPlan, video: SampledVideo, guidance_address: str) -> DraftStart:
    """To the draft, which pulls guidance at that address."""
    return DraftStart(
        session_id=plan.request_id,
        guidance_address=guidance_address,
        sampling=plan.sampling,
        seconds_per_frame=_seconds_per_frame(video),
        tree=plan.method.shape is Shape.TREE,
        **plan.options.sent_to("draft"),
    )


def make_pipeline(plan: CaptionPlan, costs: CostModel, vocab_size: int) -> Pipeline:
    """The protocol's state machine as the plan wants it."""
    method, options = plan.method, plan.options
    return Pipeline(
        get_policy(method.policy, method.gamma),
        costs,
        max_window=options.max_window,
        vocab_size=vocab_size,
        gate=Gate(costs) if method.gate and plan.speculative else None,
        undrafted_passes=UNDRAFTED_PASSES if plan.speculative else options.max_new_tokens,
        shape=method.shape,
        self_draft=method.gamma or SPARSE_GAMMA if plan.drafts_itself else 0,
    )


def _seconds_per_frame(video: SampledVideo) -> float:
    """Frames are sampled evenly over the clip's duration."""
    return video.duration_s / len(video.frames)


# -- the caption -------------------------------------------------------------------------------------------------------


class CaptionRun:
    """Drives one caption. Reads both model streams, feeds the pipeline and carries out its actions at once.

    Everything happens on the event loop and nothing in an event handler awaits, so the order of events is the order
    of actions; messages leave through queues.
    """

    def __init__(
        self,
        plan: CaptionPlan,
        video: SampledVideo,
        peers: Peers,
        costs: CostModel,
        stats: CaptionStats,
        emit: Emit,
        *,
        draft_silence_s: float,
        timeout_s: float,
    ) -> None:
        target_model = peers.target.model
        assert target_model is not None, "the target has been asked"
        self._plan = plan
        self._tokens_per_frame = target_model.tokens_per_frame
        self._video = video
        self._peers = peers
        self._stats = stats
        self._emit = emit
        self._trace = Tracer(emit, is_on=plan.options.trace)
        self._draft_silence_s = draft_silence_s
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._pipeline = make_pipeline(plan, costs, target_model.vocab_size)
        self._call: TargetCall | None = None
        self._draft_link: DraftLink | None = None
        self._drafting: asyncio.Task[None] | None = None
        self._proposals = Proposals(required=plan.sends_proposals, vocab_size=target_model.vocab_size)
        self._hold = HoldTimer()
        self._window_len = 0
        self._pass_started = 0.0
        self._restarted_at: float | None = None

    async def run(self) -> Caption:
        """To the end of the text. Cancelled, it stops both services."""
        start = target_start(self._plan, self._video, self._tokens_per_frame)
        call = self._call = self._peers.target.open(start, self._video, timeout_s=self._timeout_s)
        self._seek_draft()
        try:
            async for event in call.events():
                self._on_target_event(event)
        except ProtocolViolation as error:
            raise SlipstreamError(f"the target broke the protocol: {error}") from error
        except SlipstreamError as error:
            if self._pipeline.finish_reason is None:  # else our `end` has only crossed the target's own
                raise self._target_failure(error) from None
        finally:
            call.cancel()
            self._end()
        if self._pipeline.finish_reason is None:
            raise ServiceUnavailable("the target ended the session before the text was complete")
        return self._stats.caption(self._plan, self._video, self._pipeline)

    def _end(self) -> None:
        """Nothing goes on, and nothing leads back here that would keep this caption's memory."""
        self._hold.cancel()
        if self._drafting is not None:
            self._drafting.cancel()
        self._drafting = self._draft_link = None

    # -- what the draft says (DraftListener) --------------------------------------------------------------------------

    def draft_joining(self) -> JoinPoint:
        return self._pipeline.on_draft_joining()

    def draft_ready(self, num_known: int, ready: DraftReady) -> None:
        self._stats.joined(self._loop.time(), ready)
        self._emit(StageChange("draft_ready", ready.kept_tokens, ready.video_tokens))
        self._carry_out(self._pipeline.on_draft_ready(num_known))

    def draft_wrote(self, tokens: DraftTokens) -> None:
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
        self._stats.drafted(tokens)
        self._trace.drafted(self._loop.time(), tokens, stale=tokens.epoch != self._pipeline.epoch)
        actions = self._pipeline.on_draft_tokens(tokens.epoch, tokens.position, tokens.token_ids, tokens.parents)
        if self._pipeline.draft_phase is DraftPhase.WRITING and tokens.epoch == self._pipeline.epoch:
            self._proposals.remember(tokens)
        self._carry_out(actions)

    def draft_lost(self, reason: str) -> None:
        self._stats.drafts_lost += 1
        self._proposals.forget()
        self._emit(StageChange("draft_lost", detail=reason))
        self._carry_out(self._pipeline.on_draft_lost())

    def draft_missing(self, reason: str) -> None:
        self._emit(StageChange("draft_missing", detail=reason))

    @property
    def draft_owes(self) -> bool:
        return self._pipeline.draft_owes

    # -- what the target says -----------------------------------------------------------------------------------------

    def _on_target_event(self, event: TargetEvent) -> None:
        match event:
            case StageProgress():
                if event.stage == "queued":
                    self._leave_draft()
                else:
                    self._seek_draft()
                self._emit(StageChange(event.stage, event.done, event.total))
            case Prefilled():
                self._stats.prefilled = event
                self._emit(StageChange("generate"))
            case Judgement():
                self._on_judgement(event)

    def _on_judgement(self, judgement: Judgement) -> None:
        now, facts = self._loop.time(), judgement.facts
        round_s, held_s = now - self._pass_started, self._hold.take_held_s()
        window_len = self._window_len or facts.num_drafted
        self._trace.passed(now, self._pass_started, window_len, judgement)
        if self._pipeline.committed:
            self._pipeline.costs.target_pass_s.observe(window_len, round_s)
            self._stats.passed(window_len, facts.pass_s, round_s, held_s)
            self._stats.self_drafted(facts)
        self._pass_started, self._window_len = now, 0
        self._stats.stop_string = judgement.verdict.stop_string
        actions = self._pipeline.on_verdict(judgement.verdict, round_s, held_s)
        self._carry_out(actions, judgement.pieces)

    # -- actions ------------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action], pieces: Sequence[str] = ()) -> None:
        assert self._call is not None, "there is nothing to carry out before the target is called"
        for action in actions:
            match action:
                case JudgeWindow():
                    proposals = self._proposals.take(len(self._pipeline.committed), action.window)
                    self._call.judge(action, proposals)
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
                    self._call.end()
        self._hold.watch(self._pipeline.holding, self._pipeline.longest_hold_s, self._on_hold_expired)

    def _commit(self, action: Commit, pieces: Sequence[str]) -> None:
        if len(pieces) != len(action.tokens):
            raise ProtocolViolation("the target sent a verdict without the text of its tokens")
        tokens = tuple(
            CommittedToken(token, piece, from_draft=index < action.num_from_draft)
            for index, (token, piece) in enumerate(zip(action.tokens, pieces, strict=True))
        )
        self._stats.committed(self._loop.time(), tokens)
        self._emit(CommittedText(tokens))

    def _on_hold_expired(self) -> None:
        self._carry_out(self._pipeline.on_hold_expired())

    # -- the draft's coming and going ---------------------------------------------------------------------------------

    def _seek_draft(self) -> None:
        """Has a draft take part. The link is always a new one, as the last may still be ending."""
        if self._drafting is None and self._plan.speculative:
            self._draft_link = DraftLink(
                self._peers,
                self._draft_start,
                self._video,
                self,
                silence_s=self._draft_silence_s,
                timeout_s=self._timeout_s,
            )
            self._drafting = asyncio.create_task(self._draft_link.run())

    async def _draft_start(self) -> DraftStart:
        assert self._call is not None, "the target is called before the draft"
        return draft_start(self._plan, self._video, await self._call.guidance_address())

    def _leave_draft(self) -> None:
        """While this caption waits for the target, one that is served needs the draft's place more."""
        if self._drafting is not None:
            self._drafting.cancel()
            self._drafting = None
            self._carry_out(self._pipeline.on_draft_lost())

    def _target_failure(self, failure: SlipstreamError) -> SlipstreamError:
        emitted = len(self._pipeline.committed)
        if isinstance(failure, Overloaded):  # refused before it began, perhaps with a hint when to try again
            return failure
        return type(failure)(f"{failure} ({emitted} tokens were delivered)") if emitted else failure
