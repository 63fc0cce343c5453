"""Writes tiny checkpoints of both families with random weights, complete enough for plain transformers to load."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
FRAME_SIZE = 32
PATCH_SIZE = 8
TOKENS_PER_FRAME = 4
QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_PATCH_SIZE = 8
QWEN_PROCESSOR = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "size": {"shortest_edge": 24 * 24, "longest_edge": 48 * 64},
    "patch_size": QWEN_PATCH_SIZE,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}
"""Frames keep their aspect ratio and get 3 to 12 tokens a step."""

CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }} \
{% for content in message['content'] if content['type'] == 'video' %}<video>
{% endfor %}\
{% for content in message['content'] if content['type'] == 'text' %}
{{ content['text'] }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN_CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}\
{% if part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CORPUS = (
    "Describe the video. A red square moves to the left while a blue circle stays in the middle of the frame.",
    "What is happening here? The small green triangle turns around, then it leaves; nothing else moves at all.",
    "Décris la vidéo : un carré rouge. 描述视频。 Опиши видео. 🎬🟥🔵",
)


@cache
def _train_tokenizer(vocab: int, special_tokens: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in special_tokens])
    return tokenizer.to_str()


def tiny_tokenizer(
    vocab: int = 320, special_tokens: tuple[str, ...] = SPECIAL_TOKENS, *, end: str = "<|im_end|>"
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, by default with LLaVA-OneVision's special tokens; at most `vocab` ids."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train_tokenizer(vocab, special_tokens)),
        eos_token=end,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def text_config(
    tokenizer: PreTrainedTokenizerFast, layers: int, hidden: int, max_context: int, vocab: int = 320
) -> dict[str, Any]:
    """Of a text model with 4 heads on 2."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_context,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def write_tiny_llava(
    path: Path,
    *,
    seed: int,
    vocab: int = 320,
    layers: int = 3,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    max_context: int = 512,
) -> Path:
    """Write a checkpoint with random weights below `path`, which is returned.

    Args:
        seed: of the weights; the tokenizer depends on `vocab` alone.
        vocab: width of the logits and limit of the tokenizer.
        layers, hidden, heads, kv_heads: of the text model.
        max_context: positions of the text model.
    """
    tokenizer = tiny_tokenizer(vocab)
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=FRAME_SIZE,
            patch_size=PATCH_SIZE,
            vision_use_head=False,
        ),
        text_config=Qwen2Config(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=max_context,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        image_token_index=tokenizer.get_vocab()["<image>"],
        video_token_index=tokenizer.get_vocab()["<video>"],
        image_grid_pinpoints=[[FRAME_SIZE, FRAME_SIZE]],
        tie_word_embeddings=False,
    )
    model = LlavaOnevisionForConditionalGeneration(config).eval()
    _randomise(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    processor = {
        "video_processor_type": "LlavaOnevisionVideoProcessor",
        "size": {"height": FRAME_SIZE, "width": FRAME_SIZE},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (path / "video_preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return path


def write_tiny_qwen(
    path: Path,
    *,
    seed: int,
    layers: int = 3,
    hidden: int = 48,
    max_context: int = 512,
    tokens_per_second: int = 2,
    processor: dict[str, Any] | None = None,
) -> Path:
    """Write a Qwen2.5-VL checkpoint with random weights below `path`, which is returned.

    A token is 16 x 16 pixels of two frames; a window of the vision tower is 2 x 2 tokens, and its second layer sees
    whole frames.

    Args:
        seed: of the weights.
        layers, hidden: of the text model, which has 4 heads on 2.
        max_context: positions of the text model.
        tokens_per_second: steps of the time axis in a second.
        processor: changes to the video processor's settings.
    """
    tokenizer = tiny_tokenizer(320, QWEN_SPECIAL_TOKENS)
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": QWEN_PATCH_SIZE,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "window_size": 4 * QWEN_PATCH_SIZE,
            "fullatt_block_indexes": [1],
            "out_hidden_size": hidden,
            "tokens_per_second": tokens_per_second,
        },
        text_config=text_config(tokenizer, layers, hidden, max_context) | _qwen2_rotary(hidden),
        tie_word_embeddings=False,
        **_token_ids(),
    )
    return write_qwen(path, Qwen2_5_VLForConditionalGeneration(config), seed, QWEN_PROCESSOR | (processor or {}))


def write_tiny_qwen2(path: Path, *, seed: int, layers: int = 3, hidden: int = 48, max_context: int = 512) -> Path:
    """Write a Qwen2-VL checkpoint with random weights below `path`, which is returned; sizes as `write_tiny_qwen`."""
    tokenizer = tiny_tokenizer(320, QWEN_SPECIAL_TOKENS)
    config = Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": hidden,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": QWEN_PATCH_SIZE,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        },
        text_config=text_config(tokenizer, layers, hidden, max_context) | _qwen2_rotary(hidden),
        tie_word_embeddings=False,
        **_token_ids(),
    )
    return write_qwen(path, Qwen2VLForConditionalGeneration(config), seed, QWEN_PROCESSOR)


def _qwen2_rotary(hidden: int) -> dict[str, Any]:
    """Positions of three axes, and no sliding windows: of a text model with 4 heads."""
    half = hidden // 8
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    return {"rope_parameters": rotary, "use_sliding_window": False}


def _token_ids() -> dict[str, Any]:
    """Of the tokens that stand for pictures, as a model of Qwen's is configured with them."""
    ids = tiny_tokenizer(320, QWEN_SPECIAL_TOKENS).get_vocab()
    kinds = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": ids[f"<|{token}|>"] for name, token in kinds.items()}


def write_qwen(path: Path, model: PreTrainedModel, seed: int, processor: dict[str, Any]) -> Path:
    """A Qwen model with its processor's settings."""
    return write_checkpoint(path, model, seed, tiny_tokenizer(320, QWEN_SPECIAL_TOKENS), QWEN_CHAT_TEMPLATE, processor)


def write_qwen3(
    path: Path,
    config: Callable[..., Any],
    model: Callable[..., PreTrainedModel],
    *,
    seed: int,
    vision: dict[str, Any],
    text: dict[str, Any],
) -> Path:
    """A checkpoint of Qwen3-VL or a younger one. A token is 16 x 16 pixels of two frames.

    `config`, `model`: upstream's classes. `vision`: what the vision tower has beside what all have. `text`: settings of
    the text model.
    """
    made = config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": QWEN_PATCH_SIZE,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 36,
            **vision,
        },
        text_config=text,
        tie_word_embeddings=False,
        **_token_ids(),
    )
    sizes = {"shortest_edge": 4 * 24 * 24, "longest_edge": 10 * 48 * 64}
    processor = QWEN_PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor", "size": sizes}
    return write_qwen(path, model(made), seed, processor)


def write_checkpoint(
    path: Path,
    model: PreTrainedModel,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    processor: dict[str, Any],
    processor_file: str = "video_preprocessor_config.json",
) -> Path:
    """The model, with random weights, and what a checkpoint has beside it."""
    _randomise(model.eval(), seed)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    (path / processor_file).write_text(json.dumps(processor), encoding="utf-8")
    return path


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that attention matters and greedy answers neither repeat at once nor depend on rounding."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = 1.0 if parameter.dim() == 1 else 2.0 / parameter.shape[-1] ** 0.5
        parameter.data = scale * torch.randn(parameter.shape, generator=generator)
