"""`slipstream caption` against a fake gateway: text, JSON, exit statuses, several videos, interruption."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.cli.app import run
from slipstream.cli.views import _Screen, printable
from slipstream.messages import StageChange
from slipstream.rpc.grpc_options import UPLOAD_CHUNK_BYTES
from tests.cli.fake_gateway import DETAILS, TEXT, FakeGateway, good_video, hanging_video, refused_video

SHOWN_TEXT = TEXT.replace("\x1b", "\N{REPLACEMENT CHARACTER}")


def test_streams_text_and_closing_line(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = good_video(tmp_path / "a.mp4")
    assert run(["caption", str(video), "--gateway", gateway.address]) == 0
    output = capsys.readouterr()
    text, closing = output.out.splitlines()
    assert text == SHOWN_TEXT
    assert closing == "[5 tokens, 8.0 tokens/s, tau 0.75, 2 passes, first token after 0.25 s]"
    assert output.err == ""


def test_uploads_the_whole_file_in_chunks(gateway: FakeGateway, tmp_path: Path) -> None:
    video = good_video(tmp_path / "a.mp4", os.urandom(1_200_000))
    assert run(["caption", str(video), "--gateway", gateway.address]) == 0
    assert gateway.received == video.read_bytes()
    full, rest = divmod(1_200_000, UPLOAD_CHUNK_BYTES)
    assert gateway.chunk_sizes == [UPLOAD_CHUNK_BYTES] * full + [rest]


def test_sends_only_the_options_that_are_given(gateway: FakeGateway, tmp_path: Path) -> None:
    video = str(good_video(tmp_path / "a.mp4"))
    assert run(["caption", video, "--gateway", gateway.address]) == 0
    assert gateway.options.ListFields() == []
    given = ["--prompt", "why", "--method", "autoregressive", "--frames", "7", "--max-new-tokens", "9", "--seed", "0"]
    given += ["--pruner", "random", "--alpha", "0", "--policy", "fixed", "--max-window", "3"]
    given += ["--guidance", "scores", "--positions", "compact"]
    given += ["--temperature", "0.5", "--top-k", "5", "--top-p", "0.25", "--min-p", "0.125"]
    given += ["--repetition-penalty", "1.5", "--presence-penalty", "-2", "--frequency-penalty", "1.25"]
    given += ["--min-new-tokens", "4"]
    given += ["--sampling-rule", "rejection", "--stop", "the end", "--stop", ".", "--no-gate"]
    assert run(["caption", video, "--gateway", gateway.address, *given]) == 0
    assert {field.name: value for field, value in gateway.options.ListFields()} == {
        "prompt": "why",
        "method": "autoregressive",
        "num_frames": 7,
        "max_new_tokens": 9,
        "pruner": "random",
        "alpha": 0.0,
        "policy": "fixed",
        "max_window": 3,
        "guidance": "scores",
        "positions": "compact",
        "seed": 0,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -2.0,
        "frequency_penalty": 1.25,
        "min_new_tokens": 4,
        "sampling_rule": "rejection",
        "stop": ["the end", "."],
        "gate": False,
    }


def test_predictions_are_read_from_files(gateway: FakeGateway, tmp_path: Path) -> None:
    video = str(good_video(tmp_path / "a.mp4"))
    for name, content in (("1.txt", "A red circle.\n"), ("2.txt", "\ufeffEin Kreis \u00e4ndert sich.")):
        (tmp_path / name).write_text(content)
    files = [word for name in ("1.txt", "2.txt") for word in ("--prediction-file", str(tmp_path / name))]
    assert run(["caption", video, "--gateway", gateway.address, *files, "--method", "hsd", "--tolerance", "0.75"]) == 0
    assert list(gateway.options.prediction) == ["A red circle.\n", "Ein Kreis \u00e4ndert sich."]
    assert gateway.options.tolerance == 0.75


def test_a_schema_is_read_from_a_file_and_choices_are_given_one_by_one(gateway: FakeGateway, tmp_path: Path) -> None:
    video, schema = str(good_video(tmp_path / "a.mp4")), tmp_path / "scene.json"
    schema.write_text('{"type": "object"}\n')
    assert run(["caption", video, "--gateway", gateway.address, "--json-schema", str(schema)]) == 0
    assert gateway.options.json_schema == '{"type": "object"}\n'
    assert run(["caption", video, "--gateway", gateway.address, "--choice", "a star", "--choice", "none"]) == 0
    assert list(gateway.options.choice) == ["a star", "none"]


def test_an_empty_file_is_no_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (schema := tmp_path / "scene.json").touch()
    assert run(["caption", str(good_video(tmp_path / "a.mp4")), "--json-schema", str(schema)]) == 2
    assert f"--json-schema: {str(schema)!r} is empty" in capsys.readouterr().err
    assert run(["caption", str(tmp_path / "a.mp4"), "--regex", ""]) == 2
    assert "--regex: it is empty, which would ask for nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"x" * 10_000_000, "more than 1048576 bytes"), (b"caf\xe9", "it is not UTF-8"), (None, "No such file")],
)
def test_a_prediction_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    path = tmp_path / "old.txt"
    if content is not None:
        path.write_bytes(content)
    assert run(["caption", str(good_video(tmp_path / "a.mp4")), "--prediction-file", str(path)]) == 2
    output = capsys.readouterr()
    assert words in output.err and "--prediction-file" in output.err and len(output.err.splitlines()) == 1


def test_json_is_one_object_a_video(gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    videos = [str(good_video(tmp_path / name)) for name in ("a.mp4", "b.mp4")]
    assert run(["caption", *videos, "--json", "--gateway", gateway.address]) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["file"] for document in documents] == videos
    for document in documents:
        assert document["text"] == TEXT
        assert document["finish_reason"] == "stop"
        assert document["timings"]["longest_gap_s"] == 0
        assert document["speculation"]["guidance_bytes"] == 2**40
        assert document["speculation"]["pass_costs"] == []
        assert document["video"]["video_tokens"] == 500


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("INVALID_ARGUMENT", 2),
        ("OUT_OF_RANGE", 2),
        ("NOT_FOUND", 3),
        ("UNAVAILABLE", 4),
        ("RESOURCE_EXHAUSTED", 4),
        ("DEADLINE_EXCEEDED", 4),
        ("INTERNAL", 1),
        ("UNIMPLEMENTED", 1),
    ],
)
def test_a_refusal_is_one_line_and_its_exit_status(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, exit_code: int
) -> None:
    video = refused_video(tmp_path / "a.mp4", code)
    assert run(["caption", str(video), "--gateway", gateway.address]) == exit_code
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"slipstream: {video}: ")
    assert exit_code == 4 or DETAILS in line


@pytest.mark.parametrize("token", ["", "secret"])
def test_a_refusal_during_the_upload_keeps_its_reason(
    gateway: FakeGateway,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    token: str,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", token)
    video = str(good_video(tmp_path / "a.mp4", bytes(20_000_000)))
    videos = [video] * 50
    assert run(["caption", *videos, "--prompt", "refuse", "--gateway", gateway.address]) == 2
    assert capsys.readouterr().err.splitlines() == [f"slipstream: {video}: {DETAILS}"] * 50


def test_goes_on_after_a_bad_video_and_ends_with_the_first_error(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = refused_video(tmp_path / "refused.mp4", "NOT_FOUND")
    invalid = refused_video(tmp_path / "invalid.mp4", "INVALID_ARGUMENT")
    good = good_video(tmp_path / "good.mp4")
    assert run(["caption", str(refused), str(invalid), str(good), "--gateway", gateway.address]) == 3
    output = capsys.readouterr()
    assert SHOWN_TEXT in output.out
    assert len(output.err.splitlines()) == 2
    assert run(["caption", str(refused), str(good), "--json", "--gateway", gateway.address]) == 3
    failed, captioned = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert failed == {"file": str(refused), "error": DETAILS}
    assert captioned["text"] == TEXT


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("is_full", [False, True])
def test_whether_anybody_hears_of_bad_videos_changes_nothing(
    gateway: FakeGateway, tmp_path: Path, is_full: bool, unbuffered: str
) -> None:
    """Python's own end fails, too, where it cannot write what is buffered."""
    good = str(good_video(tmp_path / "good.mp4"))
    videos = [str(tmp_path / "missing.mp4"), good, str(refused_video(tmp_path / "bad.mp4", "INVALID_ARGUMENT")), good]
    command = [sys.executable, "-m", "slipstream.cli", "caption", *videos, "--json", "--gateway", gateway.address]
    if is_full:
        unheard = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, unheard = os.pipe()
        os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=unheard, env=environment, timeout=120)
    os.close(unheard)
    assert ended.returncode == 3
    documents = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(documents) == 4
    assert [document["file"] for document in documents if "text" in document] == [good, good]


