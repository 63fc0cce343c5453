"""The gate alone, in made-up seconds: what it costs at most, when it closes, and when it opens again."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.speculation.company import Company
from slipstream.speculation.gate import (
    CREDIT,
    FIRST_BUDGET,
    FIRST_REST,
    FRUITLESS,
    LONGEST_HOLD,
    LONGEST_REST,
    LONGEST_ROUND,
    RECONSIDER,
    TRIAL_BUDGET,
    Gate,
)
from slipstream.speculation.pacing import CostModel

PLAIN_S = 0.02


def _gate(*, plain_known: bool = True) -> Gate:
    """A gate whose process knows what a plain pass costs."""
    costs = CostModel()
    if plain_known:
        costs.plain_token_s.observe(PLAIN_S)
    return Gate(costs)


def _rest(gate: Gate, pass_s: float = PLAIN_S) -> int:
    """Plain passes until the gate opens again; how many those were."""
    num_tokens = 0
    while gate.closed:
        batch = gate.num_passes
        for index in range(batch):
            assert gate.closed, "it thinks again only between batches"
            gate.on_plain_pass(pass_s, in_batch=index > 0, undisturbed=True)
        num_tokens += batch
    return num_tokens


def _fail(gate: Gate) -> int:
    """Rounds at twice the cost of plain passes until the gate closes."""
    num_rounds = 0
    while not gate.closed:
        gate.on_round(1, 2 * PLAIN_S, 0.0)
        num_rounds += 1
    return num_rounds


def test_it_closes_past_its_budget_and_rests_twice_as_long_after_each_failed_trial() -> None:
    gate = _gate()
    assert _fail(gate) == FIRST_BUDGET + 1
    rests, trials = [_rest(gate)], []
    for _ in range(5):
        trials.append(_fail(gate))
        rests.append(_rest(gate))
    assert rests == [64, 128, 256, 512, 512, 512]
    assert trials == [TRIAL_BUDGET + 1] * 5
    assert (gate.num_closings, gate.num_gated_tokens) == (6, sum(rests))
    assert LONGEST_REST == 512


def test_a_trial_that_proves_itself_restores_the_first_rest_and_may_lose_no_more_than_it_gained() -> None:
    gate = _gate()
    _fail(gate)
    _rest(gate)
    _fail(gate)
    assert _rest(gate) == 2 * FIRST_REST
    for _ in range(100):
        gate.on_round(5, 2 * PLAIN_S, 0.0)
    assert gate.loss == pytest.approx(-CREDIT)
    gate.on_round(1, 0.5 * PLAIN_S, 0.0)  # away from rounding at the edge
    assert _fail(gate) == CREDIT + 1
    assert _rest(gate) == FIRST_REST


def test_a_wrong_notion_of_plain_decoding_is_corrected_within_a_few_passes() -> None:
    """Speculation at half the cost of plain passes that were thought to be four times cheaper than they are."""
    costs = CostModel()
    costs.plain_token_s.observe(PLAIN_S / 4)
    gate = Gate(costs)
    while not gate.closed:
        gate.on_round(2, PLAIN_S, 0.0)
    assert _rest(gate) == RECONSIDER
    for _ in range(50):
        gate.on_round(2, PLAIN_S, 0.0)
    assert not gate.closed
    assert gate.num_closings == 1


def test_rounds_that_bring_nothing_close_it_whatever_the_clock_says() -> None:
    """Where plain passes were measured while the machine was busy, such rounds look as cheap."""
    gate = _gate()
    for _ in range(FRUITLESS):
        assert not gate.closed
        gate.on_round(1, 0.99 * PLAIN_S, 0.0)
    assert gate.closed and _rest(gate) == FIRST_REST
    gate.on_round(2, PLAIN_S, 0.0)  # the trial brings a token
    for _ in range(FRUITLESS):
        gate.on_round(1, PLAIN_S, 0.0)
    assert not gate.closed and gate.num_closings == 1


def test_without_any_measurement_the_gate_is_strict_not_lax() -> None:
    """Then a round is an upper bound of a plain pass, so that one token a round cannot look like a gain for long."""
    gate = _gate(plain_known=False)
    for _ in range(100):
        if not gate.closed:
            gate.on_round(1, 1.6 * PLAIN_S, 0.2 * PLAIN_S)
    assert gate.closed


def test_a_stall_of_the_machine_does_not_close_it() -> None:
    gate = _gate()
    gate.on_round(1, 100 * PLAIN_S, 0.0)
    assert not gate.closed


def test_a_hold_counts_whole_and_may_last_no_longer_than_the_budget() -> None:
    gate = _gate()
    waited = 0
    while not gate.closed:
        patience_s = gate.patience_s
        assert patience_s <= 1.5 * PLAIN_S
        gate.on_round(1, PLAIN_S, patience_s)
        gate.on_round(1, 1.1 * PLAIN_S, 0.0)
        waited += 1
    assert waited <= 4
    assert gate.loss < FIRST_BUDGET + 0.2


def test_where_nothing_is_known_it_begins_by_measuring_and_that_is_no_closing() -> None:
    gate = _gate(plain_known=False)
    assert gate.closed
    assert _rest(gate, 3 * PLAIN_S) == RECONSIDER
    assert gate.plain_s == pytest.approx(3 * PLAIN_S)
    assert (gate.loss, gate.num_closings) == (0.0, 0)


def test_passes_beside_a_draft_at_work_measure_nothing() -> None:
    gate = _gate(plain_known=False)
    for index in range(50):
        gate.on_plain_pass(9 * PLAIN_S, in_batch=index > 0, undisturbed=False)
    assert gate.closed and gate.num_gated_tokens == 50
    assert _rest(gate) == RECONSIDER
    assert gate.plain_s == pytest.approx(PLAIN_S)


def test_a_good_draft_is_hardly_ever_doubted() -> None:
    """tau = 0.93 and windows of 8 at 1.8 plain passes, with noise: thousands of rounds and no closing."""
    chance, gate = random.Random(3), _gate()
    for _ in range(20_000):
        num_accepted = 0
        while num_accepted < 8 and chance.random() < 0.93:
            num_accepted += 1
        gate.on_round(num_accepted + 1, PLAIN_S * 1.8 * (1 + 0.2 * chance.random()), 0.3 * PLAIN_S)
    assert gate.num_closings == 0


ROUNDS = st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 2.5)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cycle=ROUNDS, num_tokens=st.integers(1, 3000), hold=st.booleans())
def test_the_excess_over_plain_decoding_is_bounded(cycle: list[tuple[int, float]], num_tokens: int, hold: bool) -> None:
    """Whatever the rounds: the bound of the module's docstring, with the excess of one round beyond the budget."""
    gate, spent, done, index, worst = _gate(), 0.0, 0, 0, 0.0
    while done < num_tokens:
        if gate.closed:
            rest = _rest(gate)
            done, spent = done + rest, spent + rest
            continue
        tokens, passes = cycle[index % len(cycle)]
        held = gate.patience_s / PLAIN_S * hold
        index += 1
        gate.on_round(tokens, passes * PLAIN_S, held * PLAIN_S)
        done, spent = done + tokens, spent + passes + held
        worst = max(worst, passes - tokens)
    assert spent - done <= FIRST_BUDGET + worst + (TRIAL_BUDGET + worst) * done / FIRST_REST + 1e-6


