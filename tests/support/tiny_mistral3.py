"""Writes tiny checkpoints with random weights in the form of Mistral Small 3.1's and Ministral 3's repositories."""

import json
from pathlib import Path
from typing import Any

from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from tests.support.tiny_checkpoint import text_config, tiny_tokenizer, write_checkpoint

SPECIAL_TOKENS = (
    *("<|endoftext|>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
PATCH_SIZE, MERGE_SIZE, LONGEST_EDGE = 8, 2, 80
SCALED_FROM = 64
"""Ministral 3's queries are scaled from this position on, in steps."""
CHAT_TEMPLATE = """\
{{ '<s>' }}{% for message in messages %}\
{% if message['role'] == 'system' %}[SYSTEM_PROMPT]{{ message['content'][0]['text'] }}[/SYSTEM_PROMPT]\
{% elif message['role'] == 'user' %}[INST]{% for part in message['content'] %}\
{% if part['type'] == 'image' %}[IMG]{% else %}{{ part['text'] }}{% endif %}{% endfor %}[/INST]\
{% else %}{{ message['content'][0]['text'] }}</s>{% endif %}{% endfor %}"""


def write_tiny_mistral3(
    path: Path,
    *,
    seed: int,
    layers: int = 3,
    hidden: int = 32,
    max_context: int = 1024,
    text: str = "mistral",
    template: str = CHAT_TEMPLATE,
) -> Path:
    """Write a checkpoint with random weights below `path`, which is returned. A token is 16 x 16 pixels of a frame.

    Args:
        text: model type of the text model: mistral as of Mistral Small 3.1, ministral3 as of Ministral 3.
    """
    tokenizer = tiny_tokenizer(320, SPECIAL_TOKENS, end="</s>")
    config = Mistral3Config(
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": LONGEST_EDGE,
            "patch_size": PATCH_SIZE,
        },
        text_config=text_config(tokenizer, layers, hidden, max_context)
        | {"model_type": text, "head_dim": 16, "sliding_window": None, "rope_parameters": _rotary(text)},
        image_token_index=tokenizer.get_vocab()["[IMG]"],
        spatial_merge_size=MERGE_SIZE,
        tie_word_embeddings=False,
    )
    processor = {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": PATCH_SIZE, "width": PATCH_SIZE},
        "size": {"longest_edge": LONGEST_EDGE},
        "resample": 3,
    }
    model = Mistral3ForConditionalGeneration(config)
    write_checkpoint(path, model, seed, tokenizer, template, processor, "preprocessor_config.json")
    told = {"processor_class": "PixtralProcessor", "patch_size": PATCH_SIZE, "spatial_merge_size": MERGE_SIZE}
    (path / "processor_config.json").write_text(json.dumps(told), encoding="utf-8")
    return path


def _rotary(text: str) -> dict[str, Any]:
    if text == "mistral":
        return {"rope_type": "default", "rope_theta": 10_000.0}
    return {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": SCALED_FROM,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
