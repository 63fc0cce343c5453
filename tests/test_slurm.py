"""The Slurm script: what it makes of its settings, by the command line's own parser. A real Slurm runs it in
`python -m bench scale-check --only slurm`."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import typer.main

from slipstream.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "deploy/slurm/worker.sbatch"
STUB = '#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\nenv > "$SEEN"\n'


def run_script(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """With a `slipstream` that shows its words, and its environment in `seen`."""
    stub = folder / "slipstream"
    stub.write_text(STUB)
    stub.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "SEEN": str(folder / "seen")} | settings
    return subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, env=env, timeout=30)


def parse(words: list[str]) -> dict[str, object]:
    """As `slipstream` reads them. Raises for a word that it does not know."""
    name, *options = words
    group: Any = typer.main.get_command(app)
    return dict(group.commands[name].make_context(name, options).params)


def test_the_words_are_options_of_up(tmp_path: Path) -> None:
    queue = {"SLIPSTREAM_GATEWAY_REDIS": "redis://:secret@queue:6379/0", "SLIPSTREAM_VIDEOS": str(tmp_path)}
    done = run_script(tmp_path, **queue, SLIPSTREAM_TARGET="/models/big", SLIPSTREAM_DRAFT="/models/small")
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[0] == "up" and "secret" not in done.stdout
    given = parse(words)
    assert given["no_http"] is True and given["archive_slots"] == 4 and given["video_root"] == [tmp_path]
    assert (given["target"], given["draft"]) == ("/models/big", "/models/small")
    assert (given["device"], given["draft_device"]) == ("cuda:0", "cuda:1")
    seen = (tmp_path / "seen").read_text()
    assert "SLIPSTREAM_GATEWAY_REDIS=redis://:secret@queue" in seen
    ours = set(re.findall(r"^SLIPSTREAM_\w+", seen, re.MULTILINE))
    assert ours == {"SLIPSTREAM_GATEWAY_REDIS"}, "services take no variable of theirs that they do not know"


def test_on_cpus(tmp_path: Path) -> None:
    queue = {"SLIPSTREAM_GATEWAY_REDIS": "redis://queue", "SLIPSTREAM_VIDEOS": str(tmp_path)}
    given = parse(run_script(tmp_path, **queue, SLIPSTREAM_CPU="1", SLIPSTREAM_SLOTS="2").stdout.splitlines())
    assert (given["device"], given["threads"], given["archive_slots"]) == ("cpu", 1, 2)


def test_a_setting_that_is_missing_is_named(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode != 0 and "SLIPSTREAM_GATEWAY_REDIS: set it to the URL of the queue" in done.stderr
    done = run_script(tmp_path, SLIPSTREAM_GATEWAY_REDIS="redis://queue")
    assert done.returncode != 0 and "SLIPSTREAM_VIDEOS: set it to the folder" in done.stderr


def test_slurm_is_asked_to_queue_it_again_and_to_say_when_it_ends() -> None:
    told = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.MULTILINE))
    assert "requeue" in told and told["signal"] == "B:TERM@60" and told["open-mode"] == "append"
    assert SCRIPT.read_text().rstrip().splitlines()[-1].startswith("exec "), "the signal reaches the stack itself"
