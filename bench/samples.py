"""One caption by one method, as plain figures, and the statistics over many. Pure: no clock, no service, no model."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.captions import Captioned
from bench.tasks import Generated
from slipstream.cli.summary import decoding_rate

ENGINE_PLAIN = "autoregressive"
OUTSIDE_PLAIN = "transformers"


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


def stack_sample(method: str, clip: str, captioned: Captioned) -> Sample:
    """From what a client of the stack saw."""
    summary = captioned.summary
    speculation, timings = summary.speculation, summary.timings
    figures: dict[str, float] = {
        "target_pass_s": speculation.target_pass_s,
        "passes": speculation.passes,
        "longest_gap_s": timings.longest_gap_s,
        "target_encode_s": timings.target_encode_s,
        "target_prefill_s": timings.target_prefill_s,
    }
    if speculation.plain_pass_s:
        figures["plain_pass_s"] = speculation.plain_pass_s
    if summary.method != "autoregressive":
        figures |= {
            "mean_accepted_length": speculation.mean_accepted_length,
            "tau": speculation.tau,
            "draft_pass_s": speculation.draft_pass_s,
            "c": speculation.speed_ratio,
            "windows": speculation.windows,
            "mean_window": _mean_window(captioned),
            "restarts": speculation.restarts,
            "held_share": speculation.held_s / timings.generate_s if timings.generate_s else 0.0,
            "draft_ready_s": timings.draft_ready_s,
            "draft_ready_before_first_token": float(captioned.ready_at[:1] == (0,)),
            "drafts_lost": speculation.drafts_lost,
            "guidance_bytes": speculation.guidance_bytes,
            "kept_tokens": speculation.kept_tokens,
        }
    costs = {cost.window: WindowCost(cost.count, cost.pass_s, cost.round_s) for cost in speculation.pass_costs}
    return Sample(
        method,
        clip,
        captioned.token_ids,
        decoding_rate(summary),
        timings.first_token_s,
        timings.total_s,
        figures | {"video_tokens": summary.video.video_tokens},
        costs,
    )


def reference_sample(method: str, clip: str, answer: Generated) -> Sample:
    """From an answer of transformers."""
    rate = answer.num_timed / answer.decode_s if answer.decode_s > 0 else 0.0
    return Sample(method, clip, answer.token_ids, rate, answer.first_token_s, note=answer.note)


def method_row(method: str, samples: Sequence[Sample]) -> dict[str, object]:
    """The figures of one method: medians over its clips; ratios are medians of the ratios clip by clip."""
    own = [sample for sample in samples if sample.method == method]
    engine_plain, outside_plain = by_clip(samples, ENGINE_PLAIN), by_clip(samples, OUTSIDE_PLAIN)
    own_plain = outside_plain if method.startswith(OUTSIDE_PLAIN) else engine_plain
    rate = Spread.of(sample.tokens_per_s for sample in own)
    notes = sorted({sample.note for sample in own if sample.note})
    return {
        "method": method,
        "n": len(own),
        "tokens": median(len(sample.token_ids) for sample in own),
        "tokens_per_s": None if rate is None else {"median": rate.median, "quartiles": [rate.low, rate.high]},
        "decode_speedup": median(_ratios(own, own_plain, _rate)),
        "decode_speedup_over_engine_plain": median(_ratios(own, engine_plain, _rate)),
        "decode_speedup_over_transformers": median(_ratios(own, outside_plain, _rate)),
        "end_to_end_speedup": median(_ratios(own, engine_plain, _inverse_total)),
        "first_token_s": median(sample.first_token_s for sample in own),
        "first_token_ratio": median(_ratios(own, own_plain, lambda sample: sample.first_token_s)),
        "identical": _identical_share(own, engine_plain),
        **{name: median(s.figures[name] for s in own if name in s.figures) for name in _figure_names(own)},
        **({"note": "; ".join(notes)} if notes else {}),
    }


def median(values: Iterable[float]) -> float | None:
    """None for no values."""
    spread = Spread.of(values)
    return None if spread is None else spread.median


def by_clip(samples: Iterable[Sample], method: str) -> dict[str, Sample]:
    """The samples of one method by clip."""
    return {sample.clip: sample for sample in samples if sample.method == method}


def rate_ratio(samples: Sequence[Sample], method: str, other: str) -> float | None:
    """Median over the clips of one method's tokens a second over another's."""
    return median(_ratios([s for s in samples if s.method == method], by_clip(samples, other), _rate))


def _rate(sample: Sample) -> float:
    return sample.tokens_per_s


def _inverse_total(sample: Sample) -> float:
    return 1 / sample.total_s if sample.total_s else 0.0


def _ratios(own: Iterable[Sample], base: Mapping[str, Sample], of: Callable[[Sample], float]) -> list[float]:
    """Clip by clip, where both were measured."""
    pairs = [(of(sample), of(base[sample.clip])) for sample in own if sample.clip in base]
    return [part / whole for part, whole in pairs if part and whole]


def _identical_share(own: Sequence[Sample], base: Mapping[str, Sample]) -> float | None:
    compared = [sample.token_ids == base[sample.clip].token_ids for sample in own if sample.clip in base]
    return sum(compared) / len(compared) if compared else None


def _figure_names(own: Iterable[Sample]) -> list[str]:
    return list(dict.fromkeys(name for sample in own for name in sample.figures))


def _mean_window(captioned: Captioned) -> float:
    """Draft tokens a pass, passes without a window included."""
    costs = captioned.summary.speculation.pass_costs
    return sum(cost.window * cost.count for cost in costs) / max(sum(cost.count for cost in costs), 1)
