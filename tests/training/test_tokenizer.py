"""The tokenizer takes any text, and full clips stay within the promised caption length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from training.captions import write_caption
from training.tokenizer import chat_ids, load_tokenizer
from training.world import HELD_OUT_SEEDS, sample_clip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer()


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids) == text


def test_captions_of_full_clips_have_120_to_250_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    lengths = [len(tokenizer.encode(write_caption(sample_clip(seed)))) + 1 for seed in HELD_OUT_SEEDS[:200]]
    assert min(lengths) >= 120
    assert max(lengths) <= 250


def test_chat_puts_the_video_before_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    before, after = chat_ids(tokenizer, "What is this?")
    assert tokenizer.decode(before) == "<|im_start|>user "
    assert tokenizer.decode(after) == "\nWhat is this?<|im_end|><|im_start|>assistant\n"
