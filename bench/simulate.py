"""Both policies in simulated time, and the best constant plan, at the papers' working points and at one of a CPU; then
what bad drafts cost.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from bench.common import make_parser
from bench.output import finish
from bench.simulator import SimulationInput, SimulationResult, draw_agreement, pass_cost_table, play, simulate
from slipstream.speculation.pacing import CostModel, Moment, WindowPlan, get_policy


@dataclass(frozen=True)
class Constant:
    """The same plan whatever was measured: `hold` for a fresh line, then whatever is pending; `cap` at most."""

    writes_ahead: ClassVar[bool] = True
    hold: int
    cap: int

    def plan(self, moment: Moment, costs: CostModel) -> WindowPlan:
        return WindowPlan(self.hold if moment.fresh else 0, self.cap)


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


def bad_drafts(num_tokens: int = 200, seed: int = 0) -> dict[str, SimulationInput]:
    """Captions whose draft does not help, on the CPU of `working_points`, in a process that has measured nothing yet.

    One never agrees, one is slower than the target, and one agrees (tau = 0.93) for the first half of the text only.
    """
    base = replace(working_points()["cpu tau=0.9"], policy=get_policy("self_clocked"), seed=seed)
    base = replace(base, tau=0.0, num_tokens=num_tokens, gate=True, known=False)
    good = draw_agreement(replace(base, tau=0.93))
    turning = tuple(agrees and position < num_tokens // 2 for position, agrees in enumerate(good))
    return {
        "nonsense": base,
        "slow": replace(base, tau=0.93, draft_pass_s=0.04),
        "turns bad": replace(base, agreement=turning),
    }


def best_constant(setup: SimulationInput) -> tuple[Constant, SimulationResult]:
    """The fastest constant plan, by trying them all on a shorter text and the best again on the whole."""
    short = replace(setup, num_tokens=min(setup.num_tokens, 1500))
    plans = [Constant(hold, cap) for cap in range(1, setup.max_window + 1, 2) for hold in range(0, cap + 1, 2)]
    best = max(plans, key=lambda plan: play(replace(short, policy=plan)).tokens_per_s)
    return best, simulate(replace(setup, policy=best))


def main(argv: Sequence[str]) -> None:
    make_parser("simulate", "Speedups in simulated time.").parse_args(argv)
    columns = ("fixed", "self_clocked", "constant")
    print(f"{'point':16}{''.join(f'{name:>14}' for name in columns)}  (x plain)   best (hold, cap)")
    document: dict[str, dict[str, object]] = {}
    for name, setup in working_points().items():
        results = {policy: simulate(replace(setup, policy=get_policy(policy))) for policy in columns[:2]}
        plan, results["constant"] = best_constant(setup)
        print(f"{name:16}{''.join(f'{results[c].speedup:14.2f}' for c in columns)}{'':14}({plan.hold}, {plan.cap})")
        document[name] = {policy: asdict(result) for policy, result in results.items()}
    for name, setup in bad_drafts().items():
        gated, ungated = simulate(setup), simulate(replace(setup, gate=False))
        print(
            f"{name:16} takes {1 / gated.speedup:.3f} of plain decoding's time, {1 / ungated.speedup:.3f} without gate"
        )
        document[name] = {"gated": asdict(gated), "ungated": asdict(ungated)}
    finish("simulate", document)
