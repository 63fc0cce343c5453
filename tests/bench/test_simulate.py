"""The simulator against closed forms: the papers' theorems for `fixed`, the cycle formula for `self_clocked`."""

import random
from dataclasses import replace

import pytest

from bench.simulate import Constant, bad_drafts, best_constant, working_points
from bench.simulator import SimulationInput, pass_cost_table, simulate
from slipstream.speculation.gate import RECONSIDER
from slipstream.speculation.pacing import Fixed, Policy, SelfClocked
from tests.support.variants import some


def _ideal(speed_ratio: float, tau: float, policy: Policy | None, **others: object) -> SimulationInput:
    """T_p = 1 whatever the window, and messages that take no time."""
    setup = SimulationInput(lambda _: 1.0, 1 / speed_ratio, policy, tau=tau, max_window=32, num_tokens=3000)
    return replace(setup, **others)  # type: ignore[arg-type]


def test_without_a_draft_it_is_plain_decoding() -> None:
    result = simulate(_ideal(9, 0.8, None, num_tokens=500))
    assert (result.tokens_per_s, result.speedup, result.num_passes) == (1.0, 1.0, 499)


@pytest.mark.parametrize("policy", [Fixed(), SelfClocked()])
def test_without_agreement_it_is_as_fast_as_plain_decoding(policy: Policy) -> None:
    """But for the first moments, before it has learnt that waiting does not pay."""
    result = simulate(_ideal(9, 0.0, policy, num_tokens=1000))
    assert result.speedup == pytest.approx(1.0, rel=0.01)
    assert result.tau == 0.0


def test_messages_slow_plain_decoding_only_once() -> None:
    """All its passes are asked for together."""
    setup = SimulationInput(lambda _: 0.01, 0.001, None, message_s=0.002, num_tokens=4001)
    assert simulate(setup).tokens_per_s == pytest.approx(4000 / (4000 * 0.01 + 0.004))


@pytest.mark.parametrize("policy", [Fixed(), SelfClocked()])
@pytest.mark.parametrize("speed_ratio", [3, 9, 25])
def test_full_agreement_is_as_fast_as_the_draft(speed_ratio: int, policy: Policy) -> None:
    """ParallelVLM, theorem 3 with gamma = c: a speedup of c."""
    assert simulate(_ideal(speed_ratio, 1.0, policy)).speedup == pytest.approx(speed_ratio, rel=0.02)


@pytest.mark.parametrize("gamma", [3, 5])
def test_full_agreement_with_short_windows_is_bound_by_the_target(gamma: int) -> None:
    """ParallelVLM, theorem 3 with gamma < c: gamma tokens a pass; here the target's own token comes on top."""
    assert simulate(_ideal(9, 1.0, Constant(gamma, gamma))).speedup == pytest.approx(gamma + 1, rel=0.01)


@pytest.mark.parametrize(("speed_ratio", "tau"), [(5, 0.5), (9, 0.6), (9, 0.8), (15, 0.7)])
def test_partial_agreement_stays_between_the_theorems(speed_ratio: int, tau: float) -> None:
    """ParallelVLM: theorem 5's tau c ignores rollbacks, so it is above; theorem 6 retries once, so it is below."""
    speedup = simulate(_ideal(speed_ratio, tau, Fixed())).speedup
    expected_run = tau * (1 - tau**speed_ratio) / (1 - tau)
    assert (1 + tau**speed_ratio) * expected_run / 2 < speedup < tau * speed_ratio


@pytest.mark.parametrize(("speed_ratio", "tau"), [(9, 0.8), (15, 0.7), (25, 0.7)])
def test_fixed_takes_its_cycle(speed_ratio: int, tau: float) -> None:
    """A pass for the first token; if it matched, rounds of gamma tokens and the match of the target's own.

    A round lasts until the draft has written what the next one needs: (gamma + 1) T_q, one T_q more than T_p.
    """
    round_s = 1 + 1 / speed_ratio
    cycle = 1 + tau * (round_s / (1 - tau ** (speed_ratio + 1)))
    assert simulate(_ideal(speed_ratio, tau, Fixed())).speedup == pytest.approx(1 / (1 - tau) / cycle, rel=0.04)


