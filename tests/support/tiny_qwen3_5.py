"""Writes tiny Qwen 3.5 checkpoints with random weights, in the form of the hub's repositories."""

from pathlib import Path

from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from tests.support.tiny_checkpoint import QWEN_SPECIAL_TOKENS, text_config, tiny_tokenizer, write_qwen3


def write_tiny_qwen3_5(
    path: Path, *, seed: int, layers: int = 5, hidden: int = 48, max_context: int = 1024, num_experts: int = 0
) -> Path:
    """Write a checkpoint below `path`, which is returned. Every second layer has full attention, the others recur. With
    experts, it is a mixture of them, two for a token."""
    recurrence = {
        "layer_types": [("linear_attention", "full_attention")[layer % 2] for layer in range(layers)],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 8,
    }
    rotary = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }
    mixture = {
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden,
    }
    text = text_config(tiny_tokenizer(320, QWEN_SPECIAL_TOKENS), layers, hidden, max_context) | recurrence
    if num_experts:
        del text["intermediate_size"]  # which upstream's configuration does not have
    return write_qwen3(
        path,
        Qwen3_5MoeConfig if num_experts else Qwen3_5Config,
        Qwen3_5MoeForConditionalGeneration if num_experts else Qwen3_5ForConditionalGeneration,
        seed=seed,
        vision={"depth": 2},
        text=text | {"head_dim": 16, "rope_parameters": rotary} | (mixture if num_experts else {}),
    )
