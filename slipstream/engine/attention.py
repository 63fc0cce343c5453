"""The attention call of every decoder layer: writes new keys and values into each session's cache and attends over it.

A packed pass carries rows of several sessions along the sequence axis. The decoder layers hand their extra keyword
arguments through to the attention function, which is how `attend` arrives here. Grouped-query attention folds the
query heads of a group into rows of their key/value head, so keys and values are never copied.

Milliseconds a layer on one idle Xeon core: fp32, 4 heads on 2 KV heads of 64, 6,272 tokens of past. The first two are
kept; the others lost.

    window                                         1      2      4      8     16
    matmuls, K stored [dim, token]: MatmulKernel   0.286  0.317  0.391  0.616  1.059
    SDPA on folded rows, one mask: SdpaKernel      0.285  0.415  0.516  0.727  1.186
    SDPA with enable_gqa, which expands K and V    0.484  0.516  0.740  0.922  1.381
    SDPA on the past, joined to the window by lse  0.334  0.464  0.556  0.731  1.098
    matmuls, K stored [token, dim]                 0.283  0.423  0.536  0.782  1.204
    matmuls, V stored [dim, token]                 0.265  0.452  0.608  0.834  1.244
    K @ q^T, softmax over the first axis           0.493  0.604  0.886  0.771  1.276
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from slipstream.engine.kv_cache import Layout
from slipstream.engine.segments import Segment

IMPLEMENTATION = "slipstream"
"""Name under which the attention function is registered with transformers."""

_MAX_ROWS = 64
"""Query rows that `MatmulKernel` scores at a time: bounds its score matrix and is the fastest block."""
_MAX_MASKED = 512
"""Query rows of which `SdpaKernel` makes one mask."""


class Kernel(Protocol):
    """One way to compute attention of new rows over the cache."""

    key_layout: Layout
    value_layout: Layout
    compiles: bool
    """It compiles code for this processor, so other code may be compiled as well."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        """Attention of a segment that has a past.

        Args:
            query: [heads, n, head_dim].
            keys, values: the cache with the new rows, [kv_heads, segment.past + segment.num_columns, head_dim].
            segment: as this layer has it, see `Segment.in_layer`.

        Returns:
            [heads, n, head_dim].
        """
        ...

    def attend_causal(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """The same without a past: keys and values are [kv_heads, n, head_dim]."""
        ...


class SdpaKernel:
    """`scaled_dot_product_attention`: any device, any dtype."""

    key_layout = Layout.HEAD_TOKEN_DIM
    value_layout = Layout.HEAD_TOKEN_DIM
    compiles = False

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        heads, num_rows, head_dim = query.shape
        kv_heads = keys.shape[0]
        if segment.is_masked and num_rows > _MAX_MASKED:
            return self._attend_in_blocks(query, keys, values, segment, scale)
        folded = query.reshape(1, kv_heads, -1, head_dim)
        mask = segment.folded_mask(heads // kv_heads) if segment.is_masked else None
        attended = scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask, scale=scale)
        return attended.reshape(heads, num_rows, head_dim)

    @staticmethod
    def _attend_in_blocks(query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        """A long prompt behind a long past, whose mask as a whole would take a gigabyte."""
        kv_heads, head_dim = keys.shape[0], query.shape[-1]
        grouped = query.reshape(kv_heads, -1, *query.shape[1:])
        output = grouped.new_empty(grouped.shape)
        for first in range(0, query.shape[1], _MAX_MASKED):
            block = grouped[:, :, first : first + _MAX_MASKED]
            mask = segment.mask_of(slice(first, first + _MAX_MASKED), grouped.shape[1])
            folded = block.reshape(1, kv_heads, -1, head_dim)
            attended = scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask, scale=scale)
            output[:, :, first : first + _MAX_MASKED] = attended.view(block.shape)
        return output.view(query.shape)

    def attend_causal(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if len(query) != len(keys) and not heads_share_keys(query.device, query.dtype):
            keys, values = (each.repeat_interleave(len(query) // len(each), 0) for each in (keys, values))
        whole = query[None].contiguous(), keys[None].contiguous(), values[None].contiguous()
        shares = len(query) != len(keys)
        return scaled_dot_product_attention(*whole, is_causal=True, scale=scale, enable_gqa=shares)[0]


def heads_share_keys(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether SDPA over a whole prompt takes grouped heads as they are. On CUDA flash attention does, in 16 bits; what
    bounds its memory otherwise wants as many key heads as query heads, and torch would make the matrix of all scores,
    17 GB for 16,000 tokens."""
    if device.type != "cuda":
        return True
    return dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability(device) >= (8, 0)


