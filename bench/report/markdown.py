"""Parts of a page in Markdown: tables, sections, lists, links to plots. Knows no figure of the benchmark."""

from collections.abc import Collection, Mapping, Sequence

from bench.report.rows import Row
from bench.report.terminal import Cell

FOLDER = "results"
"""Of the plots, beside the page."""


def markdown_table(columns: Mapping[str, Cell], rows: Sequence[Row]) -> str:
    """One line a row; the first column is text. Columns in which nothing was measured are left out."""
    filled = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    shown = {" ".join(name.split()).replace("- ", ""): cells for name, cells in filled.items() if set(cells) != {"-"}}
    lines = ["| " + " | ".join(shown) + " |", "|---" + "|---:" * (len(shown) - 1) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*shown.values(), strict=True)]
    return "\n".join(lines)


def section(title: str, *parts: str) -> str:
    """A heading and the parts that are not empty."""
    return "\n\n".join([f"## {title}", *(part for part in parts if part)])


def bullets(title: str, sentences: Sequence[str]) -> str:
    """A heading and a list; nothing where the list is empty."""
    return section(title, "\n".join(f"- {sentence}" for sentence in sentences)) if sentences else ""


def plot(name: str, words: str, plots: Collection[str]) -> str:
    """The plot of that name, if it could be drawn."""
    return f"![{words}]({FOLDER}/{name}.svg)" if name in plots else ""
