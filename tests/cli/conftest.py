"""A running fake gateway for the tests of the command line."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.fake_archive import FakeArchive
from tests.cli.fake_gateway import FakeGateway


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as running:
        yield running


@pytest.fixture
def archive() -> Iterator[FakeArchive]:
    with FakeArchive() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three videos, two of them deeper, among things that are none."""
    folder = tmp_path / "videos"
    for name in ("b.mp4", "deep/a.MKV", "deep/er/c.webm", "notes.txt", ".hidden.mp4", ".git/d.mp4"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


@pytest.fixture(autouse=True)
def _run_dirs_belong_to_pytest(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack that fails keeps its logs: not in the machine's temporary folder after a test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("run")))