@pytest.mark.parametrize("num_tokens", [100, 200, 1000, 10_000])
def test_a_draft_that_never_agrees_costs_a_logarithm(num_tokens: int) -> None:
    gate, spent, done = _gate(), 0.0, 0
    while done < num_tokens:
        if gate.closed:
            rest = _rest(gate)
            done, spent = done + rest, spent + rest
        else:
            gate.on_round(1, 1.7 * PLAIN_S, 0.0)
            done, spent = done + 1, spent + 1.7
    rests = math.log2(1 + done / FIRST_REST) if done < FIRST_REST * 15 else 4 + done / LONGEST_REST
    assert spent - done <= FIRST_BUDGET + 0.7 + (TRIAL_BUDGET + 0.7) * rests


def _rounds(gate: Gate, num_tokens: int, plain_passes: float, plain_s: float, count: int) -> int:
    """Rounds of so many plain passes, alone, while the target reckons that one takes `plain_s`; until the gate closes.
    How many those were."""
    company = Company(1, plain_s)
    for number in range(count):
        gate.on_round(num_tokens, plain_passes * plain_s, 0.0, company)
        if gate.closed:
            return number + 1
    return count


def test_a_target_that_has_become_faster_has_its_plain_passes_measured_anew() -> None:
    gate = _gate()
    assert _rounds(gate, 2, 1.0, PLAIN_S, 20) == 20
    assert _rounds(gate, 1, 1.5, PLAIN_S / 2, 100) <= 15, "half a plain pass is lost with each, and looks like a gain"
    assert gate.num_passes == RECONSIDER
    for index in range(RECONSIDER):
        gate.on_plain_pass(PLAIN_S / 2, Company(1, PLAIN_S / 2), in_batch=index > 0, undisturbed=True)
    assert not gate.closed, "it has lost nothing that is known"
    assert gate.plain_s == pytest.approx(PLAIN_S / 2)
    assert _rounds(gate, 1, 1.5, PLAIN_S / 2, 100) <= 2 * CREDIT + 1
    assert gate.loss > 0


