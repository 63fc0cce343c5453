"""Shows a batch until it ends: a progress bar on a terminal, plain lines in a pipe, or JSON."""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from slipstream.archive.messages import Batch, BatchTotals
from slipstream.archive.quality import COUNTED_MARKS
from slipstream.archive.queue import BatchState
from slipstream.cli.views import printable
from slipstream.client.archive_client import ArchiveClient

# -- figures ----------------------------------------------------------------------------------------------------------

SECONDS_PER_HOUR = 3600.0
WINDOW_S = 300.0
"""Rates are those of this long."""


@dataclass(frozen=True)
class Figures:
    """None: not known (yet)."""

    videos_per_h: float | None
    tokens_per_s: float | None
    speedup: float | None
    """Time of plain decoding over the time it took."""
    eta_s: float | None
    """Seconds until the last job ends, at the rate of the last minutes."""


@dataclass(frozen=True)
class _Sample:
    at_s: float
    ended: int
    done: int
    tokens: int


class Meter:
    """Takes a batch's snapshots as they come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[_Sample] = deque()

    def update(self, batch: Batch) -> Figures:
        """The figures as of this snapshot; those of a batch that has ended are over its whole life."""
        now = _Sample(self._clock(), batch.counts.num_ended, batch.counts.done, batch.totals.tokens)
        self._samples.append(now)
        while len(self._samples) > 2 and self._samples[1].at_s <= now.at_s - WINDOW_S:
            self._samples.popleft()
        if batch.is_ended:
            return overall(batch)
        first = self._samples[0]
        elapsed_s = now.at_s - first.at_s
        ended_per_s = _ratio(now.ended - first.ended, elapsed_s)
        return Figures(
            _per_hour(_ratio(now.done - first.done, elapsed_s)),
            _ratio(now.tokens - first.tokens, elapsed_s),
            speedup(batch.totals),
            _ratio(batch.counts.total - now.ended, ended_per_s or 0.0),
        )


def overall(batch: Batch) -> Figures:
    """The figures from the batch's beginning to its end; without rates while it goes on."""
    elapsed_s = batch.ended_s - batch.created_s if batch.ended_s else 0.0
    return Figures(
        _per_hour(_ratio(batch.counts.done, elapsed_s)),
        _ratio(batch.totals.tokens, elapsed_s),
        speedup(batch.totals),
        0.0 if batch.ended_s else None,
    )


def speedup(totals: BatchTotals) -> float | None:
    """How much longer plain decoding would have taken, as measured in the same captions."""
    return _ratio(totals.plain_generate_s, totals.generate_s)


def has_failures(batch: Batch) -> bool:
    """Whether it ended with jobs that have no result."""
    return batch.counts.num_ended > batch.counts.done


def describe(batch: Batch, figures: Figures) -> str:
    """Counts and figures on one line."""
    counts = batch.counts
    facts = [f"done {counts.done:,} of {counts.total:,}{' so far' if batch.state is BatchState.OPEN else ''}"]
    facts += [
        f"{number:,} {name}"
        for name, number in (
            ("failed", counts.failed),
            ("dead", counts.dead),
            ("cancelled", counts.cancelled),
            ("running", counts.running),
        )
        if number
    ]
    if batch.parts_total:
        facts.append(f"{batch.parts_done:,} of {batch.parts_total:,} parts")
    odd = [(getattr(batch.totals, mark), mark.value) for mark in COUNTED_MARKS]
    facts += describe_figures(figures) + [f"{number:,} {name}" for number, name in odd if number]
    return ", ".join(facts) + why_waiting(batch)


def why_waiting(batch: Batch) -> str:
    """What keeps jobs of it from running, where some wait; in words that end a line."""
    if not batch.obstacle or not batch.counts.queued:
        return ""
    age_s = max(time.time() - batch.obstacle_s, 0.0)
    return f"; {batch.counts.queued:,} wait: {' '.join(printable(batch.obstacle).split())} ({span(age_s)} ago)"


