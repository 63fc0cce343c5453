"""Only regular files below the allowed roots are opened, and nothing is told about others."""

import errno
import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from slipstream.errors import InvalidRequest, Overloaded, VideoNotFound
from slipstream.video.paths import open_video_path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "clip.mp4").write_bytes(b"inside")
    (tmp_path / "secret.mp4").write_bytes(b"outside")
    return folder


def test_opens_below_a_root_by_relative_or_absolute_path(root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    roots = [tmp_path / "missing", tmp_path / "other", root]
    for path in ("inner/clip.mp4", "./inner//clip.mp4", str(root / "inner" / "clip.mp4")):
        with open_video_path(path, roots) as video:
            assert video.read() == b"inside"
            assert not os.get_inheritable(video.fileno())


def test_a_root_may_be_a_link_and_so_may_folders_inside(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    (root / "again").symlink_to(root / "inner")
    for path in (str(link / "inner" / "clip.mp4"), "again/clip.mp4"):
        with open_video_path(path, [link]) as video:
            assert video.read() == b"inside"


def test_outside_looks_the_same_whether_or_not_it_exists(root: Path, tmp_path: Path) -> None:
    (root / "out").symlink_to(tmp_path)
    (root / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    (root / "dangling.mp4").symlink_to(tmp_path / "none.mp4")
    paths = [str(tmp_path / "secret.mp4"), str(tmp_path / "none.mp4"), "out/secret.mp4", "out/none.mp4"]
    paths += ["link.mp4", "dangling.mp4", "none.mp4", "%2e%2e/secret.mp4", "inner/clip.mp4/more", "a" * 5000]
    paths += ["/dev/zero", "file:///etc/passwd", "\ud800.mp4"]
    messages = set()
    for path in paths:
        with pytest.raises(VideoNotFound) as refused:
            open_video_path(path, [root])
        messages.add(str(refused.value).replace(repr(path), "PATH"))
    assert len(messages) == 1


@pytest.mark.parametrize("path", ["", ".", "clip\0.mp4", "../secret.mp4", "inner/../../secret.mp4"])
def test_impossible_paths_are_refused(root: Path, path: str) -> None:
    with pytest.raises(InvalidRequest):
        open_video_path(path, [root])


def test_folders_and_pipes_are_refused_at_once(root: Path) -> None:
    os.mkfifo(root / "pipe.mp4")
    started_s = time.monotonic()
    for path in ("pipe.mp4", "inner", str(root)):
        with pytest.raises(InvalidRequest, match="folder, pipe or device"):
            open_video_path(path, [root])
    assert time.monotonic() - started_s < 30


def test_a_file_is_not_missing_where_nothing_can_be_opened_now(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said not to be there, and a job of the archive had failed for good."""
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    with pytest.raises(Overloaded, match="no room now: Too many open files"):
        open_video_path("any.mp4", [root])


def test_refusals_leak_no_descriptor(root: Path, tmp_path: Path) -> None:
    (root / "out").symlink_to(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for path in ("inner", "out/secret.mp4"):
        with pytest.raises((InvalidRequest, VideoNotFound)):
            open_video_path(path, [root])
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_roots_means_no_file(root: Path) -> None:
    with pytest.raises(VideoNotFound):
        open_video_path(str(root / "inner" / "clip.mp4"), [])
