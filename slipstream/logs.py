"""Structured logs: one JSON object a line on stderr, with a bound request id; and what is kept out of them."""

import asyncio
import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections import Counter
from typing import Any, TextIO, TypeVar

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure_logs(service: str, level: str = "info") -> None:
    """Sets the process's log format, also for libraries. Events are `noun.verb`; callers bind `request_id`."""
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    stream: Any = LogStream(sys.stderr.stream if isinstance(sys.stderr, PrintedLines) else sys.stderr)
    structlog.configure(
        processors=[*processors, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(stream),  # a line in one write: ranks share the stream
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    libraries = logging.StreamHandler(stream)
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=processors,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[libraries], level=logging.WARNING, force=True)
    logging.captureWarnings(True)


def log_all_output() -> None:
    """Lets nothing but events reach stderr in this process: what libraries print becomes one event a line, and an
    exception that nobody caught becomes one event."""
    _hold_streams()
    sys.stderr = PrintedLines(sys.stderr)
    sys.excepthook = lambda kind, error, traceback: get_logger().critical(
        "process.crashed", error=repr(error), exc_info=(kind, error, traceback)
    )
    threading.excepthook = lambda thread: get_logger().error(
        "thread.crashed", error=repr(thread.exc_value), exc_info=thread.exc_value
    )


def _hold_streams() -> None:
    """Streams that whoever started this process has closed (`2>&-`) lead nowhere from now on. Their numbers would be
    given to sockets and files, into which libraries then print."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(null)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


class LogStream(io.TextIOBase):
    """Where lines of the log go. One that cannot be written is left out: a full disk, or a reader who is gone, fails
    nobody's call."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class PrintedLines(io.TextIOBase):
    """Stands in for stderr: every line written becomes an event."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._unfinished = ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.stream.fileno()

    def write(self, text: str) -> int:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in filter(str.strip, lines):
            get_logger().warning("stderr.printed", line=line)
        return len(text)


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """A logger that carries what is bound to the current task."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def bound_request_id() -> str:
    """The request that the current task works on; empty where it works on none."""
    return str(structlog.contextvars.get_contextvars().get("request_id") or "")


LOG_WINDOW_S = 10.0
MAX_LINES_OF_ONE, MAX_LINES = 30, 100
"""In that time, of what strangers may cause as often as they like."""


class LineBudget:
    """How many lines of the log one caller, and all together, may cause in `LOG_WINDOW_S`. The others are counted."""

    def __init__(self) -> None:
        self._ends = 0.0
        self._lines: Counter[str] = Counter()
        self._left_out = 0

    def spend(self, caller: str) -> int | None:
        """How many lines were left out since the last one; None: this one is to be left out as well."""
        now = time.monotonic()
        if now >= self._ends:
            self._lines.clear()
            self._ends = now + LOG_WINDOW_S
        if self._lines[caller] >= MAX_LINES_OF_ONE or self._lines.total() >= MAX_LINES:
            self._left_out += 1
            return None
        self._lines[caller] += 1
        left_out, self._left_out = self._left_out, 0
        return left_out


# -- unheard failures -------------------------------------------------------------------------------------------------

FutureT = TypeVar("FutureT", bound="asyncio.Future[Any]")


def heard(task: FutureT) -> FutureT:
    """`task`, whose failure counts as heard. Whoever waits for it may be cancelled just as it fails, and the event loop
    would log a failure that concerns nobody any more as an error."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
