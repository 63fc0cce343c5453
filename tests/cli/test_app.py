"""The command line as a whole: version, help, usage errors, `info`, `up`, and that no failure shows a traceback."""

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from slipstream import __version__
from slipstream.cli import up
from slipstream.cli.app import run
from slipstream.errors import InvalidConfig
from slipstream.rpc.codec import gateway_info_message, read_gateway_info
from slipstream.service_info import GatewayInfo, PeerInfo, Placement, ServiceLoad
from tests.cli.fake_gateway import FakeGateway
from tests.support.variants import some


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"slipstream {__version__}\n"
    for arguments in ([], ["--help"], ["caption", "-h"]):
        assert run(arguments) == 0
        assert "Usage: slipstream" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["caption"],
        ["caption", "a.mp4", "--nonsense"],
        ["caption", "a.mp4", "--frames", "0"],
        ["caption", "a.mp4", "--alpha", "2"],
        ["info"],
        ["demo", "--clips", "0"],
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("slipstream: ")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--target", "/nowhere"], "no checkpoint at /nowhere"),
        (["--target", "~nobody-of-this-name/big"], "no checkpoint at ~nobody-of-this-name/big"),
        (["--pin", "--threads", "3"], "--pin needs --threads 1"),
        (["--formats", "old"], "unknown --formats 'old'; known: modern, archive, all"),
        (["--results-to", "s3://"], "--results-to: 's3://' names no bucket"),
        (["--results-to", "s3://b", "--no-archive"], "--results-to is of the archive"),
        (["--no-archive", "--data", "/tmp/queue"], "--data is of the archive"),
        (["--queue-bytes", "2000000"], "--queue-bytes needs --results-to"),
    ],
)
def test_up_with_bad_options(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", *arguments]) == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "front", "is_told"), [((), "", True), ((), "tokens", False), (("--no-http",), "", False)]
)
def test_a_front_that_lacks_its_gateways_tokens_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    front: str,
    is_told: bool,
) -> None:
    def no_stack(*args: object, **kwargs: object) -> None:
        raise InvalidConfig("nothing is started here")

    monkeypatch.setattr(up, "Stack", no_stack)
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_TOKENS", "tokens")
    monkeypatch.setenv("SLIPSTREAM_FRONT_TOKENS", front)
    assert run(["up", "--no-archive", *flags]) == 2
    assert ("set it to the same file, or give --no-http" in capsys.readouterr().err) == is_told


def test_the_queue_is_kept_among_the_users_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert up.data_folder({}) == tmp_path / ".local/share/slipstream"
    assert up.data_folder({"XDG_DATA_HOME": "relative"}) == tmp_path / ".local/share/slipstream"
    assert up.data_folder({"XDG_DATA_HOME": "/data"}) == Path("/data/slipstream")


