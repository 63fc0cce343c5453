"""The benchmark's figures as tables in a terminal. Knows only the rows of the JSON document."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.report.rows import Row, prediction_rows

PIPE_WIDTH = 180
"""Columns where no terminal gives them."""

Cell = Callable[[Row], str]


def number(name: str, form: str, factor: float = 1.0, unit: str = "") -> Cell:
    """The cell of a number, whose name may lead through nested rows by dots; a dash where it was not measured."""

    def cell(row: Row) -> str:
        value = at(row, name)
        return "-" if value is None else f"{value * factor:{form}}{unit}"

    return cell


def share(name: str, form: str = ".0f") -> Cell:
    """The cell of a share, in percent."""
    return number(name, form, 100.0, "%")


def text(name: str) -> Cell:
    """The cell of a word."""
    return lambda row: str(row.get(name) or "-")


def at(row: Row, name: str) -> Any:
    """What lies at the end of a dotted name; None where a step of it is missing."""
    value: Any = row
    for step in name.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _rate(row: Row) -> str:
    rate = row.get("tokens_per_s")
    if rate is None:
        return "-"
    if not isinstance(rate, Mapping):
        return f"{rate:.1f}"
    return f"{rate['median']:.1f} ({rate['low']:.1f}-{rate['high']:.1f})"


def _name(row: Row) -> str:
    return f"{row.get('title') or row['name']}{' (lossy)' if row.get('lossy') else ''}"


SPEED: dict[str, Cell] = {
    "method": _name,
    "n": number("n", ".0f"),
    "tok/s of decoding\n(quartiles)": _rate,
    "tok/s a\ndevice": number("tokens_per_s_per_device", ".1f"),
    "x own\nplain": number("speedup_engine", ".2f"),
    "x trans-\nformers": number("speedup_transformers", ".2f"),
    "x end\nto end": number("end_to_end_speedup", ".2f"),
    "first\ntoken s": number("first_token_s", ".2f"),
    "identical\nto plain": share("identical"),
    "A": share("A", ".1f"),
}
SPECULATION: dict[str, Cell] = {
    "method": _name,
    "M": number("M", ".1f"),
    "tokens\na pass": number("mean_tokens_per_pass", ".1f"),
    "tau": number("tau", ".3f"),
    "T_p(0)\nms": number("T_p0", ".1f", 1e3),
    "T_p\nms": number("T_p", ".1f", 1e3),
    "T_q\nms": number("T_q", ".2f", 1e3),
    "c": number("c", ".1f"),
    "gamma\nused": number("gamma", ".1f"),
    "passes": number("passes", ".0f"),
    "kept": number("kept_tokens", ".0f"),
    "held": share("held_share"),
    "target\nidle": share("target_idle"),
    "draft\nidle": share("draft_idle"),
    "longest\ngap ms": number("longest_gap_s", ".0f", 1e3),
    "target\nMB": number("peak_bytes.target", ".0f", 1e-6),
    "draft\nMB": number("peak_bytes.draft", ".0f", 1e-6),
    "gateway\nMB": number("peak_bytes.gateway", ".0f", 1e-6),
}
PREDICTION: dict[str, Cell] = {
    "method": text("method"),
    "measured\ntok/s": number("measured_tokens_per_s", ".1f"),
    "predicted": number("predicted_tokens_per_s", ".1f"),
    "measured /\npredicted": number("ratio", ".2f"),
    "without\nmessages": number("ideal_tokens_per_s", ".1f"),
    "measured /\nthat": number("ratio_ideal", ".2f"),
    "a round's\noverhead ms": number("round_overhead_s", ".2f", 1e3),
    "T_q\nms": number("draft_pass_s", ".2f", 1e3),
    "agreement": number("agreement", ".3f"),
    "agreement\nfrom": text("agreement_from"),
    "lost to\nmessages": share("loss.round_overhead"),
    "to\nholding": share("loss.held"),
    "to plain\npasses": share("loss.plain_passes"),
    "to window\npasses": share("loss.window_passes"),
    "to the\nrest": share("loss.other"),
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
    stack = [row for row in document["methods"] if row.get("T_p") is not None]
    console.print(make_table("what the stack did", SPECULATION, stack))
    console.print(make_table("against the event simulator", PREDICTION, prediction_rows(document)))
    for row in document["methods"]:
        if row.get("note"):
            console.print(f"{row['name']}: {row['note']}", highlight=False)
    for note in document.get("notes") or []:
        console.print(f"note: {note}", highlight=False)
