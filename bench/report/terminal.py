"""The benchmark's figures as tables for people. Knows only the rows of the JSON document."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 150
"""Columns where no terminal gives them."""

Row = Mapping[str, Any]
Cell = Callable[[Row], str]


def number(name: str, form: str, factor: float = 1.0, unit: str = "") -> Cell:
    """The cell of a number; a dash where it was not measured."""

    def cell(row: Row) -> str:
        value = row.get(name)
        return "-" if value is None else f"{value * factor:{form}}{unit}"

    return cell


def share(name: str) -> Cell:
    """The cell of a share, in percent."""
    return number(name, ".0f", 100.0, "%")


def _rate(row: Row) -> str:
    rate = row["tokens_per_s"]
    if rate is None:
        return "-"
    low, high = rate["quartiles"]
    return f"{rate['median']:.1f} ({low:.1f}-{high:.1f})"


SPEED: dict[str, Cell] = {
    "method": lambda row: str(row["method"]),
    "n": number("n", ".0f"),
    "tok/s of decoding\n(quartiles)": _rate,
    "x own\nplain": number("decode_speedup", ".2f"),
    "x trans-\nformers": number("decode_speedup_over_transformers", ".2f"),
    "x end\nto end": number("end_to_end_speedup", ".2f"),
    "first\ntoken s": number("first_token_s", ".2f"),
    "of own\nplain": number("first_token_ratio", ".2f"),
    "draft ready\nbefore it": share("draft_ready_before_first_token"),
    "identical": share("identical"),
}
SPECULATION: dict[str, Cell] = {
    "method": lambda row: str(row["method"]),
    "M": number("mean_accepted_length", ".1f"),
    "tau": number("tau", ".3f"),
    "T_p(0)\nms": number("plain_pass_s", ".1f", 1e3),
    "T_p\nms": number("target_pass_s", ".1f", 1e3),
    "T_q\nms": number("draft_pass_s", ".2f", 1e3),
    "c": number("c", ".1f"),
    "passes": number("passes", ".0f"),
    "windows": number("windows", ".0f"),
    "mean\nwindow": number("mean_window", ".1f"),
    "held": share("held_share"),
    "longest\ngap ms": number("longest_gap_s", ".0f", 1e3),
    "kept": number("kept_tokens", ".0f"),
    "guidance\nkB": number("guidance_bytes", ".0f", 1e-3),
}
PREDICTION: dict[str, Cell] = {
    "policy": lambda row: str(row["policy"]),
    "measured\ntok/s": number("measured_tokens_per_s", ".1f"),
    "predicted": number("predicted_tokens_per_s", ".1f"),
    "measured /\npredicted": number("measured_over_predicted", ".2f"),
    "a round's\noverhead ms": number("round_overhead_s", ".2f", 1e3),
    "predicted\nwith it": number("predicted_with_overhead_tokens_per_s", ".1f"),
    "measured /\nthat": number("measured_over_predicted_with_overhead", ".2f"),
    "agreement": number("agreement", ".3f"),
}


def make_table(title: str, columns: Mapping[str, Cell], rows: Sequence[Row]) -> Table:
    """One line a row; the first column is text."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def make_console() -> Console:
    """Standard output, wide enough for the tables."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=PIPE_WIDTH)


def show(document: Mapping[str, Any]) -> None:
    """Prints the document's tables and notes."""
    console = make_console()
    console.print(make_table("speed (medians over clips)", SPEED, document["methods"]))
    speculative = [row for row in document["methods"] if "target_pass_s" in row]
    console.print(make_table("what the stack did", SPECULATION, speculative))
    console.print(make_table("against the event simulator", PREDICTION, list(document["prediction"].values())))
    for row in document["methods"]:
        if "note" in row:
            console.print(f"{row['method']}: {row['note']}", highlight=False)
