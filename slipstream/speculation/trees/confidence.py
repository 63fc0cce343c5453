"""Pacing of a draft that says how sure it is: what is measured beside the costs of a chain, and when to wait. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import ClassVar, Self

from slipstream.speculation.pacing import CostModel, DecayedMean, Moment, SelfClocked, WindowPlan
from slipstream.speculation.trees.calibration import Calibration


@dataclass
class TreeCosts(CostModel):
    """What is measured where lines branch. `tau` is the rate of the draft's first candidates."""

    calibration: Calibration = field(default_factory=Calibration)
    _round_tokens: DecayedMean = field(default_factory=lambda: DecayedMean(1.0))
    _round_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.0))

    def observe_round(self, num_tokens: int, seconds: float) -> None:
        """A round of speculation, hold and pass, committed so many tokens."""
        self._round_tokens.observe(num_tokens)
        self._round_s.observe(seconds)

    def fork(self) -> Self:
        """A copy that another session may change. The calibration stays one: what captions at once learn of a draft's
        candidates holds for all of them."""
        forked = super().fork()
        forked.calibration = self.calibration
        return forked

    @property
    def token_s(self) -> float:
        """Seconds that a token takes now: the worth of one more."""
        return self._round_s.value / self._round_tokens.value if self._round_s.weight else self.target_pass_s(0)


@dataclass(frozen=True)
class TreeMoment(Moment):
    """What there is to know of a line that branches; pending tokens are those of its main path."""

    chances: tuple[float, ...] = ()
    """Of each pending token, given those before it."""
    is_due: bool = True
    """The draft goes on behind the last of them before it hears anything."""


def survival(chances: Sequence[float]) -> list[float]:
    """S: the chance that so many pending tokens are all right, for 0, 1, ... of them."""
    return [*accumulate(chances, mul, initial=1.0)]


class Confident(SelfClocked):
    """`SelfClocked`, which knows of each pending token how likely it is.

    It holds for the h >= pending that minimises `wait(h) + T_p(h) + S_(h+1) V`, with S the product of the pending
    tokens' chances, and tau for those beyond. That sum only ever says to *wait*: used to cut windows it loses up to
    17%, as V forgets that certain tokens must still be paid for. Windows are cut by rule M (`rows.paying_rows`), which
    the line does itself; `cap` is of the main path.
    """

    writes_ahead: ClassVar[bool] = True

    def plan(self, moment: Moment, costs: CostModel) -> WindowPlan:
        if not isinstance(moment, TreeMoment) or not moment.chances:
            return super().plan(moment, costs)
        num_pending, cap = moment.num_pending, moment.max_window
        tau, draft_pass_s, pass_s = costs.tau, costs.draft_pass_s.value, costs.target_pass_s.price()
        steady_window, rest_of_cycle_s = self.steady_window(moment.max_window, costs, pass_s)
        if num_pending >= steady_window or not moment.is_due:
            return WindowPlan(0, cap)
        survives = survival(moment.chances)

        def cycle_s(hold: int) -> float:
            alive = survives[-1] * tau ** (hold + 1 - num_pending)
            wait_s = (hold - num_pending) * draft_pass_s
            return wait_s + pass_s(hold) + alive * rest_of_cycle_s

        hold = min(range(num_pending, steady_window + 1), key=cycle_s)
        return WindowPlan(hold, cap)
