"""What the simulator is fed, from synthetic measurements."""

import pytest

from bench.prediction import pooled_costs, predict, prediction_row, rising, round_overhead_s
from bench.samples import Sample, WindowCost
from bench.tasks import Agreement

COSTS = {
    0: WindowCost(10, 0.020, 0.022),
    2: WindowCost(10, 0.026, 0.028),
    8: WindowCost(10, 0.030, 0.032),
}


def measured(rate: float, draft_pass_s: float = 0.002) -> Sample:
    return Sample("parallel", "a", (1,) * 50, rate, 1.0, figures={"draft_pass_s": draft_pass_s}, costs=COSTS)


def test_tables_of_several_captions_are_weighed_by_their_passes() -> None:
    tables = [{4: WindowCost(1, 0.010, 0.012)}, {4: WindowCost(3, 0.030, 0.040), 0: WindowCost(1, 0.005, 0.006)}]
    pooled = pooled_costs(tables)
    assert list(pooled) == [0, 4]
    assert pooled[4].count == 4
    assert pooled[4].pass_s == pytest.approx(0.025)
    assert pooled[4].round_s == pytest.approx(0.033)


def test_the_overhead_is_what_a_round_takes_beside_its_pass() -> None:
    assert round_overhead_s(COSTS) == pytest.approx(0.002)
    assert round_overhead_s({}) == 0.0


def test_a_longer_window_never_costs_less() -> None:
    measurements = {0: (5, 1.0), 1: (1, 4.0), 2: (3, 2.0), 3: (1, 3.0)}
    table = rising({window: WindowCost(count, pass_s, pass_s) for window, (count, pass_s) in measurements.items()})
    assert table == {0: 1.0, 1: 2.5, 2: 2.5, 3: 3.0}


def test_a_single_window_serves_for_all() -> None:
    assert rising({0: WindowCost(1, 1.0, 1.0)}) == {0: 1.0, 1: 1.0}


def test_a_caption_is_predicted_at_its_own_pace() -> None:
    """Everything took twice as long while the second clip was captioned."""
    slow_costs = {window: WindowCost(c.count, 2 * c.pass_s, 2 * c.round_s) for window, c in COSTS.items()}
    slow = Sample("parallel", "b", (1,) * 50, 40.0, 1.0, figures={"draft_pass_s": 0.004}, costs=slow_costs)
    agreement = Agreement((True, True, True, True, False) * 10, 5)
    fast_one, slow_one = predict("fixed", [measured(80.0), slow], {"a": agreement, "b": agreement}, max_window=16)
    assert fast_one.ideal == pytest.approx(2 * slow_one.ideal, rel=0.05)


@pytest.mark.parametrize("policy", ["fixed", "self_clocked"])
def test_a_perfect_draft_is_predicted_to_be_faster_than_plain_decoding(policy: str) -> None:
    (prediction,) = predict(policy, [measured(80.0)], {"a": Agreement((True,) * 50, 5)}, max_window=16)
    assert 2 * 50.0 < prediction.ideal < 1 / 0.002
    assert prediction.measured == 80.0


@pytest.mark.parametrize("policy", ["fixed", "self_clocked"])
def test_what_rounds_cost_beside_their_pass_slows_the_prediction(policy: str) -> None:
    agreement = Agreement((True, True, True, True, False) * 10, 5)
    (prediction,) = predict(policy, [measured(80.0)], {"a": agreement}, max_window=16)
    assert prediction.with_overhead < prediction.ideal


def test_a_draft_that_never_agrees_is_predicted_not_to_help() -> None:
    (prediction,) = predict("self_clocked", [measured(40.0)], {"a": Agreement((False,) * 50, 5)}, max_window=16)
    assert prediction.ideal == pytest.approx(50.0, rel=0.15)


def test_captions_in_which_no_draft_wrote_are_left_out() -> None:
    row = prediction_row("fixed", [measured(40.0, draft_pass_s=0.0)], {"a": Agreement((True,), 5)}, max_window=16)
    assert (row["n"], row["predicted_tokens_per_s"], row["measured_over_predicted"]) == (0, None, None)
