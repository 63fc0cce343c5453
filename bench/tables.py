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
    return number(name, form, 100.0, "%")


def text(name: str) -> Cell:
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


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """Rows as they are: a column for every name that has a word or a number in some row."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, str | int | float))
    columns = {name.replace("_", "\n", 1): _plain(name) for name in names}
    make_console().print(make_table(title, columns, rows))


def _plain(name: str) -> Cell:
    def cell(row: Row) -> str:
        value = row.get(name)
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    return cell


def make_console() -> Console:
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=PIPE_WIDTH)


def markdown_table(columns: Mapping[str, Cell], rows: Sequence[Row]) -> str:
    """The same in Markdown. Columns in which nothing was measured are left out."""
    filled = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    shown = {" ".join(name.split()).replace("- ", ""): cells for name, cells in filled.items() if set(cells) != {"-"}}
    lines = ["| " + " | ".join(shown) + " |", "|---" + "|---:" * (len(shown) - 1) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*shown.values(), strict=True)]
    return "\n".join(lines)