def test_unusable_files_need_no_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = good_video(tmp_path / "empty.mp4", b"")
    os.mkfifo(tmp_path / "fifo.mp4")
    paths = [str(tmp_path / "missing.mp4"), str(empty), str(tmp_path / "fifo.mp4"), str(tmp_path)]
    assert run(["caption", *paths]) == 3
    lines = capsys.readouterr().err.splitlines()
    reasons = ("no such file", "the file is empty", "not a regular file", "not a regular file")
    assert lines == [f"slipstream: {path}: {reason}" for path, reason in zip(paths, reasons, strict=True)]


def test_an_end_without_summary_is_an_error(gateway: FakeGateway, tmp_path: Path) -> None:
    video = good_video(tmp_path / "a.mp4", b"no summary")
    assert run(["caption", str(video), "--gateway", gateway.address]) == 1


def test_nobody_at_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = good_video(tmp_path / "a.mp4")
    assert run(["caption", str(video), "--gateway", f"unix:{tmp_path}/none.sock"]) == 4
    said = capsys.readouterr().err
    assert "the gateway is not reachable" in said and f"unix:{tmp_path}/none.sock" in said and "No such file" in said


@pytest.mark.parametrize("address", ["", ",", "127.0.0.1", "127.0.0.1:99999", "http://127.0.0.1:80/v1", "http://h:1"])
def test_what_is_no_address(tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str) -> None:
    assert run(["caption", str(good_video(tmp_path / "a.mp4")), "--gateway", address]) == 2
    assert "is no address of a gateway; give HOST:PORT or unix:PATH" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--target", "/x"), ("--device", "cuda:0"), ("--dtype", "float16")])
