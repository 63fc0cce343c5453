"""When the target starts its next pass, and how many draft tokens it judges.

Pure arithmetic, no clock. A policy answers with a `WindowPlan`: wait until `hold` tokens are pending, then judge at
most `cap` of them. All costs are measured while running.
"""

import copy
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

from slipstream.errors import InvalidRequest
from slipstream.speculation.company import ALONE, KNOWN_WEIGHT, PRIOR_SLOPE, STALL, Company

# -- costs ------------------------------------------------------------------------------------------------------------

# What a session has measured of itself: T_p(k), T_q, tau and the cost of a restart, as exponentially decayed averages
# that follow the video. A session starts from a copy of the process's own running average.

DECAY = 0.97
"""Weight that an observation keeps when the next one arrives: a memory of about 33 observations."""
PLAIN_DECAY = 0.99
"""The same of windows when a plain pass arrives, which seldom come between them. Windows that a busy machine made slow
may keep all further ones from being judged, and then nothing else would tell that it is free again."""
COMPANY_DECAY = 0.8
"""The same of how many share a pass: captions come and go, and some 5 passes say how many there are now."""
PRIOR_SLOPE_WEIGHT = 20.0
"""Strength of the prior `PRIOR_SLOPE`, in units of squared window lengths."""
PRIOR_MEAN_WEIGHT = 0.25
"""And that of the pass that it foretells for windows of the mean length, in passes, where no window is remembered."""
MIN_TAU, MAX_TAU = 0.02, 0.995
FORGOTTEN_TAU, FORGOTTEN_WEIGHT = 0.5, 4.0


@dataclass
class DecayedMean:
    """An exponentially decayed mean; before the first observation it is `value`."""

    value: float
    weight: float = 0.0
    decay: float = DECAY

    def observe(self, sample: float) -> None:
        self.weight = self.weight * self.decay + 1.0
        self.value += (sample - self.value) / self.weight

    def fade(self) -> None:
        """Time passes without an observation: the next one counts for more."""
        self.weight *= self.decay


def _without_stall(seconds: float, known_s: float, weight: float) -> float:
    """Seconds of a pass as they are remembered, where passes of that weight took `known_s`."""
    return min(seconds, STALL * known_s) if weight >= KNOWN_WEIGHT else seconds


class PassMean(DecayedMean):
    """Of seconds of passes, among which a stall is not remembered."""

    def observe(self, sample: float) -> None:
        super().observe(_without_stall(sample, self.value, self.weight))


@dataclass(frozen=True)
class PassLine:
    """Seconds of a target pass by the length of its window, as measurements say now."""

    plain_s: float
    """Without a window."""
    mean_k: float
    mean_s: float
    """A point of the line: the mean window that was measured, and the mean seconds."""
    slope: float
    least_s: float
    """No window takes less."""

    def __call__(self, window_len: int) -> float:
        if window_len == 0:
            return self.plain_s
        return max(self.mean_s + self.slope * (window_len - self.mean_k), self.least_s)


@dataclass
class WindowCosts:
    """Seconds of a target pass as a function of the window length k: T_p(0), and a + b k for k >= 1.

    A single row takes another kernel than several, so k = 0 is kept apart; from k = 1 on the measured cost is close to
    a straight line (flat on a GPU, rising on a CPU). b is a ridge regression around PRIOR_SLOPE, and while few windows
    are remembered the level leans to a plain pass and that slope.

    In company a row takes the time of every session that shares the pass or waits for it. `price` is what a window
    costs all of them, by what the target measures (`Company`): b says little there, as the rows of others, and passes
    that this session was not in, outweigh what its own window does. Paced by it, windows shrink as a target fills.
    """

    plain: DecayedMean = field(default_factory=lambda: PassMean(0.05))
    num_sessions: DecayedMean = field(default_factory=lambda: DecayedMean(1.0, decay=COMPANY_DECAY))
    """Those that a pass keeps the target busy for, this one among them."""
    shared_plain_s: DecayedMean = field(default_factory=lambda: PassMean(0.0))
    """A plain pass of all those, as the target says of passes with company."""
    shared_row: DecayedMean = field(default_factory=lambda: DecayedMean(PRIOR_SLOPE))
    """What a row more of one of them costs, as a share of it."""
    _weight: float = 0.0
    _k: float = 0.0
    _t: float = 0.0
    _kk: float = 0.0
    _kt: float = 0.0

    def observe(self, window_len: int, seconds: float, company: Company = ALONE) -> None:
        self.num_sessions.observe(company.num_sessions)
        if company.is_shared:
            self.shared_plain_s.observe(company.plain_s)
            self.shared_row.observe(company.row_s / company.plain_s)
        else:  # the next company may be another one
            self.shared_plain_s.fade()
            self.shared_row.fade()
        if window_len == 0:
            self.plain.observe(seconds)
            self._age(PLAIN_DECAY)
            return
        seconds = _without_stall(seconds, self(window_len), self._weight + self.plain.weight)
        self._age(DECAY)
        self._weight += 1.0
        self._k += window_len
        self._t += seconds
        self._kk += window_len**2
        self._kt += window_len * seconds

    def _age(self, decay: float) -> None:
        for name in ("_weight", "_k", "_t", "_kk", "_kt"):
            setattr(self, name, getattr(self, name) * decay)

    def __call__(self, window_len: int) -> float:
        return self.line()(window_len)

    def line(self) -> PassLine:
        """Seconds of a pass over a window of this session, whatever the others bring."""
        mean_k, mean_t = (self._k / self._weight, self._t / self._weight) if self._weight else (0.0, self.plain.value)
        # A line that never died has run no plain pass; then the windows say what one would take.
        plain_s = self.plain.value if self.plain.weight else mean_t / (1 + PRIOR_SLOPE * mean_k)
        covariance = self._kt - self._weight * mean_k * mean_t
        variance = self._kk - self._weight * mean_k**2
        slope = (covariance + PRIOR_SLOPE_WEIGHT * PRIOR_SLOPE * plain_s) / (variance + PRIOR_SLOPE_WEIGHT)
        prior = PRIOR_MEAN_WEIGHT * max(1 - self._weight / KNOWN_WEIGHT, 0.0)
        mean_t = (self._t + prior * plain_s * (1 + PRIOR_SLOPE * mean_k)) / (self._weight + prior)
        return PassLine(plain_s, mean_k, mean_t, max(slope, 0.0), 0.2 * min(plain_s, mean_t))

    @property
    def is_shared(self) -> bool:
        """The newest passes have company of which the target has told."""
        return self.num_sessions.value >= 1.5 and self.shared_plain_s.weight > 0

    def price(self) -> PassLine:
        """Seconds of a pass to which all that share it bring such a window. A session alone pays T_p(k)."""
        if not self.is_shared:
            return self.line()
        plain_s = self.shared_plain_s.value
        slope = self.num_sessions.value * self.shared_row.value * plain_s
        return PassLine(plain_s, 0.0, plain_s, slope, 0.2 * plain_s)


