"""Bounds on the memory of a long prefill: all parts of a layer but attention take its rows in chunks."""

from typing import cast

import torch
from torch import Tensor, nn

from slipstream.engine.forward import Decoder

CHUNK_BYTES = 256 * 2**20
"""Of one of the matrices that a part of a layer makes of its rows at once."""
_IN_CHUNKS, _BESIDE_CHUNKS, _IN_ATTENTION = 3, 4.25, 6.25
"""Matrices that are alive at once, at most: those that a part makes of a chunk; those of all rows beside them, as wide
as the model; and those of all rows in attention, which is not cut."""


class RowChunks(nn.Module):
    """A part of a layer that takes the rows of a long prompt in chunks, as they do not depend on each other.

    An MLP's inner width is several times the model's, and a norm works in fp32: each alone would decide how much memory
    a prefill needs.

    Args:
        max_rows: of a chunk.
    """

    def __init__(self, part: nn.Module, max_rows: int) -> None:
        super().__init__()
        self.part = part
        self.max_rows = max_rows

    @classmethod
    def around(cls, part: nn.Module, inner_width: int, dtype: torch.dtype) -> "RowChunks":
        """In chunks of `CHUNK_BYTES`."""
        return cls(part, max(1, CHUNK_BYTES // (inner_width * dtype.itemsize)))

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, n, hidden] -> [1, n, hidden]."""
        if hidden.shape[1] <= self.max_rows:
            return cast(Tensor, self.part(hidden))
        made = torch.empty_like(hidden)
        for first in range(0, hidden.shape[1], self.max_rows):
            rows = slice(first, first + self.max_rows)
            made[:, rows] = self.part(hidden[:, rows])
        return made


def chunk_rows(decoder: Decoder) -> None:
    """Puts `RowChunks` around those parts of each layer."""
    config, dtype = decoder.config, decoder.embed_tokens.weight.dtype
    for layer in decoder.layers:
        for name, part in list(layer.named_children()):
            if name == "mlp":
                layer.mlp = RowChunks.around(part, config.intermediate_size, dtype)
            elif name != "self_attn":
                setattr(layer, name, RowChunks.around(part, config.hidden_size, torch.float32))


def prefill_bytes(decoder: Decoder, num_tokens: int) -> int:
    """Most bytes that a dense layer's pass over so many tokens needs at once, keys and values apart: no less than
    `python -m bench models` finds on torch's device `meta`, and at most a third more."""
    config, itemsize = decoder.config, decoder.embed_tokens.weight.element_size()
    widest = max(config.intermediate_size * itemsize, config.hidden_size * torch.float32.itemsize)
    chunk = min(CHUNK_BYTES, num_tokens * widest)
    matrix = num_tokens * config.hidden_size * itemsize
    return int(max(_IN_CHUNKS * chunk + _BESIDE_CHUNKS * matrix, _IN_ATTENTION * matrix))
