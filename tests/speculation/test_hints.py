"""Hints, whatever they are and whenever they come, leave the text as plain decoding writes it; and good ones help."""

import math
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidRequest
from slipstream.speculation.hints.cursor import Cursor, Guess
from slipstream.speculation.hints.draft_tree import Candidate, TreeLimits, grow_tree
from slipstream.speculation.hints.index import BREAK, MAX_LOOKED_AT, HintIndex
from slipstream.speculation.hints.strategies import WINDOW, HintStrategy, Lookup, Resynchronising, Windowed
from slipstream.speculation.hints.tolerance import Rating, Tolerance, ToleranceRule, accept_tolerantly
from slipstream.speculation.protocol import ROOT, TokenTree
from tests.support.hint_schedules import LIES, STRATEGIES, Arrival, HintSchedule, play, random_schedule

ARRIVALS = st.builds(Arrival, st.integers(0, 40), st.sampled_from(LIES), st.integers(0, 2**30))
SCHEDULES = st.builds(
    HintSchedule,
    strategy=st.sampled_from(sorted(STRATEGIES)),
    vocab_size=st.sampled_from((2, 3, 8, 40)),
    salt=st.integers(0, 2**30),
    temperature=st.sampled_from((0.0, 0.7, 1.3)),
    max_new_tokens=st.integers(1, 60),
    max_depth=st.integers(1, 40),
    max_rows=st.integers(1, 48),
    slope=st.sampled_from((0.0, 0.02, 0.3)),
    as_chain=st.booleans(),
    arrivals=st.lists(ARRIVALS, max_size=4).map(tuple),
)
WIDE = TreeLimits(max_depth=32, max_rows=64)
VOCAB = 1000


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SCHEDULES)
def test_the_text_is_plain_decodings(schedule: HintSchedule) -> None:
    assert play(schedule).is_plain


def test_schedules_of_the_bench_do_use_hints() -> None:
    order = random.Random(3)
    played = [play(random_schedule(order)) for _ in range(100)]
    assert all(one.is_plain for one in played)
    assert sum(one.num_from_hints for one in played) > 100
    assert sum(one.num_passes for one in played) < sum(len(one.text) for one in played)


# -- how a text is read along -----------------------------------------------------------------------------------------


def passes_of(strategy: HintStrategy, text: list[int], limits: TreeLimits = WIDE) -> list[int]:
    """Reads the text along: how many tokens each pass commits. The first token is committed before."""
    strategy.commit(text[:1])
    position, committed = 1, []
    while position < len(text):
        tree = strategy.propose(limits)
        end, node = position, -1
        while tree is not None and end < len(text) - 1 and (child := tree.child(node, text[end])) is not None:
            end, node = end + 1, child
        strategy.commit(text[position : end + 1])
        committed.append(end + 1 - position)
        position = end + 1
    return committed


def sentence(num_tokens: int, seed: int = 1) -> list[int]:
    return random.Random(seed).sample(range(VOCAB), num_tokens)


ERRORS = {
    "substitution": lambda text: [*text[:20], 999, *text[21:]],
    "insertion": lambda text: [*text[:20], 999, *text[20:]],
    "deletion": lambda text: [*text[:20], *text[21:]],
    "one token became three": lambda text: [*text[:20], 999, 998, 997, *text[21:]],
}


@pytest.mark.parametrize("error", ERRORS)
def test_after_an_error_the_next_pass_is_in_step_again(error: str) -> None:
    text = [token for token in sentence(60) if token < 990]
    ours, paper = Resynchronising(VOCAB), Windowed(VOCAB)
    for strategy in (ours, paper):
        strategy.add(ERRORS[error](text))
    committed = passes_of(ours, text)
    assert len(committed) <= 4, committed
    slow = passes_of(paper, text)
    assert slow[: WINDOW - 1] == [1] * (WINDOW - 1), "no window before there are three tokens"
    assert slow.count(1) >= 2 * (WINDOW - 1) and len(slow) > len(committed)


def test_the_next_region_follows_at_the_end_of_one() -> None:
    text = sentence(90)
    strategy = Resynchronising(VOCAB)
    for first in range(0, 90, 30):
        strategy.add(text[first : first + 30])
    committed = passes_of(strategy, text)
    assert len(committed) <= 5, committed


def test_regions_in_another_order_are_found_by_their_words() -> None:
    text = sentence(90)
    for strategy in (Resynchronising(VOCAB), Windowed(VOCAB)):
        for first in (60, 0, 30):
            strategy.add(text[first : first + 30])
        assert len(passes_of(strategy, text)) < 20


