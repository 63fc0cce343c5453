"""Writes tiny checkpoints with random weights in the form of the younger families' repositories.

Their tokenizers, templates and processors differ in what Slipstream has to know: see `tiny_checkpoint` for the others.
"""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaTokenizerFast,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    VideoLlama3Config,
    VideoLlama3ForConditionalGeneration,
)

from tests.support.tiny_checkpoint import (
    CORPUS,
    FRAME_SIZE,
    PATCH_SIZE,
    QWEN_PATCH_SIZE,
    QWEN_PROCESSOR,
    QWEN_SPECIAL_TOKENS,
    TOKENS_PER_FRAME,
    text_config,
    tiny_tokenizer,
    write_checkpoint,
    write_qwen3,
)

INTERNVL_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
LLAVA_INTERLEAVE_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>")
SMOLVLM_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    "<end_of_utterance>",
)
"""None for a video: its template writes a word in the place of one."""
LLAMA = {"model_type": "llama", "eos_token_id": 2, "pad_token_id": 0}
"""Of a text model."""

INTERNVL_CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}\
{% if part['type'] == 'video' %}<video>
{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SMOLVLM_CHAT_TEMPLATE = """\
<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}: \
{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

LLAVA_INTERLEAVE_CHAT_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\\n' + part['text'] }}{% endfor %}\
{{ '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
VIDEO_LLAMA_CHAT_TEMPLATE = INTERNVL_CHAT_TEMPLATE.replace("<video>", "<|video_pad|>")

LLAVA_NEXT_CHAT_TEMPLATE = """\
{% for message in messages %}{{ message['role'].upper() + ': ' }}\
{% for part in message['content'] if part['type'] == 'video' %}{{ '<video>\\n' }}{% endfor %}\
{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endfor %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""


def write_tiny_qwen3(
    path: Path,
    *,
    seed: int,
    layers: int = 4,
    hidden: int = 48,
    max_context: int = 1024,
    num_deepstack: int = 2,
    num_experts: int = 0,
) -> Path:
    """Write a Qwen3-VL checkpoint with random weights below `path`, which is returned.

    A token is 16 x 16 pixels of two frames. Layers 0 to `num_deepstack` - 1 add features of the vision tower. With
    experts, it is a mixture of them, two for a token.
    """
    mixture = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 2 * hidden // 3}
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return write_qwen3(
        path,
        Qwen3VLMoeConfig if num_experts else Qwen3VLConfig,
        Qwen3VLMoeForConditionalGeneration if num_experts else Qwen3VLForConditionalGeneration,
        seed=seed,
        vision={"depth": num_deepstack + 1, "deepstack_visual_indexes": list(range(num_deepstack))},
        text=text_config(tiny_tokenizer(320, QWEN_SPECIAL_TOKENS), layers, hidden, max_context)
        | {"head_dim": 16, "rope_parameters": rotary}
        | (mixture if num_experts else {}),
    )


def write_tiny_internvl(
    path: Path, *, seed: int, layers: int = 3, hidden: int = 32, max_context: int = 1024, text: str = "qwen3"
) -> Path:
    """Write an InternVL checkpoint with random weights below `path`, which is returned. A frame has 4 tokens.

    Args:
        text: model type of the text model: qwen2 as of InternVL3, qwen3 as of InternVL3.5, qwen3_moe as of the mixtures
            among these, of whose four experts a token takes two.
    """
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    tokenizer = tiny_tokenizer(320, INTERNVL_SPECIAL_TOKENS)
    ids = tokenizer.get_vocab()
    config = InternVLConfig(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": FRAME_SIZE,
            "patch_size": PATCH_SIZE,
        },
        text_config=text_config(tokenizer, layers, hidden, max_context)
        | {"model_type": text, "head_dim": hidden // 4}
        | (mixture if text == "qwen3_moe" else {}),
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=TOKENS_PER_FRAME,
        tie_word_embeddings=False,
    )
    processor = {
        "video_processor_type": "InternVLVideoProcessor",
        "size": {"height": FRAME_SIZE, "width": FRAME_SIZE},
        "resample": 3,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    model = InternVLForConditionalGeneration(config)
    return write_checkpoint(path, model, seed, tokenizer, INTERNVL_CHAT_TEMPLATE, processor)


def write_tiny_llava_interleave(
    path: Path,
    *,
    seed: int,
    layers: int = 3,
    hidden: int = 32,
    max_context: int = 1024,
    template: str = LLAVA_INTERLEAVE_CHAT_TEMPLATE,
    tower: str = "siglip_vision_model",
) -> Path:
    """Write a LLaVA-Interleave checkpoint with random weights below `path`, which is returned. A frame has 16 tokens.

    It knows pictures alone: it has neither a token for a video nor settings of a video processor.

    Args:
        tower: model type of the vision tower: clip_vision_model as of LLaVA 1.5.
    """
    tokenizer = tiny_tokenizer(320, LLAVA_INTERLEAVE_SPECIAL_TOKENS)
    config = LlavaConfig(
        vision_config={
            "model_type": tower,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": FRAME_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        text_config=text_config(tokenizer, layers, hidden, max_context) | {"model_type": "qwen2"},
        image_token_index=tokenizer.get_vocab()["<image>"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    processor = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": FRAME_SIZE, "width": FRAME_SIZE},
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    model = LlavaForConditionalGeneration(config)
    return write_checkpoint(path, model, seed, tokenizer, template, processor, "preprocessor_config.json")


def write_tiny_llava_next_video(
    path: Path, *, seed: int, layers: int = 3, hidden: int = 32, max_context: int = 1024
) -> Path:
    """Write a LLaVA-NeXT-Video checkpoint with random weights below `path`, which is returned. A frame has 4 tokens."""
    tokenizer = tiny_llama_tokenizer()
    ids = tokenizer.get_vocab()
    config = LlavaNextVideoConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": FRAME_SIZE,
            "patch_size": PATCH_SIZE,
        },
        text_config=text_config(tokenizer, layers, hidden, max_context, len(ids)) | LLAMA,
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=[[FRAME_SIZE, FRAME_SIZE]],
        tie_word_embeddings=False,
    )
    processor = {
        "image_processor_type": "LlavaNextVideoImageProcessor",
        "do_center_crop": True,
        "crop_size": {"height": FRAME_SIZE, "width": FRAME_SIZE},
        "size": {"shortest_edge": FRAME_SIZE},
        "resample": 3,
    }
    model = LlavaNextVideoForConditionalGeneration(config)
    return write_checkpoint(path, model, seed, tokenizer, LLAVA_NEXT_CHAT_TEMPLATE, processor)


def write_tiny_smolvlm(path: Path, *, seed: int, layers: int = 3, hidden: int = 32, max_context: int = 1024) -> Path:
    """Write a SmolVLM2 checkpoint with random weights below `path`, which is returned. A frame has 4 tokens.

    Its own chat template has no videos, like those of the hub: upstream takes another one for them.
    """
    tokenizer = tiny_tokenizer(320, SMOLVLM_SPECIAL_TOKENS)
    config = SmolVLMConfig(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": FRAME_SIZE,
            "patch_size": PATCH_SIZE,
        },
        text_config=text_config(tokenizer, layers, hidden, max_context) | LLAMA,
        image_token_id=tokenizer.get_vocab()["<image>"],
        scale_factor=2,
        tie_word_embeddings=False,
    )
    processor = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 4 * FRAME_SIZE},
        "max_image_size": {"longest_edge": FRAME_SIZE},
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": FRAME_SIZE}},
        "resample": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return write_checkpoint(
        path, SmolVLMForConditionalGeneration(config), seed, tokenizer, SMOLVLM_CHAT_TEMPLATE, processor
    )


def write_tiny_video_llama_3(
    path: Path, *, seed: int, layers: int = 3, hidden: int = 32, max_context: int = 1024
) -> Path:
    """Write a VideoLLaMA 3 checkpoint with random weights below `path`, which is returned. A token is 16 x 16 pixels of
    one frame; like those of the hub its settings ask for compressed tokens."""
    tokenizer = tiny_tokenizer(320, QWEN_SPECIAL_TOKENS)
    ids = tokenizer.get_vocab()
    config = VideoLlama3Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": QWEN_PATCH_SIZE,
        },
        text_config=text_config(tokenizer, layers, hidden, max_context) | {"model_type": "qwen2"},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=False,
    )
    processor = QWEN_PROCESSOR | {
        "video_processor_type": "VideoLlama3VideoProcessor",
        "size": {"shortest_edge": 24 * 24, "longest_edge": 10 * 48 * 64},
        "temporal_patch_size": 1,
        "use_token_compression": True,
    }
    model = VideoLlama3ForConditionalGeneration(config)
    return write_checkpoint(path, model, seed, tokenizer, VIDEO_LLAMA_CHAT_TEMPLATE, processor)


def tiny_llama_tokenizer() -> LlamaTokenizerFast:
    """A tokenizer of Llama's kind: it begins with "<s>", puts a space before the first word, and spells what it does
    not know byte by byte."""
    vocab, merges = _train_llama_tokenizer()
    tokenizer = LlamaTokenizerFast(vocab=dict(vocab), merges=list(merges), pad_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<video>"]})
    return tokenizer


@cache
def _train_llama_tokenizer() -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    words = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *trained["vocab"]]
    return {word: index for index, word in enumerate(words)}, [tuple(merge) for merge in trained["merges"]]
