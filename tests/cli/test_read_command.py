"""`slipstream read`: files that are written, and what is said where they are not."""

import asyncio
import errno
import hashlib
import io
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytest_asyncio
from PIL import Image

from slipstream import __version__
from slipstream.archive.messages import ModelReceipt, Receipt
from slipstream.cli import page_readers
from slipstream.cli import read as read_module
from slipstream.cli.app import BrokenStdout, run
from slipstream.documents.messages import (
    Box,
    DocumentFacts,
    DocumentRequest,
    Origin,
    PageDraft,
    PagePicture,
    ReadEvent,
    Region,
    RegionKind,
)
from slipstream.documents.pool import NEEDED
from slipstream.documents.reading import NOT_OF_PAGES, DocumentOptions
from slipstream.errors import InvalidRequest, ReaderUnavailable, UnreadableDocument
from slipstream.options import OPTIONS_BY_NAME, CaptionOptions
from slipstream.stack.local import Stack
from tests.support.documents import encrypted, needs_documents, pdf_of, words_at
from tests.support.world import World
from training.evaluate_reader import edit_distance
from training.pages import HELD_OUT_SEEDS, sample_page
from training.reader import READER_FACES


class FakePool:
    """Reads two pages of every document but of those that say no."""

    asked: ClassVar[list[DocumentRequest]] = []

    def __init__(self, *args: object, **more: object) -> None: ...

    async def read(self, data: bytes, request: DocumentRequest) -> AsyncGenerator[ReadEvent, None]:
        self.asked.append(request)
        yield DocumentFacts(2, (1, 2))
        for page in (1, 2):
            if data == b"no" and page == 2:
                raise UnreadableDocument("page 2 is torn")
            region = Region(Box(0, 0, 9, 9), RegionKind.TEXT, 0, f"text {page}", 1.0, Origin.OCR)
            yield PagePicture(page, 10, 10, 150, bytes([50 * page] * 300) if request.pictures else b"")
            yield PageDraft(page, 10, 10, (region,), ("faint",) if page == 2 else (), 0.5)

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _keep_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would set up the logs of all tests that follow in this process."""
    monkeypatch.setattr(page_readers, "configure_logs", lambda *given: None)


@pytest.fixture
def fake_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_readers, "ReaderPool", FakePool)
    monkeypatch.setattr(page_readers, "check_packages", lambda: None)
    FakePool.asked = []


def read(*words: object) -> int:
    return run(["read", *map(str, words)])


@pytest.mark.usefixtures("fake_pool")
def test_documents_become_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pdf").write_bytes(b"yes")
    out = tmp_path / "deep" / "out"
    assert (
        read(tmp_path / "a.pdf", "--output", out, "--ocr-only", "--pages", "1-2", "--dpi", 99, "--no-text-layer") == 0
    )
    assert (out / "a.md").read_text() == "<!-- page 1 -->\n\ntext 1\n\n<!-- page 2 -->\n\ntext 2\n\n"
    assert [json.loads(line)["page"] for line in (out / "a.jsonl").read_text().splitlines()] == [1, 2]
    assert FakePool.asked == [DocumentRequest(pages="1-2", dpi=99, text_layer=False, pictures=False)]
    said = capsys.readouterr()
    assert "2 pages, 1.0 s" in said.out and "a.pdf: page 2: faint" in said.err


@pytest.mark.usefixtures("fake_pool")
def test_a_name_may_be_no_utf_8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / f"{name}.pdf").write_bytes(b"yes")
    assert read(tmp_path / f"{name}.pdf", "--output", tmp_path, "--ocr-only") == 0
    assert "text 2" in (tmp_path / f"{name}.md").read_text()
    records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert [record["document"] for record in records] == ["caf\N{REPLACEMENT CHARACTER}.pdf"] * 2


@pytest.mark.usefixtures("fake_pool")
def test_a_document_that_fails_leaves_earlier_files_and_the_others_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, data in {"bad.pdf": b"no", "good.pdf": b"yes", "bad.md": b"earlier"}.items():
        (tmp_path / name).write_bytes(data)
    files = [tmp_path / name for name in ("bad.pdf", "good.pdf", "absent.pdf")]
    assert read(*files, "--output", tmp_path, "--ocr-only") == 3
    said = capsys.readouterr()
    assert "bad.pdf: page 2 is torn" in said.err and "absent.pdf: cannot be read: No such file" in said.err
    assert (tmp_path / "bad.md").read_text() == "earlier" and "text 2" in (tmp_path / "good.md").read_text()
    assert not list(tmp_path.glob(".*"))


class ClosedPool(FakePool):
    """Reads what is slow until it is closed, and then not."""

    def __init__(self, *args: object, **more: object) -> None:
        self.closed = asyncio.Event()

    async def read(self, data: bytes, request: DocumentRequest) -> AsyncGenerator[ReadEvent, None]:
        if data == b"slow":
            await self.closed.wait()
            raise ReaderUnavailable("this reader is closed")
        async for event in super().read(data, request):
            yield event

    def close(self) -> None:
        self.closed.set()


class FullOutput(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenStdout(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.usefixtures("fake_pool")
def test_documents_that_are_left_when_stdout_breaks_have_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_readers, "ReaderPool", ClosedPool)
    monkeypatch.setattr(sys, "stdout", FullOutput())
    for name, data in {"a.pdf": b"yes", "b.pdf": b"slow", "c.pdf": b"yes"}.items():
        (tmp_path / name).write_bytes(data)
    assert read(*sorted(tmp_path.iterdir()), "--output", tmp_path / "out", "--ocr-only", "--jobs", 2) == 2
    errors = capsys.readouterr().err
    assert "a.pdf: page 2: faint" in errors and "b.pdf" not in errors and "No space left" in errors
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.jsonl", "a.md"]


def test_what_cannot_be_done_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.pdf", "a.png"):
        (tmp_path / name).write_bytes(b"x")
    assert read(tmp_path / "a.pdf", "--output", tmp_path, "--ocr-only", "--surface", "latex") == 2
    assert "unknown --surface 'latex'; known: markdown" in capsys.readouterr().err
    assert read(tmp_path / "a.pdf", "--output", tmp_path, "--stage", "line") == 2
    assert "unknown --stage 'line'; known: page, region+page" in capsys.readouterr().err
    assert read(tmp_path / "a.pdf", "--output", tmp_path, "--ocr", "often") == 2
    assert "unknown --ocr 'often'; known: always, paying, never" in capsys.readouterr().err
    assert read(tmp_path / "a.pdf", "--output", tmp_path, "--ocr", "never", "--ocr-only") == 2
    assert "--ocr is for a target that reads: leave it out with --ocr-only" in capsys.readouterr().err
    for of_targets in (
        ["--stage", "region"],
        ["--gateway", "127.0.0.1:1"],
        ["--method", "hsd"],
        ["--max-new-tokens", 9],
        ["--frames", 3],
    ):
        assert read(tmp_path / "a.pdf", "--output", tmp_path, "--ocr-only", *of_targets) == 2
        assert f"{of_targets[0]} is for a target that reads" in capsys.readouterr().err
    for elsewhere in (["--gateway", "127.0.0.1:1"], ["--ocr-only"]):
        assert read(tmp_path / "a.pdf", "--output", tmp_path, *elsewhere, "--target", tmp_path) == 2
        assert f"leave them out, or {elsewhere[0]}" in capsys.readouterr().err
    assert read(tmp_path / "a.pdf", tmp_path / "b.pdf", tmp_path / "a.png", "--output", tmp_path, "--ocr-only") == 2
    both = f"'{tmp_path}/a.pdf' and '{tmp_path}/a.png' would have the same name"
    assert f"{both} in --output; read one of them into another folder" in capsys.readouterr().err
    assert read(tmp_path / "a.pdf", "--output", tmp_path / "a.png", "--ocr-only") == 2
    assert "--output: cannot write" in capsys.readouterr().err
    assert read(tmp_path / "a.pdf", "--output", tmp_path, "--ocr-only", "--reader", "127.0.0.1:1") == 4
    assert "the reader is not reachable" in capsys.readouterr().err


def test_missing_packages_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slipstream.documents.pool.NEEDED", (*NEEDED, "no_such_package"))
    (tmp_path / "a.pdf").write_bytes(b"x")
    assert read(tmp_path / "a.pdf", "--output", tmp_path, "--ocr-only") == 2
    assert "pip install 'slipstream[documents]'" in capsys.readouterr().err


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reading_stack(world: World) -> AsyncIterator[Stack]:
    async with Stack(replace(world.stack_options(), draft_model=None, reader=True)) as running:
        yield running


TWO_PAGES = pdf_of([words_at(72, 700, f"text {page}", 20) for page in (1, 2)])


def check_receipt(text: str, receipt: dict[str, Any]) -> None:
    """That of a page of `TWO_PAGES`, in the form of the archive's."""
    archived = Receipt("", ModelReceipt("", "", ""), None, {}, "", 0, "").as_record()
    assert receipt.keys() >= archived.keys() | {"request_id", "speculation", "timings", "num_tokens"} - {"draft"}
    assert (receipt["video_sha256"], receipt["video_bytes"]) == (sha256_of(TWO_PAGES), len(TWO_PAGES))
    assert receipt["text_sha256"] == sha256_of(text.encode()) and receipt["slipstream_version"] == __version__
    target = receipt["target"]
    assert target["model_id"] and len(target["revision"]) == 64 and target["dtype"] == "float32"
    assert "draft" not in receipt and "text" not in receipt
    asked = {"prompt": "Read this page.", "num_frames": 1, "method": "hints", "max_new_tokens": 32}
    assert receipt["options"].items() >= asked.items() and not receipt["options"].keys() & {"prediction", "lossy"}


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@needs_documents
def test_a_target_reads_with_hints(
    reading_stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_module, "MAX_PICTURED_BYTES", 2500)
    (tmp_path / "a.pdf").write_bytes(TWO_PAGES)
    words = ("--output", tmp_path, "--gateway", reading_stack.gateway_address, "--max-new-tokens", 32)
    assert read(tmp_path / "a.pdf", *words) == 0
    assert "2 pages" in (said := capsys.readouterr().out) and "from hints" in said
    records = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [record["page"] for record in records] == [1, 2]
    assert records[0]["regions"][0]["text"].strip() == "text 1" and records[0]["receipt"]["method"] == "hints"
    assert "regions" not in records[0]["receipt"], "nobody asked for them"
    check_receipt(records[0]["text"], records[0]["receipt"])
    assert "lossy" not in said
    assert all(record["text"] in (markdown := (tmp_path / "a.md").read_text()) for record in records)
    assert "lossy" not in markdown
    html = (tmp_path / "a.disagreements.html").read_text()
    assert html.count("<h2") == 2 and 'class="lossy"' not in html and html.endswith("</html>\n")
    assert html.count("<svg") == 2 and html.count("data:image/png") == 1, "the second one is behind the limit"


