"""What theory says that the measured stack should reach, by method and clip. Pure.

Theory gets what was measured: the seconds of a target pass by window (of the model pass alone; all captions of a
method together, scaled to the pace of the one at hand), T_q, what a round takes beside its pass, and for every output
position where the target's token stands among the draft's candidates. A chain with a draft is played by the event
simulator, and so is a dynamic tree, whose draft's pass takes by its rows what such passes took in the reference
process. Static trees and self-drafting are rounds in turns, with ParallelVLM's lemma 1 for the tokens that one yields;
so is plain decoding, whose rounds yield one.
(A measured caption begins with a window that was written under the prefill; a simulated one does not, which in a short
caption is worth up to one plain pass to the measured side.)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.methods.agreement import Agreement
from bench.methods.samples import Sample, WindowCost, median
from bench.simulate_trees import TreeInput, draw_trace, speed
from bench.simulator import SimulationInput, pass_cost_table, simulate
from slipstream.speculation.methods import SPARSE_GAMMA, Drafter, Method, Shape
from slipstream.speculation.pacing import DEFAULT_GAMMA, get_policy
from slipstream.speculation.trees.growth import GROWTHS

REPEATS = 8
"""The recorded text is simulated so many times in a row: the policy's estimates, which a service has from its
earlier captions, then hardly count their first guesses."""


def predictions(
    samples: Sequence[Sample],
    methods: Mapping[str, Method],
    agreements: Mapping[str, Mapping[str, Agreement]],
    *,
    max_window: int,
) -> dict[str, object]:
    """Every caption of every method against theory.

    Args:
        samples: all that was measured; those of rows that are not in `methods` are left out.
        methods: by the name of their row, as the stack ran them.
        agreements: by row and clip. What is missing is predicted from the tau that the caption measured itself.

    Returns:
        `prediction_error`, the median of |measured / predicted - 1| over all captions, or None for no captions;
        `methods`, a row each; `clips`, tokens a second of each caption: measured and predicted.
    """
    clips: list[dict[str, Any]] = []
    rows = []
    undrafted = {name for name, method in methods.items() if method.drafter is Drafter.NONE}
    plain = [sample.costs for sample in samples if sample.method in undrafted]
    plain_s = cost.pass_s if (cost := pooled_costs(plain).get(0)) else None
    for name, method in methods.items():
        own = _predictable(method, [sample for sample in samples if sample.method == name])
        recorded = agreements.get(name, {})
        found: list[dict[str, Any]] = [
            {"method": name, "clip": sample.clip, "measured": sample.tokens_per_s, "predicted": 1 / token_s}
            for sample, token_s in zip(own, _predicted_seconds(method, own, recorded, max_window, plain_s), strict=True)
        ]
        clips += found
        if found:
            rows.append(
                {
                    "method": name,
                    "n": len(found),
                    "agreement_from": "recorded" if all(sample.clip in recorded for sample in own) else "tau",
                    "measured_tokens_per_s": median(clip["measured"] for clip in found),
                    "predicted_tokens_per_s": median(clip["predicted"] for clip in found),
                    "ratio": median(clip["measured"] / clip["predicted"] for clip in found),
                    "error": _error(found),
                    "round_overhead_s": round_overhead_s(pooled_costs(sample.costs for sample in own)),
                }
            )
    return {"prediction_error": _error(clips), "methods": rows, "clips": clips}


def _error(clips: Sequence[Mapping[str, Any]]) -> float | None:
    return median(abs(clip["measured"] / clip["predicted"] - 1) for clip in clips)


def _predict_caption(
    method: Method, sample: Sample, pass_table: Mapping[int, float], agreement: Agreement | None, max_window: int
) -> float:
    """Seconds a token, from seconds of a target pass by window, and where the draft agrees; without that, from the
    sample's tau."""
    if method.drafter is not Drafter.DRAFT or method.shape not in (Shape.CHAIN, *GROWTHS):
        return _in_turns(method, sample, pass_table)
    setup = SimulationInput(
        pass_cost_table(pass_table),
        sample.figures["draft_pass_s"],
        get_policy(method.policy, method.gamma),
        tau=sample.figures.get("tau", 0.0),
        agreement=agreement.agrees if agreement is not None else (),
        message_s=round_overhead_s(sample.costs) / 2,
        max_window=max_window,
        num_tokens=REPEATS * len(sample.token_ids),
        gate=method.gate,
    )
    if method.shape is Shape.CHAIN:
        return 1 / simulate(setup).tokens_per_s
    tree = TreeInput(replace(setup, interruptible=False), draw_trace(setup.tau), method.shape)
    if agreement is None:
        return 1 / speed(tree)
    if GROWTHS[method.shape].extends_branches and agreement.pass_s:  # what it told is the mean over passes of some rows
        tree = replace(tree, base=replace(tree.base, draft_pass_s=agreement.pass_s))
    return 1 / speed(replace(tree, trace=agreement.trace, row_share=agreement.row_share))