@pytest.mark.parametrize(("speed_ratio", "tau"), [(9, 0.8), (9, 0.6), (15, 0.7), (25, 0.7), (25, 0.9)])
def test_self_clocked_takes_the_shortest_cycle(speed_ratio: int, tau: float) -> None:
    """1 + h/c + tau^(h+1) / (1 - tau^c) passes for the tokens between two deaths (1 / (1 - tau) in the mean)."""
    result = simulate(_ideal(speed_ratio, tau, SelfClocked(), num_tokens=6000))
    cycle = min(1 + hold / speed_ratio + tau ** (hold + 1) / (1 - tau**speed_ratio) for hold in range(speed_ratio))
    assert result.speedup == pytest.approx(result.mean_accepted_length / cycle, rel=0.03)


@pytest.mark.parametrize("name", some(["c=15 tau=0.7", "cpu tau=0.8", "cpu tau=0.9"], keep=("cpu tau=0.9",)))
def test_self_clocked_is_no_slower_than_the_best_constant_plan(name: str) -> None:
    setup = replace(working_points()[name], num_tokens=4000, max_window=16)
    plan, _ = best_constant(replace(setup, num_tokens=600))
    best = simulate(replace(setup, policy=plan))
    assert simulate(replace(setup, policy=SelfClocked())).tokens_per_s > 0.98 * best.tokens_per_s


def test_a_recorded_agreement_replays_the_text_it_was_recorded_on() -> None:
    chance = random.Random(5)
    recorded = tuple(chance.random() < 0.8 for _ in range(3000))
    setup = _ideal(9, 0.0, SelfClocked(), agreement=recorded, num_tokens=3000)
    result = simulate(setup)
    assert result.tau == pytest.approx(sum(recorded) / len(recorded), abs=0.01)
    assert result.mean_accepted_length == pytest.approx(3000 / recorded.count(False), rel=0.01)


def test_a_seed_decides_everything() -> None:
    setup = working_points()["cpu tau=0.85"]
    setup = replace(setup, policy=SelfClocked(), num_tokens=1000)
    assert simulate(setup) == simulate(setup)
    assert simulate(setup) != simulate(replace(setup, seed=1))


def test_a_restart_that_takes_long_costs_time() -> None:
    prompt, slow = (_ideal(9, 0.8, SelfClocked(), restart_s=restart_s, num_tokens=2000) for restart_s in (0.0, 0.5))
    assert simulate(slow).speedup < simulate(prompt).speedup


def test_measured_pass_costs_are_joined_by_straight_lines() -> None:
    target_pass_s = pass_cost_table({7: 39.0, 0: 21.0, 3: 33.0})
    assert [target_pass_s(window_len) for window_len in (0, 1, 3, 5, 7, 9)] == [21.0, 25.0, 33.0, 36.0, 39.0, 42.0]


@pytest.mark.parametrize("num_tokens", [200, 400, 2000])
@pytest.mark.parametrize("name", ["nonsense", "slow", "turns bad"])
def test_a_bad_draft_costs_at_most_a_twentieth_with_the_gate(name: str, num_tokens: int) -> None:
    for seed in range(5):
        result = simulate(bad_drafts(num_tokens, seed)[name])
        assert 1 / result.speedup <= 1.05
        assert result.gate_closings >= 1
        assert result.gated_tokens >= num_tokens * 0.3


def test_a_good_draft_keeps_its_speedup_with_the_gate() -> None:
    setup = replace(working_points()["cpu tau=0.9"], policy=SelfClocked(), tau=0.93, num_tokens=300)
    for seed in range(20):
        gated = simulate(replace(setup, gate=True, seed=seed))
        assert gated.gate_closings == 0
        assert gated == simulate(replace(setup, gate=False, seed=seed))


def test_the_first_caption_of_a_process_pays_for_a_few_plain_passes() -> None:
    setup = replace(
        working_points()["cpu tau=0.9"], policy=SelfClocked(), tau=0.93, num_tokens=300, known=False, gate=True
    )
    for seed in range(5):
        first = simulate(replace(setup, seed=seed))
        assert (first.gate_closings, first.gated_tokens) == (0, RECONSIDER)


def test_a_draft_that_becomes_good_is_taken_up_again() -> None:
    setup = bad_drafts(3000)["nonsense"]
    becoming = replace(setup, agreement=tuple(position > 300 for position in range(4000)))
    result = simulate(becoming)
    assert result.gate_closings >= 1
    assert result.gated_tokens < 1000
    assert result.speedup > 2