class MatmulKernel(SdpaKernel):
    """Two batched matmuls around a softmax, with K stored [dim, token]: torch's fastest for fp32 on a CPU."""

    key_layout = Layout.HEAD_DIM_TOKEN

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        heads, num_rows, head_dim = query.shape
        kv_heads = keys.shape[0]
        scaled = (query * scale).view(kv_heads, -1, num_rows, head_dim)
        if num_rows <= _MAX_ROWS:
            return self._block(scaled, keys, values, segment, slice(None)).view(heads, num_rows, head_dim)
        output = torch.empty_like(scaled)
        for first in range(0, num_rows, _MAX_ROWS):
            rows = slice(first, min(first + _MAX_ROWS, num_rows))
            block = scaled[:, :, rows]
            output[:, :, rows] = self._block(block, keys, values, segment, rows).view(block.shape)
        return output.view(heads, num_rows, head_dim)

    @staticmethod
    def _block(scaled: Tensor, keys: Tensor, values: Tensor, segment: Segment, rows: slice) -> Tensor:
        """Some rows' queries [kv_heads, group, n, head_dim] -> the attention of [kv_heads, group * n, head_dim]."""
        kv_heads, group_size, num_rows, head_dim = scaled.shape
        scores = torch.bmm(scaled.reshape(kv_heads, -1, head_dim), keys.transpose(1, 2))
        if segment.is_masked:
            scores.view(kv_heads, group_size, num_rows, -1)[..., segment.past :] += segment.window_mask[rows]
        return torch.bmm(torch.softmax(scores, dim=-1), values)


PastAttention = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Queries [kv_heads, m, head_dim], keys and values [kv_heads, past, head_dim] and the scale -> output, shaped as the
queries, and log-sum-exp [kv_heads, m] of the scaled scores."""


def by_matmul(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Two matrix products around a softmax: the floor that works everywhere."""
    scores = torch.bmm(query * scale, keys.transpose(1, 2)).to(wide_dtype(query))
    lse = scores.logsumexp(dim=-1)
    return torch.bmm((scores - lse[..., None]).exp().to(values.dtype), values), lse