def _in_turns(method: Method, sample: Sample, pass_table: Mapping[int, float]) -> float:
    """A round drafts, then judges; it yields the accepted tokens (lemma 1) and the target's own."""
    if method.drafter is Drafter.NONE:
        return pass_cost_table(pass_table)(0) + round_overhead_s(sample.costs)
    window = max(sample.costs, key=lambda window: sample.costs[window].count)
    pass_s, draft_pass_s = pass_cost_table(pass_table)(window), sample.figures["draft_pass_s"]
    if method.drafter is Drafter.SELF:
        num_passes, overhead_s = method.gamma or SPARSE_GAMMA, round_overhead_s(sample.costs, draft_pass_s)
    else:  # the draft's messages take as long as the target's
        num_passes, overhead_s = method.gamma or DEFAULT_GAMMA, 2 * round_overhead_s(sample.costs)
    num_tokens = expected_accepted(sample.figures.get("tau", 0.0), num_passes) + 1
    return (pass_s + num_passes * draft_pass_s + overhead_s) / num_tokens


def expected_accepted(tau: float, num_tokens: int) -> float:
    """Of so many draft tokens in a row, those before the first that is rejected (ParallelVLM, lemma 1)."""
    return sum(tau**length for length in range(1, num_tokens + 1))


def _predictable(method: Method, samples: Sequence[Sample]) -> list[Sample]:
    """Those with tokens to time, in which the draft wrote if there is one."""
    return [
        sample
        for sample in samples
        if len(sample.token_ids) > 1 and sample.tokens_per_s > 0 and any(c.count for c in sample.costs.values())
        if method.drafter is Drafter.NONE or sample.figures.get("draft_pass_s", 0.0) > 0
    ]


def _predicted_seconds(
    method: Method,
    samples: Sequence[Sample],
    agreements: Mapping[str, Agreement],
    max_window: int,
    plain_s: float | None,
) -> list[float]:
    """`plain_s`: of a pass of plain decoding, for a method that took none. Behind a draft that is always ahead all
    windows are nearly the longest, and a line through those few would say anything of short ones."""
    costs = pooled_costs(sample.costs for sample in samples)
    known = dict(costs)
    if plain_s is not None and costs:
        known.setdefault(0, WindowCost(1, min(plain_s, *(cost.pass_s for cost in costs.values())), 0.0))
    table = rising(known)
    predicted = []
    for sample in samples:
        own_pace = pace(sample.costs, costs)
        own_table = {window: own_pace * seconds for window, seconds in table.items()}
        predicted.append(_predict_caption(method, sample, own_table, agreements.get(sample.clip), max_window))
    return predicted


# -- what passes were measured to take --------------------------------------------------------------------------------


def pooled_costs(tables: Iterable[Mapping[int, WindowCost]]) -> dict[int, WindowCost]:
    """The tables of several captions as one, in ascending order."""
    found = list(tables)
    windows = sorted({window for table in found for window in table})
    return {window: _pooled([table[window] for table in found if window in table]) for window in windows}


def round_overhead_s(costs: Mapping[int, WindowCost], drafted_token_s: float = 0.0) -> float:
    """Mean seconds that a round takes beside its pass, and beside `drafted_token_s` for each token of its window, where
    the target drafts within the round."""
    pooled = _pooled(list(costs.values()))
    num_drafted = sum(window * cost.count for window, cost in costs.items()) / pooled.count
    return max(pooled.round_s - pooled.pass_s - num_drafted * drafted_token_s, 0.0)


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


def pace(own: Mapping[int, WindowCost], pooled: Mapping[int, WindowCost]) -> float:
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
