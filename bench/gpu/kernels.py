"""Ways to compute the target's windows over a long past that the engine does not have (yet), to be measured beside it.

On CUDA `SdpaKernel` hands a window of several rows to `scaled_dot_product_attention` with a mask, which rules out its
flash backend: one block of threads then walks the whole past of a KV head. Both kernels here avoid the mask.
"""

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from slipstream.engine.attention import SdpaKernel
from slipstream.engine.segments import Segment


class LowerRightKernel(SdpaKernel):
    """Torch's own flash attention with its causal mask aligned to the end. For chains; trees go to SDPA."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        num_rows, num_keys = query.shape[1], keys.shape[1]
        if segment.tree is not None or num_keys != segment.num_keys or num_rows == 1:
            return super().attend(query, keys, values, segment, scale)
        output: Tensor = scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=causal_lower_right(num_rows, num_keys),
            scale=scale,
            enable_gqa=query.shape[0] != keys.shape[0],
        )
        return output[0]


class JoinedKernel(SdpaKernel):
    """Flash attention over the past, which every row sees whole, joined to the window's by their log-sum-exps.

    Serves trees as well. In fp16 and bf16 on CUDA, and in any type on a CPU.
    """

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        heads, num_rows, head_dim = query.shape
        kv_heads, past = keys.shape[0], segment.past
        if not segment.is_masked or past == 0:
            return super().attend(query, keys, values, segment, scale)
        folded = query.reshape(1, kv_heads, -1, head_dim)
        past_output, past_lse = _flash(folded, keys[None, :, :past], values[None, :, :past], scale)
        scores = folded[0].float() @ keys[:, past:].float().transpose(1, 2) * scale
        scores += segment.window_mask.repeat(heads // kv_heads, 1)
        lse = torch.logaddexp(past_lse[0], scores.logsumexp(dim=-1))[..., None]
        output = (scores - lse).exp() @ values[:, past:].float()
        output += past_output[0].float() * (past_lse[0][..., None] - lse).exp()
        return output.to(query.dtype).view(heads, num_rows, head_dim)


def _flash(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [1, heads, n, head_dim] and fp32 log-sum-exp [1, heads, n] of attention without a mask."""
    if query.device.type == "cpu":
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=scale)
    else:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, scale=scale)
    return output, lse
