"""A simulator of captioning, in simulated time: speedups, and what a gate saves. Knows no model.

The program prints both policies, and the best constant plan, at the papers' working points and at one
of a CPU; then what bad drafts cost.
"""

import argparse
import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from bench.output import finish
from bench.simulated_caption import NS, SimulatedCaption, SimulationInput, draw_agreement
from slipstream.speculation.pacing import CostModel, Moment, WindowPlan, get_policy

__all__ = ["SimulationInput", "SimulationResult", "bad_drafts", "simulate", "working_points"]


@dataclass(frozen=True)
class SimulationResult:
    """How the caption went, counted from its first token."""

    tokens_per_s: float
    speedup: float
    """Over the same target without a draft."""
    passes_by_window: Mapping[int, int]
    """Target passes by the length of their window; 0 is a plain pass."""
    held_s: float
    """Seconds that the target waited for draft tokens."""
    tau: float
    """Share of the draft's tokens that agreed, among those that were compared."""
    mean_accepted_length: float
    """Tokens between two deaths of the line (paper 000's M)."""
    gate_closings: int = 0
    gated_tokens: int = 0

    @property
    def num_passes(self) -> int:
        return sum(self.passes_by_window.values())

    @property
    def mean_window(self) -> float:
        """Draft tokens a pass, passes without a window included."""
        num_drafted = sum(window * count for window, count in self.passes_by_window.items())
        return num_drafted / max(self.num_passes, 1)


def simulate(setup: SimulationInput) -> SimulationResult:
    """Runs one caption to its last token. The same input gives the same result."""
    caption, plain = _play(setup), _play(replace(setup, policy=None))
    return SimulationResult(
        tokens_per_s=caption.tokens_per_s,
        speedup=caption.tokens_per_s / plain.tokens_per_s,
        passes_by_window=dict(sorted(caption.passes_by_window.items())),
        held_s=caption.held_ns / NS,
        tau=caption.pipeline.num_accepted / max(caption.pipeline.num_judged, 1),
        mean_accepted_length=setup.num_tokens / max(caption.pipeline.num_deaths, 1),
        gate_closings=caption.gate.num_closings if caption.gate else 0,
        gated_tokens=caption.gate.num_gated_tokens if caption.gate else 0,
    )


def _play(setup: SimulationInput) -> SimulatedCaption:
    caption = SimulatedCaption(setup)
    caption.run()
    return caption


# -- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """The same plan whatever was measured: `hold` for a fresh line, then whatever is pending; `cap` at most."""

    writes_ahead: ClassVar[bool] = True
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
    best = max(plans, key=lambda plan: _play(replace(short, policy=plan)).tokens_per_s)
    return best, simulate(replace(setup, policy=best))


def main(argv: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="python -m bench simulate", description="Speedups in simulated time.").parse_args(argv)
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
