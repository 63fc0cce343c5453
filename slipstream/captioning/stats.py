"""What one caption measured of itself: its trace, for who asked for one, and the summary at its end."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean

from slipstream.captioning.plan import CaptionPlan
from slipstream.messages import Caption, CaptionEvent, CommittedToken, PassCost, Speculation, Timings, Trace, VideoFacts
from slipstream.session_messages import DraftReady, DraftTokens, Judgement, PassFacts, Prefilled
from slipstream.speculation.caption_book import Opening, Start
from slipstream.speculation.pipeline import Pipeline
from slipstream.video.messages import SampledVideo

# -- trace ------------------------------------------------------------------------------------------------------------


class Tracer:
    """Emits a caption's `Trace` events; does nothing for a request without `trace`."""

    def __init__(self, emit: Callable[[CaptionEvent], None], *, is_on: bool) -> None:
        self._emit = emit
        self._is_on = is_on

    def passed(self, at_s: float, asked_s: float, num_tokens: int, judgement: Judgement) -> None:
        """A verdict came on a window of `num_tokens`, asked for at `asked_s`."""
        pass_s, accepted = judgement.facts.pass_s, judgement.verdict.num_accepted
        self._tell(Trace("pass", at_s, asked_s, pass_s, num_tokens, accepted))

    def drafted(self, at_s: float, tokens: DraftTokens, *, stale: bool) -> None:
        """The draft's tokens came; stale ones belong to a line that was given up."""
        self._tell(Trace("draft", at_s, pass_s=tokens.pass_s, tokens=len(tokens.token_ids), stale=stale))

    def restarted(self, at_s: float) -> None:
        """The draft was told to begin anew."""
        self._tell(Trace("restart", at_s))

    def _tell(self, trace: Trace) -> None:
        if self._is_on:
            self._emit(trace)


# -- figures ----------------------------------------------------------------------------------------------------------


@dataclass
class PassTally:
    """Target passes over windows of one length."""

    count: int = 0
    pass_s: float = 0.0
    round_s: float = 0.0


