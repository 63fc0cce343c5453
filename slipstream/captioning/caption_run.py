"""One caption, from sampled frames to the last token: the only I/O around the protocol's state machine."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from slipstream.captioning.draft_link import DraftLink, Proposals, check_pass_s, check_ready
from slipstream.captioning.late_hints import LateHints
from slipstream.captioning.plan import CaptionPlan, draft_start, make_pipeline, target_start
from slipstream.captioning.resumption import MAX_RESUMPTIONS, Replay, Resumptions
from slipstream.captioning.stats import CaptionStats, Tracer
from slipstream.errors import Overloaded, ProtocolViolation, ResumeMismatch, ServiceUnavailable, SlipstreamError
from slipstream.logs import get_logger
from slipstream.messages import PREFILLED, Caption, CaptionEvent, CommittedText, StageChange
from slipstream.rpc.peers import Peers, TargetCall
from slipstream.service_info import check_honours
from slipstream.session_messages import (
    DraftReady,
    DraftStart,
    DraftTokens,
    Judgement,
    Prefilled,
    PrefillStage,
    SessionKey,
    StageProgress,
    TargetEvent,
)
from slipstream.speculation.caption_book import Opening, Start
from slipstream.speculation.lines import DraftPhase
from slipstream.speculation.protocol import (
    Action,
    AdvanceLine,
    Commit,
    Finish,
    JoinPoint,
    JudgeWindow,
    MoveLine,
    RestartLine,
)
from slipstream.video.messages import SampledVideo

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
        opening: Opening,
        stats: CaptionStats,
        emit: Emit,
        *,
        draft_silence_s: float,
        timeout_s: float,
        resume_wait_s: float,
        late_hints: LateHints | None = None,
    ) -> None:
        target_model = peers.target.model
        assert target_model is not None, "the target has been asked"
        self._plan = plan.undrafted if opening.start is Start.REST else plan
        self._drafts_itself = plan.drafts_itself
        self._opening = opening
        self._key = SessionKey()
        self._tokens_per_frame = target_model.tokens_per_frame
        self._video = video
        self._peers = peers
        self._stats = stats
        self._emit = emit
        self._trace = Tracer(emit, is_on=plan.options.trace)
        self._draft_silence_s = draft_silence_s
        self._timeout_s = timeout_s
        self._resume_wait_s = resume_wait_s
        self._late_hints = late_hints
        self._hinting: asyncio.Task[None] | None = None
        self._resumptions: Resumptions | None = None
        self._replay: Replay | None = None
        """Until the target has found the tokens that were delivered without it."""
        self._loop = asyncio.get_running_loop()
        self._pipeline = make_pipeline(self._plan, opening, target_model.vocab_size)
        self._call: TargetCall | None = None
        self._draft_link: DraftLink | None = None
        self._drafting: asyncio.Task[None] | None = None
        self._proposals = Proposals(required=plan.sends_proposals, vocab_size=target_model.vocab_size)
        self._hold = HoldTimer()
        self._window: tuple[int, ...] = ()
        self._pass_started = 0.0
        self._joined_at = 0.0
        self._restarted_at: float | None = None

    async def run(self) -> Caption:
        """To the end of the text, at one target after the other if need be. Cancelled, it stops both services."""
        while True:
            try:
                await self._run_at_target()
                return self._stats.caption(self._plan, self._video, self._pipeline, self._opening)
            except ServiceUnavailable as failure:
                await self._regain_target(failure)

    async def _run_at_target(self) -> None:
        """One session at the target, to the end of the text. Raises the session's failure."""
        start = target_start(self._plan, self._key, self._video, self._tokens_per_frame)
        self._replay = Replay(tuple(self._pipeline.committed)) if self._pipeline.committed else None
        target = await self._peers.target.choose(self._video)
        if target.model is not None:  # it may be another than the one that was asked beforehand
            plan, options = self._plan, self._plan.options
            check_honours(target.model, plan.sampling, thinking=options.thinking, logprobs=options.logprobs)
        call = self._call = target.open(start, self._video, timeout_s=self._timeout_s)
        self._seek_draft()
        if self._late_hints is not None:
            self._hinting = asyncio.create_task(self._late_hints.deliver(target, call, start))
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

    # -- another target -----------------------------------------------------------------------------------------------

    async def _regain_target(self, failure: ServiceUnavailable) -> None:
        """Returns when there is a target to go on at. Raises the failure where there is none, or the caption must not
        go on."""
        num_tokens = len(self._pipeline.committed)
        wait_s = self._resume_wait_s if self._plan.resumable else 0.0
        resumptions = self._resumptions = self._resumptions or Resumptions()
        if not wait_s or not resumptions.begin(num_tokens):
            raise failure
        get_logger().warning("caption.resume", reason=str(failure), num_tokens=num_tokens)
        self._stats.target_lost(self._loop.time())
        self._emit(StageChange("resume", resumptions.count, MAX_RESUMPTIONS, str(failure)))
        self._drafting, self._restarted_at, self._window = None, None, ()  # `_run_at_target` has let the draft go
        self._proposals.forget()
        self._pipeline.on_target_lost()
        self._key = SessionKey()  # the lost session may linger there
        try:
            await self._peers.target.wait(wait_s)
        except ServiceUnavailable:
            raise failure from None

    def _on_replayed(self, replay: Replay, judgement: Judgement) -> None:
        """The target judged delivered tokens. With the last of them it has caught up."""
        fresh = replay.take(judgement)
        if fresh is None:
            assert self._call is not None
            self._call.judge(replay.window)
            return
        self._replay = None
        self._stats.caught_up(self._loop.time())
        self._stats.tokens += replay.tokens[len(self._stats.tokens) :]
        self._emit(StageChange("resumed", len(replay.tokens), len(replay.tokens)))
        self._pass_started, self._stats.stop_string = self._loop.time(), fresh.verdict.stop_string
        self._carry_out(self._pipeline.on_verdict(fresh.verdict), fresh)

    def _end(self) -> None:
        """Nothing goes on, and nothing leads back here that would keep this caption's memory."""
        self._hold.cancel()
        if self._hinting is not None:
            self._hinting.cancel()
        self._end_drafting()
        self._drafting = self._draft_link = None

    # -- what the draft says (DraftListener) --------------------------------------------------------------------------

    def draft_joining(self) -> JoinPoint:
        self._joined_at = self._loop.time()
        return self._pipeline.on_draft_joining()

    def draft_ready(self, num_known: int, ready: DraftReady) -> None:
        now = self._loop.time()
        check_ready(ready, now - self._joined_at)
        actions = self._pipeline.on_draft_ready(num_known)
        self._stats.joined(now, ready)
        self._emit(StageChange("draft_ready", ready.kept_tokens, ready.video_tokens))
        if ready.kept is not None:
            times_s = self._video.timestamps_s
            frames_per_step = -(-len(times_s) // ready.kept.num_steps) or 1
            self._emit(replace(ready.kept, times_s=times_s[::frames_per_step]))
        self._carry_out(actions)

    def draft_wrote(self, tokens: DraftTokens) -> None:
        now, pipeline = self._loop.time(), self._pipeline
        check_pass_s(tokens.pass_s, now - self._joined_at)
        self._proposals.check(tokens)
        is_stale = tokens.epoch != pipeline.epoch
        actions = pipeline.on_draft_tokens(
            tokens.epoch, tokens.position, tokens.token_ids, tokens.parents, tokens.pass_s, tokens.chances
        )
        self._trace.drafted(now, tokens, stale=is_stale)
        if is_stale:
            return
        num_passes = self._stats.drafted(tokens)
        if self._restarted_at is not None:
            writing_s = num_passes * tokens.pass_s
            pipeline.costs.restart_s.observe(max(now - self._restarted_at - writing_s, 0.0))
            self._restarted_at = None
        if pipeline.draft_phase is DraftPhase.WRITING and tokens.epoch == pipeline.epoch:
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
                if event.stage == PrefillStage.QUEUED:
                    self._leave_draft()
                else:
                    self._seek_draft()
                self._emit(StageChange(event.stage, event.done, event.total))
            case Prefilled():
                self._stats.prefilled = event
                self._emit(StageChange(PREFILLED, event.reused_tokens, event.prompt_tokens))
                self._emit(StageChange("generate"))
            case Judgement() if self._replay is not None:
                self._on_replayed(self._replay, event)
            case Judgement():
                self._on_judgement(event)

    def _on_judgement(self, judgement: Judgement) -> None:
        now, facts, verdict = self._loop.time(), judgement.facts, judgement.verdict
        round_s, held_s = now - self._pass_started, self._hold.take_held_s()
        own_s, window_len = facts.own_s(round_s), len(self._window) + facts.num_drafted
        self._trace.passed(now, self._pass_started, window_len, judgement)
        if self._pipeline.committed:
            self._pipeline.costs.target_pass_s.observe(window_len, own_s, facts.company)
            self._stats.passed(window_len, facts.pass_s, round_s, held_s)
            if self._drafts_itself:
                self._stats.self_drafted(facts)
            if self._plan.method.takes_hints:
                self._stats.hinted(facts.num_drafted, verdict.num_accepted - verdict.num_of(self._window))
        self._pass_started, self._window = now, ()
        self._stats.stop_string = verdict.stop_string
        actions = self._pipeline.on_verdict(verdict, own_s, held_s, facts.num_drafted, facts.company)
        self._carry_out(actions, judgement)

    # -- actions ------------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action], judgement: Judgement | None = None) -> None:
        """What the services wait for goes out first, as messages leave in the order in which they are put here: text
        that is written to the caller before costs both models half a millisecond and more."""
        assert self._call is not None, "there is nothing to carry out before the target is called"
        commits = []
        for action in actions:
            match action:
                case JudgeWindow():
                    proposals = self._proposals.take(len(self._pipeline.committed), action.window)
                    self._call.judge(action, proposals)
                    self._window, self._pass_started = action.window, self._loop.time()
                case RestartLine() | AdvanceLine() | MoveLine():
                    assert self._draft_link is not None
                    self._draft_link.send(action)
                    if isinstance(action, RestartLine):
                        self._proposals.forget()
                        self._trace.restarted(self._loop.time())
                        self._restarted_at = self._loop.time() if action.may_write else None
                case Commit():
                    commits.append(action)
                case Finish():
                    self._call.end()
                    self._end_drafting()
        for commit in commits:
            assert judgement is not None, "nothing else commits"
            self._commit(commit, judgement)
        self._hold.watch(self._pipeline.holding, self._pipeline.longest_hold_s, self._on_hold_expired)

    def _commit(self, action: Commit, judgement: Judgement) -> None:
        tokens = judgement.tokens(action.tokens, action.num_from_draft)
        if tokens:  # none where a text ends that was delivered already
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
        address = await self._call.guidance_address()
        return draft_start(self._plan, self._key, self._video, address, self._pipeline.vocab_size)

    def _leave_draft(self) -> None:
        """While this caption waits for the target, one that is served needs the draft's place more."""
        if self._drafting is not None:
            self._end_drafting()
            self._drafting = None
            self._carry_out(self._pipeline.on_draft_lost())

    def _end_drafting(self) -> None:
        """Nothing that a draft says is heard any more."""
        if self._drafting is not None:
            self._drafting.cancel()

    def _target_failure(self, failure: SlipstreamError) -> SlipstreamError:
        emitted = len(self._pipeline.committed)
        if isinstance(failure, Overloaded | ResumeMismatch):  # says all itself, perhaps with a hint when to try again
            return failure
        return type(failure)(f"{failure} ({emitted} tokens were delivered)") if emitted else failure
