"""Reading the benchmark's document: rows by name, spreads, and a smaller document for keeping. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

Row = Mapping[str, Any]
Document = Mapping[str, Any]
PLAIN = "autoregressive"
TRACED_S = 1.0
"""Of a caption's decoding, how much of a trace is kept."""
SIGNIFICANT = 5
"""Digits of the numbers that are kept."""
_KEPT_OF_SAMPLES = ("method", "clip", "tokens", "tokens_per_s", "first_token_s", "total_s", "identical")


def method_named(document: Document, name: str) -> Row | None:
    """The row of a method; None where it did not run."""
    return next((row for row in document["methods"] if row["name"] == name), None)


def rate_of(row: Row | None) -> float | None:
    """Median tokens/s of decoding."""
    rate = None if row is None else row.get("tokens_per_s")
    return None if rate is None else float(rate["median"] if isinstance(rate, Mapping) else rate)


def sweep(document: Document, name: str) -> list[Row]:
    """The rows of a sweep, those without a speed left out."""
    rows = (document.get("sweeps") or {}).get(name) or []
    return [row for row in rows if row.get("tokens_per_s") is not None]


def by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each method, in the order in which they came."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["method"], []).append(row)
    return groups


def prediction_rows(document: Document) -> list[Row]:
    """What the event simulator says of each method."""
    prediction = document.get("prediction") or {}
    return list(prediction.get("methods") or []) if isinstance(prediction, Mapping) else list(prediction)


def prediction_clips(document: Document) -> list[Row]:
    """The same of each caption: method, clip, and tokens/s measured and predicted."""
    prediction = document.get("prediction") or {}
    return list(prediction.get("clips") or []) if isinstance(prediction, Mapping) else []


def speedup_spread(document: Document, row: Row) -> tuple[float, float]:
    """Quartiles of a method's speedup over our plain decoding, clip by clip; without samples, those of its speed over
    plain's median."""
    samples = document.get("samples") or []
    plain = {sample["clip"]: sample["tokens_per_s"] for sample in samples if sample["method"] == PLAIN}
    ratios = [
        sample["tokens_per_s"] / plain[sample["clip"]]
        for sample in samples
        if sample["method"] == row["name"] and plain.get(sample["clip"])
    ]
    if len(ratios) > 1:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, high
    rate, base, value = row.get("tokens_per_s"), rate_of(method_named(document, PLAIN)), float(row["speedup_engine"])
    if isinstance(rate, Mapping) and base and row["name"] != PLAIN:
        return min(rate["low"] / base, value), max(rate["high"] / base, value)
    return value, value


def slim(document: Document) -> dict[str, Any]:
    """The document with rounded numbers and of each caption only what the report reads, for keeping in the project."""
    small = dict(document)
    if "samples" in small:
        small["samples"] = [
            {name: sample[name] for name in _KEPT_OF_SAMPLES if name in sample} for sample in small["samples"]
        ]
    if (small.get("kept") or {}).get("clip"):
        small["kept"] = {**small["kept"], "clip": PurePath(small["kept"]["clip"]).name}
    if "timelines" in small:
        small["timelines"] = {name: _without_late_trace(line) for name, line in small["timelines"].items()}
    return {name: _rounded(value) for name, value in small.items()}


def _without_late_trace(timeline: Row) -> dict[str, Any]:
    trace = [entry for entry in timeline.get("trace") or [] if entry["t_s"] <= TRACED_S]
    return {**timeline, **({"trace": trace} if trace else {})}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(part) for part in value]
    return value
