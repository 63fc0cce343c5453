"""Dynamic trees in simulated time: they end, a seed decides everything, and branches are worth what theory says."""

from dataclasses import replace

import pytest

from bench.simulate_trees import POINTS, SHAPES, TreeInput, TreeTrace, draw_trace, speed, tree_error
from slipstream.speculation.methods import Shape

POINT = POINTS["7B/72B"]
BASE = replace(POINT.base, num_tokens=200)
SETUP = TreeInput(BASE, draw_trace(0.7, 600))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_decides_everything(shape: Shape) -> None:
    setup = replace(SETUP, shape=shape)
    assert speed(setup) == speed(setup) != speed(replace(setup, trace=draw_trace(0.7, 600, seed=2)))


def test_each_step_is_faster_than_the_one_before_where_rows_are_cheap() -> None:
    chain, siblings, branches, trees = (speed(replace(SETUP, shape=shape)) for shape in (None, *SHAPES))
    assert chain < siblings < branches < trees


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_that_is_always_right_writes_as_fast_as_a_chain(shape: Shape) -> None:
    """And sure of it: branches are worth no row."""
    trace = TreeTrace((0,), ((0.999, 0.0005, 0.0005),))
    chain = speed(replace(SETUP, trace=trace))
    assert speed(replace(SETUP, trace=trace, shape=shape)) == pytest.approx(chain, rel=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_that_is_never_right_is_plain_decoding(shape: Shape) -> None:
    trace = TreeTrace((9,), ((0.5, 0.2, 0.1),))
    plain = (BASE.num_tokens - 1) / BASE.target_pass_s(0) / BASE.num_tokens
    assert speed(replace(SETUP, trace=trace, shape=shape)) == pytest.approx(plain, rel=0.1)


def test_passes_that_go_on_to_their_end_cost_time() -> None:
    for shape in (None, Shape.SIBLINGS):
        free = replace(SETUP, base=replace(BASE, interruptible=True), shape=shape)
        assert speed(free) > speed(replace(SETUP, shape=shape))


def test_traces_are_as_likely_to_be_right_as_they_are_asked_to_be() -> None:
    for tau in (0.6, 0.8, 0.95):
        assert draw_trace(tau, 20_000).tau == pytest.approx(tau, abs=0.02)


def test_the_distance_from_the_study_is_a_share_of_its_figures() -> None:
    row: dict[str, object] = {"point": "7B/72B", "tau": 0.8}
    for shape in SHAPES:
        row |= {shape.value: 1.1, f"{shape.value}, study": 1.0}
    assert tree_error([row]) == {name: 0.1 for shape in SHAPES for name in (shape.value, f"{shape.value}, most")}
