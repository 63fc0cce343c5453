"""When the target starts its next pass, how many draft tokens it judges, and whether speculation pays at all.

Pure arithmetic, no clock. A policy answers with a `WindowPlan`: wait until `hold` tokens are pending, then judge at
most `cap` of them. All costs are measured while running.
"""

import copy
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from slipstream.errors import InvalidRequest

# -- costs ------------------------------------------------------------------------------------------------------------

# What a session has measured of itself: T_p(k), T_q, tau and the cost of a restart, as exponentially decayed averages
# that follow the video. A session starts from a copy of the process's own running average.

DECAY = 0.97
"""Weight that an observation keeps when the next one arrives: a memory of about 33 observations."""
PRIOR_SLOPE = 0.05
"""Before anything is measured, a draft token in the window is taken to cost this share of a plain pass."""
PRIOR_SLOPE_WEIGHT = 20.0
"""Strength of that prior, in units of squared window lengths."""
MIN_TAU, MAX_TAU = 0.02, 0.995
FORGOTTEN_TAU, FORGOTTEN_WEIGHT = 0.5, 4.0


@dataclass
class DecayedMean:
    """An exponentially decayed mean; before the first observation it is `value`."""

    value: float
    weight: float = 0.0

    def observe(self, sample: float) -> None:
        self.weight = self.weight * DECAY + 1.0
        self.value += (sample - self.value) / self.weight


@dataclass
class WindowCosts:
    """Seconds of a target pass as a function of the window length k: T_p(0), and a + b k for k >= 1.

    A single row takes another kernel than several, so k = 0 is kept apart; from k = 1 on the measured cost is close to
    a straight line (flat on a GPU, rising on a CPU). b is a ridge regression around PRIOR_SLOPE.
    """

    plain: DecayedMean = field(default_factory=lambda: DecayedMean(0.05))
    _weight: float = 0.0
    _k: float = 0.0
    _t: float = 0.0
    _kk: float = 0.0
    _kt: float = 0.0

    def observe(self, window_len: int, seconds: float) -> None:
        if window_len == 0:
            self.plain.observe(seconds)
            return
        for name, sample in (("_weight", 1.0), ("_k", window_len), ("_t", seconds)):
            setattr(self, name, getattr(self, name) * DECAY + sample)
        self._kk = self._kk * DECAY + window_len**2
        self._kt = self._kt * DECAY + window_len * seconds

    def __call__(self, window_len: int) -> float:
        mean_k, mean_t = (self._k / self._weight, self._t / self._weight) if self._weight else (0.0, self.plain.value)
        # A line that never died has run no plain pass; then the windows say what one would take.
        plain_s = self.plain.value if self.plain.weight else mean_t / (1 + PRIOR_SLOPE * mean_k)
        if window_len == 0:
            return plain_s
        covariance = self._kt - self._weight * mean_k * mean_t
        variance = self._kk - self._weight * mean_k**2
        slope = (covariance + PRIOR_SLOPE_WEIGHT * PRIOR_SLOPE * plain_s) / (variance + PRIOR_SLOPE_WEIGHT)
        return max(mean_t + max(slope, 0.0) * (window_len - mean_k), 0.2 * min(plain_s, mean_t))


@dataclass
class CostModel:
    """The measured quantities that pacing decides from."""

    target_pass_s: WindowCosts = field(default_factory=WindowCosts)
    """T_p(k), as the gateway sees it: model pass and round trip."""
    draft_pass_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.005))
    """T_q."""
    restart_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.002))
    """What a restart costs beside the draft's passes: two messages and the rollback."""
    plain_token_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.05))
    """What one more plain pass costs where several are asked for at once, without a round trip, and no draft works."""
    _accepted: float = 8.0
    _judged: float = 10.0

    def observe_window(self, num_accepted: int, window_len: int) -> None:
        """Counts draft tokens that the target judged: those accepted and at most one rejected; the rest are unknown."""
        for _ in range(num_accepted):
            self._count(1.0)
        if num_accepted < window_len:
            self._count(0.0)

    def observe_match(self, matched: bool) -> None:
        """Counts a draft token that was compared with the target's own token."""
        self._count(float(matched))

    def _count(self, accepted: float) -> None:
        self._accepted = self._accepted * DECAY + accepted
        self._judged = self._judged * DECAY + 1.0

    def forget_acceptance(self) -> None:
        """What is known of tau is long past: an even chance, to be corrected by the next few tokens."""
        self._accepted, self._judged = FORGOTTEN_TAU * FORGOTTEN_WEIGHT, FORGOTTEN_WEIGHT

    @property
    def tau(self) -> float:
        """Acceptance rate per draft token, kept away from 0 and 1."""
        return min(max(self._accepted / self._judged, MIN_TAU), MAX_TAU)

    @property
    def speed_ratio(self) -> float:
        """c = T_p / T_q."""
        return self.target_pass_s(0) / self.draft_pass_s.value

    def fork(self) -> "CostModel":
        """A copy that another session may change."""
        return copy.deepcopy(self)