def test_a_hint_that_comes_late_helps_from_then_on() -> None:
    text = sentence(100)
    strategy = Resynchronising(VOCAB)
    strategy.commit(text[:50])
    assert strategy.propose(WIDE) is None
    strategy.add(text)
    strategy.commit(text[50:52])
    tree = strategy.propose(WIDE)
    assert tree is not None and tree.token_ids[:4] == tuple(text[52:56])


def test_prompt_lookup_finds_what_was_said_before() -> None:
    text = sentence(30)
    committed = passes_of(Lookup(VOCAB, prompt=text), [*text, *text[:20]])
    assert max(committed) > 15
    committed = passes_of(Lookup(VOCAB), [*text, *text])
    assert committed[:29] == [1] * 29 and max(committed[29:]) > 15
    with pytest.raises(TypeError):
        Lookup(VOCAB).add([1])


@pytest.mark.parametrize("slope", [0.02, 0.05, 0.1])
def test_hints_of_lies_cost_at_most_a_few_rows(slope: float) -> None:
    text = [random.Random(1).randrange(VOCAB) for _ in range(2000)]
    strategy = Resynchronising(VOCAB)
    strategy.add([random.Random(2).randrange(VOCAB) for _ in range(5000)])
    num_rows = 0
    strategy.commit(text[:1])
    for token in text[1:]:
        tree = strategy.propose(TreeLimits(32, 48, lambda rows: 1 + slope * rows))
        num_rows += len(tree) if tree is not None else 0
        strategy.commit([token])
    assert num_rows * slope < 0.02 * len(text)


# -- the parts --------------------------------------------------------------------------------------------------------


def test_an_index_knows_every_place() -> None:
    index = HintIndex((3,), 100)
    index.add([1, 2, 3, 4, 1, 2, 3, 5])
    index.add([2, 1, 2, 3])
    assert [index.token(place) for place in index.places((1, 2, 3))] == [4, 5], "where a text ends none goes on"
    assert index.places((3, 5, 2)) == (), "no n-gram reaches over two texts"
    index.extend([9])
    assert [index.token(place) for place in index.places((1, 2, 3))] == [4, 5, 9]
    assert index.next_head(index.heads[0]) == index.heads[1] and index.next_head(index.heads[1]) is None
    assert index.token(-5) == index.token(10_000) == BREAK


def test_a_text_that_ends_where_the_answer_stands_hides_none_that_goes_on() -> None:
    """Of pieces that overlap, the one with the longest match ends there."""
    answer = list(range(10, 40))
    strategy = Resynchronising(100)
    for first in range(len(answer) - 5):
        strategy.add(answer[first : first + 6])
    for place, token in enumerate(answer[:-6]):
        strategy.commit([token])
        tree = strategy.propose(TreeLimits(8, 8))
        assert place == 0 or (tree is not None and tree.child(ROOT, answer[place + 1]) is not None)


def test_the_longest_match_nearest_to_the_cursor_comes_first() -> None:
    index = HintIndex((2, 4), 100)
    index.add([1, 2, 3, 50, 9, 2, 3, 51, 1, 2, 3, 52])
    length, places = index.longest([7, 1, 2, 3], 12, at_most=8, num_places=2)
    assert (length, [index.token(place) for place in places]) == (3, [52, 50])
    length, places = index.longest([7, 1, 2, 3], 0, at_most=8, num_places=1)
    assert [index.token(place) for place in places] == [50]
    assert index.longest([7], 0, at_most=8, num_places=2) == (0, [])


def test_tokens_that_no_vocabulary_has_break_a_text() -> None:
    index = HintIndex((2,), 10)
    index.add([1, 2, 10, 3, -7, 4, 5, 2**70])
    assert index.tokens == [BREAK, 1, 2, BREAK, 3, BREAK, 4, 5, BREAK]
    assert index.places((2, BREAK)) == ()


def test_a_hint_that_repeats_itself_costs_no_more_than_another() -> None:
    index = HintIndex((2, 4), 10)
    index.add([7] * 50_000)
    looked_at: list[int] = []
    index._length = lambda place, *rest: looked_at.append(place) or 1  # type: ignore[func-returns-value, method-assign]
    index.longest([7] * 9, 25_000, at_most=8, num_places=2)
    assert len(looked_at) == MAX_LOOKED_AT and min(map(abs, (place - 25_000 for place in looked_at))) <= 1
    tree = Windowed(10)
    tree.add([7] * 50_000)
    tree.commit([7] * 3)
    grown = tree.propose(WIDE)
    assert grown is not None and len(grown) == WIDE.max_depth


