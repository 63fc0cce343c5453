"""The pure rules of dynamic trees: what a candidate is worth, how many rows pay, when to wait."""

import math
import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.speculation.pacing import SelfClocked
from slipstream.speculation.trees.calibration import EDGES, MAX_CHANCE, MIN_CHANCE, Calibration
from slipstream.speculation.trees.confidence import Confident, TreeMoment, survival
from slipstream.speculation.trees.rows import best_first, num_draft_rows, paying_rows
from tests.speculation.dynamic_toys import tree_costs

CHANCES = st.floats(0.0, 1.0)

# -- calibration ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.lists(CHANCES, max_size=10), st.one_of(st.none(), st.integers(0, 12))), max_size=50))
def test_a_chance_is_always_one(observed: list[tuple[list[float], int | None]]) -> None:
    calibration = Calibration()
    for ps, hit in observed:
        calibration.observe(ps, hit)
    for rank in (0, 1, 9):
        for p in (0.0, 0.5, 1.0, *EDGES):
            assert MIN_CHANCE <= calibration.chance(rank, p) <= MAX_CHANCE


def test_before_anything_was_seen_a_draft_is_believed() -> None:
    for p in (0.01, 0.15, 0.55, 0.97):
        assert Calibration().chance(0, p) == pytest.approx(p, abs=0.05)


def test_a_boaster_is_believed_as_far_as_it_was_right() -> None:
    chance, calibration = random.Random(3), Calibration()
    for _ in range(2000):
        calibration.observe([0.999, 0.999], 0 if chance.random() < 0.3 else 1 if chance.random() < 0.5 else None)
    assert calibration.chance(0, 0.999) == pytest.approx(0.3, abs=0.1)
    assert calibration.chance(1, 0.999) == pytest.approx(0.35, abs=0.1)
    assert calibration.chance(0, 0.5) == pytest.approx(0.55), "other bins know nothing of it"


def test_what_was_long_ago_is_forgotten() -> None:
    calibration = Calibration()
    for hit in (*[0] * 2000, *[None] * 1000):
        calibration.observe([0.9], hit)
    assert calibration.chance(0, 0.9) < 0.02


# -- rule M -----------------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    parents, chances = [], []
    for node in range(draw(st.integers(1, 30))):
        parents.append(draw(st.integers(-1, node - 1)))
        chances.append(draw(CHANCES))
    return parents, chances


@given(trees())
def test_the_likeliest_come_first_and_parents_before_their_children(tree: tuple[list[int], list[float]]) -> None:
    parents, chances = tree
    paths: list[float] = []
    for node, parent in enumerate(parents):
        paths.append(chances[node] * (paths[parent] if parent >= 0 else 1.0))

    def below(node: int, chance: float) -> list[tuple[float, int]]:
        return [(paths[child], child) for child, parent in enumerate(parents) if parent == node]

    found = list(best_first(below(-1, 1.0), below))
    assert sorted(node for _, node in found) == list(range(len(parents)))
    assert [chance for chance, _ in found] == sorted(paths, reverse=True)
    seen = {-1}
    for _, node in found:
        assert parents[node] in seen
        seen.add(node)


def test_rows_are_taken_while_a_token_is_worth_their_seconds() -> None:
    offered = [(chance, index) for index, chance in enumerate((0.9, 0.5, 0.3, 0.1))]

    def dear(k: int) -> float:
        return 1.0 + 0.4 * k

    assert paying_rows(offered, lambda k: 1.0, 1.0, 9) == [0, 1, 2, 3], "rows that cost nothing are all taken"
    assert paying_rows(offered, dear, 1.0, 9) == [0, 1]
    assert paying_rows(offered, dear, 10.0, 9) == [0, 1, 2, 3], "where tokens are slow, rows are worth more"
    assert paying_rows(offered, dear, 0.01, 9) == [0], "a pass is due: its first token always goes along"
    assert paying_rows(offered, dear, 0.01, 9, num_before=1) == []
    assert paying_rows(offered, lambda k: 1.0, 1.0, 6, num_before=4) == [0, 1]


