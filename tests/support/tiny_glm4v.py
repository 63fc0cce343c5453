"""Writes tiny checkpoints with random weights in the form of GLM-4.1V's repositories, and of GLM-4.6V-Flash's."""

from pathlib import Path

from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.tiny_checkpoint import (
    QWEN_PATCH_SIZE,
    QWEN_PROCESSOR,
    text_config,
    tiny_tokenizer,
    write_checkpoint,
)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
)
MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
CHAT_TEMPLATE = """\
[gMASK]<sop>{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}\
{% for part in message['content'] %}\
{% if part['type'] == 'video' %}<|begin_of_video|><|video|><|end_of_video|>{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


def write_tiny_glm4v(
    path: Path,
    *,
    seed: int,
    layers: int = 3,
    hidden: int = 64,
    max_context: int = 1024,
    model_type: str = "glm4v",
    processor: str = "",
    template: str = CHAT_TEMPLATE,
) -> Path:
    """Write a GLM-4.1V checkpoint with random weights below `path`, which is returned.

    A token is 16 x 16 pixels of two frames. Half of each head is rotated.

    Args:
        model_type: glm46v as of GLM-4.6V-Flash; glm4v_moe as of GLM-4.5V, a mixture of four experts, two for a token,
            and one that all share; its first layer has a plain MLP.
        processor: Glm46VProcessor as of GLM-4.6V-Flash; none: it goes by the model type.
    """
    tokenizer = tiny_tokenizer(320, SPECIAL_TOKENS, end="<|user|>")
    ids = tokenizer.get_vocab()
    frequencies = hidden // 4 // 4
    base = "glm4v_moe" if model_type == "glm4v_moe" else "glm4v"
    config = AutoConfig.for_model(
        model_type,
        vision_config={
            "model_type": f"{base}_vision",
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "image_size": 6 * QWEN_PATCH_SIZE,
            "patch_size": QWEN_PATCH_SIZE,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": hidden,
            "intermediate_size": 48,
        },
        text_config=text_config(tokenizer, layers, hidden, max_context)
        | (MIXTURE if base == "glm4v_moe" else {})
        | {
            "model_type": f"{base}_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [frequencies - 2 * (frequencies // 3), frequencies // 3, frequencies // 3],
            },
        },
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
        tie_word_embeddings=False,
    )
    settings = QWEN_PROCESSOR | {
        "video_processor_type": "Glm4vVideoProcessor",
        "size": {"shortest_edge": 4 * 24 * 24, "longest_edge": 10 * 48 * 64},
    }
    if processor:
        settings["processor_class"] = processor
    model = AutoModelForImageTextToText.from_config(config)
    return write_checkpoint(path, model, seed, tokenizer, template, settings)
