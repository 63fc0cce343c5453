"""The figures as tables in Markdown."""

from collections.abc import Mapping

from bench.tables import Cell, Row, at, markdown_table, number, text


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
PAIRS: Mapping[str, Cell] = {
    "pair": text("pair"),
    "video tokens": number("video_tokens", ".0f"),
    "alpha": text("alpha"),
    "T_q ms": number("draft_pass_s", ".2f", 1e3),
    "c": number("c", ".2f"),
    "T_q ms, graph": number("graph_pass_s", ".2f", 1e3),
    "c, graph": number("graph_c", ".2f"),
}


def markdown(document: Row) -> str:
    """All tables, each under its heading. Times are milliseconds."""
    parts = [f"# Random weights on {document['device_name']}", *(f"> {line}" for line in document["labels"])]
    for model in document["models"]:
        parts += _model(model, document["bandwidth_bytes_per_s"])
    if document["pairs"]:
        parts += ["## Speed ratios of pairs", markdown_table(PAIRS, document["pairs"])]
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
