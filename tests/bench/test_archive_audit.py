"""What is wrong with an audit."""

import pytest

from bench.archive_audit import Accused, Audited, wrong

PLANTED = Accused("a", "differs")
OTHER = Accused("b", "differs")


@pytest.mark.parametrize(
    ("status", "accused", "missed", "others"),
    [
        (1, {PLANTED}, 0, 0),
        (0, {PLANTED}, 1, 0),
        (0, set(), 1, 0),
        (1, {OTHER}, 1, 1),
        (1, {PLANTED, OTHER}, 0, 1),
        (1, {Accused("a", "failed")}, 1, 1),
        (1, {Accused("a", "differs", "segment 1")}, 1, 1),
    ],
)
def test_who_is_missed_and_who_is_accused(status: int, accused: set[Accused], missed: int, others: int) -> None:
    audited = Audited(status, frozenset(accused), 4, 4 - len(accused))
    assert wrong(PLANTED, audited) == {"planted_missed": missed, "others_accused": others}