# -- pacing -----------------------------------------------------------------------------------------------------------

HOLD_SLACK_S, MAX_HOLD_S = 0.005, 1.0
DEFAULT_GAMMA = 5
"""Window of sequential decoding in the papers (000, table 1)."""


@dataclass(frozen=True)
class WindowPlan:
    """How long to wait and how much to judge, both in draft tokens."""

    hold: int
    cap: int


@dataclass(frozen=True)
class Moment:
    """What a policy knows when the target is free and a draft writes."""

    num_pending: int
    """Draft tokens that wait to be judged."""
    fresh: bool
    """The line was restarted, and no pass has run since."""
    max_window: int
    """Most draft tokens that a pass may judge."""


class Policy(Protocol):
    """A pacing rule."""

    writes_ahead: ClassVar[bool]
    """The draft writes while the target judges; else it waits for every verdict, and takes the target's own token as
    given."""

    def plan(self, moment: Moment, costs: CostModel) -> WindowPlan:
        """What to do now. Asked again whenever tokens arrive, so it must be consistent as `num_pending` grows."""


class Fixed:
    """The papers' rule (paper 000, section 4.2, eq. 6; PEARL).

    Pre-verify: after a death, one pass with no window, for the first token. Post-verify: windows of exactly
    gamma = round(T_p / T_q), or as given, waited for.
    """

    writes_ahead: ClassVar[bool] = True

    def __init__(self, gamma: int | None = None) -> None:
        self.gamma = gamma

    def plan(self, moment: Moment, costs: CostModel) -> WindowPlan:
        if moment.fresh:
            return WindowPlan(hold=0, cap=0)
        gamma = min(self.gamma or max(round(costs.speed_ratio), 1), moment.max_window)
        return WindowPlan(hold=gamma, cap=gamma)


class Sequential:
    """Draft, then verify, in turns (Leviathan et al. 2023; the papers' vanilla SD): windows of gamma tokens."""

    writes_ahead: ClassVar[bool] = False

    def __init__(self, gamma: int | None = None) -> None:
        self.gamma = gamma or DEFAULT_GAMMA

    def plan(self, moment: Moment, costs: CostModel) -> WindowPlan:
        gamma = min(self.gamma, moment.max_window)
        return WindowPlan(hold=gamma, cap=gamma)


