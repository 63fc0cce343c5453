"""Texts have the target's joint distribution, and under both rules one text for a seed, with drafts that branch."""

import random
from functools import cache

import pytest

from slipstream.sampling import noise
from slipstream.sampling.noise import position_key
from slipstream.sampling.params import SamplingParams
from slipstream.speculation.methods import Shape
from slipstream.speculation.trees.growth import GROWTHS
from tests.sampling.statistics import P_FLOOR
from tests.sampling.toy_world import INTERLEAVINGS as PLANS
from tests.sampling.toy_world import RULES, Text, p_values, play, toy_drafts, toy_target
from tests.sampling.tree_world import play_trees
from tests.support.variants import one_in, some

NUM_RUNS = 32
CAUGHT = 1e-9
TEMPERATURE = 1.0
TARGET = toy_target()
DRAFTS = toy_drafts(TARGET)
SHAPES = sorted(GROWTHS)


@cache
def texts_of(rule: str, draft: str, shape: Shape) -> list[Text]:
    return play_trees((TARGET, DRAFTS[draft]), rule, TEMPERATURE, NUM_RUNS, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draft", ["good", "reversed"])
@pytest.mark.parametrize("rule", RULES)
@one_in(3, "rule", "draft", "shape")
def test_two_and_three_tokens_have_the_targets_joint_distribution(rule: str, draft: str, shape: Shape) -> None:
    found = p_values(TARGET, texts_of(rule, draft, shape), TEMPERATURE)
    assert min(found.values()) > P_FLOOR, found


@pytest.mark.parametrize("shape", some(SHAPES, keep=(Shape.SIBLINGS,)))
def test_a_seed_has_one_text_under_both_rules_and_with_any_draft(shape: Shape) -> None:
    plain = [
        tuple(play(TARGET, None, SamplingParams(TEMPERATURE, seed=seed), PLANS[0], random.Random(0)).output)
        for seed in range(NUM_RUNS)
    ]
    for rule in RULES:
        for draft in ("good", "reversed"):
            assert texts_of(rule, draft, shape) == plain


@pytest.mark.long
def test_noise_that_ignores_the_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "position_key", lambda seed, stream, position: position_key(seed, stream, 0))
    texts = play_trees((TARGET, DRAFTS["good"]), "coupled", TEMPERATURE, NUM_RUNS, Shape.SIBLINGS)
    assert min(p_values(TARGET, texts, TEMPERATURE).values()) < CAUGHT
