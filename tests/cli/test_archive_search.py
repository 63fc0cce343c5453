"""`slipstream archive search` and `index`, over exports and over a batch of a fake archive."""

import json
import os
from pathlib import Path

import pytest

from slipstream.cli.app import run
from tests.cli.fake_archive import FakeArchive
from tests.cli.test_archive_commands import ask, hand_in

LINES = [
    {"custom_id": "a.mp4", "source": "/v/a.mp4", "text": "A red\x1b car.", "receipt": {"video": {"duration_s": 2.5}}},
    {
        "custom_id": "f.mkv",
        "source": "/v/f.mkv",
        "kind": "film",
        "parts": [{"segment": 0, "start_s": 61.5, "end_s": 70.0, "text": "Two red cars and a boat."}],
    },
    {"custom_id": "d.pdf", "source": "/v/d.pdf", "kind": "document", "parts": [{"page": 3, "text": "A boat."}]},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "captions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_file_second_and_text(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["archive", "search", "red car", "--in", str(export)]) == 0
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == [
        "a.mp4  00:00:00.000  A red\N{REPLACEMENT CHARACTER} car.",
        "f.mkv  00:01:01.500  Two red cars and a boat.",
    ]
    assert shown.err == "slipstream: 2 found\n"
    assert run(["archive", "search", "boat", "--in", str(export), "--json"]) == 0
    assert {"custom_id": "d.pdf", "source": "/v/d.pdf", "page": 3, "text": "A boat."} in [
        json.loads(line) for line in capsys.readouterr().out.splitlines()
    ]
    assert run(["archive", "search", "submarine", "--in", str(export)]) == 1
    assert run(["archive", "search", '"red', "--in", str(export)]) == 2
    assert "not closed" in capsys.readouterr().err


def test_an_index_is_built_once_and_anew_when_the_export_is_another(
    export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = export.with_name("captions.jsonl.index")
    for _ in range(2):
        assert run(["archive", "search", "boat", "--in", str(export)]) == 0
        built = index.stat().st_ino
    assert index.stat().st_ino == built
    with export.open("a") as file:
        file.write(json.dumps({"custom_id": "new.mp4", "text": "A submarine."}) + "\n")
    assert run(["archive", "search", "submarine", "--in", str(export)]) == 0
    index.write_bytes(b"damaged")
    assert run(["archive", "search", "submarine", "--in", str(export)]) == 0
    assert capsys.readouterr().out.count("new.mp4") == 2


def test_damaged_lines_are_counted(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = export.read_text()
    export.write_text(whole[:40] + "\n" + whole + "\n[1]\n" + json.dumps({"custom_id": "failed", "error": "bad"}))
    for _ in range(2):  # built, and found again
        assert run(["archive", "search", "red car", "--in", str(export)]) == 0
        told = capsys.readouterr().err.splitlines()
        assert told[0] == "slipstream: 2 found" and "2 lines are not of an export" in told[1]
    index = ["archive", "index", str(export), "--output", str(tmp_path / "all.index"), "--json"]
    assert run(index) == 0
    assert json.loads(capsys.readouterr().out) == {"passages": 3, "damaged_lines": 2}


def test_several_exports_and_an_index_of_them(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"custom_id": "o.mp4", "text": "A boat in the rain."}) + "\n")
    assert run(["archive", "search", "boat", "--in", str(export), "--in", str(other)]) == 0
    assert capsys.readouterr().out.count("\n") == 3
    index = tmp_path / "all.index"
    assert run(["archive", "index", str(export), str(other), "--output", str(index)]) == 0
    assert "4 texts" in capsys.readouterr().out
    assert run(["archive", "search", "boat", "--in", str(index), "--limit", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 2 and shown.err == "slipstream: 3 found, 2 shown\n"


def test_an_index_takes_the_place_of_no_export(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(export)
    before = export.read_bytes()
    assert run(["archive", "index", str(tmp_path / "link"), f"file://{export}", "--output", str(export)]) == 2
    assert "which is read" in capsys.readouterr().err and export.read_bytes() == before


def test_a_table_among_exports_is_named_and_an_older_index_stays(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, index = tmp_path / "out.csv", tmp_path / "all.index"
    table.write_text('"custom_id","text"\n"a.mp4","A red car."\n')
    assert run(["archive", "index", str(export), "--output", str(index)]) == 0
    before = index.read_bytes()
    assert run(["archive", "index", str(export), str(table), "--output", str(index)]) == 2
    assert f"{table} has no text; give JSON lines" in capsys.readouterr().err
    assert index.read_bytes() == before


def test_what_cannot_be_searched_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n")
    assert run(["archive", "search", "x1", "--in", str(empty)]) == 2
    assert run(["archive", "search", "x1", "--in", str(tmp_path / "none")]) == 2
    assert run(["archive", "search", "x1"]) == 2
    assert run(["archive", "search", "x1", "batch"]) == 2
    said = capsys.readouterr().err
    assert "has no text" in said and "cannot read" in said and "say where to search" in said and "--gateway" in said
    assert not os.path.exists(f"{empty}.index")


def test_a_batch_is_indexed_in_the_users_cache(
    archive: FakeArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(archive, tmp_path, "mine", "a.mp4", "bad.mp4", "page.pdf")
    capsys.readouterr()
    assert ask(archive, "search", "circle moves", "mine") == 0
    assert capsys.readouterr().out.startswith("a.mp4  00:00:00.000  A red circle moves left.")
    assert ask(archive, "search", "page", "mine", "--json") == 0
    pages = [json.loads(line)["page"] for line in capsys.readouterr().out.splitlines()]
    assert pages == [1, 2, 3]
    (index,) = (tmp_path / "cache" / "slipstream" / "search").iterdir()
    built = index.stat().st_ino
    assert ask(archive, "search", "page", "mine") == 0 and index.stat().st_ino == built
    assert index.parent.stat().st_mode & 0o077 == 0
    hand_in(archive, tmp_path, "mine", "a.mp4", "more.mp4")
    assert ask(archive, "search", "circle", "mine") == 0
    assert "more.mp4" in capsys.readouterr().out
