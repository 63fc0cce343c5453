"""The pre-verify/post-verify protocol as one state machine: events in, actions out. No I/O, no clock, no torch.

The rule that makes it lossless: a target pass takes the last committed token and a pending window of k >= 0 draft
tokens, and whatever comes back is committed. k = 0 is pre-verify, k > 0 post-verify, and a caption whose draft is
slow, lying, dead or told to rest is simply a run of k = 0 passes, which is plain decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.errors import DraftFault, FaultKind
from slipstream.speculation.company import ALONE, Company
from slipstream.speculation.gate import Gate
from slipstream.speculation.lines import Comparison, DraftLines, DraftPhase, Line, TreeLine
from slipstream.speculation.methods import Shape
from slipstream.speculation.pacing import CostModel, Policy, WindowPlan, longest_hold_s
from slipstream.speculation.protocol import (
    Action,
    AdvanceLine,
    Commit,
    Finish,
    FinishReason,
    JoinPoint,
    JudgeWindow,
    MoveLine,
    PassKind,
    PassRequest,
    RestartLine,
    Verdict,
)
from slipstream.speculation.trees.confidence import TreeCosts
from slipstream.speculation.trees.dynamic_line import DynamicLine
from slipstream.speculation.trees.growth import GROWTHS, Growth

# -- passes without a draft -------------------------------------------------------------------------------------------

# What the target does while no draft writes for it: passes over its own text, or windows that it drafts itself.

UNDRAFTED_PASSES = 4
"""Passes asked for at once while there is no draft: fewer round trips, yet a draft that comes back waits little."""
JOINING_PASSES = 2
"""The same while a draft prefills and may be ready any moment."""


@dataclass(frozen=True)
class UndraftedPasses:
    """One caption's passes without a draft."""

    costs: CostModel
    gate: Gate | None
    num_passes: int
    """Asked for at once while there is no draft."""
    self_draft: int
    """Above 0: the target drafts so many tokens for each of its passes itself."""

    def ask(self, passes: PassRequest, phase: DraftPhase) -> int:
        """Notes the next request, over no window; the result is how many passes it is for."""
        num_passes = self._num_plain_passes(phase)
        passes.ask((), self.self_draft, PassKind.SELF if self.self_draft else PassKind.PLAIN, num_passes)
        return num_passes

    def observe(self, pass_s: float, phase: DraftPhase, company: Company, *, in_batch: bool) -> None:
        """A plain pass ended after `pass_s` seconds. `in_batch`: it followed another without a round trip."""
        undisturbed = phase in (DraftPhase.ABSENT, DraftPhase.RESTING)
        if in_batch and undisturbed:
            self.costs.plain_token_s.observe(company.plain_s if company.is_shared else pass_s)
            if company.plain_s > 0:
                self.costs.reckoned_s.observe(company.plain_s)
        if self.gate is not None:
            self.gate.on_plain_pass(pass_s, company, in_batch=in_batch, undisturbed=undisturbed)

    def _num_plain_passes(self, phase: DraftPhase) -> int:
        if self.gate is not None and self.gate.closed:
            return self.gate.num_passes
        return self.num_passes if phase is DraftPhase.ABSENT else JOINING_PASSES


# -- pipeline ---------------------------------------------------------------------------------------------------------

MAX_DEBT = 2
"""A line that writes ahead and is this many tokens behind the target is restarted after them instead of catching up one
by one."""


