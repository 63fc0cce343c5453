"""The heart: texts have the target's joint distribution whatever the draft, its speed and its deaths.

The statistics are of three consecutive tokens at every offset from a block of the toy text (`toy_world`), against their
exact probabilities. The last tests break the code on purpose and show that the statistics notice.
"""

import math
import random
from functools import cache
from itertools import product

import pytest
import torch

from slipstream.sampling import noise, sampler
from slipstream.sampling.noise import position_key
from slipstream.sampling.params import Proposal, SamplingParams
from slipstream.speculation.pacing import SelfClocked
from tests.sampling.statistics import P_FLOOR, chi_square_tail, fit
from tests.sampling.toy_world import (
    BLOCK,
    FULL_WINDOWS,
    INTERLEAVINGS,
    RULES,
    TEMPERATURES,
    VOCAB,
    Interleaving,
    Text,
    coin_toss,
    exact_block,
    exact_run,
    p_values,
    play,
    play_many,
    runs_of,
    toy_drafts,
    toy_target,
)
from tests.speculation.toys import Always
from tests.support.variants import one_in

NUM_RUNS = 32
"""Captions of 30 tokens for each combination: 320 blocks."""
CAUGHT = 1e-9
TARGET = toy_target()
DRAFTS = toy_drafts(TARGET)


@cache
def texts_of(rule: str, temperature: float, draft: str) -> list[Text]:
    return play_many((TARGET, DRAFTS[draft]), rule, temperature, NUM_RUNS)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("rule", RULES)
@one_in(3, "rule", "temperature", "draft")
def test_two_and_three_tokens_have_the_targets_joint_distribution(rule: str, temperature: float, draft: str) -> None:
    found = p_values(TARGET, texts_of(rule, temperature, draft), temperature)
    assert min(found.values()) > P_FLOOR, found


@pytest.mark.parametrize("rule", RULES)
def test_all_runs_together_have_it_too(rule: str) -> None:
    """A bias too small for one combination would add up."""
    statistic, degrees = 0.0, 0
    for temperature, draft in product(TEMPERATURES, DRAFTS if rule == "rejection" else ["good"]):
        exact = exact_run(exact_block(TARGET, SamplingParams(temperature)), 0, BLOCK)
        samples = [run for text in texts_of(rule, temperature, draft) for run in runs_of(text, 0, BLOCK)]
        one, more = fit(samples, exact)
        statistic, degrees = statistic + one, degrees + more
    assert chi_square_tail(statistic, degrees) > P_FLOOR


def smallest_p_of_coin_tosses(rule: str) -> float:
    """The sharpest of these tests, for the code as it is now: 2 and 3 tokens in a row that are independent."""
    target, draft = coin_toss()
    texts = play_many((target, draft), rule, 1.0, NUM_RUNS, FULL_WINDOWS)
    one = target.table[0].double().softmax(-1).tolist()
    p_values = []
    for count, offset in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        exact = {run: math.prod(one[token] for token in run) for run in product(range(VOCAB), repeat=count)}
        samples = [run for text in texts for run in runs_of(text, offset, count, step=count)]
        p_values.append(chi_square_tail(*fit(samples, exact)))
    return min(p_values)


@pytest.mark.parametrize("rule", RULES)
def test_coin_tosses_do_not_know_of_each_other(rule: str) -> None:
    assert smallest_p_of_coin_tosses(rule) > P_FLOOR


# -- coupled: one text for a seed -------------------------------------------------------------------------------------


def test_a_seed_has_one_text_without_draft_with_any_draft_and_any_window() -> None:
    plans = [Interleaving(Always(window // 2, window), window, 0.2, 1 + window // 3, 0.0) for window in range(1, 17)]
    plans += [Interleaving(SelfClocked(), 8, 0.2, 3, 0.1), *INTERLEAVINGS]
    for seed in range(2):
        params = SamplingParams(1.2, top_k=4, repetition_penalty=1.2, frequency_penalty=0.3, min_p=0.05, seed=seed)
        plain = play(TARGET, None, params, INTERLEAVINGS[0], random.Random(0)).output
        for number, plan in enumerate(plans):
            for draft in ("good", "uniform") if plan.loss else ("good",):
                stage = play(TARGET, DRAFTS[draft], params, plan, random.Random(number))
                assert stage.output == plain
    texts = play_many((TARGET, DRAFTS["good"]), "coupled", 1.0, 6)
    assert len(set(texts)) == len(texts)


def test_a_draft_may_die_and_another_one_take_its_place() -> None:
    plan = Interleaving(SelfClocked(), 8, 0.2, 3, 0.0)
    for seed in range(10):
        params = SamplingParams(1.0, seed=seed)
        plain = play(TARGET, None, params, plan, random.Random(0)).output
        stage = play(TARGET, DRAFTS["good"], params, plan, random.Random(seed), stop_at=10)
        stage.lose()
        stage.toy_draft = DRAFTS["reversed"]
        assert stage.play_on(random.Random(seed), plan).output == plain


def test_coupled_and_rejection_accept_good_drafts_and_few_of_the_reversed() -> None:
    for rule in RULES:
        rates = {}
        for name in ("good", "reversed"):
            stages = [
                play(TARGET, DRAFTS[name], SamplingParams(1.0, seed=s, rule=rule), INTERLEAVINGS[0], random.Random(s))
                for s in range(10)
            ]
            rates[name] = sum(stage.pipeline.num_accepted for stage in stages) / sum(
                stage.pipeline.num_judged for stage in stages
            )
        assert rates["good"] > 0.6 > 0.55 > rates["reversed"]


# -- the same tests of broken code ------------------------------------------------------------------------------------


def test_a_number_shared_by_all_accept_tests_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "position_key", lambda seed, stream, position: position_key(seed, stream, 0))
    assert smallest_p_of_coin_tosses("rejection") < CAUGHT


def test_a_number_shared_by_two_accept_tests_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a public implementation did: two tests in a row, one number."""
    monkeypatch.setattr(
        sampler, "position_key", lambda seed, stream, position: position_key(seed, stream, position // 2)
    )
    assert smallest_p_of_coin_tosses("rejection") < CAUGHT


def test_noise_that_ignores_the_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "position_key", lambda seed, stream, position: position_key(seed, stream, 0))
    assert smallest_p_of_coin_tosses("coupled") < CAUGHT


def test_a_rejection_without_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "residual", lambda target, draft: target)
    assert smallest_p_of_coin_tosses("rejection") < CAUGHT


def test_a_draft_that_lies_about_what_it_draws_from_is_outside_the_guarantee(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule "rejection" rests on an honest proposal, "coupled" on nothing."""
    choose, flat = sampler.DraftSampler.choose, Proposal(tuple(range(VOCAB)), (1 / VOCAB,) * VOCAB)

    def lie(draft: sampler.DraftSampler, logits: torch.Tensor, output: list[int]) -> tuple[int, Proposal | None]:
        token, proposal = choose(draft, logits, output)
        return token, proposal and flat

    monkeypatch.setattr(sampler.DraftSampler, "choose", lie)
    assert smallest_p_of_coin_tosses("rejection") < CAUGHT
    assert smallest_p_of_coin_tosses("coupled") > P_FLOOR
