"""Tables from rows, also from rows in which things were not measured."""

from io import StringIO

from rich.console import Console

from bench.report import PREDICTION, SPECULATION, SPEED, make_table
from bench.samples import Sample, method_row


def rendered(title: str, columns: object, rows: object) -> str:
    page = StringIO()
    Console(width=200, file=page).print(make_table(title, columns, rows))  # type: ignore[arg-type]
    return page.getvalue()


def test_what_was_not_measured_is_a_dash() -> None:
    row = method_row("transformers", [Sample("transformers", "a", (1, 2), 10.0, 2.0)])
    text = rendered("speed", SPEED, [row])
    assert "10.0 (10.0-10.0)" in text
    assert "-" in rendered("speculation", SPECULATION, [row])
    assert "nan" not in text.lower()


def test_a_method_without_samples_has_a_row_of_dashes() -> None:
    assert "parallel" in rendered("speed", SPEED, [method_row("parallel", [])])


def test_units_are_those_of_the_headings() -> None:
    row = {"policy": "fixed", "measured_tokens_per_s": 90.0, "measured_over_predicted": 0.9, "round_overhead_s": 0.0015}
    text = rendered("prediction", PREDICTION, [row])
    assert "1.50" in text
    assert "0.90" in text
