"""The shipped pair through the command line, as a user would run it, against plain transformers."""

import json
from pathlib import Path

import pytest

from slipstream.cli.app import run
from slipstream.stack.local import POCKET_DIR
from tests.support.clips import make_colour_clip, sample_clip
from tests.support.reference import Reference

PROMPT = "Describe this video in detail."
NUM_FRAMES, NUM_TOKENS = 8, 48


def test_the_shipped_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = make_colour_clip(5)
    (tmp_path / "clip.mp4").write_bytes(clip)
    asked = ["--prompt", PROMPT, "--frames", str(NUM_FRAMES), "--max-new-tokens", str(NUM_TOKENS)]
    assert run(["caption", str(tmp_path / "clip.mp4"), "--json", *asked, "--method", "slipstream"]) == 0
    output, _ = capsys.readouterr()
    reference = Reference(POCKET_DIR / "target")
    expected = reference.answer(sample_clip(clip, NUM_FRAMES), PROMPT, NUM_TOKENS)
    assert json.loads(output)["text"] == reference.text(expected)
