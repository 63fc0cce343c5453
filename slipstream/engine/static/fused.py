"""Decoder layers as few kernels: one product for queries, keys and values, and one for both halves of the MLP's inner
width. Only for static steps; all other passes run upstream's layers on the same weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from slipstream.engine.attention import Attend
from slipstream.engine.forward import Decoder
from slipstream.engine.static.glue import GlueShape, choose_glue

LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen2_5_VLDecoderLayer")
"""Upstream's, whose forward is the one that is written down here."""


# -- the products -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """Several linear layers of one input as one, whose outputs lie behind one another."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)


def join(parts: Sequence[nn.Linear]) -> Product:
    """One product of the layers, which from now on are views of its weights: no weight is there twice."""
    with torch.inference_mode(False), torch.no_grad():
        weight = _joined(parts, "weight")
        bias = None if parts[0].bias is None else _joined(parts, "bias")
    return Product(weight, bias)


def _joined(parts: Sequence[nn.Linear], name: str) -> Tensor:
    whole = torch.cat([getattr(part, name) for part in parts])
    for part, own in zip(parts, whole.split([part.weight.shape[0] for part in parts]), strict=True):
        setattr(part, name, nn.Parameter(own, requires_grad=False))
    return whole


def can_join(parts: Sequence[Any]) -> bool:
    """Whether these are plain linear layers of one kind. A quantised one, or one with a forward of its own, is none."""
    return (
        all(type(part) is nn.Linear and "forward" not in vars(part) for part in parts)
        and all(type(part.weight) is nn.Parameter for part in parts)
        and len({(part.weight.dtype, part.weight.device, part.bias is None) for part in parts}) == 1
    )


# -- layers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    number: int
    scale: float
    num_heads: int
    """Of queries."""
    qkv: Product
    gate_up: Product
    output: nn.Module
    down: nn.Module
    norms: tuple[Tensor, Tensor]
    """Weights of the norms before attention and before the MLP."""


class FusedLayers:
    """All layers of a decoder and the norm behind them.

    Args:
        decoder: see `can_fuse`. Its weights move; what they are does not change.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._rotary = decoder.rotary_emb
        self._layers = [_fuse(cast(Any, layer)) for layer in decoder.layers]
        self._last_norm = cast(Tensor, decoder.norm.weight)
        self._shape = _glue_shape(decoder)
        self.glue, self._glue = choose_glue(self._shape, self._last_norm)
        """Name of what lies between the products, see `known_glue`."""

    def __call__(self, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """[1, rows, hidden] -> what the language model's head takes, [rows, hidden]."""
        cos, sin = (angles[0] for angles in self._rotary(hidden, position_ids))
        hidden, glue, shape = hidden[0], self._glue, self._shape
        normed = glue.norm(hidden, self._layers[0].norms[0])
        following = [layer.norms[0] for layer in self._layers[1:]]
        for layer, next_norm in zip(self._layers, [*following, self._last_norm], strict=True):
            packed = layer.qkv(normed)
            rotated = glue.rotate(packed, cos, sin).transpose(0, 1)
            values = packed.view(len(packed), -1, shape.head_dim)[:, shape.num_rotated :].transpose(0, 1)
            query, keys = rotated[: layer.num_heads], rotated[layer.num_heads :]
            attended = attend(layer.number, query, keys, values, layer.scale)
            hidden, normed = glue.add_norm(hidden, layer.output(attended.flatten(1)), layer.norms[1])
            hidden, normed = glue.add_norm(hidden, layer.down(glue.gate(layer.gate_up(normed))), next_norm)
        return normed


def _glue_shape(decoder: Decoder) -> GlueShape:
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
    return _Layer(
        attention.layer_idx,
        float(attention.scaling),
        attention.q_proj.weight.shape[0] // attention.head_dim,
        join((attention.q_proj, attention.k_proj, attention.v_proj)),
        join((mlp.gate_proj, mlp.up_proj)),
        attention.o_proj,
        mlp.down_proj,
        (layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
    )