def test_an_index_is_bounded_by_its_tokens() -> None:
    tokens = [random.Random(4).randrange(50_000) for _ in range(20_000)]
    tracemalloc.start()
    index = HintIndex((2, 4), 50_000)
    index.add(tokens)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 2 * 400 * len(tokens)


def test_what_lengths_an_index_takes() -> None:
    for sizes in ((), (0, 2), (3, 2), (2, 2)):
        with pytest.raises(ValueError, match="ascending lengths"):
            HintIndex(sizes, 10)


def test_equal_beginnings_are_one_path() -> None:
    index = HintIndex((2,), 100)
    index.add([1, 2, 3, 4])
    index.add([1, 2, 9])
    candidates = [Candidate(head, 0.9, 0.9) for head in index.heads]
    tree = grow_tree(index, candidates, TreeLimits(10, 10))
    assert tree == TokenTree((1, 2, 3, 9, 4), (-1, 0, 1, 1, 2))
    chain = grow_tree(index, candidates, TreeLimits(10, 10, as_chain=True))
    assert chain == TokenTree((1, 2, 3, 4), (-1, 0, 1, 2))


def test_rows_are_added_while_they_pay() -> None:
    index = HintIndex((2,), 1000)
    index.add(range(500))
    candidates = [Candidate(index.heads[0], 1.0, 0.9)]

    def num_rows(slope: float) -> int:
        tree = grow_tree(index, candidates, TreeLimits(200, 200, lambda rows: 1 + slope * rows))
        return len(tree) if tree is not None else 0

    def rate(rows: int, slope: float) -> float:
        return sum(0.9**depth for depth in range(rows + 1)) / (1 + slope * rows)

    assert num_rows(0.0) == 200
    for slope in (0.02, 0.05, 0.3):
        expected = max(range(200), key=lambda rows: rate(rows, slope))
        assert abs(num_rows(slope) - expected) <= 1
    assert num_rows(2.0) == 0


def test_a_cursor_that_fails_again_and_again_is_dropped() -> None:
    index = HintIndex((2,), 100)
    index.add(range(50))
    cursor = Cursor(index)
    assert [guess.kind for guess in cursor.guesses()] == ["first head"]
    cursor.follow([Guess("first head", index.heads[0])], [0, 1, 2])
    assert [guess.place for guess in cursor.guesses()] == [index.heads[0] + 3]
    for _ in range(3):
        cursor.follow(cursor.guesses(), [99])
    assert cursor.place is None


# -- tolerance --------------------------------------------------------------------------------------------------------


def test_the_two_readings_of_equation_10() -> None:
    """At p(u^) = 0.2 and tau = 0.75 they accept from 0.117 and from 0.15 on."""
    for rule, least in ((ToleranceRule.LOG_RATIO, 0.2 ** (1 / 0.75)), (ToleranceRule.PROBABILITY_RATIO, 0.15)):
        tolerance = Tolerance(0.75, rule).check()
        assert tolerance.accepts(math.log(0.2), math.log(least * 1.001))
        assert not tolerance.accepts(math.log(0.2), math.log(least * 0.999))
        assert not tolerance.accepts(math.log(0.2), -math.inf)
    assert not Tolerance(1.0).accepts(-0.5, -0.5), "at 1 a tie goes to the model's own choice"
    assert not Tolerance(1.0).is_lossy


@pytest.mark.parametrize("values", [(0.0, "log_ratio"), (1.5, "log_ratio"), (math.nan, "log_ratio"), (0.5, "other")])
def test_tolerances_that_there_are_not(values: tuple[float, str]) -> None:
    with pytest.raises(InvalidRequest, match="tolerance"):
        Tolerance(*values).check()


def test_a_tolerant_walk_takes_the_best_candidate() -> None:
    tree = TokenTree((5, 6, 7), (-1, -1, 1))
    log_ps = {5: math.log(0.1), 6: math.log(0.3), 7: math.log(0.2)}

    def rate(row: int, path: tuple[int, ...], candidates: list[int]) -> Rating:
        return Rating(9, math.log(0.35), [log_ps[token] for token in candidates])

    assert accept_tolerantly(tree, rate, Tolerance(0.75)) == ((1,), 9)
    assert accept_tolerantly(tree, rate, Tolerance(0.5)) == ((1, 2), 9)
    assert accept_tolerantly(tree, rate, Tolerance(1.0)) == ((), 9)
