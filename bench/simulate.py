"""An event simulator of captioning: the real `Pipeline`, policies and cost model, in simulated time. Knows no model.

`python -m bench.simulate` prints both policies, and the best constant plan, at the papers' working points and at one
of a CPU.
"""

import bisect
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from bench.simulated_draft import AGREED, SimulatedClock, SimulatedDraft
from slipstream.speculation.acceptance import StopRule, judge_window
from slipstream.speculation.costs import CostModel
from slipstream.speculation.gate import Gate
from slipstream.speculation.pacing import Fixed, Moment, Policy, WindowPlan, get_policy
from slipstream.speculation.pipeline import SOLO_PASSES, Action, AdvanceLine, JudgeWindow, Pipeline, RestartLine

NS = 1_000_000_000
"""Time is counted in whole nanoseconds, so that simultaneous events are recognised as such."""


@dataclass(frozen=True)
class SimulationInput:
    """What one simulated caption is made of. Times are seconds."""

    target_pass_s: Callable[[int], float]
    """T_p as a function of the window length."""
    draft_pass_s: float
    """T_q."""
    policy: Policy | None
    """None: no draft takes part."""
    tau: float = 0.0
    """Chance that a draft token equals the target's, drawn anew for every output position."""
    agreement: tuple[bool, ...] = ()
    """Recorded agreement by output position instead of `tau`; repeated when the text is longer."""
    message_s: float = 0.0
    """One message's way between the gateway and either peer; a round of the target has two."""
    restart_s: float = 0.0
    """From a restart's arrival at the draft to its first pass: the rollback and the rest of the pass that ran."""
    max_window: int = 16
    num_tokens: int = 20_000
    seed: int = 0
    gate: bool = False
    """Decode plainly while speculation does not pay."""
    known: bool = True
    """The process has captioned before: its averages hold what passes cost. Else the session begins with guesses."""


@dataclass(frozen=True)
class SimulationResult:
    """How the caption went, counted from its first token."""

    tokens_per_s: float
    speedup: float
    """Over the same target without a draft."""
    num_passes: int
    mean_window: float
    """Draft tokens a pass, passes without a window included."""
    held_s: float
    """Seconds that the target waited for draft tokens."""
    tau: float
    """Share of the draft's tokens that agreed, among those that were compared."""
    mean_accepted_length: float
    """Tokens between two deaths of the line (paper 000's M)."""
    gate_closings: int = 0
    gated_tokens: int = 0


def simulate(setup: SimulationInput) -> SimulationResult:
    """Runs one caption to its last token. The same input gives the same result."""
    caption, plain = _play(setup), _play(replace(setup, policy=None))
    return SimulationResult(
        tokens_per_s=caption.tokens_per_s,
        speedup=caption.tokens_per_s / plain.tokens_per_s,
        num_passes=caption.num_passes,
        mean_window=caption.num_window_tokens / max(caption.num_passes, 1),
        held_s=caption.held_ns / NS,
        tau=caption.pipeline.num_accepted / max(caption.pipeline.num_judged, 1),
        mean_accepted_length=setup.num_tokens / max(caption.pipeline.num_deaths, 1),
        gate_closings=caption.gate.num_closings if caption.gate else 0,
        gated_tokens=caption.gate.num_gated_tokens if caption.gate else 0,
    )


def _play(setup: SimulationInput) -> "_Caption":
    caption = _Caption(setup)
    caption.run()
    return caption


def _known_costs(setup: SimulationInput) -> CostModel:
    """A session starts from its process's averages: one plain pass and one draft pass have been seen."""
    costs = CostModel()
    if not setup.known:
        return costs
    costs.target_pass_s.observe(0, setup.target_pass_s(0) + 2 * setup.message_s)
    costs.draft_pass_s.observe(setup.draft_pass_s)
    return costs


def _draw_agreement(setup: SimulationInput) -> tuple[bool, ...]:
    chance = random.Random(setup.seed)
    return tuple(chance.random() < setup.tau for _ in range(setup.num_tokens + 2 * setup.max_window))


