"""Packed windows of a vision tower, attended to in batches: what one call for each gives, and no wait between."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from slipstream.engine import VideoLM, load_model, vision_attention
from slipstream.engine.vision_attention import windowed_attention
from tests.engine.conftest import random_frames
from tests.support.tiny_checkpoint import write_tiny_qwen
from tests.support.tiny_families import write_tiny_qwen3

HEADS, HEAD_DIM, SCALE = 3, 8, 0.3


def one_by_one(packed: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    windows = [packed[:, :, first:end] for first, end in itertools.pairwise(bounds)]
    return torch.cat([scaled_dot_product_attention(*window, scale=SCALE) for window in windows], dim=1)


@pytest.mark.parametrize(
    ("bounds", "num_calls"),
    [([0, 5], 1), ([0, 4, 8, 12], 1), ([0, 4, 8, 10, 14, 16, 17], 3), ([0, 0, 4, 4], 1)],
)
def test_windows_of_a_length_are_one_call(bounds: list[int], num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = torch.randn(3, HEADS, bounds[-1], HEAD_DIM, generator=torch.Generator().manual_seed(1))
    calls = []

    def counted(*tensors: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(tensors[0].shape)
        return scaled_dot_product_attention(*tensors, scale=scale)

    monkeypatch.setattr(vision_attention, "scaled_dot_product_attention", counted)
    query, key, value = packed[:, None]
    found, weights = windowed_attention(
        nn.Identity(), query, key, value, None, scaling=SCALE, cu_seq_lens_q=torch.tensor(bounds)
    )
    assert weights is None and found.shape == (1, bounds[-1], HEADS, HEAD_DIM)
    assert torch.allclose(found[0].transpose(0, 1), one_by_one(packed, bounds), atol=1e-6)
    assert len(calls) == num_calls


@pytest.fixture(params=[write_tiny_qwen, write_tiny_qwen3])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> VideoLM:
    write: Callable[..., Path] = request.param
    return load_model(str(write(tmp_path / "model", seed=6)))


FRAMES = (random_frames(8, 1, (48, 80)), random_frames(3, 2, (40, 40)))


def test_a_tower_says_what_it_says_without_our_inputs(model: VideoLM) -> None:
    adapter: Any = model._adapter
    for frames in FRAMES:
        (pixels,) = model.preprocess(frames, len(frames))
        with torch.inference_mode():
            alone = adapter._model.get_video_features(pixels.values, torch.tensor([pixels.grid]))
            assert torch.equal(adapter._features(pixels).pooler_output[0], alone.pooler_output[0])


@torch.inference_mode()
def test_nothing_in_a_chunk_waits_for_the_device(model: VideoLM) -> None:
    """A tensor on `meta` has a shape and no numbers: whatever reads one fails."""
    adapter: Any = model._adapter
    chunks = [model.preprocess(frames, len(frames))[0] for frames in FRAMES]
    expected = [adapter.encode(pixels) for pixels in chunks]
    adapter._model.to("meta")
    for pixels, features in zip(chunks, expected, strict=True):
        found = adapter.encode(pixels)
        assert found.is_meta and found.shape == features.shape
    on_device = chunks[0].values.to("meta"), torch.tensor([chunks[0].grid]).to("meta")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        adapter._model.get_video_features(*on_device)
