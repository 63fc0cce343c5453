"""What was measured, as tables: in Markdown for people, and for replays (`bench.replay.device_times`)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.random_model import PAIRS, Pair
from bench.tables import Row, markdown_table, text

SPREAD = ("s", "low_s", "high_s", "n")


def markdown(document: Row) -> str:
    """All tables, each under its heading. Times are milliseconds, the medians of their runs."""
    parts = [f"# Random weights on {document['device_name']}", *(f"> {line}" for line in document["labels"])]
    bandwidth = document["bandwidth_bytes_per_s"]
    for model in document["models"]:
        sizes = model["sizes"]
        draft = [line for row in sizes for line in _draft_rows(row, bandwidth)]
        parts += [
            f"## {model['name']}: {model['parameters'] / 1e9:.2f} billion parameters",
            _table([{"encoding": model["encoding"]}]),
            "Target passes by rows, prefill and memory:",
            _table([{**row, "draft": None} for row in sizes]),
        ]
        if draft:
            parts += [f"Draft tokens by pruned share; bound: bytes / {bandwidth / 1e12:.2f} TB/s as copied here:"]
            parts += [_table(draft)]
    if document["pairs"]:
        parts += ["## Speed ratios of pairs", _table(document["pairs"])]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    """A column for each number, word and time in any row, however deep it lies."""
    flat = [dict(_cells(row)) for row in rows]
    return markdown_table({name: text(name) for name in dict.fromkeys(name for row in flat for name in row)}, flat)


def _cells(row: Row, path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and "s" in value:
            yield f"{path}{name}", f"{value['s'] * 1e3:.2f}"
            yield from _cells({key: part for key, part in value.items() if key not in SPREAD}, f"{path}{name} ")
        elif isinstance(value, Mapping):
            yield from _cells(value, f"{path}{name} ")
        elif name.endswith("_s") and value is not None:
            yield f"{path}{name.removesuffix('_s')}", f"{value * 1e3:.2f}"
        elif value is not None:
            yield f"{path}{name}", f"{value:.3g}" if isinstance(value, float) else str(value)


def _draft_rows(row: Row, bandwidth: float) -> list[Row]:
    """None of a model that is nobody's draft."""
    draft = row.get("draft", {})
    if "error" in draft:
        return [_named(row, **draft)]
    return [
        _named(row, alpha=alpha, **found, bound_s=found["pass_bytes"] / bandwidth) for alpha, found in draft.items()
    ]


def _named(row: Row, **others: object) -> Row:
    return {"video_tokens": row["video_tokens"], **others}


# -- for replays ------------------------------------------------------------------------------------------------------


def pair_rows(pair: Pair, models: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """c by alpha for each length of video at which both models of a pair were measured: both eager, and both by CUDA
    graphs. `models`: by name, the rows of `measure_all`."""
    rows = []
    for draft, target in measured_pairs(pair, models):
        plain_s, plain_graph_s = target["passes"]["1"]["s"], graph_passes(target).get("1")
        for alpha, found in draft["draft"].items():
            draft_s, graph_s = found["eager"]["s"], best_graph_s(found)
            row = {"pair": pair.name, "video_tokens": draft["video_tokens"], "alpha": alpha}
            row |= {"draft_pass_s": draft_s, "c": plain_s / draft_s}
            if graph_s and plain_graph_s:
                row |= {"graph_pass_s": graph_s, "graph_c": plain_graph_s / graph_s}
            rows.append(row)
    return rows


def measured_pairs(pair: Pair, models: Mapping[str, Sequence[Row]]) -> list[tuple[Row, Row]]:
    """The rows of draft and target at each length at which both have times: none failed, or was begun too late."""
    drafts = {row["video_tokens"]: row for row in models.get(pair.draft, ()) if _has_times(row, "draft")}
    targets = {row["video_tokens"]: row for row in models.get(pair.target, ()) if _has_times(row, "passes")}
    return [(drafts[size], targets[size]) for size in sorted(drafts.keys() & targets.keys())]


def _has_times(row: Row, part: str) -> bool:
    found = row.get(part, {})
    return bool(found) and "error" not in found


def best_graph_s(row: Row) -> float | None:
    """Seconds of a draft token that is written ahead, from captured graphs; None where there are none."""
    static = row.get("static", {})
    return static["ahead_s"] if static.get("captured") else None


def graph_passes(target: Row) -> dict[str, float]:
    """Seconds of a target's passes by their rows, from captured graphs; empty where there are none."""
    static = target.get("static_passes", {})
    passes = static.get("passes", {}) if static.get("captured") else {}
    return {rows: timing["s"] for rows, timing in passes.items()}


def replay_tables(document: Row) -> list[dict[str, Any]]:
    """For every pair and length of video: both models eager, and, where the passes of both were captured, as CUDA
    graphs make them."""
    models = {model["name"]: model for model in document["models"]}
    by_name = {name: model["sizes"] for name, model in models.items()}
    source = f"bench gpu on {document['device_name']}, {document['dtype']}{', TINY' if document['tiny'] else ''}"
    tables: list[dict[str, Any]] = []
    for pair in PAIRS:
        for draft, target in measured_pairs(pair, by_name):
            eager = {alpha: row["eager"]["s"] for alpha, row in draft["draft"].items()}
            table: dict[str, Any] = {
                "name": f"{pair.name} at {draft['video_tokens']} video tokens",
                "source": source,
                "target": _target_times(target, models[pair.target]["encoding"]),
                "draft": {"pass_s": eager, **_unpruned_prefill(draft)},
            }
            tables.append(table)
            graphs = {alpha: best_graph_s(row) for alpha, row in draft["draft"].items()}
            if (target_graphs := graph_passes(target)) and None not in graphs.values():
                both = {
                    "target": {**table["target"], "pass_s": target_graphs},
                    "draft": {**table["draft"], "pass_s": graphs},
                }
                tables.append({**table, "name": f"{table['name']}, from graphs", **both})
    return tables


def _target_times(target: Row, encoding: Row) -> dict[str, Any]:
    times: dict[str, Any] = {"pass_s": {rows: timing["s"] for rows, timing in target["passes"].items()}}
    prefill = target["prefill"]
    if "whole" in prefill:
        whole_s = prefill["whole"]["s"]
        guidance_s = prefill["until_layer"]["s"] + prefill["guidance"]["make_states_s"]
        times |= {"prefill_s": whole_s, "guidance_s": min(guidance_s, whole_s)}
    return times | ({"encode_frame_s": encoding["s"] / encoding["frames"]} if "s" in encoding else {})


def _unpruned_prefill(draft: Row) -> dict[str, Any]:
    timing = draft["draft"].get("0.0", {}).get("prefill", {})
    return {"prefill_s": timing["s"]} if "s" in timing else {}


def write_tables(tables: Sequence[Row], folder: Path) -> list[Path]:
    """One JSON file a table, named after it; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for table in tables:
        words = "".join(letter if letter.isalnum() else " " for letter in table["name"].lower()).split()
        path = folder / f"{'-'.join(words)}.json"
        path.write_text(json.dumps(table, indent=2) + "\n")
        paths.append(path)
    return paths
