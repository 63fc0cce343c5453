"""The pocket pair in the LLaVA-OneVision architecture: SigLIP frames, pooled, and a Qwen2 text model."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

from training.pocket import (
    IMAGE_SIZE,
    PIXELS,
    Role,
    begin_as_identity,
    family_folder,
    generation_config,
    sharpen_edge_filters,
)
from training.tokenizer import train_tokenizer

PATCH_SIZE = 8
TOKENS_PER_FRAME = (IMAGE_SIZE // PATCH_SIZE // 2) ** 2
FULL_FRAMES = 128
START_DEPTH = 4
"""Decoder layers that take part from the start; the others begin as the identity and join in later stages."""

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


class LlavaFamily:
    """See `training.pocket.Family`."""

    name = "llava_onevision"
    folder = family_folder("pocket")
    model_class = LlavaOnevisionForConditionalGeneration
    frames_per_step = 1
    tokens_per_step = TOKENS_PER_FRAME

    def train_tokenizer(self) -> PreTrainedTokenizerFast:
        return train_tokenizer()

    def build(
        self, role: Role, tokenizer: PreTrainedTokenizerFast, seed: int = 0
    ) -> LlavaOnevisionForConditionalGeneration:
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
        vision = SiglipVisionConfig(
            image_size=IMAGE_SIZE, patch_size=PATCH_SIZE, vision_use_head=False, **_VISION[role]
        )
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
        model.generation_config = generation_config(tokenizer)
        return model

    def video_features(self, model: LlavaOnevisionForConditionalGeneration, pixel_values: Tensor) -> Tensor:
        features: Tensor = model.model.get_video_features(pixel_values[None]).pooler_output
        return features[0, :-1].view(len(pixel_values), TOKENS_PER_FRAME, -1)

    def closing(self, model: LlavaOnevisionForConditionalGeneration) -> Tensor:
        newline: Tensor = model.model.image_newline
        return newline[None]

    def closing_parameters(self, model: LlavaOnevisionForConditionalGeneration) -> list[nn.Parameter]:
        return [model.model.image_newline]

    def prompt_positions(
        self,
        model: LlavaOnevisionForConditionalGeneration,
        before_ids: list[int],
        num_frames: int,
        after_ids: list[int],
        seconds_per_frame: float,
    ) -> tuple[Tensor, int]:
        newline = 1
        num_tokens = len(before_ids) + num_frames * TOKENS_PER_FRAME + newline + len(after_ids)
        return torch.arange(num_tokens), num_tokens

    def vision_parameters(self, model: LlavaOnevisionForConditionalGeneration) -> list[nn.Parameter]:
        return [*model.model.vision_tower.parameters(), *model.model.multi_modal_projector.parameters()]

    def prepare(self, model: LlavaOnevisionForConditionalGeneration) -> None:
        # Measured on a CPU: plain matmuls beat fused attention on 196 tokens, and compiled layers take 0.6 of the time.
        model.model.vision_tower.set_attn_implementation("eager")
        for layer in (*model.model.vision_tower.encoder.layers, *model.model.language_model.layers):
            layer.compile(dynamic=False)

    def processor_files(self) -> dict[str, dict[str, Any]]:
        pixels = {**PIXELS, "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE}}
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


@torch.no_grad()
def _prepare_weights(model: LlavaOnevisionForConditionalGeneration) -> None:
    """Replaces the initial weights that would make training from nothing needlessly slow."""
    projector = model.model.multi_modal_projector
    for linear in (projector.linear_1, projector.linear_2):
        torch.nn.init.xavier_uniform_(linear.weight)
    embeddings = model.model.vision_tower.embeddings
    filters = embeddings.patch_embedding.weight
    sharpen_edge_filters(filters)
    embeddings.position_embedding.weight.copy_(0.4 * _grid_waves(filters.shape[0]))
    begin_as_identity(model.model.language_model.layers[START_DEPTH:])


def _grid_waves(width: int) -> Tensor:
    """Sines and cosines [patches, width] of each patch's row and column."""
    side = IMAGE_SIZE // PATCH_SIZE
    rates = torch.pi / 2 ** torch.linspace(0.5, 4.5, width // 4)
    angles = torch.arange(side)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.cat([waves.repeat_interleave(side, dim=0), waves.repeat(side, 1)], dim=1)
