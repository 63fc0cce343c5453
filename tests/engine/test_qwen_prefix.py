"""A video's prefix reused for Qwen2.5-VL: positions go on where the video ended, answers are the same."""

import pytest
import torch

from slipstream.engine import DecodeState, PromptPlan, VideoLM, load_model
from slipstream.engine.prefix_cache import PrefixKey
from tests.engine.conftest import random_frames
from tests.support.tiny_checkpoint import write_tiny_qwen

FRAMES = random_frames(9, 3, (40, 56))
SECONDS_PER_FRAME = [None, 0.13, 2.7]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    return load_model(str(write_tiny_qwen(tmp_path_factory.mktemp("qwen"), seed=13)))


def plan_of(qwen: VideoLM, prompt: str, seconds_per_frame: float | None) -> PromptPlan:
    return qwen.plan_prompt(prompt, len(FRAMES), frame_size=FRAMES.shape[1:3], seconds_per_frame=seconds_per_frame)


def greedy(qwen: VideoLM, state: DecodeState, logits: torch.Tensor) -> list[int]:
    token_ids: list[int] = []
    while len(token_ids) < NUM_TOKENS:
        token_ids.append(int(logits.argmax()))
        logits = qwen.step([(state, token_ids[-1:])])[0][-1]
    return token_ids


@pytest.mark.parametrize("seconds_per_frame", SECONDS_PER_FRAME)
def test_a_resumed_prefill_answers_as_a_fresh_one(qwen: VideoLM, seconds_per_frame: float | None) -> None:
    video = qwen.encode_frames(FRAMES)
    first_plan = plan_of(qwen, "What moves?", seconds_per_frame)
    first, _ = qwen.start_prefill(first_plan, video).finish()
    plan = plan_of(qwen, "Describe the video, and then say what stays where it is.", seconds_per_frame)
    assert PrefixKey.of(plan, b"") == PrefixKey.of(first_plan, b"")
    fresh, expected = qwen.start_prefill(plan, video).finish()
    cache = first.cache.fork(plan.text_start, plan.num_tokens + NUM_TOKENS)
    state, logits = qwen.resume_prefill(plan, cache).finish()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (state.num_tokens, state.next_position) == (fresh.num_tokens, fresh.next_position)
    assert greedy(qwen, state, logits) == greedy(qwen, fresh, expected)


@pytest.mark.parametrize("seconds_per_frame", SECONDS_PER_FRAME)
def test_the_text_has_its_positions_on_all_three_axes(qwen: VideoLM, seconds_per_frame: float | None) -> None:
    plan = plan_of(qwen, "Describe the video.", seconds_per_frame)
    fresh = qwen.start_prefill(plan, qwen.encode_frames(FRAMES))
    position_ids = fresh._forward._position_ids
    assert position_ids.shape == (3, 1, plan.num_tokens)
    state, _ = fresh.finish()
    resumed = qwen.resume_prefill(plan, state.cache.fork(plan.text_start))
    assert torch.equal(resumed._forward._position_ids, position_ids[..., plan.text_start :])


def test_frames_at_another_pace_are_another_prefix(qwen: VideoLM) -> None:
    keys = {PrefixKey.of(plan_of(qwen, "?", seconds), b"the same pixels") for seconds in SECONDS_PER_FRAME}
    assert len(keys) == len(SECONDS_PER_FRAME)