@dataclass
class CaptionStats:
    """Times are `loop.time()` of this process; durations come from the services themselves."""

    arrived: float
    sampled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    draft_ready_at: float = 0.0
    longest_gap_s: float = 0.0
    held_s: float = 0.0
    draft_pass_s: float = 0.0
    draft_tokens: int = 0
    drafts_lost: int = 0
    hints_accepted: int = 0
    hints_rejected: int = 0
    """Tokens of hints that were judged in vain, as often as they were."""
    passes: defaultdict[int, PassTally] = field(default_factory=lambda: defaultdict(PassTally))
    prefilled: Prefilled = field(default_factory=Prefilled)
    draft_ready: DraftReady = field(default_factory=DraftReady)
    tokens: list[CommittedToken] = field(default_factory=list)
    stop_string: str = ""
    resumptions: int = 0
    resume_s: float = 0.0
    lost_at: float = 0.0
    """When the target was lost; 0 while there is one that brings tokens."""

    def waited_until(self, now: float) -> None:
        """The sampled frames waited until now for a place: that is no work, so it counts nowhere."""
        self.arrived += now - self.sampled
        self.sampled = now

    def committed(self, now: float, tokens: Iterable[CommittedToken]) -> None:
        """Tokens became text."""
        if not self.first_token:
            self.first_token = now
        else:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_token)
        self.last_token = now
        self.tokens.extend(tokens)
        if self.lost_at:
            self.resume_s += now - self.lost_at
            self.lost_at = 0.0

    def caught_up(self, now: float) -> None:
        """The text that was delivered before is here again; what is measured of the text begins now."""
        self.first_token = self.first_token or now
        self.last_token = self.last_token or now

    def target_lost(self, now: float) -> None:
        """The target was lost, and the caption is to go on."""
        self.resumptions += 1
        self.lost_at = self.lost_at or now

    def passed(self, window_len: int, pass_s: float, round_s: float, held_s: float) -> None:
        """A target pass ended. `round_s` is what it took as seen from here, after the target was held for `held_s`."""
        self.held_s += held_s
        tally = self.passes[window_len]
        tally.count += 1
        tally.pass_s += pass_s
        tally.round_s += round_s

    def drafted(self, tokens: DraftTokens) -> int:
        """The draft wrote tokens; the result is how many passes they took, as far as it can be believed."""
        num_passes = min(tokens.num_passes or _depth(tokens.parents) or len(tokens.token_ids), len(tokens.token_ids))
        self.draft_tokens += num_passes
        self.draft_pass_s += tokens.pass_s * num_passes
        return num_passes

    def self_drafted(self, facts: PassFacts) -> None:
        """The target drafted a window itself."""
        self.draft_tokens += facts.num_drafted
        self.draft_pass_s += facts.draft_s

    def hinted(self, num_rows: int, num_accepted: int) -> None:
        """A pass judged so many tokens that hints alone foresaw, and accepted some."""
        self.hints_accepted += num_accepted
        self.hints_rejected += num_rows - num_accepted

    def joined(self, now: float, ready: DraftReady) -> None:
        """A draft became ready; the first one's figures are kept."""
        if not self.draft_ready_at:
            self.draft_ready_at, self.draft_ready = now, ready

    def caption(self, plan: CaptionPlan, video: SampledVideo, pipeline: Pipeline, opening: Opening) -> Caption:
        """Everything, for the caller."""
        logprobs = [token.logprob for token in self.tokens if token.logprob is not None]
        return Caption(
            text="".join(token.piece for token in self.tokens),
            num_tokens=len(pipeline.committed),
            finish_reason=pipeline.finish_reason,
            stop_string=self.stop_string,
            request_id=plan.request_id,
            options=plan.options.given(),
            video=self._video_facts(video),
            timings=self._timings(),
            speculation=self._speculation(pipeline, opening),
            tokens=tuple(self.tokens),
            avg_logprob=fmean(logprobs) if logprobs else None,
        )

    def _video_facts(self, video: SampledVideo) -> VideoFacts:
        num_frames, height, width, _ = video.frames.shape
        return VideoFacts(
            num_frames=num_frames,
            width=width,
            height=height,
            duration_s=video.duration_s,
            timestamps_s=video.timestamps_s,
            warnings=video.warnings,
            video_tokens=self.prefilled.video_tokens,
            prompt_tokens=self.prefilled.prompt_tokens,
            reused_tokens=self.prefilled.reused_tokens,
        )

    def _timings(self) -> Timings:
        target, draft = self.prefilled, self.draft_ready
        return Timings(
            decode_s=self.sampled - self.arrived,
            target_encode_s=target.encode_s,
            target_prefill_s=target.prefill_until_guidance_s + target.prefill_after_guidance_s,
            draft_encode_s=draft.encode_s,
            draft_guidance_s=draft.guidance_s,
            draft_prune_s=draft.prune_s,
            draft_prefill_s=draft.prefill_s,
            first_token_s=self.first_token - self.sampled,
            draft_ready_s=self.draft_ready_at - self.sampled if self.draft_ready_at else 0.0,
            generate_s=self.last_token - self.first_token,
            total_s=self.last_token - self.arrived,
            longest_gap_s=self.longest_gap_s,
            resumptions=self.resumptions,
            resume_s=self.resume_s,
        )

    def _speculation(self, pipeline: Pipeline, opening: Opening) -> Speculation:
        tallies = sorted(self.passes.items())
        windows = [tally for window_len, tally in tallies if window_len]
        plain = self.passes.get(0, PassTally())
        num_passes = sum(tally.count for _, tally in tallies)
        mean_pass_s = sum(tally.pass_s for _, tally in tallies) / max(num_passes, 1)
        plain_pass_s = plain.pass_s / max(plain.count, 1)
        draft_pass_s = self.draft_pass_s / max(self.draft_tokens, 1)
        single_pass_s = plain_pass_s or pipeline.costs.target_pass_s(0)
        plain_token_s = pipeline.costs.plain_token_s
        return Speculation(
            passes=num_passes,
            windows=sum(tally.count for tally in windows),
            judged=pipeline.num_judged,
            accepted=pipeline.num_accepted,
            restarts=pipeline.num_deaths,
            drafts_lost=self.drafts_lost,
            tau=pipeline.num_accepted / max(pipeline.num_judged, 1),
            mean_accepted_length=pipeline.num_accepted / max(pipeline.num_deaths, 1),
            target_pass_s=mean_pass_s,
            plain_pass_s=plain_pass_s,
            draft_pass_s=draft_pass_s,
            speed_ratio=single_pass_s / draft_pass_s if draft_pass_s else 0.0,
            kept_tokens=self.draft_ready.kept_tokens,
            guidance_bytes=self.draft_ready.guidance_bytes,
            kept_digest=self.draft_ready.kept_digest,
            held_s=self.held_s,
            gate_closings=pipeline.gate.num_closings if pipeline.gate else 0,
            gated_tokens=_num_gated_tokens(pipeline, opening),
            gate_start=opening.start,
            gate_reason=opening.reason,
            plain_token_s=plain_token_s.value if plain_token_s.weight else 0.0,
            accepted_prediction_tokens=self.hints_accepted,
            rejected_prediction_tokens=self.hints_rejected,
            pass_costs=tuple(
                PassCost(
                    window=window_len,
                    count=tally.count,
                    pass_s=tally.pass_s / tally.count,
                    round_s=tally.round_s / tally.count,
                )
                for window_len, tally in tallies
            ),
        )


def _num_gated_tokens(pipeline: Pipeline, opening: Opening) -> int:
    if opening.start is Start.REST:
        return max(len(pipeline.committed) - 1, 0)
    return pipeline.gate.num_gated_tokens if pipeline.gate else 0


def _depth(parents: Iterable[int]) -> int:
    """Levels of a tree, each of which was one pass of the draft. The tree is not checked yet."""
    levels = {-1: 0}
    for node, parent in enumerate(parents):
        levels[node] = levels.get(parent, 0) + 1
    return max(levels.values())
