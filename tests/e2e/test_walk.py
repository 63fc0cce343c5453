"""How many files a reader must cross to follow one caption, one round and one archive job: counted, not estimated."""

import pytest

from tests.support.walk import CAPTION, JOB, STARTING, Note, Walk, count, measure

pytestmark = pytest.mark.timeout(900)

MOST_FOR_A_CAPTION, MOST_FOR_A_ROUND, MOST_MORE_FOR_A_JOB = 85, 43, 25
"""A ratchet on the files that a reader walks through: lower it when you can, and raise it only with a reason in the
commit."""
ATTEMPTS = 5
"""On a busy machine a draft may be late or lost: that caption takes another way, which crosses more files."""


@pytest.fixture(scope="module")
def walk() -> Walk:
    for _ in range(ATTEMPTS):
        walk = measure()
        is_short = len(walk.caption) <= MOST_FOR_A_CAPTION and len(walk.round) <= MOST_FOR_A_ROUND
        if is_short and len(walk.archive_extra) <= MOST_MORE_FOR_A_JOB:
            break
    return walk


@pytest.mark.long
def test_a_caption_crosses_few_files(walk: Walk) -> None:
    assert len(walk.caption) <= MOST_FOR_A_CAPTION, walk.caption


@pytest.mark.long
def test_a_round_crosses_few_files(walk: Walk) -> None:
    assert len(walk.round) <= MOST_FOR_A_ROUND, walk.round


@pytest.mark.long
def test_an_archive_job_crosses_few_more_files(walk: Walk) -> None:
    assert len(walk.archive_extra) <= MOST_MORE_FOR_A_JOB, walk.archive_extra


@pytest.mark.long
def test_a_walk_is_no_list_of_imports(walk: Walk) -> None:
    assert set(walk.caption) < set(walk.imported)
    assert set(walk.round) < set(walk.caption)
    assert not set(walk.archive_extra) & set(walk.caption)


def test_a_round_is_what_all_three_services_usually_do_between_two_texts() -> None:
    window = [("target", "judge"), ("draft", "write"), ("gateway", "drive")]
    rounds = {1: [*window, ("gateway", "begin")], 2: window, 3: [("target", "judge")], 4: window}
    notes = [
        Note(f"any.{module}", CAPTION + phase, "call", file)
        for phase, calls in rounds.items()
        for module, file in calls
    ]
    assert count([*notes, Note("any.cli", CAPTION + 2, "call", "show")]).round == ("drive", "judge", "write")


def test_a_stack_without_a_draft_has_no_round() -> None:
    with pytest.raises(AssertionError, match="no round"):
        count([Note("any.target", CAPTION + 1, "call", "judge")])


def test_what_an_idle_stack_does_is_on_no_walk() -> None:
    window = [Note(module, CAPTION + 1, "call", "work") for module in ("target", "draft", "gateway")]
    idle = [Note("gateway", phase, "background", "poll") for phase in (STARTING, CAPTION, JOB)]
    job = [Note("gateway", JOB, "background", "take"), Note("gateway", JOB, "call", "run")]
    walk = count([*window, *idle, *job])
    assert (walk.caption, walk.archive_extra, walk.unasked) == (("work",), ("run", "take"), ("poll",))
