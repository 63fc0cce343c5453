"""Measured times as tables for `bench.replay`, see `bench.replay.device_times`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.projection import best_graph_s

Row = Mapping[str, Any]


def replay_table(pair: Row, draft: Row, target: Row, encode_frame_s: float | None, source: str) -> dict[str, Any]:
    """The table of one pair at one length of video.

    Args:
        pair: of `projection.pair_rows`.
        draft, target: of `measure_all`, both at that length.
        encode_frame_s: the target's seconds for a frame; None leaves it out.
        source: where the times are from.
    """
    table: dict[str, Any] = {
        "name": f"{pair['pair']} at {pair['video_tokens']} video tokens",
        "source": source,
        "target": {"pass_s": {rows: timing["s"] for rows, timing in target["passes"].items()}},
        "draft": {"pass_s": {alpha: _draft_pass_s(row) for alpha, row in draft["draft"].items()}},
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


def _draft_pass_s(row: Row) -> float:
    """As the draft service runs it: eager."""
    return float(row["eager"]["s"])


def graph_variant(table: Row, draft: Row) -> dict[str, Any] | None:
    """The same table with the draft's passes from CUDA graphs, or None where they were not captured."""
    seconds = {alpha: best_graph_s(row) for alpha, row in draft["draft"].items()}
    if None in seconds.values():
        return None
    name = f"{table['name']}, draft from graphs"
    return {**table, "name": name, "draft": {**table["draft"], "pass_s": seconds}}
