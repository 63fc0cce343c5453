"""When the target starts its next pass and how many draft tokens it judges. Pure; no clock.

A policy answers with a `WindowPlan`: wait until `hold` tokens are pending, then judge at most `cap` of them.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from slipstream.errors import InvalidRequest
from slipstream.speculation.costs import CostModel

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
