"""Decoder layers as few kernels: one product for queries, keys and values, and one for both halves of the MLP's inner
width. For steps; prompts run upstream's layers on the same weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from slipstream.engine.attention import Attend
from slipstream.engine.forward import Decoder

# -- joined weights ---------------------------------------------------------------------------------------------------

# Linear layers of one input as one product, on the very weights of theirs.


@dataclass(frozen=True)
class Product:
    """Several linear layers of one input as one, whose outputs lie behind one another."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)


def join(parts: Sequence[nn.Linear]) -> Product:
    """One product of the layers, which from now on are views of its weights: no weight is there twice. Of layers that
    were joined before it copies nothing."""
    with torch.inference_mode(False), torch.no_grad():
        weight = _joined(parts, "weight")
        bias = None if parts[0].bias is None else _joined(parts, "bias")
    return Product(weight, bias)


def join_weights(decoder: Decoder) -> None:
    """Joins what `FusedLayers` will, so that whoever looks at what memory is free afterwards sees what stays free.

    A layer's output projection moves along: weights are loaded in the order of their names, so it lies between those of
    the attention, and where they were would be gaps too small for the next layer's.
    """
    for layer in cast(Sequence[Any], decoder.layers):
        of_attention, of_mlp = joined_parts(layer)
        join(of_attention)
        _move(layer.self_attn.o_proj)
        join(of_mlp)


def _move(part: Any) -> None:
    """Its weight to other memory, unless it is no plain one."""
    if is_plain(part.weight):
        with torch.inference_mode(False), torch.no_grad():
            part.weight = nn.Parameter(part.weight.clone(), requires_grad=False)


def joined_parts(layer: Any) -> tuple[Sequence[nn.Linear], Sequence[nn.Linear]]:
    """What is joined of a decoder layer: its attention's, and its MLP's."""
    attention, mlp = layer.self_attn, layer.mlp
    return (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)


def _joined(parts: Sequence[nn.Linear], name: str) -> Tensor:
    weights = [cast(Tensor, getattr(part, name)) for part in parts]
    if (there := _lying_together(weights)) is not None:
        return there
    whole = torch.cat(weights)
    for part, own in zip(parts, whole.split([len(weight) for weight in weights]), strict=True):
        setattr(part, name, nn.Parameter(own, requires_grad=False))
    return whole


def _lying_together(weights: Sequence[Tensor]) -> Tensor | None:
    """As one what lies behind one another in one storage; None where that is not so."""
    first = weights[0]
    starts = accumulate((weight.numel() for weight in weights), initial=first.storage_offset())
    for weight, start in zip(weights, starts, strict=False):
        is_there = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_there and weight.is_contiguous() and weight.storage_offset() == start):
            return None
    return first.detach().as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())


def bare(part: Any) -> nn.Module | Product:
    """A plain linear layer without a module's call around it, which takes longer than a small product."""
    return Product(part.weight, part.bias) if can_join((part,)) else part


def is_plain(weight: Any) -> bool:
    """Whether it is no tensor of another kind, as quantised ones are."""
    return type(weight) is nn.Parameter


def can_join(parts: Sequence[Any]) -> bool:
    """Whether these are plain linear layers of one kind. A quantised one, or one with a forward of its own, is none."""
    return (
        all(type(part) is nn.Linear and "forward" not in vars(part) for part in parts)
        and all(is_plain(part.weight) for part in parts)
        and len({(part.weight.dtype, part.weight.device, part.bias is None) for part in parts}) == 1
    )


LAYERS = (
    *("LlamaDecoderLayer", "MistralDecoderLayer"),
    *("Qwen2DecoderLayer", "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer"),
)
"""Upstream's, whose forward is the one that is written down here."""


# -- between the products ---------------------------------------------------------------------------------------------

# Norm, rotation, activation: each a function of tensors alone. Upstream's twenty small kernels a layer take longer than
# what they compute; on CUDA they are four, where there is a compiler (`static.glue`).


@dataclass(frozen=True)
class Glue:
    """What lies between a layer's products: functions of tensors alone, the same for all layers."""

    norm: Callable[[Tensor, Tensor], Tensor]
    """[rows, hidden], weight -> RMS norm."""
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Two [rows, hidden], weight -> their sum, and its norm."""
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Queries, keys and values [rows, heads * d], cos and sin [rows, d] -> queries and keys, rotated, [rows, n, d]."""
    gate: Callable[[Tensor], Tensor]
    """[rows, 2 * inner] -> silu of the first half times the second."""


@dataclass(frozen=True)
class GlueShape:
    """What the glue of one model is made for."""

    eps: float
    """Of its norms."""
    hidden_size: int
    inner_size: int
    num_heads: int
    """Of queries, keys and values together."""
    num_rotated: int
    """Heads of queries and keys."""
    head_dim: int


MakeGlue = Callable[[GlueShape], Glue]


def exact_glue(shape: GlueShape) -> Glue:
    """Upstream's operations in upstream's order."""

    def norm(hidden: Tensor, weight: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + shape.eps)
        return weight * wide.to(hidden.dtype)

    return glue_with(shape, norm)


