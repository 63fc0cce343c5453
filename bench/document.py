"""The benchmark's document: everything that was found, as JSON. Pure but for the machine's facts."""

from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

from bench.comparison import Findings, recorded_pruner
from bench.machine import machine_facts
from bench.methods import ALPHA, ENGINE_PLAIN, LOSSY_KEEP, MAX_WINDOW, PARALLELVLM, SLIPSTREAM, BenchMethod, Place
from bench.prediction import predictions
from bench.rows import Row, method_row, rate_ratio
from bench.samples import Sample, median
from bench.sweeps import TIMELINE, sweep_rows
from bench.tasks import Task
from bench.timeline import timeline
from slipstream.speculation.methods import Method, get_method


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
        },
        "notes": findings.notes,
        "methods": rows,
        "slipstream_over_parallelvlm": rate_ratio(samples, SLIPSTREAM, PARALLELVLM),
        "sweeps": sweep_rows(findings.points) | {"threads": _threads(rows)},
        "prediction": predicted,
        "prediction_error": predicted["prediction_error"],
        "samples": [_raw(sample, samples) for sample in samples],
        "timelines": {m.sample.method: timeline(m.sample) for m in findings.points if m.point.sweep == TIMELINE},
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
    """With the parts that its options change."""
    options = method.options
    parts = [
        getattr(options, name) if options.HasField(name) else None
        for name in ("pruner", "policy", "shape", "gate", "gamma")
    ]
    return get_method(options.method).changed(*parts)


def _threads(rows: Sequence[Row]) -> list[Row]:
    """Plain decoding by threads, from the table's own rows."""
    found = {row["name"]: row for row in rows}
    names = [name for name in (ENGINE_PLAIN, "plain_both_cores") if name in found]
    return [
        {
            "threads": found[name]["devices"],
            "cores": found[name]["devices"],
            "method": ENGINE_PLAIN,
            "clips": found[name]["n"],
            "tokens_per_s": found[name]["tokens_per_s"]["median"],
            **{key: found[name][key] for key in ("speedup", "first_token_s", "identical", "T_p0")},
        }
        for name in names
    ]


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
        "costs": [
            {"window": window, "count": cost.count, "pass_s": cost.pass_s, "round_s": cost.round_s}
            for window, cost in sample.costs.items()
        ],
    }
