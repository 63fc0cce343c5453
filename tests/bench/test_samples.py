"""Statistics over synthetic captions."""

import pytest

from bench.captions import Captioned
from bench.samples import Sample, Spread, method_row, rate_ratio, reference_sample, stack_sample
from bench.tasks import Generated
from slipstream.rpc.v1 import gateway_pb2


def sample(method: str, clip: str, rate: float, **others: object) -> Sample:
    return Sample(method, clip, (1, 2), rate, first_token_s=2.0, **others)  # type: ignore[arg-type]


def summary(method: str = "parallel") -> gateway_pb2.Summary:
    costs = [
        gateway_pb2.PassCost(window=0, count=2, pass_s=0.020, round_s=0.022),
        gateway_pb2.PassCost(window=4, count=6, pass_s=0.030, round_s=0.033),
    ]
    return gateway_pb2.Summary(
        method=method,
        num_tokens=21,
        timings=gateway_pb2.Timings(first_token_s=1.5, generate_s=0.5, total_s=2.5, draft_ready_s=1.0),
        speculation=gateway_pb2.Speculation(
            passes=8, windows=6, tau=0.9, plain_pass_s=0.02, draft_pass_s=0.002, held_s=0.1, pass_costs=costs
        ),
    )


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
    result = stack_sample("parallel fixed", "clip", Captioned((1,) * 21, (True,) * 21, (0,), (), summary()))
    assert result.tokens_per_s == pytest.approx(40.0)
    assert result.figures["held_share"] == pytest.approx(0.2)
    assert result.figures["mean_window"] == pytest.approx(3.0)
    assert result.figures["draft_ready_before_first_token"] == 1.0
    assert (result.costs[4].count, result.costs[4].pass_s) == (6, 0.030)


@pytest.mark.parametrize(("ready_at", "share"), [((), 0.0), ((3,), 0.0), ((0, 9), 1.0)])
def test_a_draft_that_joins_after_the_first_token_was_not_ready_before_it(
    ready_at: tuple[int, ...], share: float
) -> None:
    result = stack_sample("parallel fixed", "clip", Captioned((1,), (True,), ready_at, (), summary()))
    assert result.figures["draft_ready_before_first_token"] == share


def test_plain_decoding_has_no_figures_of_a_draft() -> None:
    figures = stack_sample(
        "autoregressive", "clip", Captioned((1,), (False,), (), (), summary("autoregressive"))
    ).figures
    assert "tau" not in figures
    assert figures["plain_pass_s"] == 0.02


def test_a_reference_is_timed_after_its_first_tokens() -> None:
    assert reference_sample("transformers", "clip", Generated((1, 2, 3), 1.0, 2, 0.5)).tokens_per_s == 4.0
    assert reference_sample("transformers", "clip", Generated((1,), 1.0, 0, 0.0)).tokens_per_s == 0.0


def test_speedups_are_medians_of_ratios_clip_by_clip() -> None:
    samples = [
        *(sample("autoregressive", clip, rate, total_s=4.0) for clip, rate in (("a", 10.0), ("b", 20.0), ("c", 40.0))),
        *(sample("parallel", clip, rate, total_s=2.0) for clip, rate in (("a", 30.0), ("b", 40.0), ("c", 40.0))),
        sample("transformers", "b", 10.0),
    ]
    row = method_row("parallel", samples)
    assert row["decode_speedup"] == row["decode_speedup_over_engine_plain"] == 2.0
    assert row["decode_speedup_over_transformers"] == 4.0
    assert row["end_to_end_speedup"] == 2.0
    assert row["first_token_ratio"] == 1.0
    assert row["identical"] == 1.0
    assert row["tokens_per_s"] == {"median": 40.0, "quartiles": [35.0, 40.0]}
    assert rate_ratio(samples, "parallel", "transformers") == 4.0


def test_variants_of_transformers_are_compared_with_transformers_and_keep_their_note() -> None:
    samples = [
        sample("autoregressive", "a", 40.0),
        sample("transformers", "a", 10.0),
        Sample("transformers assisted", "a", (1, 3), 5.0, 2.0, note="blind"),
    ]
    row = method_row("transformers assisted", samples)
    assert row["decode_speedup"] == 0.5
    assert row["identical"] == 0.0
    assert row["end_to_end_speedup"] is None
    assert row["note"] == "blind"
