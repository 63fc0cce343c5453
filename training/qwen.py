"""The pocket pair in the Qwen2.5-VL architecture: two frames a step, windowed vision, three-axis positions."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from training.pocket import (
    IMAGE_SIZE,
    PIXELS,
    Role,
    begin_as_identity,
    family_folder,
    generation_config,
    sharpen_edge_filters,
)
from training.tokenizer import QWEN_SPECIAL_TOKENS, train_qwen_tokenizer

PATCH_SIZE = 14
MERGE_SIZE = 2
FRAMES_PER_STEP = 2
TOKENS_PER_STEP = (IMAGE_SIZE // PATCH_SIZE // MERGE_SIZE) ** 2
FULL_FRAMES = 32
START_DEPTH = 3
"""Decoder layers that begin as anything but the identity."""

_TEXT: dict[Role, dict[str, Any]] = {
    "target": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mrope_section": [8, 8, 8],
    },
    "draft": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "mrope_section": [4, 4, 4],
    },
}
_VISION: dict[Role, dict[str, Any]] = {
    "target": {"hidden_size": 128, "intermediate_size": 320, "depth": 3, "num_heads": 4, "fullatt_block_indexes": [2]},
    "draft": {"hidden_size": 96, "intermediate_size": 256, "depth": 2, "num_heads": 4, "fullatt_block_indexes": [1]},
}
_PIXELS_PER_FRAME = {"shortest_edge": 12_000, "longest_edge": 13_000}
"""Around 112 * 112, so that a square frame of any size becomes 112 x 112 and rounding cannot make it smaller."""


class QwenFamily:
    """See `training.pocket.Family`."""

    name = "qwen2_5_vl"
    folder = family_folder("pocket-qwen")
    model_class = Qwen2_5_VLForConditionalGeneration
    frames_per_step = FRAMES_PER_STEP
    tokens_per_step = TOKENS_PER_STEP

    def train_tokenizer(self) -> PreTrainedTokenizerFast:
        return train_qwen_tokenizer()

    def build(
        self, role: Role, tokenizer: PreTrainedTokenizerFast, seed: int = 0
    ) -> Qwen2_5_VLForConditionalGeneration:
        torch.manual_seed(seed)
        text = dict(_TEXT[role])
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": text.pop("mrope_section")}
        ids = tokenizer.get_vocab()
        vision_start, video, vision_end, image = (ids[token] for token in QWEN_SPECIAL_TOKENS)
        config = Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "max_position_embeddings": 16384,
                "rope_parameters": rope,
                "tie_word_embeddings": True,
                "use_sliding_window": False,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
                "initializer_range": 0.04,
                **text,
            },
            vision_config={
                "patch_size": PATCH_SIZE,
                "temporal_patch_size": FRAMES_PER_STEP,
                "spatial_merge_size": MERGE_SIZE,
                "window_size": IMAGE_SIZE,
                "tokens_per_second": 2,
                "out_hidden_size": text["hidden_size"],
                **_VISION[role],
            },
            vision_start_token_id=vision_start,
            vision_end_token_id=vision_end,
            video_token_id=video,
            image_token_id=image,
            tie_word_embeddings=True,
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
        _prepare_weights(model)
        model.generation_config = generation_config(tokenizer)
        return model

    def video_features(self, model: Qwen2_5_VLForConditionalGeneration, pixel_values: Tensor) -> Tensor:
        patches, grid = _patches(pixel_values)
        features: Tensor = model.model.visual(patches, grid_thw=grid).pooler_output
        return features.view(-1, TOKENS_PER_STEP, features.shape[-1])

    def closing(self, model: Qwen2_5_VLForConditionalGeneration) -> Tensor:
        table: Any = model.get_input_embeddings()
        return torch.empty_like(table.weight[:0])

    def closing_parameters(self, model: Qwen2_5_VLForConditionalGeneration) -> list[nn.Parameter]:
        return []

    def prompt_positions(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        before_ids: list[int],
        num_frames: int,
        after_ids: list[int],
        seconds_per_frame: float,
    ) -> tuple[Tensor, int]:
        steps = -(-num_frames // FRAMES_PER_STEP)
        num_video = steps * TOKENS_PER_STEP
        video_id: int = model.config.video_token_id
        side = IMAGE_SIZE // PATCH_SIZE
        positions, _ = model.model.get_rope_index(
            torch.tensor([[*before_ids, *[video_id] * num_video, *after_ids]]),
            torch.tensor([[0] * len(before_ids) + [2] * num_video + [0] * len(after_ids)]),
            video_grid_thw=torch.tensor([[steps, side, side]]),
            second_per_grid_ts=torch.tensor([seconds_per_frame * FRAMES_PER_STEP]),
        )
        return positions[:, 0], int(positions[0, 0, -1]) + 1

    def vision_parameters(self, model: Qwen2_5_VLForConditionalGeneration) -> list[nn.Parameter]:
        return list(model.model.visual.parameters())

    def prepare(self, model: Qwen2_5_VLForConditionalGeneration) -> None:
        # Measured on a CPU, 32 steps there and back: 0.11 s with plain matmuls, 0.26 s with fused attention.
        model.model.visual.set_attn_implementation("eager")
        for layer in model.model.language_model.layers:
            layer.compile(dynamic=False)

    def processor_files(self) -> dict[str, dict[str, Any]]:
        pixels = {
            **PIXELS,
            "size": _PIXELS_PER_FRAME,
            "patch_size": PATCH_SIZE,
            "temporal_patch_size": FRAMES_PER_STEP,
            "merge_size": MERGE_SIZE,
        }
        names = {"processor_class": "Qwen2_5_VLProcessor"}
        video = {"video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": False, **names, **pixels}
        image = {"image_processor_type": "Qwen2VLImageProcessor", **names, **pixels}
        return {
            "video_preprocessor_config.json": video,
            "preprocessor_config.json": image,
            "processor_config.json": names,
        }


def _patches(pixel_values: Tensor) -> tuple[Tensor, Tensor]:
    """Frames [steps * 2, 3, 112, 112] as the rows of patches that the vision tower takes, and their grid [1, 3]."""
    steps, merged = len(pixel_values) // FRAMES_PER_STEP, IMAGE_SIZE // PATCH_SIZE // MERGE_SIZE
    blocks = pixel_values.reshape(
        steps, FRAMES_PER_STEP, 3, merged, MERGE_SIZE, PATCH_SIZE, merged, MERGE_SIZE, PATCH_SIZE
    )
    rows = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * (merged * MERGE_SIZE) ** 2, -1)
    return rows, torch.tensor([[steps, merged * MERGE_SIZE, merged * MERGE_SIZE]], device=pixel_values.device)


@torch.no_grad()
def _prepare_weights(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """Replaces the initial weights that would make training from nothing needlessly slow."""
    prepare_tower(model)
    begin_as_identity(model.model.language_model.layers[START_DEPTH:])


@torch.no_grad()
def prepare_tower(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """The vision tower's: larger linear layers, and filters that see edges."""
    visual: Any = model.model.visual
    for module in visual.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    filters = visual.patch_embed.proj.weight
    nn.init.normal_(filters, std=filters[0].numel() ** -0.5)
    sharpen_edge_filters(filters)
