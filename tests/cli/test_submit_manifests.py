"""`slipstream archive submit` of manifests: their lines, from stdin too, and which of them are bad."""

import errno
import io
import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from slipstream.cli.archive.sources import Sources
from slipstream.client.batch_handles import make_item
from slipstream.errors import InvalidRequest
from tests.cli.fake_archive import FakeArchive
from tests.cli.test_archive_submit import only_batch, submit


def test_a_manifest_names_options_of_its_own(archive: FakeArchive, tmp_path: Path) -> None:
    manifest = tmp_path / "list.jsonl"
    lines = [
        {"path": "a.mp4", "prompt": "what", "max_new_tokens": 7},
        {"custom_id": "b", "source": "/abs/b.mp4", "sha256": "AB" * 32},
        {"url": "https://example.org/c.mp4"},
    ]
    manifest.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert submit(archive, manifest) == 0
    first, second, third = only_batch(archive).values()
    assert (first.custom_id, first.source) == ("a.mp4", str(tmp_path / "a.mp4"))
    assert (first.caption.prompt, first.caption.max_new_tokens) == ("what", 7)
    assert (second.custom_id, second.source, second.sha256) == ("b", "/abs/b.mp4", "ab" * 32)
    assert not second.HasField("caption")
    assert (third.custom_id, third.source) == ("https://example.org/c.mp4",) * 2


def test_an_address_that_cannot_be_fetched_is_no_path(
    archive: FakeArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "http://example.org/a.mp4"
    (manifest := tmp_path / "list.jsonl").write_text(json.dumps({"source": address}))
    queried = f"{address}?x=1"
    for word, told in ((address, address), (queried, queried), (manifest, f"{manifest} line 1: {address}")):
        assert submit(archive, word) == 2
        assert f"slipstream: {told}: an address begins with https://, s3://" in capsys.readouterr().err
    with pytest.raises(InvalidRequest, match="an address begins with https://"):
        make_item(address)
    assert not archive.batches


def test_what_was_handed_in_is_told_where_a_manifest_is_written_to_behind_its_check(
    archive: FakeArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"path": f"{number}.mp4"}) for number in range(700)]
    (manifest := tmp_path / "list.jsonl").write_text("\n".join(lines))
    check = Sources.check

    def check_and_change(sources: Sources) -> None:
        check(sources)
        manifest.write_text("\n".join([*lines[:600], "cut o"]))

    monkeypatch.setattr(Sources, "check", check_and_change)
    assert submit(archive, manifest) == 2
    assert len(only_batch(archive)) == 500
    told = capsys.readouterr().err
    assert f"slipstream: {manifest} line 601: not a JSON object in UTF-8" in told
    assert "slipstream: 500 items were handed in before this; the same command goes on behind them" in told


def test_a_manifest_on_stdin(archive: FakeArchive, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"path": "/a.mp4"}\n{"path": "b.mp4"}')))
        assert submit(archive, "-") == 0
    assert [item.source for item in only_batch(archive).values()] == ["/a.mp4", f"{Path.cwd()}/b.mp4"]


def test_a_stdin_that_cannot_be_kept_is_named(
    archive: FakeArchive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Closed, as a daemon's may be; or no folder takes temporary files, or its disk is full."""
    monkeypatch.setattr("sys.stdin", None)
    assert submit(archive, "-") == 2
    assert "slipstream: `-`: stdin is closed\n" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"path": "/a.mp4"}')))
    no_folder, full = Mock(side_effect=OSError(errno.ENOENT, "No usable folder")), Mock()
    full.return_value.write.side_effect = OSError(errno.ENOSPC, "No space left")
    for temporary_file, reason in ((no_folder, "No usable folder"), (full, "No space left")):
        monkeypatch.setattr("tempfile.TemporaryFile", temporary_file)
        assert submit(archive, "-") == 2
        said = capsys.readouterr().err
        assert f"cannot be kept until it is read again: {reason}; set TMPDIR to a folder with room" in said
    assert not archive.batches


def test_bad_lines_on_stdin_may_be_skipped(
    archive: FakeArchive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"path": "/a.mp4"}\nbad')))
    assert submit(archive, "-", "--skip-bad") == 2
    assert list(only_batch(archive)) == ["/a.mp4"]
    assert "stdin line 2: skipped: not a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("{}", "exactly one of source, path and url"),
        ('{"path": "a", "url": "https://b"}', "exactly one of source, path and url"),
        ('{"path": ""}', "path must be a text"),
        ('{"path": "\\ud800"}', "path must be a text"),
        ('{"path": "a\\u0000"}', "path must be a text"),
        ('{"path": "a", "custom_id": 7}', "custom_id must be a text"),
        ('{"path": "a", "custom_id": "\\u0007"}', "256 printable characters"),
        ('{"path": "' + "a" * 257 + '"}', "path is no custom_id"),
        ('{"url": "http://a"}', "https://"),
        ('{"path": "a", "prmpt": "x"}', "unknown key 'prmpt'"),
        ('{"path": "a", "request_id": "x"}', "unknown key 'request_id'"),
        ('{"path": "a", "num_frames": "many"}', "num_frames"),
        ('{"path": "a", "num_frames": -1}', "num_frames"),
        ('{"path": "a", "prompt": "\\ud800"}', ""),
        ('{"path": "a", "sha256": "12"}', "64 hexadecimal digits"),
        ('{"path": "' + "a" * 1_100_000 + '"}', "longer than"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_handed_in(
    archive: FakeArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, complaint: str
) -> None:
    manifest = tmp_path / "list.jsonl"
    manifest.write_text('{"path": "fine.mp4"}\n\n' + line)
    assert submit(archive, manifest) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"slipstream: {manifest} line 3: ")
    assert complaint in told
    assert archive.submits == 0


def test_bad_lines_may_be_skipped_and_the_others_are_handed_in(
    archive: FakeArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "list.jsonl"
    manifest.write_text('{"path": "a.mp4"}\nbad\n{"path": "b.mp4"}\n{"path": ""}\n')
    assert submit(archive, manifest, "--skip-bad") == 2
    assert list(only_batch(archive)) == ["a.mp4", "b.mp4"]
    told = capsys.readouterr()
    assert "2 added" in told.out
    assert [line.split(": ", 2)[1:] for line in told.err.splitlines() if ": skipped: " in line] == [
        [f"{manifest} line 2", "skipped: not a JSON object in UTF-8"],
        [f"{manifest} line 4", "skipped: path must be a text that is not empty"],
    ]
    assert "2 could not be handed in" in told.err
    manifest.write_text('{"path": "a.mp4"}\n{"path": "b.mp4"}\n')
    assert submit(archive, manifest, "--skip-bad") == 0, "repeated once it is mended, it adds nothing"
    assert len(only_batch(archive)) == 2
