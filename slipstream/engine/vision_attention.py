"""Attention of a vision tower whose rows are packed: many windows, or frames, one behind the other in one sequence.

Upstream calls SDPA once for each of them, two thousand times for eight frames of Qwen2.5-VL at 16:9. Windows of one
length are rows of one batch here, so a layer takes as many calls as there are lengths: one for whole frames, up to four
for windows, which are smaller at the frame's edges.

On CUDA in 16 bits flash attention for sequences of different lengths takes all windows in one call, where torch's or
the package's works; see `known_kernels`.

Upstream also reads from the device where windows begin, three times a layer. That follows from the grid, which the host
knows, so it is made there before the tower runs (`tower_inputs`), and nothing of the tower waits for the device.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from slipstream.device_copy import to_device
from slipstream.engine.trial import MAX_ERROR, relative_error, tried
from slipstream.logs import get_logger

IMPLEMENTATION = "slipstream_flash"
"""Upstream hands over bounds, not single windows, to what has "flash" in its name."""


def windowed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """The signature is that of `AttentionInterface`.

    Args:
        query, key, value: [1, heads, rows, head_dim].
        cu_seq_lens_q: int [windows + 1] on the CPU, where each window begins, and the end.

    Returns:
        [1, rows, heads, head_dim], and no attention weights.
    """
    bounds = tuple(cu_seq_lens_q.tolist())
    rows = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    kernel = _choose_kernel(query.device, query.dtype, query.shape[1], query.shape[3])
    if kernel is None:
        return _by_length(*rows, bounds, scaling)[None], None
    longest = max(end - first for first, end in itertools.pairwise(bounds))
    return kernel(*rows, _on_device(bounds, query.device), longest, scaling)[None], None


def _by_length(query: Tensor, key: Tensor, value: Tensor, bounds: tuple[int, ...], scale: float) -> Tensor:
    """Attention of rows [rows, heads, d] by a call for each length: the floor that works everywhere."""
    packed = torch.stack([each.transpose(0, 1) for each in (query, key, value)])
    output = torch.empty_like(packed[0])
    for length, index in _windows(bounds, packed.device).items():
        batch = packed[:, :, index].unflatten(2, (-1, length)).transpose(1, 2)
        attended = scaled_dot_product_attention(batch[0], batch[1], batch[2], scale=scale)
        output[:, index] = attended.transpose(0, 1).flatten(1, 2)
    return output.transpose(0, 1)


PackedKernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]
"""Queries, keys and values [rows, heads, d], where windows begin and the last one ends (int32, on the device), rows of
the longest and the scale -> [rows, heads, d]."""
_SAMPLE = (0, 16, 80, 144, 150)
"""Bounds of windows that kernels are tried on."""


def packages_kernel(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """Flash attention of the flash-attn package."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

    output: Tensor = flash_attn_varlen_func(query, key, value, bounds, bounds, longest, longest, softmax_scale=scale)
    return output


def torchs_kernel(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """Torch's own: what `torch.nn.attention.varlen` calls."""
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, 0.0, False, False, scale=scale
    )[0]
    return output


def known_kernels(device: torch.device, dtype: torch.dtype) -> Mapping[str, PackedKernel]:
    """That may work there, by name, the first choice first."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return {}
    return {"flash-attn": packages_kernel, "varlen": torchs_kernel}


@lru_cache(maxsize=8)
def _choose_kernel(device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> PackedKernel | None:
    """The first that works and is right, tried when a tower runs for the first time, which is at a start."""
    for name, kernel in known_kernels(device, dtype).items():
        error = tried("vision_attention", name, partial(_error, kernel, device, dtype, num_heads, head_dim))
        if error is None:
            continue
        get_logger().info("vision_attention.tried", name=name, error=error)
        if error <= MAX_ERROR:
            return kernel
    return None


def _error(kernel: PackedKernel, device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> float:
    """Of windows of random rows, beside the largest number."""
    generator = torch.Generator(device).manual_seed(0)
    size, scale = (3, _SAMPLE[-1], num_heads, head_dim), head_dim**-0.5
    query, key, value = torch.randn(size, dtype=dtype, device=device, generator=generator)
    longest = max(end - first for first, end in itertools.pairwise(_SAMPLE))
    found = kernel(query, key, value, _on_device(_SAMPLE, device), longest, scale).float()
    right = _by_length(query.float(), key.float(), value.float(), _SAMPLE, scale)
    return relative_error(found, right)


@lru_cache(maxsize=64)
def _on_device(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    return to_device(torch.tensor(bounds, dtype=torch.int32), device)


@lru_cache(maxsize=64)
def _windows(bounds: tuple[int, ...], device: torch.device) -> dict[int, Tensor]:
    """Rows of all windows of a length, one window behind the other, by that length."""
    by_length: dict[int, list[Tensor]] = {}
    for first, end in itertools.pairwise(bounds):
        if end > first:
            by_length.setdefault(end - first, []).append(torch.arange(first, end))
    return {length: to_device(torch.cat(rows), device) for length, rows in by_length.items()}


def tower_inputs(tower: Any, grid: Tensor, device: torch.device, merge_size: int = 0) -> dict[str, Any]:
    """Keywords of `get_video_features` with what a tower else makes of the grid, where it waits for the device.

    Args:
        tower: of Qwen2.5-VL, Qwen3-VL or VideoLLaMA 3.
        grid: patches along time, height and width, int [1, 3] on the CPU.
        device: the tower's.
        merge_size: side of the square of patches that become one token; 0: the tower knows it itself.
    """
    merge_size = int(merge_size or tower.spatial_merge_size)
    made: dict[str, Any] = {"position_ids": to_device(get_vision_position_ids(grid, merge_size), device)}
    bounds = {"": get_vision_cu_seqlens(grid)}
    if hasattr(tower, "window_size"):
        index, bounds["window_"] = get_vision_window_index(grid, merge_size, tower.window_size, tower.patch_size)
        made["window_index"] = to_device(index, device)
    if hasattr(tower, "num_grid_per_side"):
        how = {"mode": tower.interpolation_mode, "align_corners": tower.interpolation_align_corners}
        side = tower.num_grid_per_side
        taps = get_vision_interpolation_indices_and_weights(grid, side, spatial_merge_size=merge_size, **how)
        made["interp_indices"], made["interp_weights"] = (to_device(each, device) for each in taps)
    for kind, each in bounds.items():
        made |= {f"cu_{kind}seqlens": each, f"max_{kind}seqlen": int(each.diff().max())}
    return {f"video_{name}": value for name, value in made.items()}


AttentionInterface.register(IMPLEMENTATION, windowed_attention)
