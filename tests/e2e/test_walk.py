"""How many files a reader must cross to follow one caption, one round and one archive job: counted, not estimated."""

import pytest

from tests.support.walk import Walk, measure

MOST_FOR_A_CAPTION = 65
MOST_FOR_A_ROUND = 30
MOST_MORE_FOR_A_JOB = 17


@pytest.fixture(scope="module")
def walk() -> Walk:
    return measure()


def test_a_caption_crosses_few_files(walk: Walk) -> None:
    assert len(walk.caption) <= MOST_FOR_A_CAPTION, walk.caption


def test_a_round_crosses_few_files(walk: Walk) -> None:
    assert len(walk.round) <= MOST_FOR_A_ROUND, walk.round


def test_an_archive_job_crosses_few_more_files(walk: Walk) -> None:
    assert len(walk.archive_extra) <= MOST_MORE_FOR_A_JOB, walk.archive_extra


def test_a_walk_is_no_list_of_imports(walk: Walk) -> None:
    assert set(walk.caption) < set(walk.imported)
    assert set(walk.round) < set(walk.caption)
    assert not set(walk.archive_extra) & set(walk.caption)
