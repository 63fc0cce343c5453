"""What the event simulator says that the measured stack should reach, clip by clip. Pure: no clock, no service.

The simulator gets what was measured: the seconds of a target pass by window (of the model pass alone; all captions
of a policy together, scaled to the pace of the one at hand), T_q, and for every output position whether the draft
agrees. Without message times this is the ideal stack; with them it is one whose every round costs what was measured
beside the pass. (A measured caption begins with a window that was written under the prefill; a simulated one does not,
which in a short caption is worth up to one plain pass to the measured side.)
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.samples import Sample, WindowCost, median
from bench.simulate import SimulationInput, pass_cost_table, simulate
from bench.tasks import Agreement
from slipstream.speculation.pacing import get_policy

REPEATS = 8
"""The recorded text is simulated so many times in a row: the policy's estimates, which a service has from its
earlier captions, then hardly count their first guesses."""


@dataclass(frozen=True)
class ClipPrediction:
    """Tokens a second of one clip: measured, and simulated without and with what a round costs beside the pass."""

    measured: float
    ideal: float
    with_overhead: float


def predict(
    policy: str, samples: Sequence[Sample], agreements: Mapping[str, Agreement], max_window: int
) -> list[ClipPrediction]:
    """One prediction for each of one policy's `samples` in which the draft wrote, by the agreement of its clip."""
    samples = [sample for sample in samples if sample.figures["draft_pass_s"] > 0]
    if not samples:
        return []
    costs = pooled_costs(sample.costs for sample in samples)
    table = rising(costs)
    predictions = []
    for sample in samples:
        agrees = agreements[sample.clip].agrees
        pace = _pace(sample.costs, costs)
        target_pass_s = pass_cost_table({window: pace * seconds for window, seconds in table.items()})
        rates = [
            simulate(
                SimulationInput(
                    target_pass_s,
                    sample.figures["draft_pass_s"],
                    get_policy(policy),
                    agreement=agrees,
                    message_s=message_s,
                    max_window=max_window,
                    num_tokens=REPEATS * len(agrees),
                )
            ).tokens_per_s
            for message_s in (0.0, round_overhead_s(sample.costs) / 2)
        ]
        predictions.append(ClipPrediction(sample.tokens_per_s, *rates))
    return predictions


def prediction_row(
    policy: str, samples: Sequence[Sample], agreements: Mapping[str, Agreement], max_window: int
) -> dict[str, object]:
    """Medians over the clips, and what they rest on."""
    predictions = predict(policy, samples, agreements, max_window)
    costs = pooled_costs(sample.costs for sample in samples)
    return {
        "policy": policy,
        "n": len(predictions),
        "measured_tokens_per_s": median(p.measured for p in predictions),
        "predicted_tokens_per_s": median(p.ideal for p in predictions),
        "measured_over_predicted": median(p.measured / p.ideal for p in predictions),
        "predicted_with_overhead_tokens_per_s": median(p.with_overhead for p in predictions),
        "measured_over_predicted_with_overhead": median(p.measured / p.with_overhead for p in predictions),
        "round_overhead_s": round_overhead_s(costs),
        "draft_pass_s": median(sample.figures["draft_pass_s"] for sample in samples),
        "agreement": median(sum(a.agrees) / len(a.agrees) for a in agreements.values()),
        "pass_costs": [
            {"window": window, "count": cost.count, "pass_s": cost.pass_s, "round_s": cost.round_s}
            for window, cost in costs.items()
        ],
    }


def pooled_costs(tables: Iterable[Mapping[int, WindowCost]]) -> dict[int, WindowCost]:
    """The tables of several captions as one, in ascending order."""
    by_window: defaultdict[int, list[WindowCost]] = defaultdict(list)
    for table in tables:
        for window, cost in table.items():
            by_window[window].append(cost)
    return {window: _pooled(by_window[window]) for window in sorted(by_window)}


def round_overhead_s(costs: Mapping[int, WindowCost]) -> float:
    """Mean seconds that a round takes beside its pass."""
    pooled = _pooled(list(costs.values()))
    return max(pooled.round_s - pooled.pass_s, 0.0)


def rising(costs: Mapping[int, WindowCost]) -> dict[int, float]:
    """Seconds of a pass by window, without noise that makes a longer one cheaper: such neighbours share their mean.

    A single window is given a second point of the same cost.
    """
    blocks: list[tuple[float, int, list[int]]] = []
    for window, cost in sorted(costs.items()):
        blocks.append((cost.pass_s, cost.count, [window]))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, low_count, low_windows), (high, high_count, high_windows) = blocks[-2:]
            count = low_count + high_count
            mean = (low * low_count + high * high_count) / count
            blocks[-2:] = [(mean, count, low_windows + high_windows)]
    table = {window: value for value, _, windows in blocks for window in windows}
    only_window = next(iter(table)) if len(table) == 1 else None
    return table if only_window is None else table | {only_window + 1: table[only_window]}


def _pace(own: Mapping[int, WindowCost], pooled: Mapping[int, WindowCost]) -> float:
    """How much slower this caption's passes were than passes over the same windows on average: the machine's mood."""
    return sum(cost.count * cost.pass_s for cost in own.values()) / sum(
        cost.count * pooled[window].pass_s for window, cost in own.items()
    )


def _pooled(costs: Sequence[WindowCost]) -> WindowCost:
    count = max(sum(cost.count for cost in costs), 1)
    return WindowCost(
        count,
        sum(cost.pass_s * cost.count for cost in costs) / count,
        sum(cost.round_s * cost.count for cost in costs) / count,
    )
