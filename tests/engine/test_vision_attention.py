"""Packed windows of a vision tower, attended to in batches: what one call for each gives, and no wait between."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.random_model import GEOMETRIES, RandomModel
from slipstream.engine import VideoLM, load_model, video_lm, vision_attention
from slipstream.engine.attention import SdpaKernel
from slipstream.engine.vision_attention import PackedKernel, windowed_attention
from slipstream.families.preprocess import frames_at_once
from tests.engine.conftest import random_frames
from tests.support.tiny_checkpoint import write_tiny_qwen, write_tiny_qwen2
from tests.support.tiny_families import write_tiny_qwen3
from tests.support.tiny_glm4v import write_tiny_glm4v

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


def packed_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """A `PackedKernel` as flash attention's is documented."""
    assert bounds.dtype == torch.int32 and longest == int(bounds.diff().max())
    packed = torch.stack((query, key, value)).transpose(1, 2)
    windows = [packed[:, :, first:end] for first, end in itertools.pairwise(bounds.tolist())]
    attended = [scaled_dot_product_attention(*window, scale=scale) for window in windows]
    return torch.cat(attended, dim=1).transpose(0, 1)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, PackedKernel]]:
    """Those that may work here."""
    known: dict[str, PackedKernel] = {}
    monkeypatch.setattr(vision_attention, "known_kernels", lambda device, dtype: known)
    vision_attention._choose_kernel.cache_clear()
    yield known
    vision_attention._choose_kernel.cache_clear()


@pytest.mark.parametrize("bounds", [[0, 5], [0, 4, 8, 10, 14, 16, 17], [0, 0, 4, 4]])
def test_a_packed_kernel_takes_all_windows_at_once(bounds: list[int], kernels: dict[str, PackedKernel]) -> None:
    calls = []

    def fails(*_: Any) -> torch.Tensor:
        raise ImportError("no such package")

    def counted(*given: Any) -> torch.Tensor:
        calls.append(given[3].tolist())
        return packed_kernel(*given)

    kernels |= {"absent": fails, "wrong": lambda *given: packed_kernel(*given) * 1.1, "right": counted}
    query, key, value = torch.randn(3, 1, HEADS, bounds[-1], HEAD_DIM, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        found, _ = windowed_attention(
            nn.Identity(), query, key, value, None, scaling=SCALE, cu_seq_lens_q=torch.tensor(bounds)
        )
        packed = torch.stack((query[0], key[0], value[0]))
        assert torch.allclose(found[0].transpose(0, 1), one_by_one(packed, bounds), atol=1e-6)
    assert calls == [list(vision_attention._SAMPLE), bounds, bounds], "tried once"


def test_kernels_for_cuda_are_known_for_16_bits_there_alone() -> None:
    cuda, cpu = torch.device("cuda:0"), torch.device("cpu")
    assert list(vision_attention.known_kernels(cuda, torch.bfloat16)) == ["flash-attn", "varlen"]
    assert not vision_attention.known_kernels(cuda, torch.float32)
    assert not vision_attention.known_kernels(cpu, torch.bfloat16)


@pytest.fixture(params=[write_tiny_qwen, write_tiny_qwen2, write_tiny_qwen3, write_tiny_glm4v])
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


@pytest.mark.parametrize(
    ("device", "size", "frames"), [("cpu", 448, 8), ("cuda:0", 336, 32), ("cuda:0", 448, 32), ("cuda:0", 1080, 8)]
)
def test_a_gpu_takes_more_frames_at_once(device: str, size: int, frames: int) -> None:
    assert frames_at_once(device, (size, size)) == frames


def test_chunks_of_any_size_are_the_same_frames(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = random_frames(24, 1, (48, 80))
    small = model.encode_frames(frames)
    monkeypatch.setattr(video_lm, "frames_at_once", lambda *_: 32)
    assert len(model.preprocess(frames, len(frames))) == 1
    torch.testing.assert_close(model.encode_frames(frames), small, rtol=1e-5, atol=1e-5)


class Counted(TorchDispatchMode):
    """Operations, but for views: on a GPU a launch each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kernel", "most"), [("by length", 15_000), ("packed", 10_000)])
@torch.inference_mode()
def test_launches_of_a_tower_of_full_size(
    kernel: str, most: int, kernels: dict[str, PackedKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen2.5-VL-7B's, 128 frames of 588x336; `bench gpu-vision` counts the same on a GPU."""
    if kernel == "packed":
        kernels["packed"] = lambda query, *_: query.clone()
        monkeypatch.setattr(vision_attention, "_error", lambda *_: 0.0)
    model = RandomModel.make(GEOMETRIES["Qwen2.5-VL-7B"], torch.device("meta"), torch.bfloat16)
    engine: Any = model.engine(SdpaKernel())
    engine.info = replace(engine.info, device="cuda:0")
    (pixels,) = engine.preprocess(np.zeros((32, 336, 588, 3), dtype=np.uint8), 128)
    with Counted() as counted:
        features = engine._adapter.encode(pixels)
    assert features.is_meta and len(features) == 16 * 12 * 21
    assert 2_000 < 4 * counted.count <= most
