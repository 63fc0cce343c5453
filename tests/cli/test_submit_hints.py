"""`slipstream archive submit --hints-from`: the texts of an earlier batch go along with items of the same content."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.cli.fake_archive import FakeArchive
from tests.cli.test_archive_submit import only_batch, submit


def write_captions(path: Path, *captions: tuple[bytes, str]) -> Path:
    """An export: the texts that were said of these contents, among lines that say nothing."""
    records = [
        {"text": text, "receipt": {"video_sha256": hashlib.sha256(content).hexdigest()}} for content, text in captions
    ]
    others = ['{"text": null}', "no JSON", "[1]", '{"text": "of what?", "receipt": {}}', '{"text": "\\ud800"}', ""]
    path.write_text("\n".join([*others, *map(json.dumps, records)]))
    return path


def test_old_captions_are_hints_for_the_same_content(
    archive: FakeArchive, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "deep/a.MKV").write_bytes(b"another")
    old = write_captions(
        tmp_path / "old.jsonl", (b"x", "older"), (b"other", "not here"), (b"x", "newer"), (b"x", "newer")
    )
    assert submit(archive, folder, "--hints-from", old) == 0
    hints = {name: list(item.caption.prediction) for name, item in only_batch(archive).items()}
    assert hints == {"b.mp4": ["newer", "older"], "deep/a.MKV": [], "deep/er/c.webm": ["newer", "older"]}
    assert "2 of 3 items have hints" in capsys.readouterr().err
    assert submit(archive, folder, "--hints-from", old) == 0
    assert "0 added, 3 known" in capsys.readouterr().out
    write_captions(old, (b"x", "newest"))
    assert submit(archive, folder, "--hints-from", old) == 0
    assert len(archive.batches) == 2, "other hints are another batch"


def test_a_manifest_knows_the_content_of_what_is_not_here(archive: FakeArchive, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    manifest = tmp_path / "list.jsonl"
    lines = [
        {"url": "https://example.org/a.mp4", "sha256": digest.upper()},
        {"url": "https://example.org/b.mp4"},
        {"path": "gone.mp4"},
        {"custom_id": "own", "url": "https://example.org/a.mp4", "sha256": digest, "prediction": ["my own"]},
    ]
    manifest.write_text("\n".join(map(json.dumps, lines)))
    old = write_captions(tmp_path / "old.jsonl", (b"x", "a text"), (b"x", "y" * 70_000))
    assert submit(archive, manifest, "--hints-from", old) == 0
    hints = [list(item.caption.prediction) for item in only_batch(archive).values()]
    assert hints == [[], [], [], ["my own"]], "the latest text is longer than a job may have"
    write_captions(old, (b"x", "y" * 70_000), (b"x", "a text"))
    assert submit(archive, manifest, "--hints-from", old, "--name", "again") == 0
    assert list(archive.batches["again"].items["https://example.org/a.mp4"].caption.prediction) == ["a text"]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b'{"text": "no receipt"}\n', b"[" * 100_000])
def test_a_file_without_captions_is_refused(
    archive: FakeArchive, folder: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.jsonl").write_bytes(content)
    assert submit(archive, folder, "--hints-from", tmp_path / "old.jsonl") == 2
    assert "holds no captions" in capsys.readouterr().err
    assert submit(archive, folder, "--hints-from", tmp_path / "missing.jsonl") == 2
    assert "cannot read" in capsys.readouterr().err
    assert not archive.batches


def test_a_method_that_takes_no_hints_is_refused(
    archive: FakeArchive, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_captions(tmp_path / "old.jsonl", (b"x", "a text"))
    assert submit(archive, folder, "--hints-from", old, "--method", "slipstream") == 2
    assert "drafts from no hints" in capsys.readouterr().err
