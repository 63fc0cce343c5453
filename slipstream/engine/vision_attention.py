"""Attention of a vision tower whose rows are packed: many windows, or frames, one behind the other in one sequence.

Upstream calls SDPA once for each of them, two thousand times for eight frames of Qwen2.5-VL at 16:9. Windows of one
length are rows of one batch here, so a layer takes as many calls as there are lengths: one for whole frames, up to four
for windows, which are smaller at the frame's edges.
"""

import itertools
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

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
        cu_seq_lens_q: int [windows + 1], where each window begins, and the end.

    Returns:
        [1, rows, heads, head_dim], and no attention weights.
    """
    packed = torch.stack((query[0], key[0], value[0]))
    output = torch.empty_like(packed[0])
    for length, rows in _windows(tuple(cu_seq_lens_q.tolist())).items():
        index = rows.to(packed.device)
        batch = packed[:, :, index].unflatten(2, (-1, length)).transpose(1, 2)
        attended = scaled_dot_product_attention(batch[0], batch[1], batch[2], scale=scaling)
        output[:, index] = attended.transpose(0, 1).flatten(1, 2)
    return output.transpose(0, 1)[None], None


@lru_cache(maxsize=64)
def _windows(bounds: tuple[int, ...]) -> dict[int, Tensor]:
    """Rows of all windows of a length, one window behind the other, by that length."""
    by_length: dict[int, list[Tensor]] = {}
    for first, end in itertools.pairwise(bounds):
        if end > first:
            by_length.setdefault(end - first, []).append(torch.arange(first, end))
    return {length: torch.cat(rows) for length, rows in by_length.items()}


AttentionInterface.register(IMPLEMENTATION, windowed_attention)
