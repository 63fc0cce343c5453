"""What the measured times would give with the papers' acceptance. Pure: rows in, rows out.

Random weights accept nothing, so no speed of a caption was measured here: every figure of this module is a projection,
measured times put into the simulator together with the tau that follows from a paper's mean accepted length. Draft and
target are taken to have a GPU each, and messages between them to be free.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.gpu.geometries import Pair
from bench.simulate import SimulationInput, pass_cost_table, simulate
from slipstream.speculation.pacing import get_policy

POLICIES = ("fixed", "self_clocked")
MAX_WINDOW = 31
NUM_TOKENS = 1_500
Row = Mapping[str, Any]


def pair_rows(pair: Pair, models: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """One row for each length of video at which both models of a pair were measured.

    Args:
        models: by name, the rows of `measure_all`.
    """
    drafts = {row["video_tokens"]: row for row in models.get(pair.draft, ()) if "error" not in row["draft"]}
    targets = {row["video_tokens"]: row for row in models.get(pair.target, ()) if "error" not in row["passes"]}
    return [_pair_row(pair, size, drafts[size], targets[size]) for size in sorted(drafts.keys() & targets.keys())]


def _pair_row(pair: Pair, size: int, draft: Row, target: Row) -> dict[str, Any]:
    return {
        "pair": f"{pair.draft} / {pair.target}",
        "draft": pair.draft,
        "target": pair.target,
        "video_tokens": size,
        "tau": pair.tau,
        "tau_source": f"1 - 1/M, M = {pair.mean_accepted_length} of {pair.source}",
        "is_projection": True,
        "at": {alpha: _at(pair, row, target["passes"]) for alpha, row in draft["draft"].items()},
    }


def _at(pair: Pair, row: Row, passes: Row) -> dict[str, Any]:
    """c* and projected speedups, with the draft as the engine runs it and as a CUDA graph would."""
    plain_s = passes["1"]["s"]
    draft_s = {"eager": row["eager"]["s"]}
    graph_s = best_graph_s(row)
    if graph_s is not None:
        draft_s["graph"] = graph_s
    return {
        way: {"draft_pass_s": seconds, "c": plain_s / seconds, "projected": _projected(pair.tau, passes, seconds)}
        for way, seconds in draft_s.items()
    }


def best_graph_s(row: Row) -> float | None:
    """Seconds of a draft token from the faster of the captured graphs; None where there is none."""
    seconds = [row[name]["s"] for name in row if name.startswith("graph_") and row[name].get("captured")]
    return min(seconds, default=None)


def _projected(tau: float, passes: Row, draft_s: float) -> dict[str, float]:
    target_pass_s = pass_cost_table({int(rows) - 1: timing["s"] for rows, timing in passes.items()})
    speedups = {}
    for policy in POLICIES:
        setup = SimulationInput(
            target_pass_s, draft_s, get_policy(policy), tau=tau, max_window=MAX_WINDOW, num_tokens=NUM_TOKENS
        )
        speedups[policy] = simulate(setup).speedup
    return speedups
