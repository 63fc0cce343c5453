"""Packed windows of a vision tower, attended to in batches: what one call for each of them gives."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from slipstream.engine import vision_attention
from slipstream.engine.vision_attention import windowed_attention

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
