"""Tables from rows, also from rows in which things were not measured."""

from io import StringIO

from rich.console import Console

from bench.report.page import SPECULATION, SPEED
from bench.tables import Cell, Row, make_table, markdown_table, number, share, text


def rendered(title: str, columns: dict[str, Cell], rows: list[Row]) -> str:
    page = StringIO()
    Console(width=250, file=page).print(make_table(title, columns, rows))
    return page.getvalue()


def test_what_was_not_measured_is_a_dash() -> None:
    row = {"name": "transformers", "tokens_per_s": {"median": 10.0, "low": 9.0, "high": 11.0}, "speedup_engine": None}
    printed = rendered("speed", SPEED, [row])
    assert "10.0 (9.0-11.0)" in printed
    assert "-" in rendered("speculation", SPECULATION, [row])
    assert "none" not in printed.lower()


def test_a_method_without_figures_has_a_row_of_dashes() -> None:
    assert "slipstream" in rendered("speed", SPEED, [{"name": "slipstream"}])


def test_a_lossy_method_is_marked() -> None:
    assert "fastv (lossy)" in rendered("speed", SPEED, [{"name": "fastv", "lossy": True}])


def test_units_are_those_of_the_headings() -> None:
    printed = rendered("speculation", SPECULATION, [{"T_q": 0.0015, "c": 9.0}])
    assert "1.50" in printed
    assert "9.0" in printed


def test_names_lead_through_nested_rows() -> None:
    cell = number("peak_bytes.target", ".0f", 1e-6)
    assert cell({"peak_bytes": {"target": 9e8}}) == "900"
    assert cell({"peak_bytes": None}) == "-"
    assert share("A", ".1f")({"A": 0.876}) == "87.6%"


def test_a_markdown_table_leaves_out_empty_columns() -> None:
    columns = {"name": text("name"), "a\nb": number("b", ".1f"), "c": number("c", ".1f")}
    assert markdown_table(columns, [{"name": "x", "b": 1.0}, {"name": "y"}]) == (
        "| name | a b |\n|---|---:|\n| x | 1.0 |\n| y | - |"
    )
