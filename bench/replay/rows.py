"""A replay's figures, in the table's own time: what was measured, times the speed it was run at. Pure."""

from collections.abc import Mapping, Sequence

from bench.replay.tables import Replay
from bench.samples import Sample, median

PLAIN = "autoregressive"
LATE = 1.1
"""Passes that took longer than this many times their table's time show that the machine was too slow for the replay."""


def replay_rows(replay: Replay, samples: Sequence[Sample], alphas: Mapping[str, float]) -> list[dict[str, object]]:
    """A row a method: medians over the clips.

    Args:
        alphas: by method, the share of the video that its draft does without.
    """
    plain = {sample.clip: sample for sample in samples if sample.method == PLAIN}
    methods = list(dict.fromkeys(sample.method for sample in samples))
    return [_row(replay, [s for s in samples if s.method == name], plain, alphas.get(name)) for name in methods]


def _row(replay: Replay, own: Sequence[Sample], plain: Mapping[str, Sample], alpha: float | None) -> dict[str, object]:
    name = own[0].method
    target_s, draft_s = _in_table_time("target_pass_s", own, replay), _in_table_time("draft_pass_s", own, replay)
    table_target_s = replay.target.pass_s(1)
    table_draft_s = None if alpha is None else replay.draft.pass_s(alpha)
    pairs = [(s, plain[s.clip]) for s in own if s.clip in plain]
    return {
        "method": name,
        "n": len(own),
        "tokens_per_s": median(s.tokens_per_s / replay.speed for s in own),
        "speedup": median(s.tokens_per_s / p.tokens_per_s for s, p in pairs if p.tokens_per_s),
        "paper_speedup": replay.paper_speedups.get(name),
        "tau": median(s.figures["tau"] for s in own if "tau" in s.figures),
        "M": median(s.figures["mean_accepted_length"] for s in own if "mean_accepted_length" in s.figures),
        "mean_window": median(s.figures["mean_window"] for s in own if "mean_window" in s.figures),
        "T_p": target_s,
        "T_q": draft_s,
        "c": table_target_s / table_draft_s if table_draft_s else None,
        "table_T_p": table_target_s,
        "table_T_q": table_draft_s,
        "late": _is_late(own, replay, draft_s, table_draft_s),
        "first_token_s": _first_token_s(own, replay),
        "identical": median(float(s.token_ids == p.token_ids) for s, p in pairs),
    }


def _in_table_time(figure: str, samples: Sequence[Sample], replay: Replay) -> float | None:
    return median(s.figures[figure] * replay.speed for s in samples if s.figures.get(figure))


def _first_token_s(samples: Sequence[Sample], replay: Replay) -> float | None:
    """None where prefills lasted what they really take."""
    if replay.target.prefill_s is None:
        return None
    return median(sample.first_token_s * replay.speed for sample in samples)


def _is_late(samples: Sequence[Sample], replay: Replay, measured_draft_s: float | None, draft_s: float | None) -> bool:
    costs = [(window, cost) for sample in samples for window, cost in sample.costs.items()]
    took_s = replay.speed * sum(cost.count * cost.pass_s for _, cost in costs)
    if took_s > LATE * sum(cost.count * replay.target.pass_s(window + 1) for window, cost in costs):
        return True
    return measured_draft_s is not None and draft_s is not None and measured_draft_s > LATE * draft_s
