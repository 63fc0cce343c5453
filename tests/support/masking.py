"""A reference for caches that lack rows: an attention kernel that keeps all of them and masks those that are gone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.engine import VideoLM
from slipstream.engine.attention import Kernel, SdpaKernel
from slipstream.engine.segments import Segment


class MaskingKernel(SdpaKernel):
    """For passes of one session, through all layers in turn.

    Args:
        unseen: [layers, kv_heads or 1, tokens], True where a KV head of a layer must not see the token.
    """

    def __init__(self, unseen: Tensor) -> None:
        self._unseen = unseen
        self._layer = -1

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        self._layer = (self._layer + 1) % len(self._unseen)
        num_rows, num_keys = query.shape[1], keys.shape[1]
        repeats = query.shape[0] // keys.shape[0]
        unseen = self._unseen[self._layer, :, :num_keys].expand(keys.shape[0], -1).repeat_interleave(repeats, 0)
        sees = torch.ones(len(query), num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
        sees[..., : unseen.shape[1]] &= ~unseen[:, None]
        sees[..., num_keys - num_rows :] |= torch.eye(num_rows, dtype=torch.bool)  # a masked row must see something
        keys, values = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
        return scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=sees, scale=scale)[0]

    def attend_causal(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        segment: Any = None
        return self.attend(query, keys, values, segment, scale)


@contextmanager
def kernel_of(model: VideoLM, kernel: Kernel) -> Iterator[None]:
    """The model computes attention with `kernel`, on caches of the same layout."""
    before = model.runner.kernel
    assert (before.key_layout, before.value_layout) == (kernel.key_layout, kernel.value_layout)
    model.runner.kernel = kernel
    try:
        yield
    finally:
        model.runner.kernel = before
