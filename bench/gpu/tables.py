"""The figures as markdown. Knows only the rows of the JSON document."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def markdown(document: Row) -> str:
    """All tables, each under its heading."""
    parts = [f"# {document['title']}", *(f"> {line}" for line in document["labels"])]
    for model in document["models"]:
        parts += _model(model, document["bandwidth_bytes_per_s"])
    if document["pairs"]:
        parts += ["## Projections (no acceptance was measured)", _pairs(document["pairs"])]
    if document["end_to_end"]:
        parts += ["## The pocket pair, end to end (measured)", _end_to_end(document["end_to_end"])]
    return "\n\n".join(parts) + "\n"


def _model(model: Row, bandwidth: float) -> list[str]:
    head = (
        f"## {model['name']}: {model['parameters'] / 1e9:.2f} billion parameters, {model['weight_bytes'] / 1e9:.1f} GB"
    )
    encoding = f"Vision tower: {_ms(model['encoding'])} ms for {model['encoding'].get('frames', '-')} frames."
    sizes = model["sizes"]
    return [
        head,
        encoding,
        "Target passes, ms by rows, and prefill, s:",
        _grid(["video tokens", *_names(sizes, "passes"), *_PREFILL], [_pass_row(row) for row in sizes]),
        f"Draft tokens, ms by pruned share; bound: bytes / {bandwidth / 1e12:.2f} TB/s as copied here:",
        _grid(_DRAFT, [line for row in sizes for line in _draft_rows(row, bandwidth)]),
        "Kernels, ms of a pass by rows, and the largest difference of a logit from the math path:",
        _grid(_KERNELS, [line for row in sizes for line in _kernel_rows(row)]),
        "Memory, GB, and one layer of prefill, ms:",
        _grid(_MEMORY, [_memory_row(row) for row in sizes]),
    ]


_PREFILL = ("prefill", "to layer L", "L", "guidance made, ms", "to host, ms", "MB", "selected, ms")
_DRAFT = (
    "video tokens",
    "alpha",
    "kept",
    "eager",
    "graph, matmul",
    "graph, sdpa",
    "logits differ by",
    "bound",
    "prefill",
)
_KERNELS = ("video tokens", "kernel", "1 row", "8 rows", "difference")
_MEMORY = ("video tokens", "cache", "peak", "layer, engine", "layer, math")


def _pass_row(row: Row) -> list[str]:
    prefill = row["prefill"]
    if "error" in prefill:
        rest = [prefill["error"], *["-"] * (len(_PREFILL) - 1)]
    else:
        guidance = prefill["guidance"]
        rest = [
            f"{prefill['whole']['s']:.3f}",
            f"{prefill['until_layer']['s']:.3f}",
            str(prefill["layer"]),
            f"{guidance['make_states_s'] * 1e3:.2f}",
            f"{guidance['states_to_host_s'] * 1e3:.1f}",
            f"{guidance['states_bytes'] / 1e6:.1f}",
            f"{guidance['select_s'] * 1e3:.2f}",
        ]
    passes = row["passes"]
    return [str(row["video_tokens"]), *_values(passes), *rest]


def _draft_rows(row: Row, bandwidth: float) -> Iterable[list[str]]:
    if "error" in row["draft"]:
        yield [str(row["video_tokens"]), row["draft"]["error"], *["-"] * (len(_DRAFT) - 2)]
        return
    for alpha, found in row["draft"].items():
        graphs = [found["graph_matmul"], found["graph_sdpa"]]
        differences = [f"{graph['largest_difference']:.2g}" for graph in graphs if "largest_difference" in graph]
        yield [
            str(row["video_tokens"]),
            alpha,
            str(found["kept"]),
            _ms(found["eager"]),
            *(_ms(graph) if graph.get("captured", True) else "no graph" for graph in graphs),
            " ".join(differences) or "-",
            f"{found['pass_bytes'] / bandwidth * 1e3:.2f}",
            _ms(found["prefill"]),
        ]


def _kernel_rows(row: Row) -> Iterable[list[str]]:
    for name, found in row["kernels"].items():
        if "error" in found:
            yield [str(row["video_tokens"]), name, found["error"], "-", "-"]
        else:
            difference = f"{found['largest_difference']:.3g}"
            yield [str(row["video_tokens"]), name, _ms(found["1"]), _ms(found["8"]), difference]


def _memory_row(row: Row) -> list[str]:
    memory, layer = row["memory"], row["prefill_layer"]
    if "error" in memory:
        sizes = [memory["error"], "-"]
    else:
        sizes = ["-" if memory[key] is None else f"{memory[key] / 1e9:.2f}" for key in ("kv_bytes", "peak_bytes")]
    layers = [layer["error"], "-"] if "error" in layer else [_ms(layer["engine"]), _ms(layer["math"])]
    return [str(row["video_tokens"]), *sizes, *layers]


def _pairs(pairs: Sequence[Row]) -> str:
    heads = (
        "pair",
        "video tokens",
        "alpha",
        "draft",
        "T_q, ms",
        "c*",
        "tau",
        "fixed, projected",
        "self_clocked, projected",
    )
    rows = [
        [
            pair["pair"],
            str(pair["video_tokens"]),
            alpha,
            way,
            f"{found['draft_pass_s'] * 1e3:.2f}",
            f"{found['c']:.2f}",
            f"{pair['tau']:.3f}",
            *(f"{found['projected'][policy]:.2f}x" for policy in ("fixed", "self_clocked")),
        ]
        for pair in pairs
        for alpha, ways in pair["at"].items()
        for way, found in ways.items()
    ]
    return _grid(heads, rows)


def _end_to_end(found: Row) -> str:
    if "error" in found:
        return f"Failed: {found['error']}"
    heads = ("clip", "tokens", "plain, tok/s", "slipstream, tok/s", "speedup", "text identical", "tau")
    rows = [
        [
            row["clip"],
            str(row["tokens"]),
            *(f"{rate:.1f}" for rate in row["tokens_per_s"].values()),
            f"{row['decode_speedup']:.2f}x",
            "yes" if row["identical"] else "NO",
            f"{row['tau']:.3f}",
        ]
        for row in found["clips"]
    ]
    return f"Two processes on {found['device']}.\n\n{_grid(heads, rows)}"


def _names(sizes: Sequence[Row], key: str) -> list[str]:
    found: Row = next((row[key] for row in sizes if "error" not in row[key]), {"-": {}})
    return [f"{name} rows" for name in found]


def _values(found: Row) -> list[str]:
    return [found["error"]] if "error" in found else [_ms(timing) for timing in found.values()]


def _ms(found: Row) -> str:
    return f"{found['s'] * 1e3:.2f}" if "s" in found else str(found.get("error", "-"))


def _grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
