"""Which settings and faults the long runs cover, and what is made of them."""

from collections import Counter

import pytest

from bench.guarantees.draft_faults import KINDS, Fault, Outcome, kind_row, plan_faults
from bench.guarantees.identity import (
    ALPHAS,
    GUIDANCE_KINDS,
    GUIDED_PRUNERS,
    PRUNERS,
    WINDOWS,
    Setting,
    coverage,
    plan_settings,
)


def test_every_level_of_every_setting_is_covered_several_times() -> None:
    plan = plan_settings([8] * 27 + [4] * 3, seed=0)
    counts = coverage(setting for settings in plan for setting in settings)
    assert set(counts["max_window"]) == {str(window) for window in WINDOWS}
    assert set(counts["pruner"]) == set(PRUNERS)
    assert set(counts["alpha"]) == {str(alpha) for alpha in ALPHAS}
    assert set(counts["method"]) == {"slipstream", "autoregressive"}
    assert set(counts["cut"]) == {"none", "first token", "inside", "at the end"}
    assert min(count for levels in counts.values() for count in levels.values()) >= 5


def test_every_clip_is_decoded_plainly_and_with_both_kinds_of_guidance() -> None:
    for settings in plan_settings([5, 2, 3], seed=1):
        assert settings[0].method == "autoregressive"
        first, second = settings[1:3]
        assert (first.guidance, second.guidance) == GUIDANCE_KINDS
        assert first.pruner == second.pruner
        assert first.pruner in GUIDED_PRUNERS
        assert first.alpha == second.alpha


def test_the_same_seed_gives_the_same_plan() -> None:
    assert plan_settings([6] * 4, seed=3) == plan_settings([6] * 4, seed=3)
    assert plan_settings([6] * 4, seed=3) != plan_settings([6] * 4, seed=4)


@pytest.mark.parametrize(
    ("cut", "share", "limit"),
    [
        ("none", 0.5, 320),
        ("first token", 0.5, 1),
        ("inside", 0.0, 1),
        ("inside", 0.5, 50),
        ("inside", 1.0, 99),
        ("at the end", 0.5, 100),
    ],
)
def test_limits_cut_where_they_say(cut: str, share: float, limit: int) -> None:
    assert Setting("slipstream", cut=cut, cut_share=share).limit(100, 320) == limit


def test_a_cut_inside_one_token_is_that_token() -> None:
    assert Setting("slipstream", cut="inside", cut_share=1.0).limit(1, 320) == 1


def test_faults_are_spread_over_clips_policies_and_the_text() -> None:
    counts = dict(zip(KINDS, (1, 20, 10, 10), strict=True))
    faults = plan_faults(counts, num_clips=4, seed=0)
    assert Counter(fault.kind for fault in faults) == counts
    assert {fault.clip for fault in faults} == {0, 1, 2, 3}
    assert {fault.options["policy"] for fault in faults} == {"self_clocked", "fixed"}
    assert all(0 <= fault.at_share <= 0.8 for fault in faults)
    assert all(fault.at_share <= 0.1 for fault in faults if fault.kind == "restart")
    assert faults == plan_faults(counts, num_clips=4, seed=0)


def outcome(kind: str, gap_s: float, *, identical: bool = True, rejoined: bool = True, struck_at: int = 7) -> Outcome:
    return Outcome(Fault(kind, 0, 0.5, 1.0), identical, 1, struck_at, rejoined, gap_s, 50.0)


@pytest.mark.parametrize(
    ("kind", "identical", "rejoined", "passed"),
    [
        ("kill", True, False, True),
        ("restart", True, False, False),
        ("restart", True, True, True),
        ("freeze", False, True, False),
    ],
)
def test_a_run_passes_with_the_same_text_and_a_restarted_draft(
    kind: str, identical: bool, rejoined: bool, passed: bool
) -> None:
    assert outcome(kind, 0.1, identical=identical, rejoined=rejoined).passed is passed


def test_a_run_without_its_fault_proves_nothing() -> None:
    assert not outcome("kill", 0.1, struck_at=0).passed
    assert outcome("none", 0.1, struck_at=0).passed


def test_a_row_tells_the_longest_gap_of_its_kind() -> None:
    outcomes = [
        outcome("kill", 0.1),
        outcome("kill", 0.4, rejoined=False),
        outcome("kill", 0.2),
        outcome("freeze", 9.0),
    ]
    row = kind_row("kill", outcomes)
    assert (row["runs"], row["identical"], row["rejoined"], row["drafts_lost"]) == (3, 3, 2, 3)
    assert (row["longest_gap_s"], row["median_longest_gap_s"]) == (0.4, 0.2)
    assert kind_row("none", outcomes)["longest_gap_s"] is None
