"""Theory against synthetic measurements."""

from dataclasses import replace
from typing import Any

import pytest

from bench.methods.agreement import Agreement
from bench.methods.prediction import pooled_costs, predictions, rising, round_overhead_s
from bench.methods.samples import Sample, WindowCost
from bench.simulate_trees import TreeTrace, draw_trace
from slipstream.speculation.methods import Method, get_method

COSTS = {
    0: WindowCost(10, 0.020, 0.022),
    2: WindowCost(10, 0.026, 0.028),
    8: WindowCost(10, 0.030, 0.032),
}
FREE = {window: WindowCost(cost.count, cost.pass_s, cost.pass_s) for window, cost in COSTS.items()}
"""The same where rounds take no longer than their passes."""


def agreed(agrees: tuple[bool, ...]) -> Agreement:
    """The second candidate is right wherever the first is not."""
    return Agreement(TreeTrace(tuple(int(not is_right) for is_right in agrees), ((0.8, 0.15, 0.01),) * len(agrees)), 5)


MOSTLY = agreed((True, True, True, True, False) * 10)


def measured(name: str = "slipstream", rate: float = 80.0, draft_pass_s: float = 0.002, **others: Any) -> Sample:
    figures = {"draft_pass_s": draft_pass_s, "tau": 0.8, **others.pop("figures", {})}
    return Sample(name, "a", (1,) * 50, rate, 1.0, figures=figures, **{"costs": COSTS, **others})


def predicted(*samples: Sample, agreement: Agreement | None = MOSTLY, method: Method | None = None) -> Any:
    name = samples[0].method
    agreements = {name: {sample.clip: agreement for sample in samples}} if agreement else {}
    return predictions(samples, {name: method or get_method(name)}, agreements, max_window=16)


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


def test_tokens_that_the_target_drafts_within_a_round_are_no_overhead() -> None:
    assert round_overhead_s({4: WindowCost(3, 0.020, 0.063)}, drafted_token_s=0.010) == pytest.approx(0.003)


def test_a_longer_window_never_costs_less() -> None:
    measurements = {0: (5, 1.0), 1: (1, 4.0), 2: (3, 2.0), 3: (1, 3.0)}
    table = rising({window: WindowCost(count, pass_s, pass_s) for window, (count, pass_s) in measurements.items()})
    assert table == {0: 1.0, 1: 2.5, 2: 2.5, 3: 3.0}


def test_a_single_window_serves_for_all() -> None:
    assert rising({0: WindowCost(1, 1.0, 1.0)}) == {0: 1.0, 1: 1.0}


def test_a_caption_is_predicted_at_its_own_pace() -> None:
    """Everything took twice as long while the second clip was captioned."""
    slow_costs = {window: WindowCost(c.count, 2 * c.pass_s, 2 * c.round_s) for window, c in FREE.items()}
    slow = replace(measured("parallelvlm", 40.0, 0.004, costs=slow_costs), clip="b")
    fast_clip, slow_clip = predicted(measured("parallelvlm", costs=FREE), slow)["clips"]
    assert fast_clip["predicted"] == pytest.approx(2 * slow_clip["predicted"], rel=0.05)


@pytest.mark.parametrize("name", ["slipstream", "parallelvlm", "sd"])
def test_a_perfect_draft_is_predicted_to_be_faster_than_plain_decoding(name: str) -> None:
    agreement = agreed((True,) * 50)
    (clip,), (free,) = (predicted(measured(name, costs=costs), agreement=agreement)["clips"] for costs in (COSTS, FREE))
    assert 2 * 50.0 < free["predicted"] < 1 / 0.002
    assert clip["measured"] == 80.0
    assert clip["predicted"] < 1.01 * free["predicted"]


def test_a_draft_that_never_agrees_is_predicted_not_to_help() -> None:
    (clip,) = predicted(measured(rate=40.0, costs=FREE), agreement=agreed((False,) * 50))["clips"]
    assert clip["predicted"] == pytest.approx(50.0, rel=0.15)


@pytest.mark.parametrize("name", ["slipstream_branches", "slipstream_tree"])
def test_lines_that_branch_are_predicted_to_be_faster_than_a_chain(name: str) -> None:
    drawn = Agreement(draw_trace(0.8, 500), 5)
    chain, tree = (
        predicted(measured(each, costs=FREE), agreement=drawn)["clips"][0]["predicted"] for each in ("slipstream", name)
    )
    assert tree > 1.1 * chain


