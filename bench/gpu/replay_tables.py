"""What measured times say of pairs: c, and tables for the services' `--replay` (`bench.replay.device_times`)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.random_model import Pair
from bench.tables import Row


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


def replay_table(pair: Pair, draft: Row, target: Row, encode_frame_s: float | None, source: str) -> dict[str, Any]:
    """The table of one pair at one length of video.

    Args:
        draft, target: of `measure_all`, both at that length.
        encode_frame_s: the target's seconds for a frame; None leaves it out.
        source: where the times are from.
    """
    table: dict[str, Any] = {
        "name": f"{pair.name} at {draft['video_tokens']} video tokens",
        "source": source,
        "target": {"pass_s": {rows: timing["s"] for rows, timing in target["passes"].items()}},
        "draft": {"pass_s": {alpha: row["eager"]["s"] for alpha, row in draft["draft"].items()}},
    }
    prefill = target["prefill"]
    if "error" not in prefill:
        whole_s = prefill["whole"]["s"]
        guidance_s = prefill["until_layer"]["s"] + prefill["guidance"]["make_states_s"]
        table["target"] |= {"prefill_s": whole_s, "guidance_s": min(guidance_s, whole_s)}
    if encode_frame_s is not None:
        table["target"]["encode_frame_s"] = encode_frame_s
    whole = draft["draft"].get("0.0", {}).get("prefill", {})
    if "s" in whole:
        table["draft"]["prefill_s"] = whole["s"]
    return table


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


def graph_variant(table: Row, draft: Row) -> dict[str, Any] | None:
    """The same table with the draft's passes from CUDA graphs, or None where they were not captured."""
    seconds = {alpha: best_graph_s(row) for alpha, row in draft["draft"].items()}
    if None in seconds.values():
        return None
    name = f"{table['name']}, draft from graphs"
    return {**table, "name": name, "draft": {**table["draft"], "pass_s": seconds}}