def test_a_gateway_has_its_models(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    """Who compares two checkpoints would compare one with itself."""
    video = str(good_video(tmp_path / "a.mp4"))
    assert run(["caption", video, "--gateway", gateway.address, *option]) == 2
    assert "leave them out, or --gateway" in capsys.readouterr().err


def test_words_that_are_not_utf_8(gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = str(good_video(tmp_path / "a.mp4"))
    assert run(["caption", video, "--gateway", gateway.address, "--prompt", "a \udcff"]) == 2
    assert capsys.readouterr().err.startswith("slipstream: prompt has a text that is no valid Unicode")
    assert run(["archive", "status", "a\udcff", "--gateway", gateway.address]) == 2
    assert capsys.readouterr().err == "slipstream: 'a\\udcff' is not UTF-8\n"


def test_a_text_that_stdout_has_no_letters_for(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1"))
    assert run(["caption", str(good_video(tmp_path / "a.mp4")), "--gateway", gateway.address]) == 2
    said = "slipstream: stdout is latin-1, which has no '\\ufffd': set PYTHONIOENCODING=utf-8\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize("timeout", ["inf", "1e300"])
def test_no_limit_is_a_long_one(gateway: FakeGateway, tmp_path: Path, timeout: str) -> None:
    assert (
        run(["caption", str(good_video(tmp_path / "a.mp4")), "--gateway", gateway.address, "--timeout", timeout]) == 0
    )


def test_deadline(gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = hanging_video(tmp_path / "a.mp4")
    assert run(["caption", str(video), "--gateway", gateway.address, "--timeout", "0.3"]) == 4
    assert capsys.readouterr().err == f"slipstream: {video}: the gateway did not finish within 0.3 s\n"


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_the_caption(gateway: FakeGateway, tmp_path: Path, number: int, exit_code: int) -> None:
    command = [sys.executable, "-m", "slipstream.cli", "caption", str(hanging_video(tmp_path / "a.mp4"))]
    process = subprocess.Popen(
        [*command, "--gateway", gateway.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == "A red"
    process.send_signal(number)
    rest, errors = process.communicate(timeout=120)
    assert (rest, errors) == ("\n", "")
    assert process.returncode == exit_code
    assert gateway.cancelled.wait(60)


def test_a_terminal_gets_the_live_view(gateway: FakeGateway, tmp_path: Path) -> None:
    video = good_video(tmp_path / "a.mp4")
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "slipstream.cli", "caption", str(video), "--gateway", gateway.address]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = _read_all(controller)
    assert process.wait(120) == 0
    assert "\x1b[32m circle\x1b[0m" in shown
    assert "5 tokens, 8.0 tokens/s" in shown
    assert "\x1b[31m." not in shown


@pytest.mark.parametrize("words", ["A[bold]B", "x [/bold] y", "[/]", "\x1b[2J"])
def test_a_drafts_words_cannot_style_the_view(words: str) -> None:
    shown, screen = io.StringIO(), _Screen()
    screen.apply(StageChange("draft_lost", detail=words))
    Console(file=shown, width=120).print(screen.layout)
    assert f"draft lost: {printable(words)}" in shown.getvalue()


def _read_all(descriptor: int) -> str:
    chunks = []
    try:
        while chunk := os.read(descriptor, 65_536):
            chunks.append(chunk)
    except OSError:  # how Linux reports that the other side has closed
        pass
    os.close(descriptor)
    return b"".join(chunks).decode()
