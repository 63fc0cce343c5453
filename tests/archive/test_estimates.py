"""From a sample to a whole: what is chosen, totals, intervals, and how many jobs ran at once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.estimates import (
    LEAST_OF_STRATUM,
    LEVEL,
    STRATA,
    UNKNOWN_SIZE,
    UNSIZED,
    Sampled,
    Span,
    choose,
    estimate,
    strata_of,
    together,
)

SIZES = st.lists(st.integers(UNKNOWN_SIZE, 10**10), min_size=1, max_size=200)
SECONDS = st.floats(0.01, 1000)


@given(SIZES, st.integers(2, 40), st.integers(0, 9))
def test_a_sample_has_some_of_every_stratum_and_the_same_seed_the_same(
    sizes: list[int], wanted: int, seed: int
) -> None:
    strata = strata_of(sizes)
    chosen = choose(strata, wanted, seed)
    assert chosen == choose(strata, wanted, seed) == sorted(set(chosen))
    counts, sampled = Counter(strata.tolist()), Counter(strata[chosen].tolist())
    assert all(sampled[stratum] >= min(LEAST_OF_STRATUM, number) for stratum, number in counts.items())
    assert len(chosen) <= max(wanted, 1) + (LEAST_OF_STRATUM + 1) * (STRATA + 1)


@given(SIZES)
def test_strata_are_equal_parts_by_size(sizes: list[int]) -> None:
    strata = strata_of(sizes)
    known = [stratum for stratum, size in zip(strata.tolist(), sizes, strict=True) if size != UNKNOWN_SIZE]
    assert all((stratum == 0) == (size == UNKNOWN_SIZE) for stratum, size in zip(strata, sizes, strict=True))
    by_size = sorted(zip((size for size in sizes if size != UNKNOWN_SIZE), known, strict=True))
    assert [stratum for _, stratum in by_size] == sorted(known) or len({size for size, _ in by_size}) < len(by_size)
    assert max(Counter(known).values(), default=0) - min(Counter(known).values(), default=0) <= 1 or len(known) < STRATA


ITEMS = st.lists(st.tuples(st.integers(UNKNOWN_SIZE, 10**10), st.integers(0, 12)), min_size=1, max_size=200)


@given(ITEMS)
def test_formats_that_many_have_are_parted_by_themselves(items: list[tuple[int, int]]) -> None:
    strata = strata_of([size for size, _ in items], [kind for _, kind in items]).tolist()
    known = [(stratum, *item) for stratum, item in zip(strata, items, strict=True) if item[0] != UNKNOWN_SIZE]
    assert all((stratum == UNSIZED) == (size == UNKNOWN_SIZE) for stratum, (size, _) in zip(strata, items, strict=True))
    assert len({stratum for stratum, *_ in known}) <= 2 * STRATA + 1
    counts = Counter(kind for *_, kind in known)
    common = {kind for kind, number in counts.items() if 2 * STRATA * number >= len(known)}
    for stratum in {stratum for stratum, *_ in known}:
        kinds = {kind for at, _, kind in known if at == stratum}
        assert len(kinds) == 1 or not kinds & common
    for kind in common:
        in_order = sorted((size, stratum) for stratum, size, of in known if of == kind)
        by_stratum = sorted((stratum, size) for size, stratum in in_order)
        assert [size for size, _ in in_order] == [size for _, size in by_stratum], "by size"
        numbers = Counter(stratum for _, stratum in in_order).values()
        assert max(numbers) - min(numbers) <= 1, "equal parts"


@given(SIZES)
def test_one_format_is_as_none(sizes: list[int]) -> None:
    assert strata_of(sizes, [7] * len(sizes)).tolist() == strata_of(sizes).tolist()


def test_formats_part_what_sizes_do_not() -> None:
    """Two codecs of the same sizes, of which one has a tenth of the bytes a second: the strata tell them apart."""
    chance = np.random.default_rng(5)
    seconds = chance.uniform(10, 100, 400)
    formats = chance.integers(0, 2, 400)
    sizes = (seconds * np.where(formats == 0, 1e6, 1e5)).astype(np.int64)
    spread = {}
    for known in (None, formats):
        strata = strata_of(sizes.tolist(), None if known is None else known.tolist())
        spread[known is None] = sum((seconds[strata == one].var() * (strata == one).sum()) for one in set(strata))
    assert spread[False] < spread[True] / 2


@given(SECONDS, st.integers(2, 8), st.integers(1, 5), st.integers(1, 10_000))
def test_equal_jobs_leave_nothing_open(seconds: float, rounds: int, at_once: int, num_items: int) -> None:
    spans = [Span(number * seconds, (number + 1) * seconds) for number in range(rounds) for _ in range(at_once)]
    found = estimate([Sampled(1, span, tokens=7) for span in spans], {1: num_items})
    assert found.at_once == pytest.approx(at_once)
    assert found.seconds.value == pytest.approx(num_items * seconds / at_once)
    assert found.seconds.low == pytest.approx(found.seconds.high)
    assert found.tokens.value == 7 * num_items


def test_jobs_that_began_together_and_did_not_wait() -> None:
    assert together([Span(0, 4), Span(0, 2)]) == pytest.approx(1.5)
    assert together([Span(0, 4)]) == 1
    assert together([Span(1, 1)]) == 1


def test_strata_weigh_by_their_numbers_and_one_without_a_sample_is_like_the_others() -> None:
    sample = [Sampled(1, Span(0, 1), tokens=10), Sampled(2, Span(1, 2), tokens=100)]
    assert estimate(sample, {1: 900, 2: 100}).tokens.value == 900 * 10 + 100 * 100
    assert estimate(sample, {3: 10}).tokens.value == 10 * 55


def test_a_sample_that_is_all_there_is_leaves_nothing_open() -> None:
    sample = [Sampled(number % 2, Span(number, 3 * number + 1), tokens=number**2) for number in range(9)]
    for stratum in (estimate(sample, {0: 5, 1: 4}).tokens, estimate(sample, {0: 5, 1: 4}).seconds):
        assert stratum.low == pytest.approx(stratum.value) == pytest.approx(stratum.high)
    half = estimate(sample, {0: 5, 1: 400}).tokens
    assert half.low < half.value < half.high


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    chance = np.random.default_rng(3)
    sizes = np.sort(chance.lognormal(0, 1, 400) * 1e6).astype(np.int64)
    seconds = 1 + sizes / 1e6 * chance.uniform(0.5, 1.5, len(sizes))
    strata = strata_of(sizes.tolist())
    held = []
    for seed in range(200):
        chosen = choose(strata, 20, seed)
        sample = [Sampled(int(strata[n]), Span(0.0, 1.0), tokens=int(1000 * seconds[n])) for n in chosen]
        found = estimate(sample, Counter(strata.tolist())).tokens
        held.append(found.low <= 1000 * seconds.sum() <= found.high)
    assert LEVEL - 0.15 <= np.mean(held) <= 1
