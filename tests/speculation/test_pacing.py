"""When the target waits and how much it judges: against the formula of the cycle, and at the edges."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidRequest
from slipstream.speculation.company import Company
from slipstream.speculation.pacing import (
    POLICIES,
    CostModel,
    Fixed,
    Moment,
    SelfClocked,
    WindowCosts,
    WindowPlan,
    foreseen_speedup,
    get_policy,
)
from tests.speculation.toys import measured_costs

COSTS = st.builds(
    measured_costs,
    st.floats(0.2, 1000.0),
    st.floats(0.0, 1.0),
    slope=st.floats(0.0, 0.5),
    restart_s=st.floats(0.0, 2.0),
)


def _window(costs: CostModel) -> int:
    return SelfClocked.steady_window(16, costs, costs.target_pass_s.price())[0]


def _hold(costs: CostModel, *, max_window: int = 64) -> int:
    return SelfClocked().plan(Moment(0, True, max_window), costs).hold


@pytest.mark.parametrize("tau", [0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("speed_ratio", [4, 9, 15, 25, 40])
def test_the_hold_minimises_the_cycle(speed_ratio: int, tau: float) -> None:
    costs = measured_costs(speed_ratio, tau)
    hold = _hold(costs)

    def cycle(hold: float) -> float:
        return 1 + hold / speed_ratio + math.pow(tau, hold + 1) / (1 - tau**speed_ratio)

    # The policy's line is a ridge estimate, so a neighbour that is as good to 1 in 1000 is as right.
    assert cycle(hold) <= 1.001 * min(cycle(other) for other in range(speed_ratio))
    stationary = math.log((1 - tau**speed_ratio) / (speed_ratio * math.log(1 / tau))) / math.log(tau) - 1
    assert abs(hold - min(max(stationary, 0.0), speed_ratio - 1)) <= 1


@settings(max_examples=300, deadline=None, derandomize=True)
@given(costs=COSTS, fresh=st.booleans(), max_window=st.integers(1, 32))
def test_the_plan_is_kept_while_the_tokens_arrive(costs: CostModel, fresh: bool, max_window: int) -> None:
    for policy in (SelfClocked(), Fixed()):
        promised = policy.plan(Moment(0, fresh, max_window), costs).hold
        assert 0 <= promised <= max_window
        for num_pending in range(promised + 1):
            plan = policy.plan(Moment(num_pending, fresh, max_window), costs)
            assert 0 <= plan.cap <= max_window
            assert (num_pending >= plan.hold) == (num_pending == promised), "wait until the hold, then go"


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("speed_ratio", [1e-3, 0.3, 1.0, 1000.0])
@pytest.mark.parametrize("policy", [Fixed(), SelfClocked()])
def test_extreme_costs_give_usable_plans(policy: Fixed | SelfClocked, speed_ratio: float, tau: float) -> None:
    for num_pending in (0, 1, 16):
        plan = policy.plan(Moment(num_pending, False, 16), measured_costs(speed_ratio, tau))
        assert 1 <= plan.cap <= 16
        assert plan.hold <= 16


@pytest.mark.parametrize("tau", [0.1, 0.8])
def test_a_draft_slower_than_the_target_is_not_waited_for(tau: float) -> None:
    assert _hold(measured_costs(0.5, tau)) == 0


def test_a_draft_that_is_always_wrong_is_not_waited_for() -> None:
    assert _hold(measured_costs(9, 0.0)) == 0


def test_a_dear_restart_is_not_waited_for() -> None:
    assert _hold(measured_costs(9, 0.8)) > 0
    assert _hold(measured_costs(9, 0.8, restart_s=3.0)) == 0


@pytest.mark.parametrize("num_sessions", [1, 2, 8])
def test_rows_are_priced_at_the_time_of_all_that_share_a_pass(num_sessions: int) -> None:
    costs = measured_costs(25, 0.9, slope=0.01, num_sessions=num_sessions).target_pass_s
    for window_len in range(16):
        assert costs.price()(window_len) == pytest.approx(1 + 0.01 * num_sessions * window_len, rel=0.01)


def test_what_the_target_tells_of_company_outweighs_what_one_session_sees() -> None:
    """Its own passes took longer whenever its window was short, for what others did."""
    costs = WindowCosts()
    for window_len in [1, 16] * 50:
        costs.observe(window_len, 3.0 - 0.1 * window_len, Company(8, 1.0, 0.02))
    assert costs.line().slope == 0.0 and costs.price()(10) == pytest.approx(1 + 10 * 8 * 0.02)


def test_rows_that_were_held_for_free_are_paid_for_once_they_cost() -> None:
    costs = WindowCosts()
    for _ in range(100):
        costs.observe(8, 1.0, Company(8, 1.0, 0.0))
    assert costs.price()(10) == costs.price()(0)
    for _ in range(100):
        costs.observe(8, 1.0, Company(8, 1.0, 0.02))
    assert costs.price()(10) == pytest.approx(1 + 10 * 8 * 0.02, rel=0.1)


def test_company_that_leaves_is_soon_forgotten() -> None:
    costs = measured_costs(25, 0.9, slope=0.05, num_sessions=16)
    for _ in range(20):
        costs.target_pass_s.observe(8, 1.4)
    assert not costs.target_pass_s.is_shared and costs.target_pass_s.price() == costs.target_pass_s.line()


def test_what_many_cost_is_no_price_of_two_who_come_later() -> None:
    costs = measured_costs(25, 0.9, slope=0.005, num_sessions=16).target_pass_s
    for _ in range(200):
        costs.observe(8, 1.04)
    for _ in range(10):
        costs.observe(8, 1.08, Company(2, 1.0, 0.005))
    assert costs.is_shared and costs.price()(10) == pytest.approx(1 + 10 * 2 * 0.005, rel=0.02)


def test_whether_a_caption_has_company_its_own_first_pass_tells() -> None:
    before = measured_costs(25, 0.9, slope=0.05, num_sessions=16)
    caption = before.fork()
    assert caption.target_pass_s.is_shared, "as those before it had"
    caption.target_pass_s.observe(8, 1.4)
    assert not caption.target_pass_s.is_shared and before.target_pass_s.is_shared


def test_speculation_foresees_what_it_brings_all() -> None:
    """Windows of others are in a session's own passes, and not in the plain decoding of all that they are held to."""
    costs = measured_costs(1000, 0.9, slope=0.02, num_sessions=8)
    costs.plain_token_s.observe(5.0)  # of a pass beside others' windows
    round_s, num_tokens = costs.target_pass_s.price(), lambda window: (1 - 0.9 ** (window + 1)) / (1 - 0.9)
    best = max(num_tokens(window) / round_s(window) for window in range(1, 17))
    assert foreseen_speedup(16, costs) == pytest.approx(best, rel=0.1)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.floats(0.0, 1.0), st.floats(0.05, 0.5), st.integers(2, 16))
