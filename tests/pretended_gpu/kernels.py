"""What torch has for CUDA alone, by its definition."""

from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Any, ...]:
    """`aten::_flash_attention_forward` of packed sequences: queries [rows, heads, d] -> output, lse [heads, rows]."""
    assert not is_causal and not dropout_p and not return_debug_mask
    if query.dtype not in HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
    used = cum_seq_k.diff() if seqused_k is None else seqused_k
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output, lse = torch.ops.pretended_gpu.packed_attention(query, key, value, cum_seq_q, cum_seq_k, used, scale)
    return output, lse, None, None, None


@torch.library.custom_op("pretended_gpu::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, starts: Tensor, used: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One kernel: the lengths are read when it runs."""
    output, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=torch.float32)
    group = query.shape[1] // key.shape[1]
    bounds = zip(rows.tolist(), rows.tolist()[1:], starts.tolist(), used.tolist(), strict=False)
    for first, end, start, length in bounds:
        held = (each[start : start + length].float().repeat_interleave(group, dim=1) for each in (key, value))
        keys, values = held
        scores = torch.einsum("qhd,khd->hqk", query[first:end].float(), keys) * scale
        lse[:, first:end] = scores.logsumexp(dim=-1)
        output[first:end] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values).to(query.dtype)
    return output, lse


def scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_flash_attention`: output, lse and what nobody takes."""
    if query.dtype not in HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = on_cpu(query, key, value, dropout_p, is_causal, scale=scale)
    return _laid_out_as(query, output), lse, None, None, 0, 0, None, None, None


def _laid_out_as(query: Tensor, output: Tensor) -> Tensor:
    """In the order of the queries' strides, as flash attention allocates it; without their gaps."""
    return torch.empty_like(query.transpose(-3, -2)).transpose(-3, -2).copy_(output)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Of the kernels behind it the one that takes masks and 32 bits (`_efficient_attention_forward` in torch's
    attention.cu) gives [batch, rows, heads, d], transposed."""
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
    by_rows = query.dtype == torch.float32 or (query.dtype in HALF and attn_mask is not None)
    if by_rows:
        return output.transpose(-3, -2).contiguous().transpose(-3, -2)
    return _laid_out_as(query, output) if query.dtype in HALF else output


def histc(numbers: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Of integers, too."""
    assert min < max, "else the device's numbers decide, which the host waits for"
    return torch.histc(numbers.float(), bins, min, max).to(numbers.dtype)


BY_NAME = {
    "histc": histc,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "_flash_attention_forward": flash_attention_forward,
    "_scaled_dot_product_flash_attention": scaled_dot_product_flash_attention,
}
