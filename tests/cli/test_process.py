"""What a dead child's log tells, and how large it grows."""

import json
from pathlib import Path

import pytest

from slipstream.stack import process
from slipstream.stack.process import bound_log, last_error


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ""),
        ([json.dumps({"level": "info", "event": "service.ready"})], ""),
        ([json.dumps({"level": "error", "event": "service.failed", "error": "no\nweights"}), ""], "no weights"),
        (
            [json.dumps({"level": "error", "event": "lock.taken"}), json.dumps({"level": "info", "event": "x"})],
            "lock.taken",
        ),
        (["Traceback (most recent call last):", "  ...", "KeyError: 'x'"], "KeyError: 'x'"),
        (["[1, 2]"], "[1, 2]"),
    ],
)
def test_last_error(tmp_path: Path, lines: list[str], expected: str) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    assert last_error(log) == expected


def test_an_earlier_start_is_not_quoted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("KeyError: 'x'\n")
    assert last_error(log, log.stat().st_size) == ""


def test_a_log_on_a_full_disk_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_LOG_BYTES", 100)
    log = tmp_path / "log"
    log.write_text("x" * 200)
    log.with_name("log.1").symlink_to("/dev/full")
    bound_log(log)
    assert log.stat().st_size == 0