class SelfClocked:
    """Takes what is pending when the target is free; holds only for as long as that shortens the cycle.

    Between two deaths of the line a cycle yields 1 / (1 - tau) tokens whatever the plan, so the best plan has the
    shortest cycle. Starting with h pending tokens and going on with windows of W, it takes

        wait(h) + T_p(h) + tau^(h+1) V,    V = min_W max(T_p(W), (W+1) T_q) / (1 - tau^(W+1)),

    as a round over W tokens (and the match of the target's own) survives with probability tau^(W+1), and cannot be
    shorter than the draft needs to write the next one. W does not depend on h: both are found by one scan.
    With T_p constant this is design section 3's  1 + h/c + tau^(h+1) / (1 - tau^c), in units of T_p.
    """

    writes_ahead: ClassVar[bool] = True

    def plan(self, moment: Moment, costs: CostModel) -> WindowPlan:
        if moment.num_pending >= moment.max_window:
            return WindowPlan(hold=moment.num_pending, cap=self._steady_window(moment.max_window, costs)[0])
        steady_window, rest_of_cycle_s = self._steady_window(moment.max_window, costs)
        if moment.num_pending >= steady_window:
            return WindowPlan(hold=steady_window, cap=steady_window)
        tau, draft_pass_s = costs.tau, costs.draft_pass_s.value

        def cycle_s(hold: int) -> float:
            wait_s = (hold - moment.num_pending) * draft_pass_s
            if moment.fresh and moment.num_pending == 0 and hold > 0:
                wait_s += costs.restart_s.value
            return wait_s + costs.target_pass_s(hold) + tau ** (hold + 1) * rest_of_cycle_s

        hold = min(range(moment.num_pending, steady_window + 1), key=cycle_s)
        return WindowPlan(hold=hold, cap=steady_window)

    @staticmethod
    def _steady_window(max_window: int, costs: CostModel) -> tuple[int, float]:
        """The best window of a living line, and the expected seconds that it still lives (V)."""
        tau, draft_pass_s = costs.tau, costs.draft_pass_s.value

        def rest_s(window_len: int) -> float:
            round_s = max(costs.target_pass_s(window_len), (window_len + 1) * draft_pass_s)
            return round_s / (1 - tau ** (window_len + 1))

        best = min(range(1, max_window + 1), key=rest_s)
        return best, rest_s(best)


def longest_hold_s(max_window: int, costs: CostModel) -> float:
    """Seconds after which a hold has lasted a few times what a whole window should take the draft."""
    expected_s = max_window * costs.draft_pass_s.value + costs.restart_s.value
    return min(HOLD_SLACK_S + 3 * expected_s, MAX_HOLD_S)


POLICIES = ("self_clocked", "fixed", "sequential")


def get_policy(name: str, gamma: int | None = None) -> Policy:
    """The policy of that name, or `InvalidRequest` with the names there are. `gamma`: window length of the two papers'
    policies; `self_clocked` finds its own."""
    match name:
        case "self_clocked":
            return SelfClocked()
        case "fixed":
            return Fixed(gamma)
        case "sequential":
            return Sequential(gamma)
        case _:
            raise InvalidRequest(f"policy {name!r} is unknown; choose one of {', '.join(POLICIES)}")


# -- gate -------------------------------------------------------------------------------------------------------------

# Whether speculation pays, judged from measured seconds: a caption whose draft does not help is decoded plainly.
#
# Seconds come in with the events, and all losses are counted in plain passes, the seconds that one more token costs
# when several plain passes are asked for at once (as `method="autoregressive"` does: no round trip a token) and
# no draft is at work: a draft that prefills or writes may slow the target down, and that is part of its price.
#
# **Open**, every round of speculation (hold, round trip, pass) is charged `seconds / plain_s - tokens committed`. The
# running sum is the *loss*. Past a *budget* the gate closes. Gains make the loss negative, down to -CREDIT: a draft
# that was good may fail a little later, and one that turned bad is still noticed within some rounds. Once it has
# gained PROOF the budget is 0: speculation may lose what it has gained, and no more.
#
# **Closed**, the target runs plain passes in one batch and the draft rests: its line is dropped and none begins. The
# first RECONSIDER passes measure plain decoding anew, at this moment's load; if the loss was but a wrong notion of
# what plain costs, the gate opens again at once (once, until speculation has proved itself). Otherwise it stays
# closed for FIRST_REST tokens, then opens for a trial with TRIAL_BUDGET. Each trial that fails doubles the rest, up
# to LONGEST_REST; proof restores the first one.
#
# **What it can cost.** A closed gate is plain decoding but for two round trips a rest; an open one loses at most its
# budget and the excess of the round that exceeds it (hold and round trip are within the budget: `patience_s`). The
# bound over a whole text, and its derivation, are in docs/algorithms.md.
#
# **The first caption of its length** in a process, plain ones included, teaches what plain decoding costs. If that is
# a speculative one, its gate begins closed, for RECONSIDER passes with a resting draft.

