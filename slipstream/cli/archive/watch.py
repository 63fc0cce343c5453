"""Shows a batch until it ends: a progress bar on a terminal, plain lines in a pipe, or JSON."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from slipstream.cli.archive.client import ENDED, ArchiveClient
from slipstream.cli.archive.figures import Meter, describe, has_failures, num_ended, overall
from slipstream.cli.summary import message_dict
from slipstream.rpc.v1 import archive_pb2 as pb

JOBS_WITHOUT_RESULT = 5
"""Exit status of a command that waited for a batch which ended with jobs that have no result."""
LINE_PERIOD_S = 5.0
"""Most lines in a pipe are that far apart."""

Show = Callable[[pb.Batch], None]


async def watch(client: ArchiveClient, batch: str, view: AbstractContextManager[Show]) -> pb.Batch:
    """Shows every change until the batch has ended; its last state."""
    with view as show:
        last = pb.Batch()
        async with aclosing(client.watch(batch)) as snapshots:
            async for last in snapshots:
                show(last)
    return last


def exit_status(batch: pb.Batch) -> int:
    """What a command that waited for this batch ends with."""
    return JOBS_WITHOUT_RESULT if has_failures(batch) else 0


def choose_view(as_json: bool, stream: TextIO | None = None) -> AbstractContextManager[Show]:
    """The view that fits the request and what the stream (stdout, if none is given) is."""
    stream = stream or sys.stdout
    if as_json:
        return _json_lines(stream)
    console = Console(file=stream)
    return _bar(console) if console.is_terminal else _plain_lines(stream)


def batch_dict(batch: pb.Batch) -> dict[str, Any]:
    """The batch under the names of the contract, with the figures of its whole life once it has ended."""
    figures = overall(batch)
    return message_dict(batch) | {
        "state": state_name(batch),
        "videos_per_h": figures.videos_per_h,
        "tokens_per_s": figures.tokens_per_s,
        "speedup": figures.speedup,
    }


def state_name(batch: pb.Batch) -> str:
    """As users know it."""
    return pb.BatchState.Name(batch.state).removeprefix("BATCH_STATE_").lower()


@contextmanager
def _bar(console: Console) -> Iterator[Show]:
    columns = SpinnerColumn(), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    meter = Meter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("waiting", total=None)

        def show(batch: pb.Batch) -> None:
            line = describe(batch, meter.update(batch))
            progress.update(task, description=line, completed=num_ended(batch.counts), total=batch.counts.total or None)

        yield show


@contextmanager
def _plain_lines(stream: TextIO) -> Iterator[Show]:
    meter = Meter()
    due = _every(LINE_PERIOD_S)

    def show(batch: pb.Batch) -> None:
        figures = meter.update(batch)
        if due(batch):
            print(f"{state_name(batch)}: {describe(batch, figures)}", file=stream, flush=True)

    yield show


@contextmanager
def _json_lines(stream: TextIO) -> Iterator[Show]:
    due = _every(LINE_PERIOD_S)

    def show(batch: pb.Batch) -> None:
        if due(batch):
            print(json.dumps(batch_dict(batch)), file=stream, flush=True)

    yield show


def _every(period_s: float) -> Callable[[pb.Batch], bool]:
    """Whether a line is due: the first, one a period, and always the last."""
    next_s = 0.0

    def due(batch: pb.Batch) -> bool:
        nonlocal next_s
        if time.monotonic() < next_s and batch.state not in ENDED:
            return False
        next_s = time.monotonic() + period_s
        return True

    return due
