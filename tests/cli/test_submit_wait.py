"""`slipstream archive submit` while it waits: what it keeps where it is interrupted, or results cannot be written."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.app import run
from slipstream.cli.archive.output import export
from slipstream.errors import Overloaded
from tests.cli.fake_archive import FakeArchive
from tests.cli.test_archive_submit import submit


def test_an_interrupted_wait_keeps_what_is_done(archive: FakeArchive, folder: Path, tmp_path: Path) -> None:
    (folder / "stuck.mp4").write_bytes(b"x")
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "slipstream.cli", "archive", "submit", str(folder), "--output", str(output)]
    process = subprocess.Popen([*command, "--gateway", archive.address], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("in_progress"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted: batch batch-0 goes on" in errors
    assert "Traceback" not in errors
    assert len(output.read_text().splitlines()) == 3
    (key,) = archive.batches
    assert run(["archive", "cancel", key, "--gateway", archive.address]) == 0
    assert submit(archive, folder, "--output", output) == 5
    assert len(output.read_text().splitlines()) == 3


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_interruption_that_nobody_hears_keeps_what_is_done(
    archive: FakeArchive, folder: Path, tmp_path: Path, is_terminal: bool
) -> None:
    """As when Ctrl-C also ends `tee`, or a terminal is closed."""
    (folder / "stuck.mp4").write_bytes(b"x")
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "slipstream.cli", "archive", "submit", str(folder), "--output", str(output)]
    heard, told = os.openpty() if is_terminal else os.pipe()
    process = subprocess.Popen([*command, "--gateway", archive.address], stderr=told)
    os.close(told)
    seen = b""
    while b"done 0 of 4" not in seen:
        seen += os.read(heard, 4096)
    os.close(heard)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert len(output.read_text().splitlines()) == 3


@pytest.mark.parametrize(("num_failures", "status"), [(2, 0), (3, 4)])
def test_only_the_last_export_ends_a_wait_by_failing(
    archive: FakeArchive,
    folder: Path,
    tmp_path: Path,
    num_failures: int,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of three: one for each snapshot, and the last."""
    left = [OSError(28, "No space left on device"), Overloaded("busy"), Overloaded("full")][:num_failures]

    async def export_later(*words: Any) -> Counter[str]:
        if left:
            raise left.pop(0)
        return await export(*words)

    monkeypatch.setattr("slipstream.cli.archive.submit.FIRST_EXPORT_S", -1)
    monkeypatch.setattr("slipstream.cli.archive.submit.EXPORT_SHARE", 1e9)
    monkeypatch.setattr("slipstream.cli.archive.submit.export", export_later)
    assert submit(archive, folder, "--output", tmp_path / "out.jsonl") == status
    told = capsys.readouterr().err
    assert "No space left on device" in told and "is tried again: busy" in told and not left
    assert (tmp_path / "out.jsonl").exists() == (status == 0)