FIRST_BUDGET = 4.0
TRIAL_BUDGET = 1.0
CREDIT = 8.0
PROOF = 4.0
LONGEST_HOLD = 1.5
LONGEST_ROUND = 3.0
"""A round's pass counts as no more plain passes than this, since the draft is not to blame when the machine stalls.
Holds count in full."""
FIRST_REST, LONGEST_REST = 64, 512
RECONSIDER = 6
SHORTEST_PASS_S = 1e-9
ENOUGH_SAMPLES = 3
"""Plain passes that must have been measured in this caption before their median counts."""
RECENT_SAMPLES = 15
UNMEASURED_SHARE = 0.75
"""Of a target pass as speculation sees it (round trip and window included), a plain pass is taken to be this much."""


class Gate:
    """One caption's gate. Starts open if the process knows what a plain pass costs, and else by measuring it."""

    def __init__(self, costs: CostModel) -> None:
        self.closed = not costs.plain_token_s.weight
        self.num_closings = 0
        self.num_gated_tokens = 0
        self._costs = costs
        self._budget = FIRST_BUDGET
        self._rest = FIRST_REST
        self._plain_samples: deque[float] = deque(maxlen=RECENT_SAMPLES)
        self._shortest_round_s = float("inf")
        self._spent_s = self._num_tokens = 0.0
        self._num_left = RECONSIDER if self.closed else 0
        self._may_reconsider = True
        self._reconsidering = self.closed

    @property
    def plain_s(self) -> float:
        """Seconds of one more plain pass: the median of this caption's; before there are enough, the process's average
        or a share of a pass over a window, and never more than the shortest round of this caption."""
        if len(self._plain_samples) >= ENOUGH_SAMPLES:
            return statistics.median(self._plain_samples)
        known = self._costs.plain_token_s
        guess_s = known.value if known.weight else UNMEASURED_SHARE * self._costs.target_pass_s(0)
        return min(guess_s, self._shortest_round_s)

    @property
    def loss(self) -> float:
        """Plain passes that speculation has cost more than plain decoding since the gate opened; negative is gain."""
        return self._spent_s / max(self.plain_s, SHORTEST_PASS_S) - self._num_tokens

    @property
    def patience_s(self) -> float:
        """Seconds that the target may be held for the draft now."""
        return min(max(self._budget - self.loss, 0.0), LONGEST_HOLD) * self.plain_s

    @property
    def num_passes(self) -> int:
        """Plain passes to ask for at once while the gate is closed; it thinks again after them."""
        return self._num_left

    def on_round(self, num_tokens: int, round_s: float, held_s: float) -> None:
        """A round of speculation ended: the target was held for `held_s` and answered after `round_s` more."""
        self._shortest_round_s = min(self._shortest_round_s, round_s)
        plain_s = self.plain_s
        self._spent_s += held_s + min(round_s, LONGEST_ROUND * plain_s)
        self._num_tokens += num_tokens
        loss = self.loss
        if loss <= -PROOF:
            self._budget, self._rest, self._may_reconsider = 0.0, FIRST_REST, True
        if loss < -CREDIT:
            self._spent_s *= CREDIT / -loss
            self._num_tokens *= CREDIT / -loss
        if loss > self._budget:
            self._close()

    def on_plain_pass(self, pass_s: float, *, in_batch: bool, undisturbed: bool) -> None:
        """A plain pass ended after `pass_s`.

        `in_batch`: it followed another without a round trip; `undisturbed`: no draft was at work.
        """
        if in_batch and undisturbed:
            self._plain_samples.append(pass_s)
        if not self.closed:
            return
        self.num_gated_tokens += 1
        if self._reconsidering and not undisturbed:
            return
        self._num_left -= 1
        if self._num_left == 0:
            self._think_again()

    def _close(self) -> None:
        self.closed = True
        self.num_closings += 1
        self._reconsidering = self._may_reconsider
        self._num_left = RECONSIDER if self._reconsidering else self._rest

    def _think_again(self) -> None:
        if self._reconsidering:
            self._reconsidering, self._may_reconsider = False, self.num_closings == 0
            if self.loss > self._budget / 2:
                self._num_left = self._rest - RECONSIDER
            else:
                self.closed = False
            return
        self.closed = False
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._budget = TRIAL_BUDGET
        self._spent_s = self._num_tokens = 0.0
        self._costs.forget_acceptance()
