"""Documents of the archive on the command line: what is shown of them, and what their pages become on disk."""

import csv
import io
import json
from pathlib import Path

import pytest

from slipstream.cli.app import run
from slipstream.rpc.v1 import archive_pb2
from tests.cli.fake_archive import FakeArchive

PAGES = ["Page 1\x1b.", "Page 2\x1b.", "Page 3\x1b."]


@pytest.fixture
def batch(archive: FakeArchive, tmp_path: Path) -> str:
    """A document, one whose last page is torn, and a video."""
    manifest = tmp_path / "list.jsonl"
    names = ("deep/a.pdf", "torn.pdf", "v.mp4")
    manifest.write_text("".join(json.dumps({"path": f"/{name}", "custom_id": name}) + "\n" for name in names))
    assert run(["archive", "submit", str(manifest), "--name", "mine", "--gateway", archive.address]) == 0
    return "mine"


def ask(archive: FakeArchive, command: str, *words: object) -> int:
    return run(["archive", command, *map(str, words), "--gateway", archive.address])


def test_status_says_how_many_pages_are_read(
    archive: FakeArchive, batch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert ask(archive, "status", batch) == 0
    first, problem = capsys.readouterr().out.splitlines()
    assert first.startswith("batch-0 completed: done 2 of 3, 1 failed, 5 of 6 parts, ")
    assert problem == "  failed torn.pdf: page 3 cannot be opened (2 of 3 pages are kept)"
    assert ask(archive, "status", batch, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["parts_done"], document["parts_total"], document["problems"][0]["parts_done"]) == (5, 6, 2)
    (found,) = archive.batches.values()
    found.jobs["torn.pdf"].kind = archive_pb2.JOB_KIND_FILM
    assert ask(archive, "status", batch) == 0
    assert capsys.readouterr().out.endswith(" (2 of 3 parts are kept)\n"), "a segment has a part for each prompt"


def test_lines_carry_the_pages(archive: FakeArchive, batch: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert ask(archive, "export", batch, "--output", output) == 0
    document, video = map(json.loads, output.read_text().splitlines())
    assert (document["kind"], document["parts_done"], document["parts_total"]) == ("document", 3, 3)
    assert document["text"] == "\n\n".join(PAGES) and document["receipt"]["video_sha256"] == "ef" * 32
    assert [part["text"] for part in document["parts"]] == PAGES
    first = document["parts"][0]
    assert (first["page"], first["width"], first["dpi"], first["receipt"]["text_sha256"]) == (1, 30, 150.0, "aa" * 32)
    assert first["regions"] == [
        {"order": 0, "kind": "text", "box": [1, 2, 9, 9], "text": "ocr", "score": 0.5, "origin": "ocr"}
    ]
    assert "parts" not in video and "kind" not in video
    (torn,) = map(json.loads, output.with_name("out.jsonl.errors.jsonl").read_text().splitlines())
    assert (torn["text"], torn["error"]) == (None, "page 3 cannot be opened")
    assert [part["text"] for part in torn["parts"]] == PAGES[:2], "what was read is not lost"


def test_a_table_has_a_row_for_a_document(archive: FakeArchive, batch: str, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    assert ask(archive, "export", batch, "--output", output) == 0
    document, video = csv.DictReader(io.StringIO(output.read_text(), newline=""))
    assert (document["kind"], document["parts_done"], video["kind"]) == ("document", "3", "video")
    assert document["text"].startswith("Page 1") and "\x1b" not in document["text"]


def test_a_folder_of_markdown(archive: FakeArchive, batch: str, tmp_path: Path) -> None:
    output = tmp_path / "pages"
    assert ask(archive, "export", batch, "--output", output, "--format", "md") == 0
    assert sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()) == ["deep/a.pdf.md"]
    text = (output / "deep/a.pdf.md").read_text()
    assert text.count("<!-- page ") == 3 and "<!-- page 2 -->\n\nPage 2" in text