def test_company_never_makes_windows_longer(tau: float, slope: float, company: int) -> None:
    """Where it is the target's time that counts, and rows cost at least the prior, which a caption alone leans to."""
    alone, shared = (measured_costs(1e6, tau, slope=slope, num_sessions=count) for count in (1, company))
    assert _window(shared) <= _window(alone)
    assert all(shared.target_pass_s.price()(window_len) > 0 for window_len in range(17))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.floats(0.0, 1.0), st.floats(0.0, 0.5), st.integers(2, 16), st.integers(0, 16))
def test_more_company_never_makes_windows_longer(tau: float, slope: float, company: int, more: int) -> None:
    """Whatever rows cost, which the target tells all."""
    few, many = (measured_costs(1e6, tau, slope=slope, num_sessions=count) for count in (company, company + more))
    assert _window(many) <= _window(few)
    assert all(many.target_pass_s.price()(window_len) > 0 for window_len in range(17))


def test_windows_shrink_where_rows_take_the_time_of_others() -> None:
    alone, shared, flat = (
        _window(measured_costs(25, 0.9, slope=slope, num_sessions=count))
        for slope, count in ((0.05, 1), (0.05, 8), (0.0, 8))
    )
    assert shared < alone / 2 and flat == 16


def test_rows_that_cost_more_than_they_return_are_not_judged() -> None:
    flat = SelfClocked().plan(Moment(16, False, 16), measured_costs(25, 0.7))
    steep = SelfClocked().plan(Moment(16, False, 16), measured_costs(25, 0.7, slope=0.2))
    assert steep.cap < flat.cap


@pytest.mark.parametrize(("speed_ratio", "gamma"), [(0.4, 1), (1.0, 1), (9.4, 9), (9.6, 10), (100.0, 16)])
def test_fixed_waits_for_whole_windows_of_the_speed_ratio(speed_ratio: float, gamma: int) -> None:
    costs = measured_costs(speed_ratio, 0.8)
    assert Fixed().plan(Moment(0, False, 16), costs) == WindowPlan(gamma, gamma)


@pytest.mark.parametrize("num_pending", [0, 5, 16])
def test_fixed_verifies_the_first_token_of_a_line_beforehand(num_pending: int) -> None:
    assert Fixed().plan(Moment(num_pending, True, 16), measured_costs(9, 0.8)) == WindowPlan(0, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_go_by_name(name: str) -> None:
    assert get_policy(name, gamma=3).plan(Moment(3, False, 16), measured_costs(9, 0.8)).cap > 0


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"'magic' is unknown.*self_clocked.*fixed"):
        get_policy("magic")
