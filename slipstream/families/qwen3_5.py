"""Qwen 3.5: Qwen3-VL's prompts and positions, a vision tower without features for the text model's layers, and layers
of linear attention, which `slipstream.engine.recurrent` runs."""

from torch import Tensor

from slipstream.families.adapter import Pixels
from slipstream.families.qwen2_5_vl import Qwen2_5VL
from slipstream.families.qwen3_vl import Qwen3VL


class Qwen3_5(Qwen3VL):
    """Adapter of `Qwen3_5ForConditionalGeneration`, and of its mixtures of experts."""

    def encode(self, pixels: Pixels) -> Tensor:
        return Qwen2_5VL.encode(self, pixels)