def test_a_target_that_stays_as_it_was_is_measured_once() -> None:
    gate = _gate()
    assert _rounds(gate, 3, 1.5, 0.8 * PLAIN_S, 200) == 200
    assert _rounds(gate, 3, 1.5, PLAIN_S, 200) == 200
    assert gate.num_closings == 0


def test_in_company_a_round_is_held_against_plain_passes_of_all() -> None:
    """Its own plain passes are half the sessions', where they take turns: a round over both would look a loss."""
    gate = _gate()
    company = Company(8, 4 * PLAIN_S)
    for _ in range(40):
        gate.on_round(3, 8 * PLAIN_S, 0.0, company)
    assert not gate.closed and gate.num_closings == 0 and gate.plain_s == 4 * PLAIN_S
    while not gate.closed:
        gate.on_round(1, 8 * PLAIN_S, 0.0, company)
    for index in range(RECONSIDER):
        gate.on_plain_pass(PLAIN_S, company, in_batch=index > 0, undisturbed=True)
    assert gate.closed and gate.plain_s == 4 * PLAIN_S, "what half of them take is no measure"


def test_after_company_plain_passes_are_those_of_one() -> None:
    gate = _gate()
    for _ in range(20):
        gate.on_round(3, 8 * PLAIN_S, 0.0, Company(8, 4 * PLAIN_S))
    for _ in range(20):
        gate.on_round(1, 2 * PLAIN_S, 0.0, Company(1, PLAIN_S))
    assert gate.closed and gate.plain_s == PLAIN_S


def test_what_was_spent_in_company_stays_what_it_was_when_the_others_leave() -> None:
    gate = _gate()
    for _ in range(20):
        gate.on_round(4, 8 * PLAIN_S, 0.0, Company(8, 4 * PLAIN_S))
    assert gate.gain == pytest.approx(40)
    for num_left in (4, 3, 2, 1):
        for _ in range(5):
            gate.on_round(3, 2 * num_left * PLAIN_S / 2, 0.0, Company(num_left, num_left * PLAIN_S / 2))
    assert not gate.closed and not gate.num_closings
    assert gate.gain == pytest.approx(40 + 20 * (3 - 2))


def test_a_round_costs_no_more_than_its_bound_when_others_left() -> None:
    """What plain passes took among many is no measure of a stall beside few."""
    gate = _gate()
    for _ in range(20):
        gate.on_round(8, 16 * PLAIN_S, 0.0, Company(16, 8 * PLAIN_S))
    gain, patience_s = gate.gain, gate.patience_s
    gate.on_round(1, 100 * PLAIN_S, 0.0, Company(2, PLAIN_S))
    assert gate.gain == pytest.approx(gain - (LONGEST_ROUND - 1))
    assert gate.patience_s <= LONGEST_HOLD * PLAIN_S < patience_s


def test_what_was_spent_alone_stays_what_it_was_when_others_come() -> None:
    gate = _gate()
    for _ in range(3):
        gate.on_round(1, 2 * PLAIN_S, 0.0)
    loss = gate.loss
    gate.on_round(1, 8 * PLAIN_S, 0.0, Company(8, 8 * PLAIN_S))
    assert gate.loss == pytest.approx(loss) == 3
