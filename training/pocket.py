"""The shape of the pocket pair: builds, loads and saves both models as plain `transformers` folders."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

Role = Literal["target", "draft"]
ROLES: tuple[Role, ...] = ("target", "draft")

IMAGE_SIZE = 112
PATCH_SIZE = 8
TOKENS_PER_FRAME = (IMAGE_SIZE // PATCH_SIZE // 2) ** 2
FULL_FRAMES = 128
START_DEPTH = 4
"""Decoder layers that take part from the start; the others begin as the identity and join in later stages."""
STORED_DTYPE = torch.bfloat16

_TEXT: dict[Role, dict[str, Any]] = {
    "target": {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "draft": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
}
_VISION: dict[Role, dict[str, Any]] = {
    "target": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 2},
    "draft": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
}


def build_model(
    role: Role, tokenizer: PreTrainedTokenizerFast, seed: int = 0
) -> LlavaOnevisionForConditionalGeneration:
    """A freshly initialised model of the role's size."""
    torch.manual_seed(seed)
    language = Qwen2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.04,
        **_TEXT[role],
    )
    vision = SiglipVisionConfig(image_size=IMAGE_SIZE, patch_size=PATCH_SIZE, vision_use_head=False, **_VISION[role])
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config=language,
        image_token_index=tokenizer.get_vocab()["<image>"],
        video_token_index=tokenizer.get_vocab()["<video>"],
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_grid_pinpoints=[[IMAGE_SIZE, IMAGE_SIZE]],
        tie_word_embeddings=True,
    )
    model = LlavaOnevisionForConditionalGeneration(config)
    _prepare_weights(model)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=320,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


@torch.no_grad()
def _prepare_weights(model: LlavaOnevisionForConditionalGeneration) -> None:
    """Replaces the initial weights that would make training from nothing needlessly slow."""
    projector = model.model.multi_modal_projector
    for linear in (projector.linear_1, projector.linear_2):
        torch.nn.init.xavier_uniform_(linear.weight)
    embeddings = model.model.vision_tower.embeddings
    filters = embeddings.patch_embedding.weight
    edge_filters = torch.arange(len(filters)) % 4 != 0
    filters[edge_filters] -= filters[edge_filters].mean((2, 3), keepdim=True)
    filters[edge_filters] *= 3.0
    embeddings.position_embedding.weight.copy_(0.4 * _grid_waves(filters.shape[0]))
    for layer in model.model.language_model.layers[START_DEPTH:]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _grid_waves(width: int) -> torch.Tensor:
    """Sines and cosines [patches, width] of each patch's row and column."""
    side = IMAGE_SIZE // PATCH_SIZE
    rates = torch.pi / 2 ** torch.linspace(0.5, 4.5, width // 4)
    angles = torch.arange(side)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.cat([waves.repeat_interleave(side, dim=0), waves.repeat(side, 1)], dim=1)


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> LlavaOnevisionForConditionalGeneration:
    return LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=dtype)


def save_model(model: LlavaOnevisionForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes every file of a checkpoint, each replaced at once, weights rounded to the stored type."""
    scratch = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    rounded: Any = LlavaOnevisionForConditionalGeneration(model.config)
    rounded.to(STORED_DTYPE)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = model.generation_config
    rounded.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    for name, content in _processor_files().items():
        (scratch / name).write_text(json.dumps(content, indent=2) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for path in scratch.iterdir():
        path.chmod(0o644)
        os.replace(path, folder / path.name)
    scratch.rmdir()


def text_config(model: LlavaOnevisionForConditionalGeneration) -> Qwen2Config:
    config = model.config.text_config
    assert isinstance(config, Qwen2Config)
    return config


def normalise(frames: torch.Tensor) -> torch.Tensor:
    """uint8 frames [..., height, width, 3] as the pixel values [..., 3, height, width] the vision tower takes."""
    return (frames.float() / 127.5 - 1.0).movedim(-1, -3).contiguous()


def video_features(model: LlavaOnevisionForConditionalGeneration, pixel_values: torch.Tensor) -> torch.Tensor:
    """Pooled tokens of frames [n, 3, 112, 112] as [n, 49, hidden], just as the model itself computes them."""
    features: torch.Tensor = model.model.get_video_features(pixel_values[None]).pooler_output
    return features[0, :-1].view(len(pixel_values), TOKENS_PER_FRAME, -1)


def _processor_files() -> dict[str, dict[str, Any]]:
    """What `LlavaOnevisionProcessor` and its parts read; written by hand because they need torchvision to exist."""
    pixels = {
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    video = {
        "video_processor_type": "LlavaOnevisionVideoProcessor",
        "processor_class": "LlavaOnevisionProcessor",
        "default_to_square": False,
        "do_center_crop": None,
        "crop_size": None,
        "do_sample_frames": False,
        **pixels,
    }
    image = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "processor_class": "LlavaOnevisionProcessor",
        "image_grid_pinpoints": [[IMAGE_SIZE, IMAGE_SIZE]],
        "do_pad": True,
        **pixels,
    }
    processor = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": (IMAGE_SIZE // PATCH_SIZE) ** 2,
        "vision_feature_select_strategy": "full",
        "image_token": "<image>",
        "video_token": "<video>",
        "vision_aspect_ratio": "anyres_max_9",
    }
    return {
        "video_preprocessor_config.json": video,
        "preprocessor_config.json": image,
        "processor_config.json": processor,
    }
