"""Rates, gains and the end of a batch; and the key by which a repeated command finds its batch."""

import asyncio
import io
import re
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.messages import Batch, BatchTotals, JobCounts
from slipstream.archive.queue import BatchState
from slipstream.cli.app import guard_streams
from slipstream.cli.archive import batch_view
from slipstream.cli.archive.batch_view import Meter, choose_view, describe, span
from slipstream.cli.archive.sources import batch_key
from slipstream.client import archive_client
from slipstream.client.archive_client import ArchiveClient
from slipstream.options import CaptionOptions

EMPTY = Batch("", "", BatchState.IN_PROGRESS, {}, JobCounts(), 0.0, 0.0, BatchTotals())


def snapshot(done: int, total: int = 100, failed: int = 0, ended_s: float = 0.0) -> Batch:
    return replace(
        EMPTY,
        state=BatchState.COMPLETED if ended_s else BatchState.IN_PROGRESS,
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


def test_what_is_still_handed_in_is_told_as_such() -> None:
    """All of it may be done by now, and then it has an end that is none."""
    idle = replace(snapshot(done=100, ended_s=1100.0), state=BatchState.OPEN, counts=JobCounts(total=100, done=100))
    figures = Meter().update(idle)
    assert figures.videos_per_h is None and describe(idle, figures).startswith("done 100 of 100 so far, ")


def test_nothing_is_known_of_an_empty_batch() -> None:
    assert describe(EMPTY, Meter().update(EMPTY)) == "done 0 of 0"


def test_why_jobs_wait_is_told() -> None:
    counts = JobCounts(total=3, done=1, queued=2)
    waiting = replace(EMPTY, counts=counts, obstacle="no\ndraft\x1b[2J", obstacle_s=time.time())
    line = describe(waiting, Meter().update(waiting))
    assert re.fullmatch(r"done 1 of 3; 2 wait: no draft[^\x1b]* \([0-9]+ s ago\)", line), line
    for silent in (
        replace(waiting, counts=JobCounts(total=3, done=3)),
        replace(waiting, obstacle=""),
    ):
        assert "ago" not in describe(silent, Meter().update(silent))


@pytest.mark.parametrize(("seconds", "said"), [(3, "3 s"), (119, "2 min"), (7300, "2.0 h"), (200_000, "2.3 days")])
def test_spans(seconds: float, said: str) -> None:
    assert span(seconds) == said


class Quiet(ArchiveClient):
    """Says at once that its batch runs and then that it waits, and nothing more until somebody has heard it twice."""

    def __init__(self) -> None:
        self.is_heard = asyncio.Event()

    async def watch(self, batch: str) -> AsyncGenerator[Batch, None]:
        yield replace(EMPTY, counts=JobCounts(total=1, running=1))
        yield WAITING
        await self.is_heard.wait()
        yield replace(EMPTY, state=BatchState.COMPLETED, counts=JobCounts(total=1, done=1))


WAITING = replace(EMPTY, counts=JobCounts(total=1, queued=1), obstacle="no draft here", obstacle_s=1.0)


async def test_a_line_in_a_pipe_is_told_late_rather_than_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes too soon behind another line, where nothing changes afterwards."""
    monkeypatch.setattr(batch_view, "LINE_PERIOD_S", 0.2)
    monkeypatch.setattr(archive_client, "QUIET_S", 0.1)
    client, stream, seen = Quiet(), io.StringIO(), []

    @contextmanager
    def view() -> Iterator[batch_view.Show]:
        with choose_view(as_json=False, stream=stream) as show:

            def look(batch: Batch) -> None:
                show(batch)
                seen.append(batch)
                if seen.count(WAITING) > 5 and "no draft here" in stream.getvalue():
                    client.is_heard.set()

            yield look

    async with asyncio.timeout(120):
        await batch_view.watch(client, "batch", view())
    first, second, last = stream.getvalue().splitlines()
    assert "1 running" in first and "1 wait: no draft here (" in second and "done 1 of 1" in last


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
