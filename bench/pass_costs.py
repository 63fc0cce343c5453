"""What target passes were measured to take, by window: pooled over captions, made monotone, set to a pace. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from bench.samples import WindowCost


def pooled_costs(tables: Iterable[Mapping[int, WindowCost]]) -> dict[int, WindowCost]:
    """The tables of several captions as one, in ascending order."""
    by_window: defaultdict[int, list[WindowCost]] = defaultdict(list)
    for table in tables:
        for window, cost in table.items():
            by_window[window].append(cost)
    return {window: _pooled(by_window[window]) for window in sorted(by_window)}


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
