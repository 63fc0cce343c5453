"""The acceptance of both position schemes: a draft that is its target agrees wherever it sees the same."""

from pathlib import Path

import pytest

from bench.guarantees import acceptance as positions
from tests.support.tiny_checkpoint import write_tiny_qwen
from training.data import render_clip


def test_a_model_agrees_with_itself_on_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("target", "draft"):
        write_tiny_qwen(tmp_path / role, seed=3, layers=2)
    clip = tmp_path / "clip.mp4"
    render_clip(1, clip, (1, 1), size=64)
    monkeypatch.setattr(positions, "PAIRS", {"qwen2_5_vl": (str(tmp_path), (1, 1))})
    monkeypatch.setattr(positions, "MAX_NEW_TOKENS", 12)
    monkeypatch.setattr(positions, "held_out_clips", lambda *_: [clip])
    found = positions.measure_positions(num_clips=1, num_frames=5)["qwen2_5_vl"]
    assert found["tokens"] == 12
    acceptance = found["acceptance"]
    assert acceptance["0.0"]["original"] == 1.0
    assert {scheme for shares in acceptance.values() for scheme in shares} == {"original", "compact"}
    assert all(0.0 <= share <= 1.0 for shares in acceptance.values() for share in shares.values())
