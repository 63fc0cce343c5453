"""The simulator against ParallelVLM, appendix C, theorem by theorem, with T_p constant and T_q = T_p / c.

The papers' tau of theorems 4 and 5 is the share of drafted tokens that is accepted; the simulator's is the chance that
a token agrees, whose windows are cut at the first that does not: lemma 1 leads from one to the other.
"""

import itertools
import math
import statistics

import pytest

from bench.methods.prediction import expected_accepted
from bench.simulator import SimulationInput, SimulationResult, draw_agreement, simulate
from slipstream.speculation.pacing import Fixed, Policy, SelfClocked, Sequential

SPEED_RATIOS = (3, 9, 25)
POINTS = [(5, 9, 0.8), (9, 9, 0.7), (5, 25, 0.6), (15, 15, 0.9)]
"""gamma, c, tau."""
PASS_S = 0.05


def _result(policy: Policy, speed_ratio: float, tau: float) -> SimulationResult:
    setup = SimulationInput(lambda _: PASS_S, PASS_S / speed_ratio, policy, tau=tau, max_window=32, num_tokens=2500)
    return simulate(setup)


def _cycle(hold: int, speed_ratio: int, tau: float) -> float:
    """Design, section 3: passes between two deaths of a line that the target holds `hold` tokens for."""
    return float(1 + hold / speed_ratio + tau ** (hold + 1) / (1 - tau**speed_ratio))


@pytest.mark.parametrize("gamma", [1, 5, 9])
@pytest.mark.parametrize("speed_ratio", SPEED_RATIOS)
def test_theorem_2_sequential_decoding_under_full_acceptance(gamma: int, speed_ratio: int) -> None:
    expected = speed_ratio * (gamma + 1) / (gamma + speed_ratio)
    assert _result(Sequential(gamma), speed_ratio, 1.0).speedup == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("gamma", [9, 12, 20])
def test_theorem_3_parallel_decoding_under_full_acceptance_is_as_fast_as_the_draft(gamma: int) -> None:
    """gamma >= c. (A round also brings the target's own token, which the draft must reproduce: no gain, no loss.)"""
    assert _result(Fixed(gamma), 9, 1.0).speedup == pytest.approx(9, rel=0.02)


@pytest.mark.parametrize("gamma", [2, 4, 7])
def test_theorem_3_parallel_decoding_with_short_windows_is_bound_by_the_target(gamma: int) -> None:
    """gamma < c: a speedup of gamma, to which the target's own token of each pass adds one."""
    assert _result(Fixed(gamma), 9, 1.0).speedup - 1 == pytest.approx(gamma, rel=0.01)


@pytest.mark.parametrize("speed_ratio", SPEED_RATIOS)
def test_theorem_3_parallel_over_sequential_decoding(speed_ratio: int) -> None:
    """2c / (c + 1) with gamma = c."""
    parallel, sequential = (_result(policy(speed_ratio), speed_ratio, 1.0) for policy in (Fixed, Sequential))
    assert parallel.speedup / sequential.speedup == pytest.approx(2 * speed_ratio / (speed_ratio + 1), rel=0.02)


@pytest.mark.parametrize(("gamma", "speed_ratio", "tau"), POINTS)
def test_lemma_1_and_theorem_4_sequential_decoding_under_partial_acceptance(
    gamma: int, speed_ratio: int, tau: float
) -> None:
    accepted_share = tau * (1 - tau**gamma) / (1 - tau) / gamma
    assert expected_accepted(tau, gamma) == pytest.approx(gamma * accepted_share)
    expected = speed_ratio * (accepted_share * gamma + 1) / (gamma + speed_ratio)
    assert _result(Sequential(gamma), speed_ratio, tau).speedup == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("speed_ratio", [9, 25])
def test_theorem_5_ignores_rollbacks_and_is_approached_as_they_become_rare(speed_ratio: int) -> None:
    """tau c: an upper bound of both policies, and near as deaths are many windows apart."""
    shares = []
    for tau in (0.8, 0.95, 0.998):
        fixed, self_clocked = (_result(policy, speed_ratio, tau).speedup for policy in (Fixed(), SelfClocked()))
        assert max(fixed, self_clocked) < tau * speed_ratio
        shares.append(fixed / (tau * speed_ratio))
    assert shares == sorted(shares)
    assert shares[-1] > 0.9


@pytest.mark.parametrize(("speed_ratio", "tau"), [(5, 0.5), (9, 0.6), (9, 0.8), (15, 0.7)])
def test_theorem_6_counts_two_rounds_and_bounds_from_below(speed_ratio: int, tau: float) -> None:
    """Its two forms are equal; its tokens are those of two windows in a row; rounds that follow make us faster."""
    speedup = (1 + tau**speed_ratio) * expected_accepted(tau, speed_ratio) / 2
    assert speedup == pytest.approx(sum(tau**k for k in range(1, 2 * speed_ratio + 1)) / 2)
    agreement = draw_agreement(SimulationInput(lambda _: 1.0, 1.0, None, tau=tau, num_tokens=40_000))
    runs = [sum(1 for _ in run) for agrees, run in itertools.groupby(agreement) if agrees]
    lengths = [*runs, *[0] * (agreement.count(False) - len(runs))]
    two_windows = statistics.mean(min(length, 2 * speed_ratio) for length in lengths)
    assert two_windows / 2 == pytest.approx(speedup, rel=0.04)
    assert _result(Fixed(), speed_ratio, tau).speedup > speedup


@pytest.mark.parametrize(("speed_ratio", "tau"), [(9, 0.8), (9, 0.6), (15, 0.7), (25, 0.7)])
def test_the_best_hold_is_where_the_cycle_s_derivative_is_zero(speed_ratio: int, tau: float) -> None:
    """Design, section 3: tau^(h+1) = (1 - tau^c) / (c ln(1/tau)). (That self-clocked decoding takes the shortest
    cycle is in test_simulate.)"""
    best = min(range(speed_ratio), key=lambda hold: _cycle(hold, speed_ratio, tau))
    slope = -math.log(tau)
    solved = -math.log((1 - tau**speed_ratio) / (speed_ratio * slope)) / slope - 1
    assert abs(best - max(solved, 0)) <= 1
