"""Figures of one caption, and the rows made of many; all synthetic."""

import pytest

from bench.common import Captioned, Usage
from bench.methods.document import method_row, rate_ratio
from bench.methods.listing import (
    RUN_BETWEEN_DEATHS,
    TOKENS_A_VERIFICATION,
    BenchMethod,
    Family,
    Place,
    methods,
    variations,
)
from bench.methods.samples import Sample, Spread, reference_sample, stack_sample
from bench.reference import Generated
from slipstream import Caption, CommittedToken, Speculation, Timings
from slipstream.messages import PassCost

TABLE = {method.name: method for method in methods(side_clips=2)}


def sample(method: str, clip: str, rate: float, **others: object) -> Sample:
    return Sample(method, clip, (1, 2), rate, first_token_s=2.0, **others)  # type: ignore[arg-type]


def captioned(method: str = "slipstream", ready_at: tuple[int, ...] = ()) -> Captioned:
    costs = (PassCost(0, 2, 0.020, 0.022), PassCost(4, 6, 0.030, 0.033))
    speculation = Speculation(
        passes=8, windows=6, tau=0.9, plain_pass_s=0.02, draft_pass_s=0.002, held_s=0.1, pass_costs=costs
    )
    timings = Timings(first_token_s=1.5, generate_s=0.5, total_s=2.5, draft_ready_s=1.0)
    tokens = (CommittedToken(1, "a", True),) * 21
    caption = Caption("", 21, None, options={"method": method}, timings=timings, speculation=speculation, tokens=tokens)
    return Captioned(caption, ready_at)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([3.0], Spread(3.0, 3.0, 3.0, 1)),
        ([1.0, 2.0, 3.0, 4.0, 9.0], Spread(3.0, 2.0, 4.0, 5)),
    ],
)
def test_a_spread_is_the_median_and_the_quartiles(values: list[float], expected: Spread | None) -> None:
    assert Spread.of(values) == expected


def test_a_stack_sample_holds_rates_and_shares_of_its_summary() -> None:
    usage = {"target": Usage(0.4, 1000), "draft": Usage(0.1, 500), "gateway": Usage(0.2, 100)}
    result = stack_sample("parallelvlm", "clip", captioned(ready_at=(0,)), usage)
    assert result.tokens_per_s == pytest.approx(40.0)
    assert result.figures["held_share"] == pytest.approx(0.2)
    assert result.figures["mean_window"] == pytest.approx(3.0)
    assert result.figures["mean_tokens_per_pass"] == pytest.approx(2.5)
    assert result.figures["draft_ready_before_first_token"] == 1.0
    assert (result.costs[4].count, result.costs[4].pass_s) == (6, 0.030)
    assert result.figures["target_idle"] == pytest.approx(0.2)
    assert result.figures["draft_idle"] == pytest.approx(0.8)
    assert "gateway_idle" not in result.figures


def test_a_draft_that_took_no_part_is_not_idle() -> None:
    usage = {name: Usage(0.1, 0) for name in ("target", "draft")}
    figures = stack_sample("autoregressive", "clip", captioned("autoregressive"), usage).figures
    assert "target_idle" in figures and "draft_idle" not in figures


def test_a_process_with_two_cores_is_idle_while_one_of_them_is() -> None:
    result = stack_sample("plain_both_cores", "clip", captioned("autoregressive"), {"target": Usage(0.5, 0, cores=2)})
    assert result.figures["target_idle"] == pytest.approx(0.5)


@pytest.mark.parametrize(("ready_at", "share"), [((), 0.0), ((3,), 0.0), ((0, 9), 1.0)])
def test_a_draft_that_joins_after_the_first_token_was_not_ready_before_it(
    ready_at: tuple[int, ...], share: float
) -> None:
    result = stack_sample("parallelvlm", "clip", captioned(ready_at=ready_at))
    assert result.figures["draft_ready_before_first_token"] == share


def test_plain_decoding_has_no_figures_of_a_draft() -> None:
    figures = stack_sample("autoregressive", "clip", captioned("autoregressive")).figures
    assert "tau" not in figures
    assert figures["plain_pass_s"] == 0.02


def test_a_reference_is_timed_after_its_first_tokens() -> None:
    assert reference_sample("transformers", "clip", Generated((1, 2, 3), 1.0, 2, 0.5)).tokens_per_s == 4.0
    assert reference_sample("transformers", "clip", Generated((1,), 1.0, 0, 0.0)).tokens_per_s == 0.0


