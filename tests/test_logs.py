"""The log format: one JSON object a line, whoever speaks."""

import asyncio
import errno
import io
import json
import logging
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from slipstream.errors import InvalidConfig
from slipstream.logs import configure_logs, get_logger, log_all_output


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root, handlers, level = logging.getLogger(), logging.getLogger().handlers[:], logging.getLogger().level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def entries(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("target")
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        get_logger().info("session.opened", num_frames=3)
    (entry,) = entries(capsys)
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {
        "event": "session.opened",
        "level": "info",
        "service": "target",
        "request_id": "r1",
        "num_frames": 3,
    }


def test_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("target", "warning")
    get_logger().info("session.opened")
    get_logger().warning("draft.lost")
    assert [entry["event"] for entry in entries(capsys)] == ["draft.lost"]


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes write to one file, and no line of one begins within a line of another."""
    writes: list[str] = []
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", writes.append)
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logs("target")
    get_logger().info("session.opened")
    logging.getLogger("grpc").warning("a library")
    assert len(writes) == 2 and all(line.count("\n") == 1 and line.endswith("}\n") for line in writes)


def test_a_line_that_cannot_be_written_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full, or whoever read the log is gone: calls go on, and so does the log when there is room again."""

    class FullDisk(io.StringIO):
        is_full = True

        def flush(self) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")

    stream = FullDisk()
    monkeypatch.setattr(sys, "stderr", stream)
    own_process(monkeypatch)
    configure_logs("target")
    get_logger().info("session.opened")
    logging.getLogger("library").warning("of a library")
    sys.stderr.write("printed\n")
    stream.is_full = False
    get_logger().info("session.closed")
    assert json.loads(stream.getvalue().splitlines()[-1])["event"] == "session.closed"


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_service_whose_streams_are_closed_ends_as_any_other(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" -m slipstream.services.gateway --listen nowhere {closed}', sys.executable]
    assert subprocess.run(command, check=False).returncode == InvalidConfig.exit_code


def test_line_breaks_stay_inside_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("target")
    get_logger().error("service.failed", error="one\ntwo\u2028three")
    (entry,) = entries(capsys)
    assert entry["error"] == "one\ntwo\u2028three"


def test_a_traceback_is_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("target")
    try:
        raise RuntimeError("on purpose")
    except RuntimeError:
        get_logger().exception("request.failed")
    (entry,) = entries(capsys)
    assert "RuntimeError: on purpose" in entry["exception"]
    assert entry["level"] == "error"


def test_libraries_speak_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("draft")
    logging.getLogger("some.library").warning("careful: %d", 7)
    logging.getLogger("some.library").info("never mind")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logs("draft")  # a second time, as a service does once it knows its level
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    careful, old = entries(capsys)
    assert (careful["event"], careful["level"], careful["service"]) == ("careful: 7", "warning", "draft")
    assert "DeprecationWarning: old" in old["event"]


def test_an_exception_that_nobody_retrieves(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("gateway")

    async def main() -> None:
        asyncio.get_running_loop().call_exception_handler({"message": "lost", "exception": ValueError("on purpose")})

    asyncio.run(main())
    (entry,) = entries(capsys)
    assert entry["event"].startswith("lost") and "ValueError: on purpose" in entry["exception"]


def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `run_service` begins. Called in a test's body, as pytest puts its own stderr back before that."""
    for owner, name in ((sys, "stderr"), (sys, "excepthook"), (threading, "excepthook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    log_all_output()


def test_what_a_library_prints_is_one_event_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_process(monkeypatch)
    configure_logs("target")
    configure_logs("target", "warning")
    try:
        raise ValueError("once")
    except ValueError:
        traceback.print_exc()
    sys.stderr.write("half a ")
    sys.stderr.write("line\n\n")
    printed = entries(capsys)
    assert {(entry["event"], entry["level"]) for entry in printed} == {("stderr.printed", "warning")}
    assert printed[0]["line"].startswith("Traceback")
    assert [entry["line"] for entry in printed[-2:]] == ["ValueError: once", "half a line"]


def test_an_exception_that_nobody_caught_is_one_event(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_process(monkeypatch)
    configure_logs("target")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    try:
        raise ValueError("last")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    in_thread, at_the_end = entries(capsys)
    assert (in_thread["event"], in_thread["level"]) == ("thread.crashed", "error")
    assert "ZeroDivisionError" in in_thread["exception"]
    assert (at_the_end["event"], at_the_end["error"]) == ("process.crashed", "ValueError('last')")
