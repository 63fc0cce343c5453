"""Ways to attend over a past: how they are joined, judged and chosen."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from bench.gpu import kernels
from bench.gpu.checks import Report
from slipstream.engine.attention import join_window

CPU = torch.device("cpu")


def test_times_over_a_short_past_are_shown_and_not_judged() -> None:
    report = Report(Namespace(device=torch.device("cuda"), tiny=False))
    cases = {
        f"{past} + 1": {"past": past, "over_reading": over} for past, over in ((1024, 9.0), (8192, 1.5), (25088, 3))
    }
    kernels.judge_times(report, "sdpa", cases)
    assert [(row["value"], row["ok"]) for row in report.rows] == [(9.0, None), (1.5, True), (3, False)]


def test_several_rows_are_joined_as_their_heads_were_found_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compiled(function: Any) -> Any:
        made.append(function)
        return function

    monkeypatch.setattr(kernels, "compiled", compiled)
    ways = kernels.make_ways(CPU, torch.float32, {(4, 2): "compiled", (2, 2): "plain"})
    way = ways["joined, matmul"]()
    for heads, num_rows, num_made in (((4, 2), 1, 0), ((4, 2), 8, 1), ((4, 2), 5, 1), ((2, 2), 8, 1)):
        case = kernels.make_case(heads, 16, 50, num_rows, CPU, torch.float32, seed=0)
        torch.testing.assert_close(way(case).double(), case.maths(), rtol=1e-5, atol=1e-6)
        assert made == [join_window] * num_made


def test_the_decision_is_the_fastest_right_way() -> None:
    way = {"error_of_maths": 1e-3, "fixed_bits": True, "s_of_all": 1.0}
    ways = {
        "slow": way,
        "fast": {**way, "s_of_all": 0.5},
        "wrong": {**way, "error_of_maths": 0.1, "s_of_all": 0.1},
        "shifting": {**way, "fixed_bits": False, "s_of_all": 0.1},
        "untimed": {**way, "error": "no graph", "s_of_all": 0.0},
        "absent": {"error": "no module"},
    }
    assert kernels.decide(ways) == "fast"
    assert kernels.decide({"wrong": ways["wrong"], "absent": ways["absent"]}) is None


def test_a_way_that_reads_behind_its_window_is_found_out() -> None:
    case = kernels.make_case((4, 2), 16, 50, 8, CPU, torch.float32, seed=0)
    (sdpa,) = [make() for name, make in kernels.make_ways(CPU, torch.float32).items() if name == "sdpa"]
    torch.testing.assert_close(sdpa(case).double(), case.maths(), rtol=1e-5, atol=1e-6)
    assert kernels.has_fixed_bits(sdpa, case) and kernels.has_bits_of_one_row(sdpa, case)
    assert not kernels.has_fixed_bits(lambda one: one.query + one.seen[0].mean(), case)
