"""What the benchmarks found, for people: tables in a terminal, and a page with plots."""

from bench.report.terminal import PREDICTION, SPECULATION, SPEED, Cell, make_console, make_table, number, show

__all__ = ["PREDICTION", "SPECULATION", "SPEED", "Cell", "make_console", "make_table", "number", "show"]