def describe_figures(figures: Figures) -> list[str]:
    """What is known of them, in words."""
    facts = []
    if figures.videos_per_h:
        facts.append(f"{figures.videos_per_h:,.0f} videos/h")
    if figures.tokens_per_s:
        facts.append(f"{figures.tokens_per_s:,.1f} tokens/s")
    if figures.speedup:
        facts.append(f"speedup {figures.speedup:.2f}x")
    if figures.eta_s:
        facts.append(f"{span(figures.eta_s)} left")
    return facts


def span(seconds: float) -> str:
    """A length of time as people say it."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes / 60:.1f} h" if minutes < 48 * 60 else f"{minutes / 60 / 24:.1f} days"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _per_hour(per_s: float | None) -> float | None:
    return None if per_s is None else per_s * SECONDS_PER_HOUR


# -- watch ------------------------------------------------------------------------------------------------------------

# Shows a batch until it ends: a progress bar on a terminal, plain lines in a pipe, or JSON.

JOBS_WITHOUT_RESULT = 5
"""Exit status of a command that waited for a batch which ended with jobs that have no result."""
LINE_PERIOD_S = 5.0
"""Most lines in a pipe are that far apart."""

Show = Callable[[Batch], None]


async def watch(client: ArchiveClient, batch: str, view: AbstractContextManager[Show]) -> Batch:
    """Shows every change until the batch has ended; its last state."""
    with view as show:
        async with aclosing(client.follow(batch)) as snapshots:
            async for snapshot in snapshots:
                show(snapshot)
    return snapshot


def exit_status(batch: Batch) -> int:
    """What a command that waited for this batch ends with."""
    return JOBS_WITHOUT_RESULT if has_failures(batch) else 0


def choose_view(as_json: bool, stream: TextIO | None = None) -> AbstractContextManager[Show]:
    """The view that fits the request and what the stream (stdout, if none is given) is."""
    stream = stream or sys.stdout
    if as_json:
        return _json_lines(stream)
    console = Console(file=stream)
    return _bar(console) if console.is_terminal else _plain_lines(stream)


def batch_dict(batch: Batch) -> dict[str, Any]:
    """The fields of the batch, with the figures of its whole life once it has ended."""
    figures = overall(batch)
    return asdict(batch) | {
        "videos_per_h": figures.videos_per_h,
        "tokens_per_s": figures.tokens_per_s,
        "speedup": figures.speedup,
    }


@contextmanager
def _bar(console: Console) -> Iterator[Show]:
    line = TextColumn("{task.description}", markup=False)
    columns = SpinnerColumn(), BarColumn(), TaskProgressColumn(), line, TimeElapsedColumn()
    meter = Meter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("waiting", total=None)

        def show(batch: Batch) -> None:
            line = describe(batch, meter.update(batch))
            progress.update(task, description=line, completed=batch.counts.num_ended, total=batch.counts.total or None)

        yield show


@contextmanager
def _plain_lines(stream: TextIO) -> Iterator[Show]:
    meter = Meter()
    due = _every(LINE_PERIOD_S)

    def show(batch: Batch) -> None:
        figures = meter.update(batch)
        if due(batch):
            print(f"{batch.state}: {describe(batch, figures)}", file=stream, flush=True)

    yield show


@contextmanager
def _json_lines(stream: TextIO) -> Iterator[Show]:
    due = _every(LINE_PERIOD_S)

    def show(batch: Batch) -> None:
        if due(batch):
            print(json.dumps(batch_dict(batch)), file=stream, flush=True)

    yield show


def _every(period_s: float) -> Callable[[Batch], bool]:
    """Whether a line is due: the first, one a period where something has changed, and always the last."""
    next_s, last = 0.0, None

    def due(batch: Batch) -> bool:
        nonlocal next_s, last
        if batch == last or (time.monotonic() < next_s and not batch.is_ended):
            return False
        next_s, last = time.monotonic() + period_s, batch
        return True

    return due
