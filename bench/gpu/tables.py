"""What was measured, as tables: in Markdown for people, and for replays (`bench.replay.device_times`)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.random_model import PAIRS, Pair
from bench.tables import Cell, Row, at, markdown_table, number, text

# -- for people -------------------------------------------------------------------------------------------------------


def ms(name: str) -> Cell:
    """The cell of a timing, or why there is none."""

    def cell(row: Row) -> str:
        found = at(row, name) or {}
        return f"{found['s'] * 1e3:.2f}" if "s" in found else str(found.get("error", "-"))

    return cell


PREFILL: Mapping[str, Cell] = {
    "prefill": ms("prefill.whole"),
    "failed": text("prefill_error"),
    "to layer L": ms("prefill.until_layer"),
    "L": number("prefill.layer", ".0f"),
    "guidance made": number("prefill.guidance.make_states_s", ".2f", 1e3),
    "to host": number("prefill.guidance.states_to_host_s", ".1f", 1e3),
    "guidance MB": number("prefill.guidance.states_bytes", ".1f", 1e-6),
    "selected": number("prefill.guidance.select_s", ".2f", 1e3),
    "cache GB": number("memory.kv_bytes", ".2f", 1e-9),
    "peak GB": number("memory.peak_bytes", ".2f", 1e-9),
}
DRAFT: Mapping[str, Cell] = {
    "video tokens": number("video_tokens", ".0f"),
    "alpha": text("alpha"),
    "kept": number("kept", ".0f"),
    "eager": ms("eager"),
    "graph, matmul": ms("graph_matmul"),
    "logits differ by": number("graph_matmul.largest_difference", ".2g"),
    "graph, sdpa": ms("graph_sdpa"),
    "logits differ by ": number("graph_sdpa.largest_difference", ".2g"),
    "captured": text("captured"),
    "bound": number("bound_s", ".2f", 1e3),
    "prefill": ms("prefill"),
    "failed": text("error"),
}
KERNELS: Mapping[str, Cell] = {
    "video tokens": number("video_tokens", ".0f"),
    "kernel": text("kernel"),
    "1 row": ms("1"),
    "8 rows": ms("8"),
    "difference": number("largest_difference", ".3g"),
    "failed": text("error"),
}
RATIOS: Mapping[str, Cell] = {
    "pair": text("pair"),
    "video tokens": number("video_tokens", ".0f"),
    "alpha": text("alpha"),
    "T_q ms": number("draft_pass_s", ".2f", 1e3),
    "c": number("c", ".2f"),
    "T_q ms, graph": number("graph_pass_s", ".2f", 1e3),
    "c, graph": number("graph_c", ".2f"),
}


def markdown(document: Row) -> str:
    parts = [f"# Random weights on {document['device_name']}", *(f"> {line}" for line in document["labels"])]
    for model in document["models"]:
        parts += _model(model, document["bandwidth_bytes_per_s"])
    if document["pairs"]:
        parts += ["## Speed ratios of pairs", markdown_table(RATIOS, document["pairs"])]
    return "\n\n".join(parts) + "\n"


def _model(model: Row, bandwidth: float) -> list[str]:
    sizes = [{**row, "prefill_error": row["prefill"].get("error")} for row in model["sizes"]]
    windows = {window: None for row in sizes if "error" not in row["passes"] for window in row["passes"]}
    passes = {"video tokens": number("video_tokens", ".0f"), **{f"{n} rows": ms(f"passes.{n}") for n in windows}}
    size = f"{model['parameters'] / 1e9:.2f} billion parameters, {model['weight_bytes'] / 1e9:.1f} GB"
    frames = model["encoding"].get("frames", "-")
    kernels = [_named(row, kernel=name, **found) for row in sizes for name, found in row["kernels"].items()]
    return [
        f"## {model['name']}: {size}",
        f"Vision tower: {ms('encoding')(model)} ms for {frames} frames. Target passes and prefill:",
        markdown_table({**passes, "passes failed": text("passes.error"), **PREFILL}, sizes),
        f"Draft tokens by pruned share; bound: bytes / {bandwidth / 1e12:.2f} TB/s as copied here:",
        markdown_table(DRAFT, [line for row in sizes for line in _draft_rows(row, bandwidth)]),
        "Kernels by rows of a pass, and the largest difference of a logit from the math path:",
        markdown_table(KERNELS, kernels),
    ]


def _draft_rows(row: Row, bandwidth: float) -> list[Row]:
    if "error" in row["draft"]:
        return [_named(row, error=row["draft"]["error"])]
    return [
        _named(row, alpha=alpha, bound_s=found["pass_bytes"] / bandwidth, captured=_captured(found), **found)
        for alpha, found in row["draft"].items()
    ]


def _captured(found: Row) -> str:
    return "yes" if all(found[name].get("captured") for name in ("graph_matmul", "graph_sdpa")) else "no"


def _named(row: Row, **others: object) -> Row:
    return {"video_tokens": row["video_tokens"], **others}


# -- for replays ------------------------------------------------------------------------------------------------------


def pair_rows(pair: Pair, models: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """c by alpha for each length of video at which both models of a pair were measured, with the draft as the engine
    runs it and as a CUDA graph would. `models`: by name, the rows of `measure_all`."""
    rows = []
    for draft, target in measured_pairs(pair, models):
        plain_s = target["passes"]["1"]["s"]
        for alpha, found in draft["draft"].items():
            draft_s, graph_s = found["eager"]["s"], best_graph_s(found)
            row = {"pair": pair.name, "video_tokens": draft["video_tokens"], "alpha": alpha}
            row |= {"draft_pass_s": draft_s, "c": plain_s / draft_s}
            rows.append(row | ({"graph_pass_s": graph_s, "graph_c": plain_s / graph_s} if graph_s else {}))
    return rows


def measured_pairs(pair: Pair, models: Mapping[str, Sequence[Row]]) -> list[tuple[Row, Row]]:
    """The rows of draft and target at each length at which neither failed."""
    drafts = {row["video_tokens"]: row for row in models.get(pair.draft, ()) if "error" not in row["draft"]}
    targets = {row["video_tokens"]: row for row in models.get(pair.target, ()) if "error" not in row["passes"]}
    return [(drafts[size], targets[size]) for size in sorted(drafts.keys() & targets.keys())]


def best_graph_s(row: Row) -> float | None:
    """Seconds of a draft token from the faster of the captured graphs; None where there is none."""
    seconds = [row[name]["s"] for name in row if name.startswith("graph_") and row[name].get("captured")]
    return min(seconds, default=None)


def replay_tables(document: Row) -> list[dict[str, Any]]:
    """For every pair and length of video: with the draft as it is, and, where its passes were captured, as CUDA graphs
    would make it."""
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
            if None not in graphs.values():
                name = f"{table['name']}, draft from graphs"
                tables.append({**table, "name": name, "draft": {**table["draft"], "pass_s": graphs}})
    return tables


def _target_times(target: Row, encoding: Row) -> dict[str, Any]:
    times: dict[str, Any] = {"pass_s": {rows: timing["s"] for rows, timing in target["passes"].items()}}
    prefill = target["prefill"]
    if "error" not in prefill:
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
