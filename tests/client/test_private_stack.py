"""Captioners with a stack of their own, of services without models: it starts, and it is always ended."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

import slipstream
from slipstream.client import async_captioner
from slipstream.errors import InvalidRequest, ModelNotUsable
from slipstream.stack.local import StackOptions
from tests.cli.fake_gateway import TEXT
from tests.support.processes import our_children

ROOT = Path(__file__).resolve().parents[2]
MODULES = dict.fromkeys(("target", "draft", "gateway"), "tests.cli.fake_service")


_others: set[int] = set()
"""Children of this process that belong to tests before."""


@pytest.fixture(autouse=True)
def _know_the_others() -> None:
    _others.clear()
    _others.update(_children())


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Of a target and a draft, for the fake services."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(async_captioner, "StackOptions", partial(StackOptions, modules=MODULES))
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text("{}")
    return tmp_path / "target", tmp_path / "draft"


def _children() -> set[int]:
    """Those that the test started."""
    return our_children() - _others


def _wait_until_gone(folder: Path, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while (_children() or list(folder.glob("slipstream-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _children() and not list(folder.glob("slipstream-*"))


def test_it_ends_with_the_block(folders: tuple[Path, Path]) -> None:
    with slipstream.Captioner(*folders) as captioner:
        assert len(_children()) == 3
        assert captioner.caption(b"good").text == TEXT
    assert not _children() and not list(folders[0].parent.glob("slipstream-*"))
    with pytest.raises(InvalidRequest, match="closed"):
        captioner.caption(b"good")


def test_it_ends_with_the_last_reference(folders: tuple[Path, Path]) -> None:
    captioner = slipstream.Captioner(*folders)
    assert captioner.caption(b"good").text == TEXT
    del captioner
    _wait_until_gone(folders[0].parent)


def test_without_a_draft(folders: tuple[Path, Path]) -> None:
    with slipstream.Captioner(folders[0]):
        assert len(_children()) == 2


async def test_the_asynchronous_twin_starts_it_with_the_first_caption(folders: tuple[Path, Path]) -> None:
    captioner = slipstream.AsyncCaptioner(*folders)
    assert not _children()
    assert (await captioner.caption(b"good")).text == TEXT
    await captioner.close()
    assert not _children()


async def test_the_asynchronous_twin_ends_with_its_last_reference_too(folders: tuple[Path, Path]) -> None:
    captioner = slipstream.AsyncCaptioner(*folders)
    stream = captioner.stream(b"good")
    del captioner
    assert [str(piece) async for piece in stream] and len(_children()) == 3
    del stream
    await asyncio.to_thread(_wait_until_gone, folders[0].parent)


def test_a_model_that_is_not_there(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    with pytest.raises(ModelNotUsable, match="nowhere"):
        slipstream.Captioner(tmp_path / "nowhere")
    assert not _children()


def test_a_program_that_just_ends_leaves_nothing(folders: tuple[Path, Path]) -> None:
    script = f"""
from functools import partial
import slipstream
from slipstream.client import async_captioner
async_captioner.StackOptions = partial(async_captioner.StackOptions, modules={MODULES!r})
captioner = slipstream.Captioner({str(folders[0])!r}, {str(folders[1])!r})
print(captioner.caption(b"good").num_tokens)
"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": tempfile.gettempdir()}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("5\n", "")
    assert not list(folders[0].parent.glob("slipstream-*"))
