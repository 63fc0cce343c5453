"""Bounds on the memory of a long prefill: all parts of a layer but attention take its rows in chunks."""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

CHUNK_BYTES = 256 * 2**20
"""Of one of the matrices that a part of a layer makes of its rows at once."""
_IN_CHUNKS, BESIDE_CHUNKS, _IN_ATTENTION = 3, 4.25, 6.25
"""Matrices that are alive at once, at most: those that a part makes of a chunk; those of all rows beside them, as wide
as the model; and those of all rows in attention, which is not cut."""
_JOINED = 1
"""More of a chunk in an MLP that makes gate and inner rows by one product."""
_REPEATED = 2
"""More in attention where keys and values are repeated for each query head, see `heads_share_keys`."""
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
    return max(int(config.intermediate_size) * itemsize, int(config.hidden_size) * torch.float32.itemsize)


def joins_gate(layer: Any) -> bool:
    """Whether its MLP makes gate and inner rows by one product, as GLM's does."""
    return hasattr(layer.mlp, "gate_up_proj")


def prefill_bytes(
    config: Any, itemsize: int, num_tokens: int, *, share_keys: bool = True, joined_gate: bool = False
) -> int:
    """Most bytes that a dense layer's pass over so many tokens needs at once, keys and values apart: no less than
    `python -m bench models` finds on torch's device `meta`, and at most a third more."""
    chunk = min(CHUNK_BYTES, num_tokens * _widest_row(config, itemsize))
    matrix = num_tokens * config.hidden_size * itemsize
    in_attention = _IN_ATTENTION + (0 if share_keys else _REPEATED)
    in_chunks = _IN_CHUNKS + (_JOINED if joined_gate else 0)
    return int(max(in_chunks * chunk + BESIDE_CHUNKS * matrix, in_attention * matrix))
