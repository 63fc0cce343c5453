"""Tables of rows, for a terminal and for a page. Knows no benchmark."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 180
"""Columns where no terminal gives them."""

Row = Mapping[str, Any]
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


def markdown_table(columns: Mapping[str, Cell], rows: Sequence[Row]) -> str:
    """The same in Markdown. Columns in which nothing was measured are left out."""
    filled = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    shown = {" ".join(name.split()).replace("- ", ""): cells for name, cells in filled.items() if set(cells) != {"-"}}
    lines = ["| " + " | ".join(shown) + " |", "|---" + "|---:" * (len(shown) - 1) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*shown.values(), strict=True)]
    return "\n".join(lines)
