"""Which rows ride along, on devices whose times are given: without models, threads or clocks."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.ride_plan import (
    ALONE_ROWS,
    LEARNT,
    NUMBERS,
    PEOPLE_SHARE,
    REST_EVERY,
    SAVING,
    RideCounts,
    RidePlanner,
    alone_counts,
)

NOTHING = RideCounts(0, 0)
ExtraS = Callable[[int], float]


@dataclass
class Passes:
    """Passes of one row, each of which carries what the planner says of an endless row of prompts."""

    planner: RidePlanner
    plain_s: float
    extra_s: ExtraS
    """Seconds that so many rows add."""
    prompt_rows: int = 10**9
    done: RideCounts = NOTHING

    def run(self, num_passes: int, *, beside_people: bool = False) -> list[int]:
        """Rows that rode, pass by pass."""
        rode = []
        for _ in range(num_passes):
            counts = self.planner.next_counts(1, self.done, self.prompt_rows, beside_people=beside_people)
            assert 0 <= counts.first <= self.prompt_rows - self.done.first
            assert 0 <= counts.second <= self.done.first + counts.first - self.done.second
            self.done = RideCounts(self.done.first + counts.first, self.done.second + counts.second)
            extra_s = self.extra_s(counts.most) if counts.most else 0.0
            assert self.planner.observe(1, counts, self.plain_s + extra_s) == pytest.approx(extra_s)
            rode.append(counts.most)
        return rode


def device(free_rows: int, row_s: float) -> ExtraS:
    """Rows are free while the device waits for its memory anyway, then each takes time: a GPU; without any, a CPU."""
    return lambda num_rows: max(num_rows - free_rows, 0) * row_s


DEVICES = st.builds(device, st.sampled_from([0, 0, 3, 50, 240]), st.floats(1e-4, 2.0))


def test_the_first_passes_carry_nothing() -> None:
    assert Passes(RidePlanner(1.0), 1.0, device(0, 0.01)).run(LEARNT + 1) == [0] * LEARNT + [1]


@settings(max_examples=25, deadline=None)
@given(DEVICES, st.floats(0.01, 4.0))
def test_passes_grow_to_their_budget_and_not_beyond(extra_s: ExtraS, share: float) -> None:
    """A number that takes too long is tried once in a while; all others fit."""
    passes = Passes(RidePlanner(share), 1.0, extra_s)
    passes.run(100)
    rode = passes.run(200)
    if extra_s(1) > 0.99 * share:  # then rows ride now and then
        assert sum(map(extra_s, rode)) <= 1.01 * share * len(rode) + 2 * SAVING * share + extra_s(1)
        return
    assert sum(extra_s(number) > 1.01 * share for number in rode) <= 2
    fitting = max((number for number in NUMBERS if extra_s(number) <= 0.99 * share), default=0)
    assert not fitting or sum(number >= fitting for number in rode) >= 0.8 * len(rode)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.02, 0.5), st.floats(0.001, 0.02), st.floats(0.05, 4.0))
def test_where_the_first_rows_are_dear_passes_save_for_more_at_once(first_s: float, row_s: float, share: float) -> None:
    """A CPU: a pass of several rows takes other kernels than a pass of one."""
    passes = Passes(RidePlanner(share), 1.0, lambda num_rows: first_s + num_rows * row_s)
    for _ in range(10):
        passes.planner.observe_alone(512, 512 * row_s)
    passes.run(500)
    rode = passes.run(480)
    taken_s = sum(passes.extra_s(number) for number in rode if number)
    assert taken_s <= 1.01 * share * len(rode) + SAVING * share
    largest_s = passes.extra_s(NUMBERS[-1])
    saves_enough = min(SAVING * share, largest_s) >= 15 * first_s
    assert not saves_enough or taken_s <= 1.4 * row_s * sum(rode), "hardly more than alone"


@settings(max_examples=25, deadline=None)
@given(DEVICES, st.floats(0.01, 4.0), st.booleans())
def test_every_prompt_is_done_in_the_end(extra_s: ExtraS, share: float, beside_people: bool) -> None:
    """However dear a row is, and however little time there is."""
    passes = Passes(RidePlanner(share), 1.0, extra_s, prompt_rows=3)
    for _ in range(20):
        passes.run(50, beside_people=beside_people)
        if passes.done == RideCounts(3, 3):
            return
    per_pass_s = min(share, PEOPLE_SHARE) if beside_people else share
    assert passes.done.second >= 1 or extra_s(1) > SAVING * per_pass_s


@settings(max_examples=25, deadline=None)
@given(DEVICES, st.floats(0.2, 4.0), st.booleans())
def test_beside_people_passes_grow_by_a_tenth(extra_s: ExtraS, share: float, knows_alone: bool) -> None:
    """On the average; and where few of them take all of it, those are fewer than one in twenty."""
    passes = Passes(RidePlanner(share), 1.0, extra_s)
    if knows_alone:
        passes.planner.observe_alone(512, 512 * max(extra_s(10**6) / 10**6, 1e-4))
    passes.run(60)
    passes.run(300, beside_people=True)
    longer_s = [extra_s(number) if number else 0.0 for number in passes.run(480, beside_people=True)]
    assert sum(sorted(longer_s)[:-2]) <= 1.02 * PEOPLE_SHARE * len(longer_s) + SAVING * PEOPLE_SHARE
    assert sum(seconds > 1.01 * PEOPLE_SHARE for seconds in longer_s) <= len(longer_s) / 20 + 3


def test_what_took_too_long_is_tried_again_when_it_has_become_cheaper() -> None:
    passes = Passes(RidePlanner(1.0), 1.0, device(0, 0.1))
    assert max(passes.run(100)) <= 12
    passes.extra_s = device(0, 0.01)
    passes.run(800)
    assert max(passes.run(10)) == 96


def test_a_pass_now_and_then_carries_nothing_and_says_what_it_takes() -> None:
    passes = Passes(RidePlanner(1.0), 1.0, device(0, 0.01))
    rode = passes.run(LEARNT + 3 * (REST_EVERY + 1))
    assert rode[LEARNT:].count(0) == 3


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (NOTHING, RideCounts(ALONE_ROWS, 0)),
        (RideCounts(990, 100), RideCounts(10, 0)),
        (RideCounts(1000, 100), RideCounts(0, ALONE_ROWS)),
        (RideCounts(1000, 999), RideCounts(0, 1)),
    ],
)
def test_alone_a_prompt_reaches_layer_l_first(done: RideCounts, expected: RideCounts) -> None:
    assert alone_counts(done, 1000) == expected