class _Caption:
    """The gateway and the target of one caption: carries out the pipeline's actions and feeds it what comes back."""

    def __init__(self, setup: SimulationInput) -> None:
        self.num_passes = self.num_window_tokens = self.held_ns = 0
        costs = _known_costs(setup)
        self.gate = Gate(costs) if setup.gate and setup.policy else None
        self.pipeline = Pipeline(
            setup.policy or Fixed(),
            costs,
            max_window=setup.max_window,
            vocab_size=2,
            gate=self.gate,
            solo_passes=SOLO_PASSES if setup.policy else setup.num_tokens,
        )
        self._setup = setup
        self._clock = SimulatedClock()
        self._message_ns = round(setup.message_s * NS)
        self._draft = SimulatedDraft(
            self._clock,
            self._post_tokens,
            agreement=setup.agreement or _draw_agreement(setup),
            pass_ns=round(setup.draft_pass_s * NS),
            restart_ns=round(setup.restart_s * NS),
        )
        self._rule = StopRule((), setup.num_tokens)
        self._asked_ns = self._held_ns = 0
        self._hold: object | None = None
        self._restarted_ns: int | None = None

    @property
    def tokens_per_s(self) -> float:
        return (self._setup.num_tokens - 1) / (self._clock.now_ns / NS)

    def run(self) -> None:
        if self._setup.policy is not None:
            point = self.pipeline.on_draft_joining()
            self._draft.restart(RestartLine(point.epoch, 0, point.committed, point.write_until, point.first_chunk))
            self._carry_out(self.pipeline.on_draft_ready(len(point.committed)))
        self._carry_out(self.pipeline.on_verdict(judge_window((), (AGREED,), 0, self._rule)))
        while self.pipeline.finish_reason is None:
            holding, since_ns = self.pipeline.holding, self._clock.now_ns
            self._clock.step()
            self._held_ns += (self._clock.now_ns - since_ns) * holding

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case JudgeWindow():
                    self._judge(action)
                case RestartLine():
                    self._restarted_ns = self._clock.now_ns if action.may_write else None
                    self._clock.after(self._message_ns, partial(self._draft.restart, action))
                case AdvanceLine():
                    self._clock.after(self._message_ns, partial(self._draft.advance, action))
        if self.pipeline.holding and self._hold is None:
            self._hold = object()
            self._clock.after(round(self.pipeline.longest_hold_s * NS), partial(self._hold_expires, self._hold))

    def _hold_expires(self, hold: object) -> None:
        if hold is self._hold:
            self._carry_out(self.pipeline.on_hold_expired())

    def _judge(self, judge: JudgeWindow) -> None:
        self._asked_ns = self._clock.now_ns
        self._hold = None
        delay_ns = 2 * self._message_ns
        for window in (judge.window, *[()] * (judge.num_passes - 1)):
            delay_ns += round(self._setup.target_pass_s(len(window)) * NS)
            self._clock.after(delay_ns, partial(self._verdict_arrives, window), rank=1)

    def _verdict_arrives(self, window: tuple[int, ...]) -> None:
        if self.pipeline.finish_reason is not None:
            return
        round_s, held_s = (self._clock.now_ns - self._asked_ns) / NS, self._held_ns / NS
        self.pipeline.costs.target_pass_s.observe(len(window), round_s)
        self.held_ns += self._held_ns
        self._asked_ns, self._held_ns = self._clock.now_ns, 0
        choices = [AGREED] * (len(window) + 1)
        verdict = judge_window(window, choices, len(self.pipeline.committed), self._rule)
        self.num_passes += 1
        self.num_window_tokens += len(window)
        self._carry_out(self.pipeline.on_verdict(verdict, round_s, held_s))

    def _post_tokens(self, epoch: int, position: int, tokens: tuple[int, ...]) -> None:
        self._clock.after(self._message_ns, partial(self._tokens_arrive, epoch, position, tokens))

    def _tokens_arrive(self, epoch: int, position: int, tokens: tuple[int, ...]) -> None:
        costs = self.pipeline.costs
        costs.draft_pass_s.observe(self._setup.draft_pass_s)
        if self._restarted_ns is not None and epoch == self.pipeline.epoch:
            writing_s = len(tokens) * self._setup.draft_pass_s
            costs.restart_s.observe((self._clock.now_ns - self._restarted_ns) / NS - writing_s)
            self._restarted_ns = None
        self._carry_out(self.pipeline.on_draft_tokens(epoch, position, tokens))


# -- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """The same plan whatever was measured: `hold` for a fresh line, then whatever is pending; `cap` at most."""

    hold: int
    cap: int

    def plan(self, moment: Moment, costs: CostModel) -> WindowPlan:
        return WindowPlan(self.hold if moment.fresh else 0, self.cap)


def pass_cost_table(seconds_by_window: Mapping[int, float]) -> Callable[[int], float]:
    """T_p from measured points: straight lines between them, the last line continued."""
    points = sorted(seconds_by_window.items())

    def target_pass_s(window_len: int) -> float:
        index = min(max(bisect.bisect(points, (window_len, math.inf)), 1), len(points) - 1)
        (left, low), (right, high) = points[index - 1], points[index]
        return low + (high - low) * (window_len - left) / (right - left)

    return target_pass_s


def working_points() -> dict[str, SimulationInput]:
    """The papers' regimes (T_p constant, messages free) and one measured on a CPU."""
    papers = {
        f"c={c} tau={tau}": SimulationInput(lambda _: 1.0, 1 / c, None, tau=tau, max_window=32)
        for c, tau in ((9, 0.8), (15, 0.7), (25, 0.7))
    }
    cpu_pass_s = pass_cost_table({0: 21.1e-3, 1: 29.9e-3, 3: 32.8e-3, 7: 39.3e-3, 15: 53.0e-3})
    cpu = {
        f"cpu tau={tau}": SimulationInput(cpu_pass_s, 1.27e-3, None, tau=tau, message_s=1.25e-3)
        for tau in (0.8, 0.85, 0.9, 0.95)
    }
    return papers | cpu


def best_constant(setup: SimulationInput) -> tuple[Constant, SimulationResult]:
    """The fastest constant plan, by trying them all on a shorter text and the best again on the whole."""
    short = replace(setup, num_tokens=min(setup.num_tokens, 1500))
    plans = [Constant(hold, cap) for cap in range(1, setup.max_window + 1, 2) for hold in range(0, cap + 1, 2)]
    best = max(plans, key=lambda plan: _play(replace(short, policy=plan)).tokens_per_s)
    return best, simulate(replace(setup, policy=best))


def main() -> None:
    columns = ("fixed", "self_clocked", "constant")
    print(f"{'point':16}{''.join(f'{name:>14}' for name in columns)}  (x plain)   best (hold, cap)")
    document: dict[str, dict[str, object]] = {}
    for name, setup in working_points().items():
        results = {policy: simulate(replace(setup, policy=get_policy(policy))) for policy in columns[:2]}
        plan, results["constant"] = best_constant(setup)
        print(f"{name:16}{''.join(f'{results[c].speedup:14.2f}' for c in columns)}{'':14}({plan.hold}, {plan.cap})")
        document[name] = {policy: asdict(result) for policy, result in results.items()}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