@needs_documents
def test_a_target_reads_regions_first(reading_stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the method that waits for all of them, as its text depends on them."""
    (tmp_path / "a.pdf").write_bytes(TWO_PAGES)
    words = ("--output", tmp_path, "--gateway", reading_stack.gateway_address, "--max-new-tokens", 32)
    tolerant = ("--method", "hsd", "--tolerance", 0.9)
    assert read(tmp_path / "a.pdf", *words, "--stage", "region+page", *tolerant) == 0
    assert "2 regions read first" in (said := capsys.readouterr().out)
    fact = "lossy: hints within a tolerance of 0.9 (log_ratio)"
    assert f"a.md  [{fact}, 2 pages" in said
    assert (tmp_path / "a.md").read_text().count(f"<!-- {fact} -->") == 2
    assert (tmp_path / "a.disagreements.html").read_text().count(f'<p class="lossy">{fact}</p><h2') == 1
    records = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [record["receipt"]["regions"]["num_read"] for record in records] == [1, 1]


def test_a_gateway_without_a_reader_is_told_of(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.pdf").write_bytes(TWO_PAGES)
    assert read(tmp_path / "a.pdf", "--output", tmp_path, "--gateway", stack.gateway_address) == 2
    assert "reads no documents; start it with --reader" in capsys.readouterr().err
    assert read(tmp_path / "a.pdf", "--output", tmp_path, "--reader", "127.0.0.1:1") == 2
    assert "--reader is for --ocr-only" in capsys.readouterr().err


def test_the_help_shows_what_a_page_can_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    of_films: dict[str, Any] = {"segments": "fixed:9s", "summary": True, "summary_prompt": "In short?"}
    others = {"duplicates": "hint", "skip_marked": "black", "turns": ("Who?", "A fox."), "num_frames": 2, "fps": 1.0}
    assert run(["read", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--prompt " in told and "--method " in told
    for name in NOT_OF_PAGES:
        assert f"--{OPTIONS_BY_NAME[name].flag} " not in told
        options = CaptionOptions(**of_films if name in of_films else {name: others[name]})
        with pytest.raises(InvalidRequest, match="must be left out"):
            DocumentOptions(caption=options).check()


@needs_documents
@pytest.mark.long
def test_without_a_target_the_pocket_reader_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = sample_page(HELD_OUT_SEEDS[0], "report", READER_FACES[0])
    Image.fromarray(page.pixels).save(tmp_path / "a.png")
    assert read(tmp_path / "a.png", "--output", tmp_path) == 0
    (record,) = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert record["receipt"]["method"] == "hints"
    assert edit_distance(record["text"], page.text) <= 0.05 * len(page.text)
    said = capsys.readouterr()
    assert "1 pages" in said.out and said.err.count("knows only synthetic pages") == 1


@needs_documents
@pytest.mark.long
def test_a_real_document_and_one_behind_a_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.pdf").write_bytes(pdf_of([words_at(72, 700, "Seven foxes read", 20)]))
    (tmp_path / "locked.pdf").write_bytes(encrypted())
    assert read(tmp_path / "good.pdf", tmp_path / "locked.pdf", "--output", tmp_path, "--ocr-only") == 3
    assert "needs a password" in capsys.readouterr().err
    assert "Seven foxes read" in (tmp_path / "good.md").read_text()
