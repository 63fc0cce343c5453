"""InternVL in the engine against plain transformers: frames behind their numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import InternVLForConditionalGeneration

from slipstream.engine import DecodeState, VideoLM, load_model
from slipstream.engine.checkpoint import Checkpoint
from slipstream.families.preprocess import FramePreprocessor
from tests.engine.conftest import random_frames
from tests.engine.test_qwen2_5_vl import greedy
from tests.support.tiny_checkpoint import TOKENS_PER_FRAME
from tests.support.tiny_families import write_tiny_internvl

PROMPT = "Describe the video."
VIDEOS = [random_frames(number, number, (40, 56)) for number in (1, 3, 8, 11)]


class InternVLPair:
    """One checkpoint, twice."""

    def __init__(self, path: Path) -> None:
        self.ours: VideoLM = load_model(str(path))
        self.theirs: Any = InternVLForConditionalGeneration.from_pretrained(path).eval()
        self.theirs.generation_config.eos_token_id = None
        self._preprocess = FramePreprocessor.from_config(Checkpoint.open(str(path)).video_processor_config())

    def prefill(self, frames: Any) -> tuple[DecodeState, torch.Tensor]:
        plan = self.ours.plan_prompt(PROMPT, len(frames))
        return self.ours.start_prefill(plan, self.ours.encode_frames(frames)).finish()

    def generate(self, frames: Any, num_tokens: int) -> list[int]:
        input_ids = torch.tensor([self.ours.plan_prompt(PROMPT, len(frames)).token_ids])
        pixels = self._preprocess(frames)
        output = self.theirs.generate(
            input_ids=input_ids, pixel_values=pixels, max_new_tokens=num_tokens, do_sample=False
        )
        answer: list[int] = output[0, input_ids.shape[1] :].tolist()
        return answer


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> InternVLPair:
    return InternVLPair(write_tiny_internvl(tmp_path_factory.mktemp("internvl"), seed=7, text=request.param))


@pytest.mark.parametrize("frames", VIDEOS, ids=lambda frames: f"{len(frames)} frames")
def test_greedy_answers_equal_those_of_transformers(pair: InternVLPair, frames: Any) -> None:
    assert greedy(pair.ours, *pair.prefill(frames), 24) == pair.generate(frames, 24)


def test_two_videos_interleaved_do_not_touch_each_other(pair: InternVLPair) -> None:
    videos = VIDEOS[1:3]
    references = [pair.generate(video, 16) for video in videos]
    sessions = [pair.prefill(video) for video in videos]
    answers = [[int(logits.argmax())] for _, logits in sessions]
    for _ in range(15):
        steps = pair.ours.step([(state, answer[-1:]) for (state, _), answer in zip(sessions, answers, strict=True)])
        for logits, answer in zip(steps, answers, strict=True):
            answer.append(int(logits[-1].argmax()))
    assert answers == references


def test_the_prompt_is_that_of_the_processor(pair: InternVLPair) -> None:
    plan = pair.ours.plan_prompt(PROMPT, 3)
    text = pair.ours._text._tokenizer.decode(list(plan.token_ids), skip_special_tokens=False)
    frames = [f"Frame{number}: <img>{'<IMG_CONTEXT>' * TOKENS_PER_FRAME}</img>" for number in (1, 2, 3)]
    assert text.split("user\n")[1].split("<|im_end|>")[0] == "\n".join(frames) + f"\n{PROMPT}"
    assert [len(span) for span in plan.video] == [TOKENS_PER_FRAME] * 3 and plan.text_start == plan.video_stop + 1


def test_a_pruned_prompt_equals_upstream_with_those_rows_left_out(pair: InternVLPair) -> None:
    frames = VIDEOS[2]
    plan, embeddings = pair.ours.plan_prompt(PROMPT, len(frames)), pair.ours.encode_frames(frames)
    keep = torch.tensor([0, 5, 6, plan.num_video_tokens - 1])
    _, logits = pair.ours.start_prefill(plan, embeddings, keep=keep, positions="compact").finish()
    rows = torch.ones(plan.num_tokens, dtype=torch.bool)
    rows[plan.video_rows] = False
    rows[plan.video_rows[keep]] = True
    model = pair.theirs.model.language_model
    with torch.inference_mode():
        inputs = model.embed_tokens(torch.tensor([plan.token_ids]))
        inputs[0, plan.video_rows] = embeddings
        expected = pair.theirs.lm_head(model(inputs_embeds=inputs[:, rows]).last_hidden_state)[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