def by_flash(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Torch's own flash attention: on CUDA in 16 bits, on a CPU in any type."""
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attend = cpu if query.device.type == "cpu" else torch.ops.aten._scaled_dot_product_flash_attention
    output, lse, *_ = attend(query[None], keys[None], values[None], scale=scale)
    return output[0], lse[0]


@contextmanager
def flash_of(name: str) -> Iterator[None]:
    """Torch's flash attention by another implementation, such as "FA3" or "FA4". Raises whatever its package does."""
    from torch.nn import attention  # torch 2.11

    attention.activate_flash_attention_impl(name)
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


class JoinedKernel(SdpaKernel):
    """Attention in two parts: over the past, which every row of a window sees whole, and over the window itself.

    The query heads of a KV head and all rows of the window are one block of queries over the past, without a mask, so
    keys and values are read once, and any kernel that tells its log-sum-exp will do. The window, a chain or a tree, is
    small and masked. With outputs o_1, o_2 and log-sum-exps l_1, l_2 of both parts, attention over all is
    (e^l_1 o_1 + e^l_2 o_2) / (e^l_1 + e^l_2).
    """

    def __init__(self, attend_past: PastAttention) -> None:
        self._attend_past = attend_past

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        kv_heads, past = keys.shape[0], segment.past
        if not segment.is_masked or past == 0:
            return super().attend(query, keys, values, segment, scale)
        folded = query.reshape(kv_heads, -1, query.shape[-1])
        of_past = self._attend_past(folded, keys[:, :past], values[:, :past], scale)
        mask = segment.window_mask.repeat(len(query) // kv_heads, 1)
        return join_window(of_past, folded, keys[:, past:], values[:, past:], mask, scale).view(query.shape)


def join_window(
    of_past: tuple[Tensor, Tensor], query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Attention over past and window from that over the past.

    Args:
        of_past: as `PastAttention` returns it.
        query: [kv_heads, m, head_dim]. `keys`, `values`: the window's own, [kv_heads, n, head_dim].
        mask: 0 or -inf, broadcast against [kv_heads, m, n]; every row sees a key.

    Returns:
        Shape and dtype of `query`.
    """
    wide = wide_dtype(query)
    output, past_lse = (part.to(wide) for part in of_past)
    scores = query.to(wide) @ keys.to(wide).transpose(-1, -2) * scale + mask
    lse = torch.logaddexp(past_lse, scores.logsumexp(dim=-1))[..., None]
    joined = (scores - lse).exp() @ values.to(wide)
    joined += output * (past_lse[..., None] - lse).exp()
    return joined.to(query.dtype)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What scores are kept in: at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


class FlashKernel:
    """The `flash-attn` package on CUDA; its causal mask is aligned to the end, so one call serves every chain.

    It has no other mask: trees go to SDPA.
    """

    key_layout = Layout.TOKEN_HEAD_DIM
    value_layout = Layout.TOKEN_HEAD_DIM
    compiles = False

    def __init__(self) -> None:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

        self._attend = flash_attn_func
        self._masked = SdpaKernel()

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        if segment.tree is not None:
            return self._masked.attend(query, keys, values, segment, scale)
        return self.attend_causal(query, keys, values, scale)

    def attend_causal(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        batch = (tensor.transpose(0, 1)[None] for tensor in (query, keys, values))
        output: Tensor = self._attend(*batch, softmax_scale=scale, causal=True)
        return output[0].transpose(0, 1)


class Attend(Protocol):
    """All that a pass does in the attention of one layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[heads, rows, head_dim], rotated, and twice [kv_heads, rows, head_dim] -> [rows, heads, head_dim]."""
        ...


def attend_segments(
    segments: Sequence[Segment], kernel: Kernel, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """`Attend` over every segment's own cache."""
    outputs = []
    for whole in segments:
        segment = whole.in_layer(layer)
        rows = segment.rows
        keys, values = segment.cache.write(layer, key[:, rows], value[:, rows], segment.ahead)
        if segment.observer is not None:
            segment.observer.observe(layer, query[:, rows], keys[:, : segment.num_keys], scale)
        if segment.past == 0 and segment.tree is None:
            output = kernel.attend_causal(query[:, rows], key[:, rows], value[:, rows], scale)
        else:
            output = kernel.attend(query[:, rows], keys, values, segment, scale)
        outputs.append(output.transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attend: Attend,
    **_: Any,
) -> tuple[Tensor, None]:
    """What a decoder layer calls, with the signature of `AttentionInterface`; `attend` comes from the pass.

    Args:
        module: the layer's attention module, for its `layer_idx`.
        query: [1, heads, rows, head_dim], rotated. `key`, `value`: [1, kv_heads, rows, head_dim].
        attention_mask: unused; the pass knows what each row may see.

    Returns:
        [1, rows, heads, head_dim], and no attention weights.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    return attend(layer, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(IMPLEMENTATION, packed_attention)
