"""The benchmark's document: everything that was found, as JSON. Pure but for the machine's facts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

from bench.common import Task, machine_facts
from bench.methods.comparison import Findings, recorded_pruner
from bench.methods.listing import (
    ALPHA,
    ENGINE_PLAIN,
    LOSSY_KEEP,
    MAX_WINDOW,
    OUTSIDE_PLAIN,
    PARALLELVLM,
    SLIPSTREAM,
    TOKENS_A_VERIFICATION,
    BenchMethod,
    Family,
    Place,
)
from bench.methods.prediction import pooled_costs, predictions, round_overhead_s
from bench.methods.samples import COUNTS, LATENCIES, Sample, Spread, by_clip, median, timeline
from slipstream.speculation.methods import Method, get_method

Row = dict[str, Any]
_RENAMED = {"T_p": "target_pass_s", "T_q": "draft_pass_s", "gamma": "mean_window"}
_OURS = ("mean_tokens_per_pass", "held_share", "longest_gap_s", "target_idle", "draft_idle")
_FIGURES = _RENAMED | {name: name for name in (*COUNTS, *_OURS, "draft_ready_before_first_token")}
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
        **_speculation(method, own, plain.values()),
        "peak_bytes": _peaks(own),
        "latency": {name: found for name in LATENCIES if (found := _median_of(own, name)) is not None},
        **({"note": "; ".join(notes)} if notes else {}),
    }


def rate_ratio(samples: Sequence[Sample], method: str, other: str) -> float | None:
    """Median over the clips of one method's tokens a second over another's."""
    return median(_ratios([s for s in samples if s.method == method], by_clip(samples, other), _rate))


def _speculation(method: BenchMethod, own: Sequence[Sample], plain: Iterable[Sample]) -> Row:
    """A drafting method's T_p(0) is plain decoding's: its own few plain passes are those that nobody drafted for."""
    m_kind = method.m_kind
    row: Row = {name: _median_of(own, figure) for name, figure in _FIGURES.items()}
    single_pass_s = _median_of(own if m_kind is None else plain, "plain_pass_s") or _median_of(own, "plain_pass_s")
    costs = pooled_costs(sample.costs for sample in own)
    drafted_token_s = (row["T_q"] or 0.0) if method.family is Family.SELF else 0.0  # within the round
    accepted_length = row["mean_tokens_per_pass" if m_kind == TOKENS_A_VERIFICATION else "mean_accepted_length"]
    return row | {
        "M": None if m_kind is None else accepted_length,
        "M_kind": m_kind,
        "T_p0": single_pass_s,
        "round_overhead_s": round_overhead_s(costs, drafted_token_s) if costs else None,
        "c": single_pass_s / row["T_q"] if single_pass_s and row["T_q"] else None,
    }


def _median_of(samples: Iterable[Sample], figure: str) -> float | None:
    return median(sample.figures[figure] for sample in samples if figure in sample.figures)


def _peaks(own: Iterable[Sample]) -> dict[str, int]:
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


def make_document(
    findings: Findings, methods: Sequence[BenchMethod], template: Task, clips: Sequence[Path], run: Mapping[str, Any]
) -> dict[str, Any]:
    """All of it. `run` says how it was run: command, started, wall_s, minutes."""
    samples = findings.samples
    rows = [
        method_row(method, samples, findings.accepted.get(method.name, ()))
        for method in methods
        if any(sample.method == method.name for sample in samples)
    ]
    predicted = _predictions(findings, methods)
    video_tokens = median(s.figures["video_tokens"] for s in samples if "video_tokens" in s.figures)
    return {
        "kind": "slipstream-bench",
        "version": 1,
        **{name: run[name] for name in ("command", "started", "wall_s")},
        "machine": machine_facts(),
        "setup": {
            "clips": findings.num_clips,
            "reference_clips": sum(s.method == "transformers" for s in samples),
            "frames": template.num_frames,
            "video_tokens": video_tokens,
            "max_new_tokens": template.max_new_tokens,
            "alpha": ALPHA,
            "max_window": MAX_WINDOW,
            "lossy_keep": LOSSY_KEEP,
            "target": _shown(template.target),
            "draft": _shown(template.draft),
            "minutes": run["minutes"],
            "temperature": run.get("temperature", 0.0),
            "json_schema": run.get("json_schema", ""),
        },
        "notes": findings.notes,
        "methods": rows,
        "slipstream_over_parallelvlm": rate_ratio(samples, SLIPSTREAM, PARALLELVLM),
        "prediction": predicted,
        "prediction_error": predicted["prediction_error"],
        "samples": [_raw(sample, samples) for sample in samples],
        "timelines": {sample.method: timeline(sample) for sample in findings.timelines},
        "kept": {
            "clip": _shown(clips[0]),
            "frames": template.num_frames,
            "grid": [isqrt(int((video_tokens or 0) // template.num_frames))] * 2,
            "alpha": ALPHA,
            "pruners": findings.kept,
        },
    }


def _shown(path: Path) -> str:
    """From the working folder, where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _predictions(findings: Findings, methods: Sequence[BenchMethod]) -> dict[str, Any]:
    pair = [method for method in methods if method.place is Place.PAIR and not method.lossy]
    recorded = {method.name: recorded_pruner(method) for method in pair}
    return predictions(
        findings.samples,
        {method.name: _as_run(method) for method in pair},
        {name: findings.agreements[pruner] for name, pruner in recorded.items() if pruner in findings.agreements},
        max_window=MAX_WINDOW,
    )


def _as_run(method: BenchMethod) -> Method:
    options = method.options
    parts = [options.get(name, None) for name in ("pruner", "policy", "shape", "gate", "gamma")]
    return get_method(options.method).changed(*parts)


def _raw(sample: Sample, samples: Sequence[Sample]) -> dict[str, Any]:
    plain = [s.token_ids for s in samples if s.method == ENGINE_PLAIN and s.clip == sample.clip]
    return {
        "method": sample.method,
        "clip": Path(sample.clip).stem,
        "tokens": len(sample.token_ids),
        "tokens_per_s": sample.tokens_per_s,
        "first_token_s": sample.first_token_s,
        "total_s": sample.total_s,
        "identical": sample.token_ids == plain[0] if plain else None,
        "figures": dict(sample.figures),
        "costs": {window: vars(cost) for window, cost in sample.costs.items()},
    }