def test_speedups_are_medians_of_ratios_clip_by_clip() -> None:
    samples = [
        *(sample("autoregressive", clip, rate, total_s=4.0) for clip, rate in (("a", 10.0), ("b", 20.0), ("c", 40.0))),
        *(sample("slipstream", clip, rate, total_s=2.0) for clip, rate in (("a", 30.0), ("b", 40.0), ("c", 40.0))),
        sample("transformers", "b", 10.0),
    ]
    row = method_row(TABLE["slipstream"], samples)
    assert row["speedup"] == row["speedup_engine"] == 2.0
    assert row["speedup_transformers"] == 4.0
    assert row["end_to_end_speedup"] == 2.0
    assert row["identical"] == 1.0
    assert row["tokens_per_s"] == {"median": 40.0, "low": 35.0, "high": 40.0}
    assert row["tokens_per_s_per_device"] == 20.0
    assert rate_ratio(samples, "slipstream", "transformers") == 4.0


def test_variants_of_transformers_are_compared_with_transformers_and_keep_their_note() -> None:
    samples = [
        sample("autoregressive", "a", 40.0),
        sample("transformers", "a", 10.0),
        Sample("transformers_assisted", "a", (1, 3), 5.0, 2.0, note="blind"),
    ]
    row = method_row(TABLE["transformers_assisted"], samples)
    assert (row["speedup"], row["speedup_engine"]) == (0.5, 0.125)
    assert row["identical"] == 0.0
    assert row["end_to_end_speedup"] is None
    assert row["note"] == "blind"


def test_m_is_what_the_papers_of_that_kind_count() -> None:
    figures = {"mean_tokens_per_pass": 4.0, "mean_accepted_length": 9.0, "draft_pass_s": 0.002}
    samples = [
        sample("autoregressive", "a", 40.0, figures={"plain_pass_s": 0.02}),
        *(sample(name, "a", 80.0, figures=figures) for name in ("sd", "slipstream")),
    ]
    in_turns, in_parallel = (method_row(TABLE[name], samples) for name in ("sd", "slipstream"))
    assert (in_turns["M"], in_turns["M_kind"]) == (4.0, TOKENS_A_VERIFICATION)
    assert (in_parallel["M"], in_parallel["M_kind"]) == (9.0, RUN_BETWEEN_DEATHS)
    assert in_turns["c"] == pytest.approx(10.0)
    assert method_row(TABLE["autoregressive"], samples)["M"] is None


def test_t_p0_of_a_drafting_method_is_plain_decodings_and_transformers_has_none() -> None:
    samples = [
        sample("autoregressive", "a", 40.0, figures={"plain_pass_s": 0.02}),
        sample("slipstream", "a", 80.0, figures={"plain_pass_s": 0.05, "draft_pass_s": 0.002}),
        sample("fastv", "a", 80.0, figures={"plain_pass_s": 0.01}),
        sample("transformers", "a", 30.0),
    ]
    found = [method_row(TABLE[name], samples)["T_p0"] for name in ("slipstream", "fastv", "transformers")]
    assert found == [0.02, 0.01, None]


def test_a_lossy_method_has_the_share_of_its_tokens_that_the_target_would_choose() -> None:
    row = method_row(TABLE["fastv"], [sample("fastv", "a", 50.0)], [0.9, 0.8])
    assert row["lossy"]
    assert row["A"] == pytest.approx(0.85)


def test_a_peak_is_the_highest_of_any_caption() -> None:
    own = [sample("sd", clip, 1.0, usage={"target": Usage(0.0, peak)}) for clip, peak in (("a", 5), ("b", 7))]
    assert method_row(TABLE["sd"], own)["peak_bytes"] == {"target": 7}


def test_methods_have_names_of_their_own_and_the_processes_that_they_need() -> None:
    compared = methods(side_clips=2)
    assert len({method.name for method in compared}) == len(compared)
    assert all((method.place is Place.OUTSIDE) == (method.family is Family.OUTSIDE) for method in compared)
    assert all(("lossy" in method.options.given()) == method.lossy for method in compared)
    assert BenchMethod("", "", Family.SELF).m_kind == TOKENS_A_VERIFICATION


def test_an_option_can_be_varied_over_values() -> None:
    rows = variations(["alpha=0,0.5", "pruner=random", "gate=false"], side_clips=1)
    assert [row.name for row in rows] == [
        "slipstream alpha=0",
        "slipstream alpha=0.5",
        "slipstream pruner=random",
        "slipstream gate=false",
    ]
    assert (rows[1].options.alpha, rows[2].options.pruner, rows[3].options.gate) == (0.5, "random", False)
    assert all(row.options.method == "slipstream" and row.max_clips == 1 for row in rows)


@pytest.mark.parametrize("asked", ["nonsense=1", "alpha=many"])
def test_an_option_that_there_is_not_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match=asked):
        variations([asked], side_clips=1)
