"""Mixtures of experts in a model with a strict width: what a token's experts make of it has the same bits in any pass.

Upstream takes all rows of an expert at once, and a product rounds by how many they are.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from slipstream.engine.forward import Decoder


def take_rows_one_by_one(decoder: Decoder, width: int) -> None:
    """Has the experts of a decoder, if it has any, do so in passes of so many rows, and fewer. Wider ones are prompts,
    which are the same whoever drafts."""
    config: Any = decoder.config
    if getattr(config, "num_experts_per_tok", 0):
        name = f"slipstream_{width}_rows"
        ALL_EXPERTS_FUNCTIONS.register(name, partial(_experts, width))
        config._experts_implementation = name


def _experts(width: int, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The signature is that of `ExpertsInterface` behind `width`: [rows, hidden], and for each row experts and weights,
    [rows, taken], -> [rows, hidden]."""
    if len(hidden) > width:
        return grouped_mm_experts_forward(module, hidden, chosen, weights)
    rows = zip(hidden.split(1), chosen.split(1), weights.split(1), strict=True)
    return torch.cat([batched_mm_experts_forward(module, *row) for row in rows])
