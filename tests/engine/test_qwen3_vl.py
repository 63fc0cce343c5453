"""Qwen3-VL in the engine against plain transformers: a video in several parts, its times in words, and features that
are added behind the first layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from slipstream.engine import DecodeState, PromptPlan, VideoLM, load_model
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.text_attention import TextAttention
from slipstream.errors import InvalidRequest
from slipstream.families.preprocess import QWEN3_PATCHES, PatchPreprocessor
from tests.engine.conftest import random_frames
from tests.engine.test_qwen2_5_vl import greedy
from tests.support.tiny_families import write_tiny_qwen3

PROMPT = "Describe the video."


class Qwen3Pair:
    """One checkpoint, twice."""

    def __init__(self, path: Path) -> None:
        self.ours: VideoLM = load_model(str(path))
        self.theirs: Any = Qwen3VLForConditionalGeneration.from_pretrained(path).eval()
        self.theirs.generation_config.eos_token_id = None
        config = Checkpoint.open(str(path)).video_processor_config()
        self._preprocess = PatchPreprocessor.from_config(config, QWEN3_PATCHES)

    def plan(self, frames: Any, times_s: tuple[float, ...] = ()) -> PromptPlan:
        return self.ours.plan_prompt(PROMPT, len(frames), frame_size=frames.shape[1:3], times_s=times_s)

    def prefill(self, frames: Any) -> tuple[DecodeState, torch.Tensor]:
        return self.ours.start_prefill(self.plan(frames), self.ours.encode_frames(frames)).finish()

    def inputs(self, frames: Any) -> dict[str, torch.Tensor]:
        input_ids = torch.tensor([self.plan(frames).token_ids])
        return {
            "input_ids": input_ids,
            "mm_token_type_ids": 2 * (input_ids == self.theirs.config.video_token_id).int(),
            "pixel_values_videos": self._preprocess(frames),
            "video_grid_thw": torch.tensor([self._preprocess.grid(*frames.shape[:3])]),
        }

    def generate(self, frames: Any, num_tokens: int) -> list[int]:
        inputs = self.inputs(frames)
        output = self.theirs.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        answer: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return answer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Qwen3Pair:
    return Qwen3Pair(write_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), seed=11))


VIDEOS = [
    random_frames(number, number, size)
    for number, size in [(2, (32, 48)), (5, (90, 160)), (8, (48, 48)), (20, (40, 24))]
]


@pytest.mark.parametrize("frames", VIDEOS, ids=lambda frames: f"{len(frames)} frames")
def test_greedy_answers_equal_those_of_transformers(pair: Qwen3Pair, frames: Any) -> None:
    assert greedy(pair.ours, *pair.prefill(frames), 24) == pair.generate(frames, 24)


def test_compact_positions_have_no_gaps(pair: Qwen3Pair) -> None:
    plan = pair.plan(VIDEOS[2])
    everything = torch.arange(plan.num_tokens)
    adapter = pair.ours._adapter
    whole, following = adapter.positions(plan, everything, "original")
    compact, after = adapter.positions(plan, everything, "compact")
    assert torch.equal(whole, compact) and following == after, "where all is kept nothing moves"
    none, after = adapter.positions(plan, everything[plan.video_parts < 0], "compact")
    assert none[0].tolist() == list(range(plan.num_tokens - plan.num_video_tokens)) and after == len(none[0])


def test_dropping_rows_in_the_middle_drops_their_features(pair: Qwen3Pair) -> None:
    """Behind layer 1 the rest of the video's features are added to what is still there."""
    frames = VIDEOS[2]
    plan, embeddings = pair.plan(frames), pair.ours.encode_frames(frames)
    attention = TextAttention(plan)
    prefill = pair.ours.start_prefill(plan, embeddings, observer=attention)
    prefill.run_layers(1)
    keep = torch.tensor([1, plan.num_video_tokens - 2])
    kept = prefill.video_states()[keep]
    prefill.keep_video(keep)
    assert torch.equal(prefill.video_states(), kept)
    prefill.finish()
    assert [scores.shape[1] for scores in attention.by_layer.values()] == [plan.num_video_tokens, 2, 2, 2]


def test_times_are_told_in_words(pair: Qwen3Pair) -> None:
    frames = VIDEOS[1]
    plan = pair.plan(frames, (0.0, 0.5, 1.25, 2.0, 3.0))
    text = pair.ours.text.tokenizer.decode(list(plan.token_ids), skip_special_tokens=True)
    assert [word for word in ("<0.2 seconds>", "<1.6 seconds>", "<3.0 seconds>") if word not in text] == []
    assert len(plan.video) == 3 and plan.text_start == plan.video_stop + 2, "the last step's end, and the video's"
    with pytest.raises(InvalidRequest, match="5 frames need as many times"):
        pair.plan(frames, (0.0, 1.0))
    with pytest.raises(InvalidRequest, match="5 frames need as many times"):
        pair.plan(frames, (0.0, 0.5, 1.25, 2.0, float("nan")))


@pytest.mark.parametrize(
    ("config", "capped_pixels"),
    [
        ({}, 0),
        ({"cap_pixels_per_frame": True}, 768 * 1024),
        ({"cap_pixels_per_frame": True, "max_video_tokens": 9}, 9216),
    ],
)
def test_a_cap_on_the_pixels_of_a_frame(config: dict[str, Any], capped_pixels: int) -> None:
    assert PatchPreprocessor.from_config(config, QWEN3_PATCHES).frame_size.capped_pixels == capped_pixels
