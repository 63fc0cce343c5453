"""What the benchmarks found, for people: tables in a terminal, and `docs/results.md` with its plots."""

from bench.report.terminal import PREDICTION, SPECULATION, SPEED, Cell, make_console, make_table, number, show
from bench.report.writing import write

__all__ = ["PREDICTION", "SPECULATION", "SPEED", "Cell", "make_console", "make_table", "number", "show", "write"]
