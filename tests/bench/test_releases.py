"""What the check of two releases calls a failure: each promise broken by itself; and which checkouts it takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.faults.drain import Harmed
from bench.release_check import FILMS, MOVES, report_of
from slipstream.archive.messages import Job
from slipstream.archive.queue import JobState
from tests.support.archive_faults.checker import Verdict
from tests.support.archive_faults.history import History
from tests.support.releases import checkout

WELL = Verdict(1, 1, 1, 1, 0, 0, 0, 0.0, 0, ())
JOB = Job("id", "job", "/a", JobState.DONE, "", "", "", 0, 0, "worker", 0.0, 0.0, 0.0)
TEXTS = {f"film-{number}": ["a", "b"] for number in range(2 * FILMS)}
SHOWN = {
    "moves_under_jobs": MOVES,
    "films_given_back": [1, 2],
    "films_that_waited": 1,
    "of_them_at_the_older_target": 1,
}


def found(verdict: Verdict = WELL, job: Job = JOB, **shown: Any) -> dict[str, Any]:
    batch = Harmed(verdict, History([], [], [], []), [job])
    return {**SHOWN, **shown, "rolled": batch, "mixed": batch}


def films(**first: Any) -> list[tuple[Job, list[str]]]:
    every = [(replace(JOB, custom_id=name), list(texts)) for name, texts in TEXTS.items()]
    return [(replace(every[0][0], **first), every[0][1]), *every[1:]]


def test_what_is_well() -> None:
    report = report_of(found(), films(), TEXTS)
    assert report["passed"] is True
    assert (report["jobs"], report["films_done"], report["counted"]) == (2, 2 * FILMS, 0)


@pytest.mark.parametrize(
    "broken",
    [
        found(moves_under_jobs=MOVES - 1),
        found(films_given_back=[1, 0]),
        found(films_that_waited=0),
        found(of_them_at_the_older_target=0),
        found(replace(WELL, identical=0)),
        found(replace(WELL, committed_once=0)),
        found(replace(WELL, violations=("job: reruns: it was well",))),
        found(job=replace(JOB, attempts=1)),
        found(job=replace(JOB, crashes=1)),
    ],
)
def test_a_roll_that_showed_nothing_or_broke_a_promise_fails(broken: dict[str, Any]) -> None:
    assert report_of(broken, films(), TEXTS)["passed"] is False


@pytest.mark.parametrize("first", [{"state": JobState.DEAD}, {"attempts": 1}])
def test_a_film_that_is_lost_or_counted_fails(first: dict[str, Any]) -> None:
    assert report_of(found(), films(**first), TEXTS)["passed"] is False


def test_a_film_with_another_text_fails() -> None:
    assert report_of(found(), films(), TEXTS | {"film-0": ["b", "a"]})["passed"] is False


def test_what_is_no_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="'no-such-commit' is no folder, and no commit"):
        checkout("no-such-commit", tmp_path / "older")
    with pytest.raises(OSError, match="is no checkout of Slipstream"):
        checkout(str(tmp_path), tmp_path / "older")