def glue_with(shape: GlueShape, norm: Callable[[Tensor, Tensor], Tensor]) -> Glue:
    """Upstream's operations around a norm."""

    def add_norm(hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = hidden + update
        return total, norm(total, weight)

    def rotate(packed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = packed.view(len(packed), -1, shape.head_dim)[:, : shape.num_rotated]
        first, second = rotated.chunk(2, dim=-1)
        return rotated * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    def gate(packed: Tensor) -> Tensor:
        first, second = packed.chunk(2, dim=-1)
        return silu(first) * second

    return Glue(norm, add_norm, rotate, gate)


# -- layers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    number: int
    scale: float
    num_heads: int
    """Of queries."""
    qkv: Product
    gate_up: Product
    output: nn.Module | Product
    down: nn.Module | Product
    norms: tuple[Tensor, Tensor]
    """Weights of the norms before attention and before the MLP."""


class FusedLayers:
    """All layers of a decoder and the norm behind them.

    Args:
        decoder: see `can_fuse`. Its weights move; what they are does not change.
        make_glue: makes what lies between the products.
    """

    def __init__(self, decoder: Decoder, make_glue: MakeGlue = exact_glue) -> None:
        self.rotary = decoder.rotary_emb
        self.layers = [_fuse(cast(Any, layer)) for layer in decoder.layers]
        norms = [norm for layer in self.layers for norm in layer.norms]
        self.norms = [*norms, cast(Tensor, decoder.norm.weight).detach()]
        """Weights of all norms, in their order; no parameters, as compiled code is of one type of tensor."""
        self.shape = glue_shape(decoder)
        self._glue = make_glue(self.shape)

    def __call__(self, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """[1, rows, hidden] -> what the language model's head takes, [rows, hidden]."""
        cos, sin = (angles[0] for angles in self.rotary(hidden, position_ids))
        hidden, glue, shape = hidden[0], self._glue, self.shape
        normed = glue.norm(hidden, self.norms[0])
        for layer, next_norm in zip(self.layers, self.norms[2::2], strict=True):
            packed = layer.qkv(normed)
            rotated = glue.rotate(packed, cos, sin).transpose(0, 1)
            values = packed.view(len(packed), -1, shape.head_dim)[:, shape.num_rotated :].transpose(0, 1)
            query, keys = rotated[: layer.num_heads], rotated[layer.num_heads :]
            attended = attend(layer.number, query, keys, values, layer.scale)
            hidden, normed = glue.add_norm(hidden, layer.output(attended.flatten(1)), layer.norms[1])
            hidden, normed = glue.add_norm(hidden, layer.down(glue.gate(layer.gate_up(normed))), next_norm)
        return normed


def glue_shape(decoder: Decoder) -> GlueShape:
    """Of a decoder that can be fused."""
    attention, mlp = cast(Any, decoder.layers[0]).self_attn, cast(Any, decoder.layers[0]).mlp
    heads = [part.weight.shape[0] // attention.head_dim for part in (attention.q_proj, attention.k_proj)]
    return GlueShape(
        eps=float(cast(Any, decoder.norm).variance_epsilon),
        hidden_size=len(decoder.norm.weight),  # type: ignore[arg-type]
        inner_size=mlp.up_proj.weight.shape[0],
        num_heads=sum(heads) + heads[1],
        num_rotated=sum(heads),
        head_dim=attention.head_dim,
    )


def can_fuse(decoder: Decoder, num_axes: int) -> bool:
    """Whether every layer is one of `LAYERS` with plain weights, and positions, of so many axes, rotate whole heads."""
    return all(map(_is_plain, decoder.layers)) and _rotates_heads(decoder, num_axes)


def _is_plain(layer: Any) -> bool:
    if type(layer).__name__ not in LAYERS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    return (
        {name for name, _ in attention.named_children()} == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and can_join((attention.q_proj, attention.k_proj, attention.v_proj))
        and can_join((mlp.gate_proj, mlp.up_proj))
        and attention.config.hidden_act in ("silu", "swish")
    )


def _rotates_heads(decoder: Decoder, num_axes: int) -> bool:
    attention = cast(Any, decoder.layers[0]).self_attn
    hidden = decoder.embed_tokens.weight[None, :2]
    position_ids = torch.zeros(1, 2, dtype=torch.int64, device=hidden.device)
    cos, _ = decoder.rotary_emb(hidden, on_axes(position_ids, num_axes))
    return bool(cos.shape == (1, 2, attention.head_dim))


def on_axes(position_ids: Tensor, num_axes: int) -> Tensor:
    """[1, rows] -> as a rotary embedding of so many axes takes them, all equal."""
    return position_ids if num_axes == 1 else position_ids.expand(num_axes, 1, -1)


def _fuse(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = map(join, joined_parts(layer))
    return _Layer(
        attention.layer_idx,
        float(attention.scaling),
        attention.q_proj.weight.shape[0] // attention.head_dim,
        qkv,
        gate_up,
        bare(attention.o_proj),
        bare(mlp.down_proj),
        (layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()),
    )