def test_a_row_that_costs_as_much_as_a_pass_leaves_little_of_a_tree() -> None:
    cheap, dear = replace(MOSTLY, row_share=0.0), replace(MOSTLY, row_share=1.0)
    of_cheap, of_dear = (
        predicted(measured("slipstream_tree", draft_pass_s=0.01), agreement=agreement)["clips"][0]["predicted"]
        for agreement in (cheap, dear)
    )
    assert of_cheap > 1.05 * of_dear


def test_a_tree_is_priced_by_passes_over_one_row() -> None:
    """Its draft tells the mean over passes of some rows."""
    timed = replace(MOSTLY, pass_s=0.002)
    quick, slow = (
        predicted(measured("slipstream_tree", draft_pass_s=told_s), agreement=timed)["clips"]
        for told_s in (0.002, 0.01)
    )
    assert quick == slow


def test_without_a_record_the_measured_tau_stands_in() -> None:
    drawn, recorded = (predicted(measured(costs=FREE), agreement=agreement) for agreement in (None, MOSTLY))
    assert drawn["methods"][0]["agreement_from"] == "tau"
    by_tau, by_record = (document["clips"][0]["predicted"] for document in (drawn, recorded))
    assert 1.5 * 50.0 < by_tau < by_record  # regular runs suit it


def test_plain_decoding_is_predicted_to_take_its_passes() -> None:
    plain = Sample("autoregressive", "a", (1,) * 50, 40.0, 1.0, costs={0: WindowCost(49, 0.020, 0.021)})
    document = predicted(plain, agreement=None)
    assert document["clips"] == [
        {"method": "autoregressive", "clip": "a", "measured": 40.0, "predicted": pytest.approx(1 / 0.021)}
    ]
    assert document["prediction_error"] == pytest.approx(1 - 40.0 * 0.021)


def test_self_drafting_takes_its_rounds() -> None:
    """Of 9 tokens drafted in 10 ms each, the first 3.46 are accepted in the mean (ParallelVLM, lemma 1)."""
    costs = {9: WindowCost(20, 0.030, 0.123)}
    (clip,) = predicted(measured("std", 30.0, 0.010, costs=costs), agreement=None)["clips"]
    expected = 0.8 * (1 - 0.8**9) / 0.2 + 1
    assert 1 / clip["predicted"] == pytest.approx((9 * 0.010 + 0.033) / expected)


def test_trees_take_their_rounds() -> None:
    costs = {0: WindowCost(1, 0.020, 0.022), 25: WindowCost(20, 0.030, 0.033)}
    (clip,) = predicted(measured("sd_tree", 50.0, 0.004, costs=costs), agreement=None)["clips"]
    expected = 0.8 * (1 - 0.8**5) / 0.2 + 1
    overhead_s = 2 * (1 * 0.002 + 20 * 0.003) / 21
    assert 1 / clip["predicted"] == pytest.approx((5 * 0.004 + 0.030 + overhead_s) / expected)


def test_captions_that_show_nothing_are_left_out() -> None:
    """No draft wrote, nothing was decoded, or the row is none of the stack's."""
    silent, empty = measured(rate=40.0, draft_pass_s=0.0), replace(measured(), token_ids=(1,))
    document = predictions(
        [silent, empty, measured("other")], {"slipstream": get_method("slipstream")}, {}, max_window=8
    )
    assert document == {"prediction_error": None, "methods": [], "clips": []}


def test_windows_that_are_all_long_do_not_say_what_short_ones_take() -> None:
    """A line through 23 and 24 rows, which differ by chance, would have a plain pass take less than nothing."""
    long = {23: WindowCost(9, 0.040, 0.042), 24: WindowCost(9, 0.044, 0.046)}
    plain = replace(measured("autoregressive"), costs={0: WindowCost(9, 0.016, 0.017)})
    samples, agreements = [measured(costs=long), plain], {"slipstream": {"a": MOSTLY}}
    methods = {name: get_method(name) for name in ("slipstream", "autoregressive")}
    speeds = predictions(samples, methods, agreements, max_window=24)["clips"]
    own, alone = (clip["predicted"] for clip in speeds)  # type: ignore[attr-defined]
    assert alone == pytest.approx(1 / 0.017) and own > 1.5 * alone
