"""That the estimates recover what they are fed, follow changes, and stay usable before anything is measured."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.speculation.company import PRIOR_SLOPE
from slipstream.speculation.pacing import MAX_TAU, MIN_TAU, CostModel, DecayedMean, WindowCosts

SECONDS = st.floats(1e-4, 10.0)


def test_the_first_observation_replaces_the_prior() -> None:
    mean = DecayedMean(5.0)
    mean.observe(1.0)
    assert mean.value == 1.0


def test_few_observations_are_averaged_and_old_ones_fade() -> None:
    mean = DecayedMean(5.0)
    mean.observe(1.0)
    mean.observe(3.0)
    assert mean.value == pytest.approx(2.0, abs=0.05)
    for _ in range(200):
        mean.observe(7.0)
    assert mean.value == pytest.approx(7.0, abs=0.05)


@pytest.mark.parametrize("slope", [0.0, 0.0016, 0.01])
def test_the_line_of_window_costs_is_recovered_from_noisy_passes(slope: float) -> None:
    chance = random.Random(1)
    costs = WindowCosts()
    for _ in range(400):
        costs.observe(0, 0.021)
        window_len = chance.randint(1, 16)
        costs.observe(window_len, (0.028 + slope * window_len) * chance.uniform(0.97, 1.03))
    assert costs(0) == pytest.approx(0.021)
    for window_len in (1, 8, 16):
        assert costs(window_len) == pytest.approx(0.028 + slope * window_len, rel=0.1)


def test_windows_of_one_length_leave_the_slope_to_the_prior() -> None:
    costs = WindowCosts()
    for _ in range(100):
        costs.observe(0, 0.02)
        costs.observe(8, 0.03)
    assert costs(8) == pytest.approx(0.03)
    assert costs(9) - costs(8) == pytest.approx(PRIOR_SLOPE * 0.02)


def test_slow_windows_are_forgotten_in_plain_passes() -> None:
    """Where they keep all further windows from being judged, nothing else tells that the machine is free again."""
    costs = WindowCosts()
    for _ in range(5):
        costs.observe(0, 0.02)
        costs.observe(4, 0.5)
        costs.observe(12, 2.0)
    assert costs(8) > 20 * costs(0)
    for _ in range(800):
        costs.observe(0, 0.02)
    assert costs(8) < 3 * costs(0)
    for _ in range(80_000):
        costs.observe(0, 0.02)
    assert costs(8) == pytest.approx(costs(0) * (1 + 8 * PRIOR_SLOPE))


@pytest.mark.parametrize("num_plain", [4, 9, 64])
def test_one_stall_among_rare_windows_says_little(num_plain: int) -> None:
    costs = WindowCosts()
    for _ in range(20):
        for _ in range(num_plain):
            costs.observe(0, 0.02)
        costs.observe(8, 0.025)
    costs.observe(8, 5.0)
    assert costs(8) < 4 * costs(0)


def test_before_any_window_a_plain_pass_is_the_guide() -> None:
    costs = WindowCosts(plain=DecayedMean(0.02))
    assert costs(0) == 0.02
    assert costs(10) == pytest.approx(0.02 * (1 + 10 * PRIOR_SLOPE))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(passes=st.lists(st.tuples(st.integers(0, 16), SECONDS), max_size=40))
def test_estimates_are_positive_and_never_fall_with_the_window(passes: list[tuple[int, float]]) -> None:
    costs = WindowCosts()
    for window_len, seconds in passes:
        costs.observe(window_len, seconds)
    estimates = [costs(window_len) for window_len in range(1, 17)]
    assert all(estimate > 0 for estimate in [costs(0), *estimates])
    assert all(left <= right + 1e-12 for left, right in itertools.pairwise(estimates))


def test_tau_counts_at_most_one_rejected_token_of_a_window() -> None:
    one_window, one_by_one = CostModel(), CostModel()
    one_window.observe_window(3, 8)
    for matched in (True, True, True, False):
        one_by_one.observe_match(matched)
    assert one_window.tau == one_by_one.tau
    one_window.observe_window(3, 3)
    for _ in range(3):
        one_by_one.observe_match(True)
    assert one_window.tau == one_by_one.tau


@pytest.mark.parametrize("tau", [0.3, 0.8, 0.95])
def test_tau_is_recovered(tau: float) -> None:
    chance = random.Random(2)
    costs = CostModel()
    seen = []
    for _ in range(5000):
        costs.observe_match(chance.random() < tau)
        seen.append(costs.tau)
    assert sum(seen[500:]) / len(seen[500:]) == pytest.approx(tau, abs=0.02)


@pytest.mark.parametrize(("matched", "bound"), [(True, MAX_TAU), (False, MIN_TAU)])
def test_tau_stays_away_from_0_and_1(matched: bool, bound: float) -> None:
    costs = CostModel()
    for _ in range(1000):
        costs.observe_match(matched)
    assert costs.tau == bound


def test_a_fork_learns_on_its_own() -> None:
    costs = CostModel()
    fork = costs.fork()
    fork.target_pass_s.observe(0, 9.0)
    fork.observe_match(False)
    assert costs.target_pass_s(0) != fork.target_pass_s(0)
    assert costs.tau > fork.tau


def test_the_speed_ratio_is_a_plain_pass_over_a_draft_pass() -> None:
    costs = CostModel(WindowCosts(plain=DecayedMean(0.09)), DecayedMean(0.01))
    assert costs.speed_ratio == pytest.approx(9.0)


def test_a_machine_that_stood_still_is_not_remembered() -> None:
    costs = CostModel()
    known = (costs.target_pass_s.plain, costs.draft_pass_s, costs.plain_token_s)
    for _ in range(40):
        for mean in known:
            mean.observe(0.01)
        costs.target_pass_s.observe(8, 0.02)
    for mean in known:
        mean.observe(5.0)
        assert 0.01 < mean.value < 0.0115
    costs.target_pass_s.observe(8, 5.0)
    assert 0.02 < costs.target_pass_s(8) < 0.023


def test_a_cost_that_rose_is_followed() -> None:
    costs = CostModel()
    for seconds, num_passes in ((0.01, 40), (0.2, 100)):
        for _ in range(num_passes):
            costs.plain_token_s.observe(seconds)
            costs.target_pass_s.observe(8, seconds)
    assert costs.plain_token_s.value == pytest.approx(0.2, rel=0.1)
    assert costs.target_pass_s(8) == pytest.approx(0.2, rel=0.1)


def test_first_passes_are_taken_as_they_are() -> None:
    mean = CostModel().draft_pass_s
    mean.observe(3.0)
    assert mean.value == 3.0
