"""Runs a benchmark's coroutine: progress to stderr, a clean end on SIGTERM. Knows no benchmark."""

import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer

from slipstream.cli.common import run_async

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. A signal that ends this process ends the processes that `work` started, too."""
    try:
        return run_async(work)
    except typer.Exit as stopped:
        sys.exit(stopped.exit_code)


def say(line: str) -> None:
    """Tells how far the run is."""
    print(line, file=sys.stderr, flush=True)
