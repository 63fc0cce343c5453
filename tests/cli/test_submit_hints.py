"""`slipstream archive submit --hints-from`: the texts of an earlier batch go along with items of the same content."""

import hashlib
import json
import threading
from pathlib import Path

import pytest

from slipstream.archive.messages import MAX_ITEM_HINT_BYTES, BatchItem
from slipstream.cli.archive import old_captions
from slipstream.cli.archive.old_captions import LONGEST_LINE, MAX_TEXTS, OldCaptions
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
    assert hints == [["y" * MAX_ITEM_HINT_BYTES], [], [], ["my own"]], "as much of the latest as a job may have"


class LeftSoon(threading.Event):
    """Set at the second look."""

    num_looks = 0

    def is_set(self) -> bool:
        self.num_looks += 1
        return self.num_looks > 1


def test_a_file_is_read_no_further_when_its_item_is_not_wanted_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_captions, "BLOCK_BYTES", 1)
    (tmp_path / "a.mp4").write_bytes(b"xyz")
    items = [BatchItem("a", str(tmp_path / "a.mp4"))]
    captions = OldCaptions("", {hashlib.sha256(b"xyz").hexdigest(): ["a text"]})
    is_left = LeftSoon()
    assert [dict(item.caption) for item in captions.hinted(items, is_left)] == [{}] and is_left.num_looks == 2
    captions = OldCaptions("", captions.texts)
    (hinted,) = captions.hinted(items, threading.Event())
    assert hinted.caption == {"prediction": ("a text",)}


def test_texts_too_long_for_a_job_are_cut_between_characters(
    archive: FakeArchive, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many whole texts as fit, the latest first, and then a beginning; older ones not at all."""
    long = "\N{EURO SIGN}" * 30_000  # 3 bytes each
    old = write_captions(tmp_path / "old.jsonl", (b"x", "oldest"), (b"x", long), (b"x", "a text"))
    assert submit(archive, folder, "--hints-from", old) == 0
    for item in only_batch(archive).values():
        whole, cut = item.caption.prediction
        assert whole == "a text" and long.startswith(cut) and len(cut) == (MAX_ITEM_HINT_BYTES - len(whole)) // 3
        assert sum(len(text.encode()) for text in item.caption.prediction) <= MAX_ITEM_HINT_BYTES
    assert "3 of 3 items have hints, 3 of them cut to 65,536 bytes" in capsys.readouterr().err
    write_captions(old, (b"x", "no room"), (b"x", "z" * MAX_ITEM_HINT_BYTES))
    assert submit(archive, folder, "--hints-from", old, "--name", "full") == 0
    assert {len(item.caption.prediction) for item in archive.batches["full"].items.values()} == {1}


def test_lines_that_give_no_hint_are_counted(
    archive: FakeArchive, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_captions(tmp_path / "old.jsonl", *((b"x", f"text {n}") for n in range(MAX_TEXTS + 1)))
    (found,) = map(json.loads, old.read_text().splitlines()[-1:])
    long = json.dumps(found | {"text": "y" * LONGEST_LINE})
    old.write_text(f"{long}\n{old.read_text()}\n\n{long}")
    assert submit(archive, folder, "--hints-from", old) == 0
    assert list(only_batch(archive)["b.mp4"].caption.prediction) == ["text 4", "text 3", "text 2", "text 1"]
    (told,) = (line for line in capsys.readouterr().err.splitlines() if "--hints-from" in line)
    told, _, reasons = told.partition(" lines were left out: ")
    assert told == "slipstream: --hints-from: 8 of 12"
    assert set(reasons.split(", ")) == {
        "2 longer than 4 MiB",
        "2 without a text",
        "1 no JSON",
        "1 without a receipt that names the file",
        "1 whose text is not valid Unicode",
        "1 older than the latest 4 of the same file",
    }


def test_nothing_is_said_of_lines_where_all_give_hints(
    archive: FakeArchive, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_captions(tmp_path / "old.jsonl", (b"x", "a text"))
    old.write_text(old.read_text().splitlines()[-1])
    assert submit(archive, folder, "--hints-from", old) == 0
    assert "3 of 3 items have hints\n" in (said := capsys.readouterr().err) and "lines were left out" not in said


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
