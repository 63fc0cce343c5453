"""Bounds on the memory of a long prefill: all parts of a layer but attention take its rows in chunks."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

CHUNK_BYTES = 256 * 2**20
"""Of one of the matrices that a part of a layer makes of its rows at once."""
_IN_CHUNKS, BESIDE_CHUNKS = 3, 4.25
"""Matrices that are alive at once, at most: those that a part makes of a chunk, and those of all rows beside them, as
wide as the model."""
_IN_EXPERTS = 6
"""Those of a chunk in a mixture of experts, which has a row for each expert that a token takes: before their products,
behind them, and weighted, which is in fp32 where the weights are, in two orders."""
_JOINED = 1
"""More of a chunk in an MLP that makes gate and inner rows by one product."""
_BESIDE_HEADS = 2.15
"""Those of all rows beside the queries and keys of attention, which is not cut, as wide as the model."""
_ROTATING = ((4, 2), (3, 4))
"""Those as wide as the queries, and as the keys, while either are rotated."""
_NORMING = (5.05, 0)
"""The same where each head has a norm, which works in fp32."""
_GATING = (7, 0)
"""The same where a gate is made with the queries, as Qwen 3.5's is."""
_REPEATED = 2
"""More as wide as queries where keys and values are repeated for each of their heads, see `heads_share_keys`."""
_MIXES_ROWS = ("self_attn", "linear_attn")
"""The parts of a layer in which rows depend on each other."""


class RowChunks(nn.Module):
    """A part of a layer that takes the rows of a long prompt in chunks, as they do not depend on each other.

    Args:
        max_rows: of a chunk.
    """

    def __init__(self, part: nn.Module, max_rows: int) -> None:
        super().__init__()
        self.part = part
        self.max_rows = max_rows

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, n, hidden] -> [1, n, hidden]."""
        made = torch.empty_like(hidden)
        for first in range(0, hidden.shape[1], self.max_rows):
            rows = slice(first, first + self.max_rows)
            made[:, rows] = self.part(hidden[:, rows])
        return made


def whole_rows(config: Any, itemsize: int) -> int:
    """Of a pass that needs no chunks, at most."""
    return max(1, CHUNK_BYTES // _widest_row(config, itemsize))


def in_chunks(layer: nn.Module, max_rows: int) -> nn.Module:
    """A twin of a decoder layer, with the same weights, whose parts take so many rows at a time.

    An MLP's inner width is several times the model's, and a norm works in fp32: each alone would decide how much memory
    a prefill needs. The layer itself stays as it is: steps of decoding, which are short, pay nothing for that.
    """
    twin, parts = copy(layer), layer.named_children()
    twin._modules = {name: part if name in _MIXES_ROWS else RowChunks(part, max_rows) for name, part in parts}
    return twin


def _widest_row(config: Any, itemsize: int) -> int:
    """Bytes of a row of the widest matrix that a part of a layer makes."""
    hidden, in_mlp = int(config.hidden_size), int(getattr(config, "intermediate_size", 0) or 0)
    in_expert = max(hidden, 2 * int(getattr(config, "moe_intermediate_size", 0) or 0))
    return max(hidden * torch.float32.itemsize, in_mlp * itemsize, _taken(config) * in_expert * itemsize)


def _taken(config: Any) -> int:
    """How many experts a token takes; 0: it is no mixture of them."""
    return int(getattr(config, "num_experts_per_tok", 0) or 0)


def prefill_bytes(
    config: Any, layers: Sequence[Any], itemsize: int, num_tokens: int, *, share_keys: bool = True
) -> int:
    """Most bytes that a pass of so many tokens over a layer needs at once, keys and values apart: no less than
    `python -m bench models` finds on torch's device `meta`, and at most a third more, of a mixture of experts a half.
    """
    chunk = min(CHUNK_BYTES, num_tokens * _widest_row(config, itemsize))
    matrix = num_tokens * config.hidden_size * itemsize
    joins_gate = any(hasattr(layer.mlp, "gate_up_proj") for layer in layers)  # as GLM's do
    in_chunks = _IN_EXPERTS if _taken(config) else _IN_CHUNKS + (_JOINED if joins_gate else 0)
    in_attention = num_tokens * itemsize * _attention_width(config.hidden_size, layers, share_keys=share_keys)
    return int(max(in_chunks * chunk + BESIDE_CHUNKS * matrix, in_attention))


def _attention_width(hidden_size: int, layers: Sequence[Any], *, share_keys: bool) -> float:
    """Of all matrices of a layer's attention that are alive at once, at most, whichever layer attends."""
    attention = next(layer.self_attn for layer in layers if hasattr(layer, "self_attn"))
    queries, keys = attention.o_proj.weight.shape[1], attention.k_proj.weight.shape[0]
    moments = (*_ROTATING, _NORMING) if hasattr(attention, "q_norm") else _ROTATING
    if len(attention.q_proj.weight) > queries:
        moments = (*moments, _GATING)
    widest = max(of_queries * queries + of_keys * keys for of_queries, of_keys in moments)
    return float(_BESIDE_HEADS * hidden_size + widest + (0 if share_keys else _REPEATED * queries))
