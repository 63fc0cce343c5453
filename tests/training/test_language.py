"""The training step sees what `transformers` itself would see, and layers that join later change nothing at first."""

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from training import language
from training.examples import CaptionExample, CaptionExamples, ClipRange, spread_indices
from training.families import FAMILIES
from training.pocket import IMAGE_SIZE, Family, normalise, text_config

FRAMES = 4
TEXT_LEN = 128


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def tokenizer(family: Family) -> PreTrainedTokenizerFast:
    return family.train_tokenizer()


def example_of(family: Family, tokenizer: PreTrainedTokenizerFast, num_frames: int) -> CaptionExample:
    clips = ClipRange((2, 2), (num_frames,), FRAMES // family.frames_per_step)
    return CaptionExamples(clips, family, tokenizer, 0).example(5)


def own_inputs(family: Family, model: Any, example: CaptionExample) -> dict[str, Any]:
    """What `transformers` wants of the example up to its prompt."""
    num_video = FRAMES // family.frames_per_step * family.tokens_per_step + len(family.closing(model))
    ids = [*example.prefix_ids, *[model.config.video_token_id] * num_video, *example.prompt_ids]
    pixels = normalise(example.frames)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
    if family.name == "llava_onevision":
        return inputs | {"pixel_values_videos": pixels[None]}
    side, half = IMAGE_SIZE // 14, IMAGE_SIZE // 28
    patches = pixels.view(-1, 2, 3, half, 2, 14, half, 2, 14).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return inputs | {
        "pixel_values_videos": patches.reshape(-1, 3 * 2 * 14 * 14),
        "video_grid_thw": torch.tensor([[FRAMES // 2, side, side]]),
        "second_per_grid_ts": torch.tensor([2 * example.seconds_per_frame]),
        "mm_token_type_ids": 2 * (inputs["input_ids"] == model.config.video_token_id).int(),
    }


def test_all_tokens_kept_gives_the_model_s_own_logits(
    family: Family, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "roughen", normalise)
    model = family.build("draft", tokenizer).eval()
    example = example_of(family, tokenizer, FRAMES)
    clips = language.encode_clips(family, model, [example], "cpu")
    batch = language.make_batch(family, clips, len(clips[0].tokens), TEXT_LEN, 0, "cpu")
    num_prompt, num_answer = len(example.prompt_ids), 12
    with torch.no_grad():
        trained = language.caption_logits(family, model, batch, "cpu")[0].float()
        inputs = own_inputs(family, model, example)
        output = model(**inputs, use_cache=True)
        own = [output.logits[0, -num_prompt:]]
        for count in range(num_answer):
            # As `generate` goes on: one token at a time, at the positions the model itself gives them.
            token = torch.tensor([[example.caption_ids[count]]])
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
            own.append(output.logits[0])
    expected = torch.cat(own)
    assert (trained[: num_prompt + num_answer] - expected).abs().max() < 0.05  # bfloat16 against float32


def test_kept_tokens_stay_at_their_places(family: Family, tokenizer: PreTrainedTokenizerFast) -> None:
    model = family.build("draft", tokenizer).eval()
    example = example_of(family, tokenizer, 64)
    clips = language.encode_clips(family, model, [example], "cpu")
    positions = language.make_batch(family, clips, 20, TEXT_LEN, 0, "cpu").positions[..., 0, :]
    whole, answer_position = family.prompt_positions(
        model, example.prefix_ids, 64, example.prompt_ids, example.seconds_per_frame
    )
    before = len(example.prefix_ids)
    video = whole[..., before:]
    kept = positions[..., before : before + 20]
    everywhere = {tuple(column) for column in torch.atleast_2d(video).T.tolist()}
    assert {tuple(column) for column in torch.atleast_2d(kept).T.tolist()} <= everywhere
    num_answer = TEXT_LEN - len(example.prompt_ids)
    answer = torch.arange(answer_position, answer_position + num_answer)
    assert torch.equal(positions[..., -num_answer:], answer.expand(*positions.shape[:-1], -1))


def test_layers_that_join_later_begin_as_the_identity(family: Family, tokenizer: PreTrainedTokenizerFast) -> None:
    model = family.build("target", tokenizer).eval()
    input_ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        deep = model(input_ids=input_ids).logits
        text_config(model).num_hidden_layers = 4
        language_model = model.model.language_model
        language_model.layers = language_model.layers[:4]
        shallow = model(input_ids=input_ids).logits
    assert torch.allclose(deep, shallow, atol=1e-5)


def test_spread_indices_are_ordered_and_different() -> None:
    rng = random.Random(0)
    for num_steps in (4, 7, 128):
        indices = spread_indices(rng, num_steps, 4)
        assert indices == sorted(set(indices))
        assert indices[-1] < num_steps
