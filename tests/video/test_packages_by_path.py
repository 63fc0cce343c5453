"""Packages that come by PYTHONPATH, as a cluster's modules set it: confined processes find them there, too."""

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.video.decoder_process import child_environment
from tests.support.media import ClipSpec, even_times_ms, make_clip

ROOT = Path(__file__).resolve().parents[2]
DECODE = """
import asyncio, sys
from slipstream.video.messages import DecodeLimits
from slipstream.video.pool import DecodePool

async def main():
    pool = DecodePool(1, DecodeLimits())
    with open(sys.argv[1], "rb") as file:
        print(len((await pool.sample(file, 4)).frames), "frames")
    pool.close()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="the packages lie beside the interpreter")
def test_a_decoder_is_started_by_an_interpreter_without_packages(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(make_clip(ClipSpec(even_times_ms(8))))
    bare = getattr(sys, "_base_executable", sys.executable)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *site.getsitepackages()])}
    done = subprocess.run([bare, "-c", DECODE, clip], env=environ, capture_output=True, text=True, timeout=120)
    assert "4 frames" in done.stdout, done.stderr


def test_only_whole_paths_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would mean another folder, as a decoder works in one of its own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/opt/packages", "here", "", "/more"]))
    assert child_environment()["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/opt/packages", "/more"]
