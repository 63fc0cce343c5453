"""One caption by one method, as plain figures, and the statistics over many. Pure: no clock, no service."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.common import Captioned, Usage
from bench.reference import Generated
from slipstream import Trace
from slipstream.cli.views import decoding_rate

LATENCIES = (
    *("decode_s", "target_encode_s", "target_prefill_s", "draft_encode_s", "draft_guidance_s", "draft_prune_s"),
    *("draft_prefill_s", "draft_ready_s", "first_token_s", "generate_s", "total_s"),
)
"""Parts of a caption's time, by their names in its timings."""
COUNTS = (
    *("passes", "windows", "judged", "accepted", "restarts", "drafts_lost"),
    *("kept_tokens", "guidance_bytes", "gated_tokens", "gate_closings"),
)


@dataclass(frozen=True)
class WindowCost:
    """Target passes over windows of one length: how many, and their mean seconds."""

    count: int
    pass_s: float
    round_s: float
    """As seen by the gateway, messages included."""


@dataclass(frozen=True)
class Sample:
    """What one caption by one method showed. `figures` holds what only a stack tells; what was not measured is left
    out there."""

    method: str
    clip: str
    token_ids: tuple[int, ...]
    tokens_per_s: float
    """Of decoding: after the first token."""
    first_token_s: float
    total_s: float | None = None
    """From the request to the last token."""
    figures: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[int, WindowCost] = field(default_factory=dict)
    usage: Mapping[str, Usage] = field(default_factory=dict)
    """By service."""
    trace: tuple[Trace, ...] = ()
    text: str = ""
    note: str = ""


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and number of some values."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None for no values."""
        known = sorted(values)
        if not known:
            return None
        if len(known) == 1:
            return cls(known[0], known[0], known[0], 1)
        low, median, high = statistics.quantiles(known, n=4, method="inclusive")
        return cls(median, low, high, len(known))


def stack_sample(
    method: str, clip: str, captioned: Captioned, usage: Mapping[str, Usage] = MappingProxyType({})
) -> Sample:
    """From what a client of the stack saw, and what the services used while they decoded."""
    caption = captioned.caption
    speculation, timings = caption.speculation, caption.timings
    figures: dict[str, float] = {
        **{name: getattr(timings, name) for name in LATENCIES},
        "longest_gap_s": timings.longest_gap_s,
        "target_pass_s": speculation.target_pass_s,
        "passes": speculation.passes,
        "video_tokens": caption.video.video_tokens,
        **_idle_shares(usage, timings.generate_s, ("target", "draft") if captioned.ready_at else ("target",)),
    }
    if speculation.plain_pass_s:
        figures["plain_pass_s"] = speculation.plain_pass_s
    if speculation.passes:
        figures["mean_tokens_per_pass"] = (caption.num_tokens - 1) / speculation.passes
    if caption.options["method"] != "autoregressive":
        figures |= {name: getattr(speculation, name) for name in COUNTS} | {
            "mean_accepted_length": speculation.mean_accepted_length,
            "tau": speculation.tau,
            "draft_pass_s": speculation.draft_pass_s,
            "c": speculation.speed_ratio,
            "mean_window": _mean_window(captioned),
            "held_share": speculation.held_s / timings.generate_s if timings.generate_s else 0.0,
            "draft_ready_before_first_token": float(captioned.ready_at[:1] == (0,)),
        }
    costs = {cost.window: WindowCost(cost.count, cost.pass_s, cost.round_s) for cost in speculation.pass_costs}
    return Sample(
        method,
        clip,
        captioned.token_ids,
        decoding_rate(caption),
        timings.first_token_s,
        timings.total_s,
        figures,
        costs,
        usage,
        captioned.trace,
        caption.text,
    )


def reference_sample(method: str, clip: str, answer: Generated) -> Sample:
    """From an answer of transformers."""
    rate = answer.num_timed / answer.decode_s if answer.decode_s > 0 else 0.0
    total_s = answer.first_token_s + answer.decode_s
    return Sample(method, clip, answer.token_ids, rate, answer.first_token_s, total_s, note=answer.note)


def median(values: Iterable[float]) -> float | None:
    """None for no values."""
    spread = Spread.of(values)
    return None if spread is None else spread.median


def by_clip(samples: Iterable[Sample], method: str) -> dict[str, Sample]:
    """The samples of one method by clip."""
    return {sample.clip: sample for sample in samples if sample.method == method}


def _idle_shares(usage: Mapping[str, Usage], generate_s: float, services: Iterable[str]) -> dict[str, float]:
    """Of processes, while tokens were decoded: the share of the time in which no thread ran."""
    return {
        f"{name}_idle": 1 - usage[name].cpu_s / (usage[name].cores * generate_s)
        for name in services
        if name in usage and generate_s
    }


def _mean_window(captioned: Captioned) -> float:
    """Draft tokens a pass, passes without a window included."""
    costs = captioned.caption.speculation.pass_costs
    return sum(cost.window * cost.count for cost in costs) / max(sum(cost.count for cost in costs), 1)


def timeline(sample: Sample) -> dict[str, Any]:
    """What the gateway saw of the models, counted from the caption's first token, where it was asked for a trace."""
    return {"clip": Path(sample.clip).stem, "trace": list(_trace_rows(sample.trace))}


def _trace_rows(trace: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    """Without the pass that is the prefill's own token. Half of what a round takes beside its pass is the way there,
    and half the way back."""
    prefill = next((entry for entry in trace if entry.kind == "pass"), None)
    first_s = 0.0 if prefill is None else prefill.at_s
    for entry in trace:
        if entry is prefill:
            continue
        row: dict[str, Any] = {"t_s": round(entry.at_s - first_s, 6), "kind": entry.kind}
        if entry.kind == "pass":
            back_s = max(entry.at_s - entry.asked_s - entry.pass_s, 0.0) / 2
            row |= {"start_s": round(entry.at_s - first_s - back_s - entry.pass_s, 6), "pass_s": round(entry.pass_s, 6)}
            row |= {"window": entry.tokens, "accepted": entry.accepted}
        elif entry.kind == "draft":
            row |= {"tokens": entry.tokens, "pass_s": round(entry.pass_s, 6), "stale": entry.stale}
        yield row