@dataclass
class CostModel:
    """The measured quantities that pacing decides from."""

    target_pass_s: WindowCosts = field(default_factory=WindowCosts)
    """T_p(k), as the gateway sees it: model pass and round trip."""
    draft_pass_s: DecayedMean = field(default_factory=lambda: PassMean(0.005))
    """T_q."""
    restart_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.002))
    """What a restart costs beside the draft's passes: two messages and the rollback."""
    plain_token_s: DecayedMean = field(default_factory=lambda: PassMean(0.05))
    """What one more plain pass costs where several are asked for at once, without a round trip, and no draft works."""
    reckoned_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.0))
    """What the target reckoned of a plain pass when those were measured."""
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

    def fork(self) -> Self:
        """A copy that another session may change. Whether it has company its first pass tells."""
        forked = copy.deepcopy(self)
        forked.target_pass_s.num_sessions.weight = 0.0
        return forked


# -- pacing -----------------------------------------------------------------------------------------------------------

HOLD_SLACK_S, MAX_HOLD_S = 0.005, 1.0
DEFAULT_GAMMA = 5
"""Window of sequential decoding in the papers (ParallelVLM, table 1)."""


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
    """The papers' rule (ParallelVLM, section 4.2, eq. 6; PEARL).

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
    With T_p constant this is  1 + h/c + tau^(h+1) / (1 - tau^c), in units of T_p.
    """

    writes_ahead: ClassVar[bool] = True

    def plan(self, moment: Moment, costs: CostModel) -> WindowPlan:
        tau, draft_pass_s, pass_s = costs.tau, costs.draft_pass_s.value, costs.target_pass_s.price()
        steady_window, rest_of_cycle_s = self.steady_window(moment.max_window, costs, pass_s)
        if moment.num_pending >= moment.max_window:
            return WindowPlan(hold=moment.num_pending, cap=steady_window)
        if moment.num_pending >= steady_window:
            return WindowPlan(hold=steady_window, cap=steady_window)

        def cycle_s(hold: int) -> float:
            wait_s = (hold - moment.num_pending) * draft_pass_s
            if moment.fresh and moment.num_pending == 0 and hold > 0:
                wait_s += costs.restart_s.value
            return wait_s + pass_s(hold) + tau ** (hold + 1) * rest_of_cycle_s

        hold = min(range(moment.num_pending, steady_window + 1), key=cycle_s)
        return WindowPlan(hold=hold, cap=steady_window)

    @staticmethod
    def steady_window(max_window: int, costs: CostModel, pass_s: PassLine) -> tuple[int, float]:
        """The best window of a living line, and the expected seconds that it still lives (V). `pass_s`: what passes
        count as, their price or their own seconds."""
        tau, draft_pass_s = costs.tau, costs.draft_pass_s.value

        def rest_s(window_len: int) -> float:
            round_s = max(pass_s(window_len), (window_len + 1) * draft_pass_s)
            return round_s / (1 - tau ** (window_len + 1))

        best = min(range(1, max_window + 1), key=rest_s)
        return best, rest_s(best)


def foreseen_speedup(max_window: int, costs: CostModel) -> float:
    """Tokens a second with a draft over those of plain decoding, as measured costs say beforehand: `SelfClocked`'s
    shortest cycle and the 1 / (1 - tau) tokens that it yields, beside plain passes asked for at once. In company, all
    that share the passes are taken to decode alike."""
    tau, pass_s = costs.tau, costs.target_pass_s.price()
    window, rest_of_cycle_s = SelfClocked.steady_window(max_window, costs, pass_s)

    def cycle_s(hold: int) -> float:
        wait_s = hold * costs.draft_pass_s.value + costs.restart_s.value * (hold > 0)
        return wait_s + pass_s(hold) + tau ** (hold + 1) * rest_of_cycle_s

    seconds_a_token = (1 - tau) * min(map(cycle_s, range(window + 1)))
    plain_s = pass_s.plain_s if costs.target_pass_s.is_shared else costs.plain_token_s.value
    return plain_s / seconds_a_token


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
