"""A short run of what a draft costs over many captions: the rows say what the bounds are held against."""

import pytest

from bench.guarantees.many_captions import BAD_LIMIT, FIRST_LIMIT, make_drafts, measure, play_series
from slipstream.speculation.caption_book import Start

NUM_CAPTIONS, NUM_TOKENS = 24, 70


@pytest.mark.long
def test_a_bad_draft_costs_little_and_a_good_one_loses_nothing() -> None:
    """In simulated time, which a busy machine does not change."""
    document = measure(NUM_CAPTIONS, NUM_TOKENS)
    assert document["broken"] == []
    assert (len(document["bad"]), len(document["good"])) == (5, 5)
    for row in document["bad"].values():
        assert 1 < row["all"] <= BAD_LIMIT and row["first"] <= FIRST_LIMIT
        assert row["forgetting"] > row["all"] and row["rests"] > row["trials"] > 0
    for row in document["good"].values():
        assert row["all"] < 0.8 and row["rests"] == 0


def test_a_draft_that_brings_nothing_costs_little_without_memory_too() -> None:
    nonsense = make_drafts(NUM_CAPTIONS, NUM_TOKENS, seed=1).bad["nonsense"]
    assert max(play_series(nonsense, 5, gate=True, remembers=False).ratios) < FIRST_LIMIT


def test_without_memory_every_caption_pays_again() -> None:
    slow = make_drafts(NUM_CAPTIONS, NUM_TOKENS, seed=1).bad["slow"]
    forgetting = play_series(slow, 5, gate=True, remembers=False)
    assert min(forgetting.ratios) > FIRST_LIMIT
    assert set(forgetting.starts) == {Start.ALONE}
    remembering = play_series(slow, 5, gate=True, remembers=True)
    assert remembering.starts[0] is Start.OPEN and remembering.ratios[remembering.starts.index(Start.REST)] == 1
