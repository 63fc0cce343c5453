"""`slipstream archive submit` of documents: which files are, how they are read, and what they wait for."""

import json
from pathlib import Path

import pytest

from slipstream.rpc.v1 import archive_pb2 as pb
from tests.cli.fake_archive import FakeArchive
from tests.cli.test_archive_submit import submit


def test_documents_that_wait_for_a_reader_are_told_of(
    archive: FakeArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "list.csv"
    documents = ("a.pdf", "https://example.org/b.PNG?x=1", "s3://scans/page#1.pdf", "gs://scans/page?.pdf")
    manifest.write_text("\n".join(("source", *documents, "c.mp4", "https://[/d.pdf")))
    assert submit(archive, manifest) == 0
    assert "4 documents wait for a gateway with a reader" in capsys.readouterr().err
    archive.reads_documents = True
    assert submit(archive, manifest) == 0
    assert not capsys.readouterr().err


def test_documents_are_known_by_their_extension_and_folders_stand_for_them_when_told_to(
    archive: FakeArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name in ("a.mp4", "b.PDF", "c.tiff", "thumb.jpg"):
        (folder / name).write_bytes(b"x")
    assert submit(archive, folder, "--name", "videos") == 0
    assert list(archive.batches["videos"].items) == ["a.mp4"], "a video's thumbnail is no document to read"
    how = ("--pages", "2-3", "--dpi", "90", "--stage", "region+page", "--ocr", "paying", "--surface", "lines")
    assert submit(archive, folder, "--documents", *how, "--name", "documents") == 0
    batch = archive.batches["documents"]
    assert list(batch.items) == ["b.PDF", "c.tiff", "thumb.jpg"]
    assert (batch.options.document.pages, batch.options.document.dpi) == ("2-3", 90)
    document = batch.options.document
    assert (document.stage, document.ocr, document.surface) == ("region+page", "paying", "lines")
    assert not batch.options.document.HasField("text_layer")
    assert submit(archive, folder, "--documents") == submit(archive, folder, "--documents", "--no-text-layer") == 0
    assert len(archive.batches) == 4, "read in another way it is another batch"
    capsys.readouterr()
    assert submit(archive, folder, "--documents", "--dpi", "5") == 2
    assert "dpi is 5; ask for 20 to 600" in capsys.readouterr().err
    assert submit(archive, folder, "--documents", "--ocr", "maybe") == 2
    assert "ocr 'maybe' is unknown" in capsys.readouterr().err


def test_a_manifest_says_what_differs_for_a_document(
    archive: FakeArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "list.jsonl"
    lines: list[dict[str, object]] = [
        {"path": "a.pdf", "pages": "1", "text_layer": False},
        {"path": "scan", "kind": "document"},
    ]
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert submit(archive, manifest, "--name", "m") == 0
    first, second = archive.batches["m"].items.values()
    assert (first.kind, first.document.pages, first.document.text_layer) == (pb.JOB_KIND_UNSPECIFIED, "1", False)
    assert first.document.HasField("text_layer") and not first.document.HasField("dpi")
    assert second.kind == pb.JOB_KIND_DOCUMENT
    capsys.readouterr()
    for bad, why in (
        ({"kind": "book"}, "kind 'book' is unknown"),
        ({"pages": 7}, "pages of a document must be"),
        ({"dpi": 90, "kind": "video"}, "line 1: dpi is of documents, and this is a video: leave it out"),
        ({"path": "a.mp4", "text_layer": False}, "line 1: text_layer is of documents, and this is a video"),
    ):
        manifest.write_text(json.dumps({"path": "a.pdf"} | bad))
        assert submit(archive, manifest) == 2
        assert why in capsys.readouterr().err
