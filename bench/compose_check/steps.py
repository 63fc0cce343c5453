"""Steps with their seconds, and commands with their limits. Knows no container."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.running import say

SHOWN_LINES = 25
"""Of the output of a command that failed."""


class CheckFailed(Exception):
    """A step did not do what it should; the message says what to look at."""


class Steps:
    """What was done, in order, and how long each step took."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """Times a step. What is put into the row that it yields is reported with it."""
        say(f"{name} ...")
        row: dict[str, Any] = {"step": name, "ok": False}
        self.rows.append(row)
        started = time.monotonic()
        try:
            yield row
            row["ok"] = True
        finally:
            row["seconds"] = round(time.monotonic() - started, 1)
            say(f"{name}: {'done' if row['ok'] else 'FAILED'} after {row['seconds']} s")


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    log: Path | None = None,
    merge: bool = False,
) -> str:
    """What the command printed; with `merge`, its errors too. All of it goes to `log` where one is given. Raises
    `CheckFailed` when it fails or takes longer than `timeout_s`; then all that it started is ended."""
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        env={**os.environ, **(environ or {})},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise CheckFailed(f"{_shown(words)} took longer than {timeout_s:g} s\n{_tail(output + errors)}") from None
    if log is not None:
        log.write_text(output + errors)
    if process.returncode:
        hint = f"; all of it is in {log}" if log else ""
        raise CheckFailed(f"{_shown(words)} ended with {process.returncode}{hint}\n{_tail(output + errors)}")
    return output + errors if merge else output


def works(command: Sequence[str | Path], *, timeout_s: float, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the command can be run and ends well."""
    try:
        run(command, timeout_s=timeout_s, environ=environ)
    except (CheckFailed, OSError):
        return False
    return True


def wait_until(what: str, is_so: Callable[[], bool], timeout_s: float, look_at: str, every_s: float = 0.5) -> float:
    """Seconds until `is_so`. Raises `CheckFailed`, which says what to look at, after `timeout_s`."""
    started = time.monotonic()
    while not is_so():
        if time.monotonic() - started > timeout_s:
            raise CheckFailed(f"waited {timeout_s:g} s until {what}; look at {look_at}")
        time.sleep(every_s)
    return time.monotonic() - started


def _shown(words: Sequence[str]) -> str:
    line = " ".join(words)
    return line if len(line) < 300 else line[:300] + " ..."


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-SHOWN_LINES:])
