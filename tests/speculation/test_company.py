"""What passes in company cost, against a law that is known."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.speculation.company import KNOWN_WEIGHT, STALL, Company, CompanyCosts


def _costs(base_s: float, session_s: float, row_s: float, *, noise: float = 0.0, num_passes: int = 300) -> CompanyCosts:
    """After passes of one to ten sessions that seldom come without windows."""
    costs, draw = CompanyCosts(32), random.Random(0)
    for _ in range(num_passes):
        num_sessions = draw.randint(1, 10)
        num_rows = sum(draw.choice((0, *range(1, 17))) for _ in range(num_sessions))
        seconds = base_s + session_s * num_sessions + row_s * num_rows
        costs.observe(num_sessions, num_rows, seconds * (1 + draw.uniform(-noise, noise)))
    return costs


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(0.005, 0.05), st.floats(0.0, 0.01), st.floats(0.0, 0.003))
def test_plain_passes_are_known_from_those_with_windows(base_s: float, session_s: float, row_s: float) -> None:
    costs, mean_pass_s = _costs(base_s, session_s, row_s, noise=0.1), base_s + 5 * session_s + 40 * row_s
    for num_sessions in (1, 4, 10):
        told = costs.company(num_sessions)
        assert told.plain_s == pytest.approx(base_s + session_s * num_sessions, abs=0.15 * mean_pass_s)
        assert told.row_s == pytest.approx(row_s, abs=0.08 * mean_pass_s / 8)


def test_a_pass_at_another_speed_tells_of_plain_passes_at_that_speed() -> None:
    costs = _costs(0.01, 0.005, 0.001)
    usual, slow = costs.company(4), costs.company(4, speed=2.0)
    assert usual.plain_s == pytest.approx(0.03, rel=0.05)
    assert (slow.plain_s, slow.row_s) == pytest.approx((2 * usual.plain_s, 2 * usual.row_s))


def test_a_session_alone_has_what_its_passes_take() -> None:
    costs = CompanyCosts(32)
    for num_rows in [0, 8] * 50:
        costs.observe(1, num_rows, 0.01 + 0.001 * num_rows)
    assert costs.company(1).plain_s == pytest.approx(0.01, rel=0.02)
    assert not costs.company(1).is_shared and costs.company(2).is_shared


def test_sessions_that_do_not_fit_into_a_pass_have_theirs_after_it() -> None:
    one_by_one, by_fours = CompanyCosts(1), CompanyCosts(4)
    for num_rows in [0, 8] * 50:
        one_by_one.observe(1, num_rows, 0.01 + 0.001 * num_rows)
        by_fours.observe(4, num_rows, 0.01 + 0.001 * num_rows)
    assert one_by_one.company(8).plain_s == pytest.approx(8 * 0.01, rel=0.02)
    assert by_fours.company(10).plain_s == pytest.approx(3 * 0.01, rel=0.02)
    assert one_by_one.company(8).row_s == pytest.approx(0.001, rel=0.02), "all wait for a row"


def test_nothing_is_told_of_the_first_passes() -> None:
    costs = CompanyCosts(32)
    while not costs.is_known:
        assert costs.company(3) == Company(3) and not Company(3).is_shared
        costs.observe(3, 10, 0.1)
    assert costs.company(3).plain_s > 0


def test_a_stall_says_little() -> None:
    costs = _costs(0.01, 0.005, 0.001)
    before = costs.company(4).plain_s
    costs.observe(4, 20, 60.0)
    assert costs.company(4).plain_s < before * (1 + STALL / KNOWN_WEIGHT)


@pytest.mark.parametrize("first_s", [0.5, 60.0])
def test_a_first_pass_that_prepares_things_does_not_hide_what_rows_cost(first_s: float) -> None:
    costs, draw = CompanyCosts(32), random.Random(0)
    costs.observe(8, 40, first_s)
    for _ in range(20):
        num_rows = draw.randint(10, 80)
        costs.observe(8, num_rows, 0.03 + 0.0005 * num_rows)
    assert costs.company(8).row_s > 0.0001
    assert costs.company(8).plain_s == pytest.approx(0.03, rel=0.5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 32), st.integers(0, 512), st.floats(0.0, 10.0)), min_size=10, max_size=60))
def test_whatever_passes_take_no_costs_are_below_0(passes: list[tuple[int, int, float]]) -> None:
    costs = CompanyCosts(32)
    for num_sessions, num_rows, seconds in passes:
        costs.observe(num_sessions, num_rows, seconds)
        told = costs.company(num_sessions)
        assert told.plain_s >= 0 and told.row_s >= 0 and costs(num_sessions, num_rows) >= 0
