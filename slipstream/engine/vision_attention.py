"""Attention of a vision tower whose rows are packed: many windows, or frames, one behind the other in one sequence.

Upstream calls SDPA once for each of them, two thousand times for eight frames of Qwen2.5-VL at 16:9. Windows of one
length are rows of one batch here, so a layer takes as many calls as there are lengths: one for whole frames, up to four
for windows, which are smaller at the frame's edges.

Upstream also reads from the device where windows begin, three times a layer. That follows from the grid, which the host
knows, so it is made there before the tower runs (`tower_inputs`), and nothing of the tower waits for the device.
"""

import itertools
from functools import lru_cache
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

from slipstream.uploads import upload

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
    packed = torch.stack((query[0], key[0], value[0]))
    output = torch.empty_like(packed[0])
    for length, index in _windows(tuple(cu_seq_lens_q.tolist()), packed.device).items():
        batch = packed[:, :, index].unflatten(2, (-1, length)).transpose(1, 2)
        attended = scaled_dot_product_attention(batch[0], batch[1], batch[2], scale=scaling)
        output[:, index] = attended.transpose(0, 1).flatten(1, 2)
    return output.transpose(0, 1)[None], None


@lru_cache(maxsize=64)
def _windows(bounds: tuple[int, ...], device: torch.device) -> dict[int, Tensor]:
    """Rows of all windows of a length, one window behind the other, by that length."""
    by_length: dict[int, list[Tensor]] = {}
    for first, end in itertools.pairwise(bounds):
        if end > first:
            by_length.setdefault(end - first, []).append(torch.arange(first, end))
    return {length: upload(torch.cat(rows), device) for length, rows in by_length.items()}


def tower_inputs(tower: Any, grid: Tensor, device: torch.device) -> dict[str, Any]:
    """Keywords of `get_video_features` with what a Qwen tower else makes of the grid, where it waits for the device.

    Args:
        tower: of Qwen2.5-VL or Qwen3-VL.
        grid: patches along time, height and width, int [1, 3] on the CPU.
        device: the tower's.
    """
    merge_size = tower.spatial_merge_size
    made: dict[str, Any] = {"position_ids": upload(get_vision_position_ids(grid, merge_size), device)}
    bounds = {"": get_vision_cu_seqlens(grid)}
    if hasattr(tower, "window_size"):
        index, bounds["window_"] = get_vision_window_index(grid, merge_size, tower.window_size, tower.patch_size)
        made["window_index"] = upload(index, device)
    if hasattr(tower, "num_grid_per_side"):
        how = {"mode": tower.interpolation_mode, "align_corners": tower.interpolation_align_corners}
        side, sized = tower.num_grid_per_side, {"spatial_merge_size": merge_size}
        taps = get_vision_interpolation_indices_and_weights(grid, side, **how, **sized)
        made["interp_indices"], made["interp_weights"] = (upload(each, device) for each in taps)
    for kind, each in bounds.items():
        made |= {f"cu_{kind}seqlens": each, f"max_{kind}seqlen": int(each.diff().max())}
    return {f"video_{name}": value for name, value in made.items()}


AttentionInterface.register(IMPLEMENTATION, windowed_attention)
