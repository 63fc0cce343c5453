"""Rates, gains and the end of a batch; and the key by which a repeated command finds its batch."""

import io
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.messages import Batch, BatchTotals, JobCounts
from slipstream.archive.queue import BatchState
from slipstream.cli.app import guard_streams
from slipstream.cli.archive.batch_view import Meter, choose_view, describe, span
from slipstream.cli.archive.sources import batch_key
from slipstream.options import CaptionOptions

EMPTY = Batch("", "", BatchState.OPEN, {}, JobCounts(), 0.0, 0.0, BatchTotals())


def snapshot(done: int, total: int = 100, failed: int = 0, ended_s: float = 0.0) -> Batch:
    return replace(
        EMPTY,
        counts=JobCounts(total=total, done=done, failed=failed, running=1),
        totals=BatchTotals(tokens=10 * done, generate_s=2.0 * done, plain_generate_s=3.0 * done),
        created_s=1000.0,
        ended_s=ended_s,
    )


def test_rates_are_those_since_the_watch_began() -> None:
    now = 0.0
    meter = Meter(lambda: now)
    first = meter.update(snapshot(done=40))
    assert (first.videos_per_h, first.tokens_per_s, first.eta_s, first.speedup) == (None, None, None, 1.5)
    now = 10.0
    figures = meter.update(snapshot(done=44, failed=1))
    assert figures.videos_per_h == pytest.approx(1440)
    assert figures.tokens_per_s == pytest.approx(4)
    assert figures.eta_s == pytest.approx(110)
    assert describe(snapshot(44, failed=1), figures) == (
        "done 44 of 100, 1 failed, 1 running, 1,440 videos/h, 4.0 tokens/s, speedup 1.50x, 2 min left"
    )


def test_old_rates_are_forgotten() -> None:
    now = 0.0
    meter = Meter(lambda: now)
    for now, done in ((0.0, 0), (400.0, 1), (500.0, 51)):  # noqa: B007 (the meter's clock reads it)
        figures = meter.update(snapshot(done))
    assert figures.videos_per_h == pytest.approx(51 / 500 * 3600)
    now = 710.0
    assert meter.update(snapshot(52)).videos_per_h == pytest.approx(51 / 310 * 3600)


def test_an_ended_batch_has_the_figures_of_its_life() -> None:
    figures = Meter().update(snapshot(done=90, failed=10, ended_s=1100.0))
    assert figures.videos_per_h == pytest.approx(3240)
    assert figures.eta_s == 0


def test_nothing_is_known_of_an_empty_batch() -> None:
    assert describe(EMPTY, Meter().update(EMPTY)) == "done 0 of 0"


def test_why_jobs_wait_is_told() -> None:
    counts = JobCounts(total=3, done=1, queued=2)
    waiting = replace(EMPTY, counts=counts, obstacle="no\ndraft\x1b[2J", obstacle_s=time.time())
    line = describe(waiting, Meter().update(waiting))
    assert re.fullmatch(r"done 1 of 3; 2 wait, [0-9]+ s ago: no draft[^\x1b]*", line), line
    for silent in (
        replace(waiting, counts=JobCounts(total=3, done=3)),
        replace(waiting, obstacle=""),
    ):
        assert "ago" not in describe(silent, Meter().update(silent))


@pytest.mark.parametrize(("seconds", "said"), [(3, "3 s"), (119, "2 min"), (7300, "2.0 h"), (200_000, "2.3 days")])
def test_spans(seconds: float, said: str) -> None:
    assert span(seconds) == said


NAMES = st.lists(st.text(max_size=8), max_size=4)


@given(NAMES, NAMES, st.text(max_size=8), st.text(max_size=8))
def test_keys_differ_where_commands_do(names: list[str], others: list[str], prompt: str, other: str) -> None:
    key = batch_key(CaptionOptions(prompt=prompt), None, names)
    assert key == batch_key(CaptionOptions(prompt=prompt), None, list(names))
    same = (names, prompt) == (others, other)
    assert (key == batch_key(CaptionOptions(prompt=other), None, others)) is same


def test_the_output_stands_for_the_sources() -> None:
    options = CaptionOptions(seed=0)
    key = batch_key(options, Path("out.jsonl"), ["/a"])
    assert key == batch_key(options, Path.cwd() / "out.jsonl", ["/b"])
    assert key != batch_key(CaptionOptions(), Path("out.jsonl"), ["/a"])
    assert key != batch_key(options, None, ["output", str(Path.cwd() / "out.jsonl")])


def test_progress_is_not_among_the_results_where_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `archive submit --output - 2>&- > results.jsonl`."""
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    guard_streams()
    monkeypatch.setattr("sys.stdout", results := io.StringIO())
    with sys.stderr, choose_view(as_json=False, stream=sys.stderr) as show:
        show(EMPTY)
    assert results.getvalue() == ""
