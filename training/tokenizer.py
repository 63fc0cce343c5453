"""The tokenizer that all pocket models share: byte-level BPE trained on captions, and the chat text around a video."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.captions import DEFAULT_PROMPT, PROMPTS, write_caption
from training.world import sample_clip

POCKET_DIR = Path(__file__).resolve().parent.parent / "models" / "pocket"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<video>", "<image>")
VOCAB_SIZE = 1024
CORPUS_CLIPS = 3000
QWEN_SPECIAL_TOKENS = ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>", "<|image_pad|>")
"""Added behind the shared vocabulary, whose ids they leave alone."""

CHAT_TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}\
{% if message['content'] is string %}{{ '\\n' + message['content'] }}{% else %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\\n' + part['text'] }}{% endfor %}\
{% endif %}{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN_CHAT_TEMPLATE = CHAT_TEMPLATE.replace("<video>", "<|vision_start|><|video_pad|><|vision_end|>").replace(
    "<image>", "<|vision_start|><|image_pad|><|vision_end|>"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Learns merges from captions and prompts; every byte has a token, so any text can be encoded."""
    chat_words = ["user", "assistant", "system"] * 10
    corpus = [write_caption(sample_clip(seed)) for seed in range(CORPUS_CLIPS)]
    tokenizer = learn_merges([*corpus, *PROMPTS * 10, *chat_words], VOCAB_SIZE, list(SPECIAL_TOKENS))
    return chat_tokenizer(tokenizer, CHAT_TEMPLATE, video="<video>", image="<image>")


def learn_merges(texts: Sequence[str], vocab_size: int, special_tokens: list[str], **more: Any) -> Tokenizer:
    """Byte pairs of these texts, to a vocabulary of that size. `more`: what else the trainer is told."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        **more,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def chat_tokenizer(tokenizer: Tokenizer, chat_template: str, *, video: str, image: str) -> PreTrainedTokenizerFast:
    """As transformers wants it, with the placeholders of videos and images."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"video_token": video, "image_token": image},
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=chat_template,
    )


def train_qwen_tokenizer() -> PreTrainedTokenizerFast:
    """The same vocabulary, with Qwen2.5-VL's placeholders and chat text."""
    backend = train_tokenizer().backend_tokenizer
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN_SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"video_token": "<|video_pad|>", "image_token": "<|image_pad|>"},
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=QWEN_CHAT_TEMPLATE,
    )


def load_tokenizer(folder: Path = POCKET_DIR / "target") -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def chat_ids(tokenizer: PreTrainedTokenizerFast, prompt: str = DEFAULT_PROMPT) -> tuple[list[int], list[int]]:
    """Token ids before the video and after it, up to the point where the answer starts."""
    message: dict[str, Any] = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": prompt}]}
    text = str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
    before, after = text.split(str(tokenizer.video_token), maxsplit=1)
    return tokenizer.encode(before), tokenizer.encode(after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, nargs="*", default=[POCKET_DIR / "target", POCKET_DIR / "draft"])
    tokenizer = train_tokenizer()
    for folder in parser.parse_args().out:
        tokenizer.save_pretrained(folder)
    print(f"{len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
