"""One caption by one method, as plain figures, and the statistics over many. Pure: no clock, no service."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.common import Captioned, Usage
from bench.reference import Generated
from slipstream import Speculation, Timings, Trace

LATENCIES = tuple(part.name for part in fields(Timings))
COUNTS = tuple(part.name for part in fields(Speculation) if part.type in (int, float))
"""What a caption tells in numbers, by their names there."""


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
    caption, costs = captioned.caption, captioned.caption.speculation.pass_costs
    told = vars(caption.timings) | {name: getattr(caption.speculation, name) for name in COUNTS}
    generate_s, passes = told["generate_s"], told["passes"]
    if caption.options["method"] == "autoregressive":
        told = {name: told[name] for name in (*LATENCIES, "passes", "target_pass_s", "plain_pass_s")}
    else:
        num_drafted = sum(cost.window * cost.count for cost in costs)
        told["mean_window"] = num_drafted / max(sum(cost.count for cost in costs), 1)
        told["held_share"] = told["held_s"] / generate_s if generate_s else 0.0
        told["draft_ready_before_first_token"] = float(captioned.ready_at[:1] == (0,))
        told["c"] = told["speed_ratio"]
    if not told["plain_pass_s"]:
        del told["plain_pass_s"]
    if passes:
        told["mean_tokens_per_pass"] = (caption.num_tokens - 1) / passes
    for name in ("target", "draft") if captioned.ready_at else ("target",):
        if name in usage and generate_s:  # the share of the time in which no thread ran, while tokens were decoded
            told[f"{name}_idle"] = 1 - usage[name].cpu_s / (usage[name].cores * generate_s)
    return Sample(
        method,
        clip,
        captioned.token_ids,
        caption.decoding_rate,
        caption.timings.first_token_s,
        caption.timings.total_s,
        told | {"video_tokens": caption.video.video_tokens},
        {cost.window: WindowCost(cost.count, cost.pass_s, cost.round_s) for cost in costs},
        usage,
        captioned.trace,
    )


def reference_sample(method: str, clip: str, answer: Generated) -> Sample:
    rate = answer.num_timed / answer.decode_s if answer.decode_s > 0 else 0.0
    total_s = answer.first_token_s + answer.decode_s
    return Sample(method, clip, answer.token_ids, rate, answer.first_token_s, total_s, note=answer.note)


def median(values: Iterable[float]) -> float | None:
    """None for no values."""
    spread = Spread.of(values)
    return None if spread is None else spread.median


def by_clip(samples: Iterable[Sample], method: str) -> dict[str, Sample]:
    return {sample.clip: sample for sample in samples if sample.method == method}


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