# -- rule R -----------------------------------------------------------------------------------------------------------


@given(st.lists(CHANCES, min_size=1, max_size=20), st.floats(0.0, 2.0), st.integers(1, 8))
def test_draft_rows_maximise_chance_per_second(chances: list[float], rho: float, max_rows: int) -> None:
    chances = sorted(chances, reverse=True)

    def pass_s(rows: int) -> float:
        return 1 + rho * (rows - 1)

    def rate(rows: int) -> float:
        return sum(chances[:rows]) / pass_s(rows)

    rows = num_draft_rows(chances, pass_s, max_rows)
    assert 1 <= rows <= min(max_rows, len(chances))
    assert rate(rows) >= max(rate(other) for other in range(1, min(max_rows, len(chances)) + 1)) - 1e-9


def test_where_a_row_costs_a_pass_only_the_likeliest_node_is_read() -> None:
    assert num_draft_rows([0.9, 0.89, 0.88], lambda rows: rows, 6) == 1
    assert num_draft_rows([0.6, 0.3, 0.2, 0.01], lambda rows: 1 + 0.05 * (rows - 1), 6) == 3


# -- holding ----------------------------------------------------------------------------------------------------------


def test_survival() -> None:
    assert survival((0.5, 0.5)) == [1.0, 0.5, 0.25]


def test_without_chances_it_is_self_clocked() -> None:
    costs = tree_costs(9.0, 0.8)
    for pending in range(9):
        moment = TreeMoment(pending, pending == 0, 8)
        assert Confident().plan(moment, costs) == SelfClocked().plan(moment, costs)


def test_it_waits_where_it_is_sure_and_does_not_where_it_is_not() -> None:
    costs = tree_costs(9.0, 0.8)
    sure = Confident().plan(TreeMoment(1, True, 16, (0.999,)), costs)
    unsure = Confident().plan(TreeMoment(1, True, 16, (0.2,)), costs)
    assert unsure.hold == 1 < sure.hold


@given(
    st.lists(st.floats(MIN_CHANCE, MAX_CHANCE), min_size=1, max_size=16),
    st.sampled_from((0.5, 3.0, 9.0, 30.0)),
    st.sampled_from((0.02, 0.5, 0.99)),
)
def test_it_only_ever_waits(chances: list[float], speed_ratio: float, tau: float) -> None:
    plan = Confident().plan(TreeMoment(len(chances), True, 16, tuple(chances)), tree_costs(speed_ratio, tau, slope=0.1))
    assert plan.cap == 16
    assert plan.hold == 0 or len(chances) <= plan.hold <= 16
    if plan.hold > len(chances):
        more = (*chances, MIN_CHANCE)
        worse = Confident().plan(TreeMoment(len(more), True, 16, more), tree_costs(speed_ratio, tau, slope=0.1))
        assert worse.hold <= max(len(more), plan.hold)


def test_the_worth_of_a_token_is_what_one_takes_now() -> None:
    costs = tree_costs(9.0, 0.8)
    for _ in range(200):
        costs.observe_round(4, 2.0)
    assert costs.token_s == pytest.approx(0.5, rel=0.05)
    forked = costs.fork()
    forked.observe_round(100, 1.0)
    assert forked.token_s != costs.token_s and math.isfinite(forked.token_s)
    assert list(islice(survival([0.5] * 3), 2)) == [1.0, 0.5]


def test_captions_at_once_teach_one_calibration() -> None:
    known = tree_costs(9.0, 0.8)
    before, (one, other) = known.calibration.chance(0, 0.9), (known.fork(), known.fork())
    for _ in range(50):
        one.calibration.observe([0.9], None)
        other.calibration.observe([0.9], 0)
        other.observe_window(0, 1)
    assert one.calibration.chance(0, 0.9) == known.calibration.chance(0, 0.9) == pytest.approx(0.5, abs=0.1)
    assert before > 0.8 and one.tau == known.tau > other.tau
