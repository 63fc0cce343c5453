"""The shipped pair through the command line, as a user would run it, against plain transformers."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from slipstream.stack.local import POCKET_DIR
from tests.support.clips import make_colour_clip, sample_clip
from tests.support.reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "Describe this video in detail."
NUM_FRAMES, NUM_TOKENS = 8, 48


@pytest.mark.parametrize("method", ["slipstream"])
async def test_the_shipped_pair(tmp_path: Path, method: str) -> None:
    clip = make_colour_clip(5)
    (tmp_path / "clip.mp4").write_bytes(clip)
    asked = ["--prompt", PROMPT, "--frames", str(NUM_FRAMES), "--max-new-tokens", str(NUM_TOKENS), "--method", method]
    argv = [sys.executable, "-m", "slipstream.cli", "caption", str(tmp_path / "clip.mp4"), "--json", *asked]
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    reference = Reference(POCKET_DIR / "target")
    expected = reference.answer(sample_clip(clip, NUM_FRAMES), PROMPT, NUM_TOKENS)
    assert json.loads(output)["text"] == reference.text(expected)