class Pipeline:
    """One caption's protocol. Feed every event to the method of its name and carry out the actions in order.

    The first verdict is the prefill's: until it arrives the target counts as busy with an empty window.
    """

    def __init__(
        self,
        policy: Policy,
        costs: CostModel,
        *,
        max_window: int,
        vocab_size: int,
        undrafted_passes: int = UNDRAFTED_PASSES,
        gate: Gate | None = None,
        shape: Shape = Shape.CHAIN,
        growth: Growth | None = None,
        self_draft: int = 0,
        hint_depth: int = 0,
        committed: Sequence[int] = (),
    ) -> None:
        """`growth`: of a dynamic tree, if not its shape's. `self_draft`: no draft takes part, and the target
        drafts so many tokens for each pass. `hint_depth`: it hangs so many levels of hints beside the draft's windows.
        `committed`: what the first verdict follows."""
        assert shape is not Shape.TREE or not policy.writes_ahead, "static trees are drafted and judged in turns"
        self.policy = policy
        self.costs = costs
        self.gate = gate
        self.max_window = max_window
        self.vocab_size = vocab_size
        self.committed = list(committed)
        self.finish_reason: FinishReason | None = None
        self.draft_phase = DraftPhase.ABSENT
        self.num_deaths = 0
        self.num_judged = 0
        self.num_accepted = 0
        self._line = _new_line(shape, growth or GROWTHS.get(shape), costs, max_window)
        self._passes = PassRequest()
        self._undrafted = UndraftedPasses(costs, gate, undrafted_passes, self_draft or hint_depth)
        self._hint_depth = hint_depth
        self._hints_lead = False
        """The last pass took tokens from hints that the draft had not written: none is held for the draft."""
        self._silent = False
        self._most_debt = MAX_DEBT - 1 if policy.writes_ahead else 0

    # -- what the driver may look at ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Names the draft's current line."""
        return self._line.epoch

    @property
    def holding(self) -> bool:
        """The target is idle and waits for the draft. The driver must bound this and call `on_hold_expired`."""
        return not self._passes.running and self.finish_reason is None

    @property
    def longest_hold_s(self) -> float:
        """Seconds that a hold which begins now may last."""
        longest_s = longest_hold_s(self.max_window, self.costs)
        return min(longest_s, self.gate.patience_s) if self.gate else longest_s

    @property
    def gated(self) -> bool:
        """Speculation is off because it does not pay."""
        return self.gate is not None and self.gate.closed

    @property
    def draft_owes(self) -> bool:
        """The draft has not written as far as it may. If nothing comes for long, it is frozen."""
        return self.draft_phase is DraftPhase.WRITING and self._line.owes

    @property
    def num_pending(self) -> int:
        """Draft tokens that wait to be judged."""
        return self._line.num_pending

    # -- events ---------------------------------------------------------------------------------------------------

    def on_draft_joining(self) -> JoinPoint:
        """A draft was found and is about to be sent the video. Valid while no draft takes part."""
        if self.draft_phase is not DraftPhase.ABSENT:
            raise AssertionError("one draft at a time")
        self.draft_phase = DraftPhase.JOINING
        self._silent = False
        self._line.begin(len(self.committed) if self.gated else self._reach(), len(self.committed))
        first_chunk = 1 if self.gated else self._plan().cap or 1
        return JoinPoint(self.epoch, tuple(self.committed), self._line.write_until, first_chunk)

    def on_draft_ready(self, num_known: int) -> list[Action]:
        """The draft holds the prompt and the first `num_known` output tokens, and starts to write. Raises `DraftFault`
        when it said so before."""
        if self.finish_reason is not None:
            return []
        if self.draft_phase is not DraftPhase.JOINING:
            raise DraftFault("the draft said a second time that it is ready", FaultKind.ORDER)
        self._line.owe(self.committed[num_known:])
        if self.gated:
            self.draft_phase = DraftPhase.RESTING
            return [self._rest()] if self._line.write_until > num_known else []
        self.draft_phase = DraftPhase.WRITING
        if len(self._line.debt) > self._most_debt:
            return [self._restart(), *self._next_pass()]
        return self._next_pass()

    def on_draft_tokens(
        self,
        epoch: int,
        position: int,
        token_ids: Sequence[int],
        parents: Sequence[int] = (),
        pass_s: float = 0.0,
        chances: Sequence[float] = (),
    ) -> list[Action]:
        """The draft wrote, at `pass_s` seconds a pass (0: not known). Of a dynamic tree `position` is the first node's
        number, and `chances` are what the draft says of each. Tokens of a line that has ended are let pass, and nothing
        is learned from them. Raises `DraftFault` when it broke the protocol; the driver then calls `on_draft_lost`."""
        if self.finish_reason is not None or self.draft_phase is DraftPhase.ABSENT:
            return []
        if self.draft_phase is DraftPhase.JOINING:
            raise DraftFault("the draft wrote before it was ready", FaultKind.ORDER)
        if not self._line.hear(epoch, position, token_ids, parents, self.vocab_size, chances):
            return []
        comparison = self._line.write(token_ids, parents, chances)
        if pass_s:
            self.costs.draft_pass_s.observe(pass_s)
        self._silent = False
        self._count(comparison)
        return [*([self._restart()] if comparison.died else []), *self._next_pass()]

    def on_draft_lost(self) -> list[Action]:
        """The draft is gone: killed, frozen, unreachable or dropped. Its unjudged tokens go with it."""
        self.draft_phase = DraftPhase.ABSENT
        self._line.drop()
        return self._next_pass()

    def on_target_lost(self) -> None:
        """The target is gone, with the window that it judged, and the next one begins: its first verdict, like that of
        the first, is about what follows the committed text. The draft is to be let go and may join again. The next
        target's prefill counts as a pass that runs, so there is nothing to do until it ends."""
        self._passes = PassRequest()
        self.draft_phase = DraftPhase.ABSENT
        self._line.drop()

    def on_hold_expired(self) -> list[Action]:
        """The draft kept the target waiting for too long: go on with what there is, and do not wait again until it
        writes."""
        if not self.holding:
            return []
        self._silent = True
        return self._next_pass()

    def on_verdict(
        self,
        verdict: Verdict,
        round_s: float = 0.0,
        held_s: float = 0.0,
        num_drafted: int | None = None,
        company: Company = ALONE,
    ) -> list[Action]:
        """A target pass ended. Raises `ProtocolViolation` for a verdict that answers nothing.

        `round_s`: seconds since it was asked for, or since the verdict before it of the same request, without waits for
        work of others (`PassFacts.own_s`); `held_s`: seconds that the target was held before. The gate, if there is
        one, decides from them. `num_drafted`: tokens of a window that the target drafted itself, where that may be
        fewer than it was asked for. `company`: whom the pass kept waiting.
        """
        kind, in_batch = self._passes.kind, self._passes.follows_another
        window, depth = self._passes.answer(verdict)
        tokens = verdict.committed(window)
        self.committed.extend(tokens)
        if num_drafted is not None and kind is PassKind.SELF and not self._hint_depth:
            depth = min(depth, num_drafted)
        num_accepted = self._count_window(verdict, window, depth, kind)
        self._observe_round(len(tokens), kind, round_s, held_s, company, in_batch=in_batch and not num_drafted)
        commit = Commit(tokens, verdict.num_accepted)
        if verdict.finish_reason is None:
            return [commit, *self._continue_line(tokens, num_accepted), *self._next_pass()]
        self.finish_reason = verdict.finish_reason
        if self._line.counts_tokens and self.draft_phase is DraftPhase.WRITING:
            self._count(replace(self._line.commit(tokens, num_accepted), died=False))
        return [commit, Finish(verdict.finish_reason)]

    def _count_window(self, verdict: Verdict, window: Sequence[int], depth: int, kind: PassKind) -> int:
        """Counts what became of a window that was `depth` deep. Returns how many of the draft's tokens were accepted:
        those of hints beside them are nobody's."""
        num_accepted = verdict.num_accepted
        if self._hint_depth:
            num_accepted, depth = verdict.num_of(window), len(window)
            self._hints_lead = verdict.num_accepted > num_accepted
        if _ended_within(verdict) and num_accepted == verdict.num_accepted:
            depth = num_accepted  # what lay behind was not judged
        if depth and not self._line.counts_tokens:
            self.costs.observe_window(num_accepted, depth)
            self.num_accepted += num_accepted
            self.num_judged += min(num_accepted + 1, depth)
            self.num_deaths += kind is PassKind.SELF and num_accepted < depth  # each of its windows is a line
        return num_accepted

    def _observe_round(
        self, num_tokens: int, kind: PassKind, round_s: float, held_s: float, company: Company, *, in_batch: bool
    ) -> None:
        """Whoever decides by what a pass cost hears of it."""
        if kind is PassKind.SPECULATIVE and isinstance(self.costs, TreeCosts):
            self.costs.observe_round(num_tokens, round_s + held_s)
        if self.gate is not None and kind is PassKind.SPECULATIVE:
            self.gate.on_round(num_tokens, round_s, held_s, company, num_judged=self.num_judged)
        elif kind is PassKind.PLAIN or (self._hint_depth and kind is PassKind.SELF):
            self._undrafted.observe(round_s, self.draft_phase, company, in_batch=in_batch)

    # -- the line -------------------------------------------------------------------------------------------------

    def _continue_line(self, tokens: tuple[int, ...], num_accepted: int) -> list[Action]:
        """What newly committed tokens mean for the line: it lives, dies, comes to rest or wakes up."""
        if self.draft_phase is DraftPhase.RESTING:
            self._line.owe(tokens)
            if self.gated:
                return []
            self.draft_phase = DraftPhase.WRITING
            return [self._restart()]
        if self.draft_phase is not DraftPhase.WRITING:
            return []
        self._line.fresh = False
        comparison = self._line.commit(tokens, num_accepted)
        self._count(comparison)
        if self.gated:
            self.draft_phase = DraftPhase.RESTING
            return [self._rest()]
        return [self._restart()] if comparison.died or len(self._line.debt) > self._most_debt else []

    def _count(self, comparison: Comparison) -> None:
        for matched in (*[True] * comparison.num_matched, *[False] * comparison.mismatched):
            if not self._line.counts_tokens:
                self.costs.observe_match(matched)
            self.num_judged += 1
            self.num_accepted += matched
        self.num_deaths += comparison.died

    def _restart(self) -> RestartLine:
        """Ends the line and starts the next one after the committed tokens; the debt is what the draft lacks."""
        suffix = self._line.untold
        self._line.begin(self._reach(), len(self.committed))
        plan = self._plan()
        keep = len(self.committed) - len(suffix)
        return RestartLine(self.epoch, keep, suffix, self._line.write_until, plan.hold or self._unheld_chunk(plan))

    def _rest(self) -> RestartLine:
        """Ends the line and starts one that may not write."""
        suffix = self._line.untold or tuple(self.committed[-1:])
        self._line.begin(len(self.committed), len(self.committed))
        return RestartLine(self.epoch, len(self.committed) - len(suffix), suffix, self._line.write_until, 1)

    def _unheld_chunk(self, plan: WindowPlan) -> int:
        """First chunk of a line that no pass is held for: what comes while half a plain pass runs. A whole window would
        often arrive just after that pass, and the next one would start without it."""
        return max(min(plan.cap, int(self.costs.speed_ratio / 2)), 1)

    # -- the target's next pass -----------------------------------------------------------------------------------

    def _plan(self) -> WindowPlan:
        return self.policy.plan(self._line.moment(self.max_window), self.costs)

    def _next_pass(self) -> list[Action]:
        """Starts the next pass if the target is free and the policy does not wait; tells a living line its limit."""
        if self.finish_reason is not None:
            return []
        if self._passes.running:
            return self._advance(self._line.write_until)
        if self.draft_phase is not DraftPhase.WRITING:
            num_passes = self._undrafted.ask(self._passes, self.draft_phase)
            return [JudgeWindow((), num_passes, self_draft=self._undrafted.self_draft)]
        plan = self._plan()
        if self._line.num_pending < plan.hold and not self._silent and not self._hints_lead:
            return self._advance(len(self.committed) + self._longest_window)
        return [self._judge(min(self._line.num_pending, plan.cap)), *self._advance(self._reach())]

    def _judge(self, window_len: int) -> JudgeWindow:
        window = self._line.take(window_len)
        self._passes.ask(window, max(self._line.num_in_flight, self._hint_depth), PassKind.SPECULATIVE, 1)
        return JudgeWindow(window, 1, self._line.parents, self._hint_depth)

    def _reach(self) -> int:
        """Where a line's limit belongs: a whole window past all that the passes in flight (or the next) can commit. A
        draft that waits for verdicts writes one window past the committed text."""
        num_coming = self._passes.most_tokens if self.policy.writes_ahead else 0
        return len(self.committed) + num_coming + self._longest_window

    @property
    def _longest_window(self) -> int:
        return self.max_window if self.policy.writes_ahead else self._plan().cap

    def _advance(self, write_until: int) -> list[Action]:
        """Tells the draft how far it may write now, and below which node."""
        root = self._line.take_move()
        if root is not None:
            self._line.advance(max(write_until, self._line.write_until))
            return [MoveLine(self.epoch, root, self._line.write_until)]
        if write_until <= self._line.write_until:
            return []
        self._line.advance(write_until)
        return [AdvanceLine(self.epoch, write_until)]


def _new_line(shape: Shape, growth: Growth | None, costs: CostModel, max_window: int) -> DraftLines:
    if growth is None:
        return Line() if shape is Shape.CHAIN else TreeLine()
    assert isinstance(costs, TreeCosts), "a dynamic tree learns what its candidates are worth"
    return DynamicLine(growth, costs, max_window)


def _ended_within(verdict: Verdict) -> bool:
    """The text ended with an accepted token, or at its limit, to which windows are cut: no token was rejected."""
    return verdict.own_token is None or verdict.finish_reason is FinishReason.LENGTH
