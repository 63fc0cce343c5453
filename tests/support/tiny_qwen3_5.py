"""Writes tiny Qwen 3.5 checkpoints with random weights, in the form of the hub's repositories."""

from pathlib import Path

from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from tests.support.tiny_checkpoint import (
    QWEN_PATCH_SIZE,
    QWEN_PROCESSOR,
    QWEN_SPECIAL_TOKENS,
    text_config,
    tiny_tokenizer,
    write_qwen,
)


def write_tiny_qwen3_5(
    path: Path, *, seed: int, layers: int = 5, hidden: int = 48, max_context: int = 1024, num_experts: int = 0
) -> Path:
    """Write a checkpoint below `path`, which is returned. Every second layer has full attention, the others recur.

    A token is 16 x 16 pixels of two frames. With experts, it is a mixture of them, two for a token.
    """
    tokenizer = tiny_tokenizer(320, QWEN_SPECIAL_TOKENS)
    ids = tokenizer.get_vocab()
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
    text = text_config(tokenizer, layers, hidden, max_context) | recurrence
    config = (Qwen3_5MoeConfig if num_experts else Qwen3_5Config)(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": QWEN_PATCH_SIZE,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": 36,
        },
        text_config=text | {"head_dim": 16, "rope_parameters": rotary} | (mixture if num_experts else {}),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    sizes = {"shortest_edge": 4 * 24 * 24, "longest_edge": 10 * 48 * 64}
    processor = QWEN_PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor", "size": sizes}
    model = (Qwen3_5MoeForConditionalGeneration if num_experts else Qwen3_5ForConditionalGeneration)(config)
    return write_qwen(path, model, seed, processor)
