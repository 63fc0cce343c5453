"""The document's rows: what one method showed over its clips. Pure: no clock, no service, no model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.methods import ENGINE_PLAIN, OUTSIDE_PLAIN, TOKENS_A_VERIFICATION, BenchMethod, Family
from bench.samples import COUNTS, LATENCIES, Sample, Spread, by_clip, median

Row = dict[str, Any]
_FIGURES = {
    "T_p": "target_pass_s",
    "T_q": "draft_pass_s",
    "tau": "tau",
    "gamma": "mean_window",
    "mean_accepted_length": "mean_accepted_length",
    "mean_tokens_per_pass": "mean_tokens_per_pass",
    "held_share": "held_share",
    "longest_gap_s": "longest_gap_s",
    "target_idle": "target_idle",
    "draft_idle": "draft_idle",
    "draft_ready_before_first_token": "draft_ready_before_first_token",
    **{name: name for name in COUNTS},
}
"""Name in a row -> name in a sample."""


def method_row(method: BenchMethod, samples: Sequence[Sample], agreement: Iterable[float] = ()) -> Row:
    """One method's figures: medians over its clips; ratios are medians of the ratios clip by clip.

    Args:
        samples: of all methods.
        agreement: clip by clip, the share of the method's tokens that the target would have chosen there.
    """
    own = [sample for sample in samples if sample.method == method.name]
    plain, outside = by_clip(samples, ENGINE_PLAIN), by_clip(samples, OUTSIDE_PLAIN)
    rate = Spread.of(sample.tokens_per_s for sample in own)
    notes = sorted({sample.note for sample in own if sample.note})
    return {
        "name": method.name,
        "title": method.title,
        "family": method.family,
        "lossy": method.lossy,
        "devices": method.devices,
        "n": len(own),
        "tokens": median(len(sample.token_ids) for sample in own),
        "tokens_per_s": None if rate is None else {"median": rate.median, "low": rate.low, "high": rate.high},
        "tokens_per_s_per_device": None if rate is None else rate.median / method.devices,
        "speedup": median(_ratios(own, outside if method.family is Family.OUTSIDE else plain, _rate)),
        "speedup_engine": median(_ratios(own, plain, _rate)),
        "speedup_transformers": median(_ratios(own, outside, _rate)),
        "end_to_end_speedup": median(_ratios(own, plain, _inverse_total)),
        "first_token_s": median(sample.first_token_s for sample in own),
        "identical": _identical_share(own, plain),
        "A": median(agreement),
        **_speculation(method.m_kind, own, plain.values()),
        "peak_bytes": _peaks(own),
        "latency": {name: found for name in LATENCIES if (found := _median_of(own, name)) is not None},
        **({"note": "; ".join(notes)} if notes else {}),
    }


def point_row(m_kind: str | None, sample: Sample, plain: Sample | None) -> Row:
    """One caption of a sweep; `plain` is plain decoding of the same clip and frames."""
    base = [] if plain is None else [plain]
    return {
        "tokens_per_s": sample.tokens_per_s,
        "speedup": None if plain is None or not plain.tokens_per_s else sample.tokens_per_s / plain.tokens_per_s,
        "first_token_s": sample.first_token_s,
        "identical": None if plain is None else float(sample.token_ids == plain.token_ids),
        **_speculation(m_kind, [sample], base),
    }


def rate_ratio(samples: Sequence[Sample], method: str, other: str) -> float | None:
    """Median over the clips of one method's tokens a second over another's."""
    return median(_ratios([s for s in samples if s.method == method], by_clip(samples, other), _rate))


def _speculation(m_kind: str | None, own: Sequence[Sample], plain: Iterable[Sample]) -> Row:
    """A drafting method's T_p(0) is plain decoding's: its own few plain passes are those that nobody drafted for."""
    row: Row = {name: _median_of(own, figure) for name, figure in _FIGURES.items()}
    single_pass_s = _median_of(own if m_kind is None else plain, "plain_pass_s") or _median_of(own, "plain_pass_s")
    accepted_length = row["mean_tokens_per_pass" if m_kind == TOKENS_A_VERIFICATION else "mean_accepted_length"]
    return row | {
        "M": None if m_kind is None else accepted_length,
        "M_kind": m_kind,
        "T_p0": single_pass_s,
        "c": single_pass_s / row["T_q"] if single_pass_s and row["T_q"] else None,
    }


def _median_of(samples: Iterable[Sample], figure: str) -> float | None:
    return median(sample.figures[figure] for sample in samples if figure in sample.figures)


def _peaks(own: Iterable[Sample]) -> dict[str, int]:
    """The most memory that each service had in any caption."""
    peaks: dict[str, int] = {}
    for sample in own:
        for name, used in sample.usage.items():
            peaks[name] = max(peaks.get(name, 0), used.peak_bytes)
    return peaks


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