@pytest.mark.parametrize("words", [["up", "--no-archive"], ["archive", "search", "car", "--in", "captions.jsonl"]])
def test_a_user_without_a_home_folder_is_told_so(
    monkeypatch: pytest.MonkeyPatch, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container that runs as a number that no account has."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**30 + 1)
    assert run(words) == 2
    assert capsys.readouterr().err.startswith("slipstream: this user has no home folder: set HOME, or XDG_")


def test_info_is_a_table_without_escape_codes(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--gateway", gateway.address]) == 0
    shown = capsys.readouterr().out
    for fact in ("9.9.9", "big", "not connected", "1,000 MB", "[Describe] it."):
        assert fact in shown
    assert "\x1b" not in shown


def test_a_long_name_of_a_model_is_told_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe has 80 columns."""
    target = "/".join(f"a-long-name-of-folder-{number}" for number in range(6))

    async def fetch(*words: object) -> GatewayInfo:
        return GatewayInfo(target_model=target)

    monkeypatch.setattr(up, "_fetch", fetch)
    assert run(["info", "--gateway", "a:1"]) == 0
    told = (line.split("│")[2].strip() for line in capsys.readouterr().out.splitlines() if "│" in line)
    assert target in "".join(told)


def test_advice_is_given_once_a_draft_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def advice(*placements: Placement) -> str:
        async def fetch(*words: object) -> GatewayInfo:
            return GatewayInfo(placements=placements)

        monkeypatch.setattr(up, "_fetch", fetch)
        assert run(["info", "--gateway", "a:1", "--advise"]) == (0 if placements else 2)
        told = capsys.readouterr()
        return told.out or told.err

    assert "caption some videos" in advice()
    one, two = Placement(1, 3.0, 3.0, 0.9, 0.9), Placement(2, 2.5, 2.9, 1.1, 1.25)
    assert "Best: one draft for 2 targets." in (shown := advice(one, two))
    assert "1.10x to 1.25x" in shown and " 0.90x " in shown
    assert "no draft" in advice(one)
    assert "Not sure" in advice(one, Placement(2, 1.5, 2.9, 0.8, 1.25))


def test_info_tells_of_each_of_several(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load = ServiceLoad(3, 16, 1, 2**20, 2**30)
    peers = (PeerInfo("target", 1, "", load, 40), PeerInfo("target", 2, "the target is not reachable"))

    async def fetch(*words: object) -> GatewayInfo:
        return read_gateway_info(gateway_info_message(GatewayInfo(peers=peers)))

    monkeypatch.setattr(up, "_fetch", fetch)
    assert run(["info", "--gateway", "a:1"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "target 1 serves 3 of at most 16 captions, 1 wait; 1,023 MiB" in shown and "took 40" in shown
    assert "target 2 left out: the target is not reachable" in shown


def test_info_without_a_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--gateway", f"unix:{tmp_path}/none"]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_our_own_bugs_show_no_traceback_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*words: object) -> None:
        raise KeyError("x")

    logger = logging.getLogger("slipstream.cli")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(up, "_fetch", broken)
    assert run(["info", "--gateway", "a:1"]) == 1
    assert capsys.readouterr().err == "slipstream: internal error: KeyError: 'x' (--debug shows where)\n"
    assert run(["--debug", "info", "--gateway", "a:1"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "No such file or directory"),
        (OSError(errno.ENOSPC, "No space left on device", "/a b"), "No space left on device: '/a b'"),
    ],
)
def test_what_the_system_refuses_is_no_bug_of_ours(
    error: OSError, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the current folder was removed."""
    monkeypatch.setattr(up, "_fetch", Mock(side_effect=error))
    assert run(["info", "--gateway", "a:1"]) == InvalidConfig.exit_code
    assert capsys.readouterr().err == f"slipstream: {told} (--debug shows where)\n"


def _serving(tmp_path: Path) -> subprocess.Popen[str]:
    """`slipstream up` of services without models, when it has said where."""
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text("{}")
    script = (
        "from functools import partial\n"
        "from slipstream.cli import common\n"
        "from slipstream.cli import main\n"
        "names = ('target', 'draft', 'gateway')\n"
        "common.StackOptions = partial(common.StackOptions, modules=dict.fromkeys(names, 'tests.cli.fake_service'))\n"
        "main()\n"
    )
    arguments = ["up", "--no-http", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "XDG_DATA_HOME": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("gateway: 127.0.0.1:")
    return process


@pytest.mark.parametrize("number", some([signal.SIGINT, signal.SIGTERM], keep=(signal.SIGTERM,)))
def test_up_runs_until_a_signal(tmp_path: Path, number: int) -> None:
    with _serving(tmp_path) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert list((tmp_path / "slipstream" / "redis").glob("appendonlydir/*"))


def test_the_manual_tells_the_statuses_of_signals() -> None:
    manual = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text()
    told = manual.partition("## Exit status of the command line")[2].partition("## ")[0]
    for name, number in (("Ctrl-C", signal.SIGINT), ("SIGTERM", signal.SIGTERM), ("SIGHUP", signal.SIGHUP)):
        assert f"{128 + number} interrupted by {name}" in told or f"{128 + number} by {name}" in told


def test_up_ends_as_it_is_told_where_nobody_hears_it(tmp_path: Path) -> None:
    """As when Ctrl-C also ends `tee`."""
    with _serving(tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 128 + signal.SIGINT
