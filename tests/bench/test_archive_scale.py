"""The check of the archive at scale can fail."""

from typing import Any

import pytest

from bench.archive_scale import MUST_BE_AT_MOST, MUST_BE_ZERO, passed

SOUND: dict[str, Any] = {name: 0 for name in MUST_BE_ZERO} | {"largest_time_error_s": 0.1, "frame_step_s": 0.125}


COPIES: dict[str, Any] = {"recall": 0.95, "precision": 0.99, "search": {"recall": 0.95, "precision": 0.99}}


def test_copies_that_are_told_from_others_pass() -> None:
    assert passed(COPIES)


@pytest.mark.parametrize(
    "wrong", [{"recall": 0.94}, {"precision": 0.98}, {"search": {"recall": 0.9, "precision": 1.0}}]
)
def test_copies_that_are_missed_or_mistaken_are_not_passed_over(wrong: dict[str, Any]) -> None:
    assert not passed(COPIES | wrong)


def test_a_sound_film_passes() -> None:
    assert passed(SOUND)


@pytest.mark.parametrize("name", MUST_BE_AT_MOST)
def test_a_figure_above_its_bound_does_not(name: str) -> None:
    assert passed({name: MUST_BE_AT_MOST[name]}) and not passed({name: MUST_BE_AT_MOST[name] * 1.01})


@pytest.mark.parametrize("wrong", [*({name: 1} for name in MUST_BE_ZERO), {"largest_time_error_s": 0.126}])
def test_what_is_wrong_with_a_film_is_not_passed_over(wrong: dict[str, Any]) -> None:
    assert not passed(SOUND | wrong)
