"""Published shapes of the models that the papers use, and tiny ones of the same families. Knows no measurement.

The numbers are those of the checkpoints' config.json on huggingface.co, each named by its `source`. Weights are random:
times and memory are those of the real model, what it writes is noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from slipstream.engine.attention import IMPLEMENTATION

_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}
_QWEN_TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
MAX_CONTEXT = 131_072
"""Positions, for all of them: 25,000 video tokens must fit whatever the checkpoint was trained for."""


@dataclass(frozen=True)
class Geometry:
    """One model's shape."""

    name: str
    family: str
    """Its model type."""
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    published_parameters: float
    """What the hub counts in the checkpoint; 0: it is nobody's checkpoint."""
    source: str

    def config(self) -> PreTrainedConfig:
        """What upstream builds the model from."""
        text = {"max_position_embeddings": MAX_CONTEXT, "tie_word_embeddings": False, **self.text}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        shared: dict[str, Any] = {"tie_word_embeddings": text["tie_word_embeddings"]}
        if self.family == "llava_onevision":
            text["model_type"] = "qwen2"
            shared |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        else:
            text["rope_parameters"]["mrope_section"] = text.pop("mrope_section", [16, 24, 24])
        return AutoConfig.for_model(self.family, text_config=text, vision_config=dict(self.vision), **shared)


def _llava(name: str, parameters: float, **text: Any) -> Geometry:
    source = f"llava-hf/{name}-ov-hf"
    return Geometry(name, "llava_onevision", {"vocab_size": 152_000, **text}, _SIGLIP, parameters, source)


def _qwen(name: str, parameters: float, tower_width: int, **text: Any) -> Geometry:
    vision = {**_QWEN_TOWER, "intermediate_size": tower_width, "out_hidden_size": text["hidden_size"]}
    return Geometry(name, "qwen2_5_vl", {"vocab_size": 152_064, **text}, vision, parameters, f"Qwen/{name}-Instruct")


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        _llava(
            "llava-onevision-qwen2-0.5b",
            0.894e9,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        _llava(
            "llava-onevision-qwen2-7b",
            8.03e9,
            hidden_size=3584,
            intermediate_size=18_944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
        ),
        _qwen(
            "Qwen2.5-VL-7B",
            8.292e9,
            3420,
            hidden_size=3584,
            intermediate_size=18_944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
        ),
        _qwen(
            "Qwen2.5-VL-32B",
            33.45e9,
            3456,
            hidden_size=5120,
            intermediate_size=27_648,
            num_hidden_layers=64,
            num_attention_heads=40,
            num_key_value_heads=8,
        ),
    )
}


@dataclass(frozen=True)
class Pair:
    """A draft and its target, with what a paper measured of them."""

    draft: str
    target: str
    mean_accepted_length: float
    """M of paper 000, table 1, averaged over the data sets."""
    source: str = "paper 000, section 4.2"

    @property
    def tau(self) -> float:
        """The chance that a draft token is accepted that gives such lengths: a line dies after 1 / (1 - tau) tokens."""
        return 1.0 - 1.0 / self.mean_accepted_length


PAIRS = (
    Pair("llava-onevision-qwen2-0.5b", "llava-onevision-qwen2-7b", 8.31),
    Pair("Qwen2.5-VL-7B", "Qwen2.5-VL-32B", 4.28),
)


def tiny(geometry: Geometry) -> Geometry:
    """The same family in a size that a CPU runs in milliseconds; keeps the name."""
    deep = 4 if geometry.text["num_hidden_layers"] > 24 else 2
    text = {
        **geometry.text,
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": deep,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if geometry.family == "llava_onevision":
        vision = {**_SIGLIP, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    else:
        text["mrope_section"] = [2, 1, 1]
        vision = {**_QWEN_TOWER, "depth": 1, "hidden_size": 16, "num_heads": 2, "fullatt_block_indexes": [0]}
        vision |= {"intermediate_size": 32, "out_hidden_size": 32}
    return replace(geometry, text=text, vision=vision, published_parameters=0.0)


def make_upstream(geometry: Geometry, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """The upstream model with random weights that were made on `device`: nothing passes through the host's memory."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(
            geometry.config(),
            dtype=dtype,
            attn_implementation={"": "sdpa", "vision_config": "sdpa", "text_config": IMPLEMENTATION},
        )
    return cast(PreTrainedModel, model.eval().requires_grad_(False))


def count_parameters(geometry: Geometry) -> int:
    """Parameters of the whole model, shared ones once."""
    model = make_upstream(geometry, torch.device("meta"), torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters())
