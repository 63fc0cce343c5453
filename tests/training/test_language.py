"""The training step sees what `transformers` itself would see, and layers that join later change nothing at first."""

import random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from training import language
from training.examples import CaptionExamples, ClipRange, spread_indices
from training.pocket import TOKENS_PER_FRAME, build_model, normalise, text_config
from training.tokenizer import load_tokenizer

FRAMES = 4
TEXT_LEN = 128


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer()


def test_all_tokens_kept_gives_the_model_s_own_logits(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "roughen", normalise)
    model = build_model("draft", tokenizer).eval()
    example = CaptionExamples(ClipRange((2, 2), (FRAMES,), FRAMES), tokenizer, 0).example(5)
    clips = language.encode_clips(model, [example], "cpu")
    batch = language.make_batch(clips, FRAMES * TOKENS_PER_FRAME, TEXT_LEN, 0, "cpu")
    text_ids = [*example.prompt_ids, *example.caption_ids]
    video_ids = [model.config.video_token_id] * (FRAMES * TOKENS_PER_FRAME + 1)
    input_ids = torch.tensor([[*example.prefix_ids, *video_ids, *text_ids]])
    with torch.no_grad():
        trained = language.caption_logits(model, batch, "cpu")[0, : len(text_ids) - 1].float()
        own = model(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            pixel_values_videos=normalise(example.frames)[None],
        ).logits[0, -len(text_ids) : -1]
    assert (trained - own).abs().max() < 0.05  # bfloat16 against float32


def test_kept_tokens_stay_at_their_places(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model("draft", tokenizer).eval()
    example = CaptionExamples(ClipRange((2, 2), (64,), FRAMES), tokenizer, 0).example(5)
    clips = language.encode_clips(model, [example], "cpu")
    positions = language.make_batch(clips, 20, TEXT_LEN, 0, "cpu").positions[0]
    text_start = len(example.prefix_ids) + 64 * TOKENS_PER_FRAME + 1
    assert (positions.diff() > 0).all()
    assert positions[-TEXT_LEN:].tolist() == list(range(text_start, text_start + TEXT_LEN))


def test_layers_that_join_later_begin_as_the_identity(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model("target", tokenizer).eval()
    input_ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        deep = model(input_ids=input_ids).logits
        text_config(model).num_hidden_layers = 4
        shallow = model(input_ids=input_ids).logits
    assert torch.allclose(deep, shallow, atol=1e-5)


def test_spread_indices_are_ordered_and_different() -> None:
    rng = random.Random(0)
    for num_frames in (4, 7, 128):
        indices = spread_indices(rng, num_frames, 4)
        assert indices == sorted(set(indices))
        assert indices[-1] < num_frames
