"""`slipstream archive` status, watch, cancel, retry and export against a fake archive."""

import csv
import errno
import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.archive.messages import Job
from slipstream.cli.app import run
from slipstream.cli.archive.output import FORMULA_STARTS, replacing
from slipstream.client import archive_client
from slipstream.errors import InvalidConfig, ServiceUnavailable
from tests.cli.fake_archive import TEXT, FakeArchive

NAMES = ("a.mp4", "b/a.mp4", "bad.mp4", "dead.mp4", "../up.mp4")


@pytest.fixture
def batch(archive: FakeArchive, tmp_path: Path) -> str:
    """A batch of three done, one failed and one dead job."""
    return hand_in(archive, tmp_path, "mine", *NAMES)


def hand_in(archive: FakeArchive, tmp_path: Path, name: str, *names: str) -> str:
    manifest = tmp_path / "list.jsonl"
    manifest.write_text("".join(json.dumps({"path": f"/{item}", "custom_id": item}) + "\n" for item in names))
    assert ask(archive, "submit", str(manifest), "--name", name) == 0
    return name


def ask(archive: FakeArchive, command: str, *words: str) -> int:
    return run(["archive", command, *words, "--gateway", archive.address])


def test_status_of_all_and_of_one(archive: FakeArchive, batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert ask(archive, "status") == 0
    shown = capsys.readouterr().out
    assert "batch-0 completed done 3 of 5, 1 failed, 1 dead, 300 videos/h" in " ".join(shown.split())
    assert ask(archive, "status", batch) == 0
    first, *problems = capsys.readouterr().out.splitlines()
    assert first == ("batch-0 completed: done 3 of 5, 1 failed, 1 dead, 300 videos/h, 0.4 tokens/s, speedup 1.50x")
    assert problems == [
        "  failed bad.mp4: the file holds no video\N{REPLACEMENT CHARACTER} stream",
        "  dead dead.mp4: whatever ran it died 3 times",
    ]


def test_status_as_json(archive: FakeArchive, batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert ask(archive, "status", "batch-0", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "completed"
    assert document["counts"]["done"] == 3
    assert document["totals"]["tokens"] == 15
    assert document["speedup"] == 1.5
    assert [problem["custom_id"] for problem in document["problems"]] == ["bad.mp4", "dead.mp4"]
    assert ask(archive, "status", "--json") == 0
    assert [one["batch_id"] for one in json.loads(capsys.readouterr().out)] == ["batch-0"]


@pytest.mark.parametrize("words", [["status"], ["watch"], ["cancel"], ["retry"], ["export", "--output", "-"]])
def test_an_unknown_batch(archive: FakeArchive, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(archive, *words, "none") == 3
    assert capsys.readouterr().err == "slipstream: no batch none\n"


def test_watch_in_a_pipe(archive: FakeArchive, batch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive.lost_watches = 2
    capsys.readouterr()
    assert ask(archive, "watch", batch) == 5
    output = capsys.readouterr()
    first, last = output.out.splitlines()
    assert first.startswith("in_progress: done 0 of 5, 1 failed, 1 dead")
    assert last.startswith("completed: done 3 of 5, 1 failed, 1 dead, 300 videos/h")
    assert "\x1b" not in output.out
    assert ask(archive, "watch", hand_in(archive, tmp_path, "good", "a.mp4"), "--json") == 0
    assert [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "in_progress",
        "completed",
    ]


def test_watch_on_a_terminal(archive: FakeArchive, batch: str) -> None:
    controller, terminal = os.openpty()
    command = [sys.executable, "-m", "slipstream.cli", "archive", "watch", batch, "--gateway", archive.address]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = _read_all(controller)
    assert process.wait(120) == 5
    assert "done 3 of 5, 1 failed, 1 dead, 300 videos/h" in shown


def test_cancel_and_retry(archive: FakeArchive, batch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stuck = hand_in(archive, tmp_path, "stuck", "stuck.mp4", "a.mp4")
    capsys.readouterr()
    assert ask(archive, "cancel", stuck) == 0
    assert capsys.readouterr().out.startswith("batch-1 cancelled: done 1 of 2, 1 cancelled")
    assert ask(archive, "watch", stuck) == 5
    assert "nothing was cancelled" not in capsys.readouterr().err
    assert ask(archive, "cancel", batch) == 0
    output = capsys.readouterr()
    assert output.out.startswith("batch-0 completed: done 3 of 5")
    assert output.err == "slipstream: nothing was cancelled: the batch had ended\n"
    assert ask(archive, "retry", batch) == 0
    assert ask(archive, "retry", batch, "--failed", "--json") == 0
    assert capsys.readouterr().out == '1 jobs are queued again\n{"retried": 2}\n'


def test_a_line_carries_its_receipt(archive: FakeArchive, batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert ask(archive, "export", batch, "--output", "-") == 0
    output = capsys.readouterr()
    assert output.err == "-: 3 done, 1 failed, 1 dead\n"
    first = json.loads(output.out.splitlines()[0])
    assert (first["custom_id"], first["source"], first["state"], first["text"]) == ("a.mp4", "/a.mp4", "done", TEXT)
    assert first["error"] is None
    receipt = first["receipt"]
    assert receipt["target"] == {"model_id": "big", "revision": "ab" * 32, "dtype": "float32"}
    assert receipt["video_bytes"] == 2**40
    assert receipt["video"]["timestamps_s"] == [0.0, 5.0]
    assert receipt["speculation"]["kept_digest"] == "cafe"
    assert receipt["speculation"]["judged"] == 3
    assert receipt["timings"]["generate_s"] == 0.5
    assert receipt["finish_reason"] == "stop"
    assert receipt["runs"] == 1
    assert first["quality"] == []


def test_the_same_jobs_give_the_same_files(
    archive: FakeArchive, batch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, errors = tmp_path / "out.csv", tmp_path / "out.csv.errors.jsonl"
    assert ask(archive, "export", batch, "--output", str(output)) == 0
    contents = output.read_bytes(), errors.read_bytes()
    assert ask(archive, "export", batch, "--output", str(output)) == 0
    assert (output.read_bytes(), errors.read_bytes()) == contents
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert [row["custom_id"] for row in rows] == ["a.mp4", "b/a.mp4", "../up.mp4"]
    assert rows[0]["text"] == TEXT.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
    assert (rows[0]["target_model"], rows[0]["duration_s"], rows[0]["tokens_per_s"]) == ("big", "10.0", "8.0")
    assert [row["quality"] for row in rows] == ["", "", ""]
    assert capsys.readouterr().err.endswith(f"slipstream: 2 without a result, and why: {errors}\n")
    assert [json.loads(line)["state"] for line in errors.read_text().splitlines()] == ["failed", "dead"]
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out.csv", "out.csv.errors.jsonl"]


FORMULAS = ("=cmd|calc!A1.mp4", "+1+1.mp4", "@SUM(1).mp4", "-dash.mp4", "a;=1.mp4", "＝1.mp4")


def test_a_table_holds_no_formula_and_steers_no_terminal(
    archive: FakeArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "list.jsonl"
    items = [{"path": f"/{name}", "custom_id": name} for name in FORMULAS]
    items.append({"path": "/\x1b]0;x\x07\x9b\u202egnp.mp4", "custom_id": "steers.mp4", "prompt": "=1+1"})
    manifest.write_text("".join(json.dumps(item) + "\n" for item in items))
    assert ask(archive, "submit", str(manifest), "--name", "hostile", "--prompt", "\tx") == 0
    output = tmp_path / "out.csv"
    assert ask(archive, "export", "hostile", "--output", str(output)) == 0
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert [row["custom_id"] for row in rows[:-1]] == [name if name[0] == "a" else f"'{name}" for name in FORMULAS]
    assert not any(cell.startswith(FORMULA_STARTS) for row in rows for cell in row.values())
    assert '"a;=1.mp4"' in output.read_text(), "no other separator splits a cell"
    assert rows[-1]["source"] == "/\ufffd]0;x\ufffd\ufffd\ufffdgnp.mp4" and rows[-1]["prompt"] == "'=1+1"
    assert ask(archive, "export", "hostile", "--output", str(output), "--csv-raw") == 0
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert [row["custom_id"] for row in rows[:-1]] == list(FORMULAS) and rows[-1]["source"] == items[-1]["path"]
    capsys.readouterr()
    assert ask(archive, "export", "hostile", "--output", "-") == 0
    shown = capsys.readouterr().out
    assert json.loads(shown.splitlines()[-1])["source"] == items[-1]["path"], "JSON loses nothing"
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)


def test_what_no_such_file_can_be_made_of_is_told(
    archive: FakeArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = hand_in(archive, tmp_path, "mixed", "a.mp4", "b.pdf", "c.pdf")
    capsys.readouterr()
    assert ask(archive, "export", batch, "--output", str(tmp_path / "cues"), "--format", "vtt") == 0
    told = "2 left out: vtt is made of videos alone; jsonl, csv and parquet take all"
    assert capsys.readouterr().err.endswith(f": 3 done, 2 left out\nslipstream: {told}\n")
    assert ask(archive, "export", batch, "--output", str(tmp_path / "pages"), "--format", "md", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"done": 3, "left_out": 1}


@pytest.mark.parametrize("form", ["vtt", "md", "jsonl"])
def test_a_batch_that_there_is_not_leaves_nothing(archive: FakeArchive, tmp_path: Path, form: str) -> None:
    assert ask(archive, "export", "nowhere", "--output", str(tmp_path / "out"), "--format", form) == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("export", "--output", "out.jsonl"), ("audit",)], ids=["export", "audit"])
def test_a_gateway_that_is_not_there_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(archive_client, "PAUSE_S", 1e9)
    command, *more = words
    assert run(["archive", command, "mine", *more, "--gateway", f"unix:{tmp_path}/nobody.sock"]) == 4
    assert not list(tmp_path.iterdir())


def test_an_old_file_of_errors_goes(archive: FakeArchive, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.errors.jsonl").write_text("{}\n")
    good = hand_in(archive, tmp_path, "good", "a.mp4")
    assert ask(archive, "export", good, "--output", str(tmp_path / "out.jsonl")) == 0
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


@pytest.mark.parametrize("stem", ["x" * 230, "\N{CJK UNIFIED IDEOGRAPH-5F71}" * 78], ids=["ascii", "wide"])
def test_an_output_may_have_a_name_as_long_as_file_systems_take(
    archive: FakeArchive, batch: str, tmp_path: Path, stem: str
) -> None:
    output = tmp_path / f"{stem}.jsonl"
    assert ask(archive, "export", batch, "--output", str(output)) == 0
    errors = output.with_name(f"{output.name}.errors.jsonl")
    written = [[json.loads(line)["state"] for line in path.read_text().splitlines()] for path in (output, errors)]
    assert written == [["done"] * 3, ["failed", "dead"]]
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_an_export_that_breaks_off_leaves_the_old_file(
    archive: FakeArchive, batch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")

    def broken(job: Job, *_: object) -> None:
        raise ServiceUnavailable("gone")

    monkeypatch.setattr("slipstream.cli.archive.output.job_record", broken)
    assert ask(archive, "export", batch, "--output", str(output)) == 4
    assert output.read_text() == "old\n"
    assert [path.name for path in tmp_path.glob("*.part")] == []


def test_errors_stay_as_they_were_where_results_have_no_room(
    archive: FakeArchive, batch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    errors = tmp_path / "out.jsonl.errors.jsonl"
    for path in (output, errors):
        path.write_text("old\n")
    place = Path.replace

    def refused(part: Path, final: Path) -> Path:
        if final == output:
            raise OSError(errno.ENOSPC, "No space left on device")
        return place(part, final)

    monkeypatch.setattr(Path, "replace", refused)
    assert ask(archive, "export", batch, "--output", str(output)) == 2
    assert output.read_text() == errors.read_text() == "old\n"
    assert [path.name for path in tmp_path.glob(".*.part")] == []


def test_only_some_states(archive: FakeArchive, batch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    output = tmp_path / "out.jsonl"
    assert ask(archive, "export", batch, "--output", str(output), "--state", "dead", "--state", "failed") == 0
    assert [json.loads(line)["state"] for line in output.read_text().splitlines()] == ["failed", "dead"]
    assert not output.with_name("out.jsonl.errors.jsonl").exists()
    assert ask(archive, "export", batch, "--output", "-", "--state", "lost") == 2
    assert "the states are queued, running, done" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["vtt", "srt"])
def test_no_file_of_subtitles_is_made_of_lines(
    archive: FakeArchive, batch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    output = tmp_path / f"film.{form}"
    assert ask(archive, "export", batch, "--output", str(output)) == 2
    assert f"{form} is a file for each job: give --format {form} and a folder" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("form", ["vtt", "srt"])
def test_subtitles(archive: FakeArchive, batch: str, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "new" / "subtitles"
    for _ in range(2):
        assert ask(archive, "export", batch, "--output", str(folder), "--format", form) == 0
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob(f"*.{form}"))
    assert names[:2] == [f"a.mp4.{form}", f"b/a.mp4.{form}"]
    assert len(names) == 3
    assert names[2].startswith("up.mp4~")
    assert (folder / names[0]).read_text().count(" --> ") == 3
    assert (tmp_path / "new" / "subtitles.errors.jsonl").exists()


def test_subtitles_follow_no_link_out_of_the_folder(
    archive: FakeArchive, batch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, outside = tmp_path / "subtitles", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "b").symlink_to(outside)
    assert ask(archive, "export", batch, "--output", str(folder), "--format", "vtt") == 2
    assert "a link leads out" in capsys.readouterr().err
    assert not list(outside.iterdir())


def test_an_output_that_cannot_be_written(archive: FakeArchive, batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(archive, "export", batch, "--output", "/proc/none.jsonl") == 2
    assert "cannot write /proc/none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_full_stdout_is_named(archive: FakeArchive, batch: str, form: str) -> None:
    words = ["export", batch, "--output", "-", "--format", form, "--gateway", archive.address]
    command = [sys.executable, "-m", "slipstream.cli", "archive", *words]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr == "slipstream: cannot write to stdout: No space left on device\n"


def test_a_reader_that_goes_away(archive: FakeArchive, batch: str) -> None:
    command = [sys.executable, "-m", "slipstream.cli", "archive", "export", batch, "--output", "-"]
    process = subprocess.Popen(
        [*command, "--gateway", archive.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(120) == 1
    assert errors == ""


def _read_all(descriptor: int) -> str:
    chunks = []
    try:
        while chunk := os.read(descriptor, 65_536):
            chunks.append(chunk)
    except OSError:  # how Linux reports that the other side has closed
        pass
    os.close(descriptor)
    return b"".join(chunks).decode()


def test_a_full_disk_is_told_by_the_file_that_it_has_no_room_for(tmp_path: Path) -> None:
    """Results and errors are written at once."""
    held = resource.getrlimit(resource.RLIMIT_FSIZE)
    results, errors = tmp_path / "out.jsonl", tmp_path / "out.jsonl.errors.jsonl"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, held[1]))
    try:
        told = pytest.raises(InvalidConfig, match=rf"^cannot write {results}: File too large")
        with told, replacing(results) as file, replacing(errors):
            file.write("a line\n" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, held)
    assert not list(tmp_path.iterdir())
