"""Linear layers of one input as one product, on the very weights of theirs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from slipstream.engine.forward import Decoder


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
    """Joins what `FusedLayers` will, so that whoever looks at what memory is free afterwards sees what stays free."""
    for layer in decoder.layers:
        for parts in joined_parts(layer):
            join(parts)


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
