"""How often a model that takes no recorded steps waits for the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.engine import VideoLM, load_model
from slipstream.engine.text_attention import TextAttention
from slipstream.families.adapter import PromptPlan
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import random_frames
from tests.engine.test_families import FAMILIES
from tests.pretended_gpu import queue
from tests.support.variants import some

FRAMES = random_frames(6, 5, (56, 84))
OF_UPSTREAM = {"smolvlm": 3}
"""Waits of encoding that upstream's vision tower has of its own."""


@pytest.fixture(scope="module", params=some(FAMILIES, keep=("qwen2_5_vl", "qwen3_5", "qwen3_vl_moe", "smolvlm")))
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[VideoLM, PromptPlan, int]:
    """A model, a prompt, and how often encoding waits."""
    path = tmp_path_factory.mktemp("model")
    FAMILIES[request.param](path, seed=3)
    model = load_model(str(path), device="cuda:0")
    model.encode_frames(FRAMES)  # has what all videos of this size share made there
    plan = model.plan_prompt("What is it?", len(FRAMES), frame_size=FRAMES.shape[1:3])
    return model, plan, 1 + OF_UPSTREAM.get(request.param, 0)


def waits_of(work: Callable[[], Any]) -> int:
    queue.CALLS.clear()
    work()
    return queue.waits()


def test_videos(asked: tuple[VideoLM, PromptPlan, int]) -> None:
    model, _, num_waits = asked
    assert waits_of(lambda: model.encode_frames(FRAMES)) == num_waits


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
def test_prompts_wait_once(asked: tuple[VideoLM, PromptPlan, int], pruned: bool, observed: bool) -> None:
    model, plan, _ = asked
    embeddings = model.encode_frames(FRAMES)
    keep = torch.arange(0, plan.num_video_tokens, 3) if pruned else None
    observer = TextAttention(plan) if observed else None
    assert waits_of(lambda: model.start_prefill(plan, embeddings, keep=keep, observer=observer).finish()) == 1


def test_a_prompt_without_a_video_waits_once(asked: tuple[VideoLM, PromptPlan, int]) -> None:
    model, _, _ = asked
    plan = model.plan_text("What is it?")
    assert waits_of(lambda: model.start_text(plan).finish()) == 1


def test_rows_that_are_left_out_cost_no_wait(asked: tuple[VideoLM, PromptPlan, int]) -> None:
    model, plan, _ = asked
    prefill = model.start_prefill(plan, model.encode_frames(FRAMES))
    prefill.run_layers(1)
    keep = torch.arange(0, plan.num_video_tokens, 2)
    assert waits_of(lambda: prefill.keep_video(keep)) == 0
    assert waits_of(prefill.finish) == 1


@pytest.mark.parametrize("window", [(5,), (5, 6, 7), TokenTree((5, 6, 7), (-1, 0, 0))], ids=["one", "chain", "tree"])
def test_passes_wait_once(asked: tuple[VideoLM, PromptPlan, int], window: Any) -> None:
    model, plan, _ = asked
    state, _ = model.start_prefill(plan, model.encode_frames(FRAMES)).finish()
    assert waits_of(lambda: model.step([(state, window)])) == 1
    state.close()
