"""The recorded attention is that of plain transformers, whatever the kernel, and recording changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlavaOnevisionForConditionalGeneration, Qwen2_5_VLForConditionalGeneration

from slipstream.engine import PromptPlan, load_model
from slipstream.engine import text_attention as observe_module
from slipstream.engine.text_attention import TextAttention
from tests.engine.conftest import Pair, random_frames
from tests.engine.test_qwen2_5_vl import PROMPT, VIDEOS, load_qwen
from tests.support.tiny_checkpoint import write_tiny_llava, write_tiny_qwen

FRAMES = random_frames(5, 3)


def expected_attention(weights: tuple[Tensor, ...], plan: PromptPlan, kv_heads: int, rows: slice) -> list[Tensor]:
    """From the whole matrices of transformers, [1, heads, n, n] a layer: [kv_heads, num_video_tokens] a layer."""
    video = slice(plan.video_start, plan.video_stop)
    by_head = [layer[0, :, plan.text_start :][:, rows, video].mean(dim=1) for layer in weights]
    return [layer.unflatten(0, (kv_heads, -1)).mean(dim=1) for layer in by_head]


def eager_llava(path: Path, pair: Pair, plan: PromptPlan, frames: NDArray[np.uint8] = FRAMES) -> tuple[Tensor, ...]:
    eager: Any = LlavaOnevisionForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()
    inputs = {"input_ids": torch.tensor([plan.token_ids]), "pixel_values_videos": pair.pixels(frames)[None]}
    with torch.inference_mode():
        weights: tuple[Tensor, ...] = eager(**inputs, output_attentions=True).attentions
    return weights


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("max_scores", [1, 1 << 22])
def test_attention_is_that_of_transformers(
    tmp_path: Path, pair: Pair, heads: int, kv_heads: int, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe_module, "_MAX_SCORES", max_scores)
    path = write_tiny_llava(tmp_path, seed=4, heads=heads, kv_heads=kv_heads)
    for kernel in ("matmul", "sdpa"):
        model = load_model(str(path), attention=kernel)
        plan = model.plan_prompt("What happens?", len(FRAMES))
        weights = eager_llava(path, pair, plan)
        video = model.encode_frames(FRAMES)
        for text_rows, rows in ((None, slice(None)), ([-1], slice(-1, None)), ([0, 2, 4], slice(0, 5, 2))):
            attention = TextAttention(plan, text_rows=text_rows)
            model.start_prefill(plan, video, observer=attention).finish()
            expected = expected_attention(weights, plan, kv_heads, rows)
            assert list(attention.by_layer) == [0, 1, 2]
            for layer, recorded in attention.by_layer.items():
                torch.testing.assert_close(recorded, expected[layer], rtol=1e-4, atol=1e-6)
            mean = torch.stack(expected).mean(dim=(0, 1))
            torch.testing.assert_close(attention.mean(), mean, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(attention.mean([1]), expected[1].mean(dim=0), rtol=1e-4, atol=1e-6)


def test_attention_is_that_of_transformers_with_three_axes(tmp_path: Path) -> None:
    qwen = load_qwen(write_tiny_qwen(tmp_path, seed=5))
    eager: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager").eval()
    plan = qwen.plan(PROMPT, VIDEOS[3])
    with torch.inference_mode():
        weights = eager(**qwen.inputs(PROMPT, VIDEOS[3]), output_attentions=True).attentions
    attention = TextAttention(plan)
    qwen.ours.start_prefill(plan, qwen.ours.encode_frames(VIDEOS[3].frames), observer=attention).finish()
    for layer, expected in enumerate(expected_attention(weights, plan, 2, slice(None))):
        torch.testing.assert_close(attention.by_layer[layer], expected, rtol=1e-4, atol=1e-6)


def test_a_resumed_prompt_pays_the_attention_of_a_whole_one(pair: Pair) -> None:
    strict = load_model(str(pair.path), strict_width=3)  # its caches show more than they hold
    expected: list[Tensor] = []
    for model in (pair.ours, strict):
        plan, video = model.plan_prompt("What happens?", len(FRAMES)), model.encode_frames(FRAMES)
        whole, resumed = TextAttention(plan), TextAttention(plan)
        state, logits = model.start_prefill(plan, video, observer=whole).finish()
        _, again = model.resume_prefill(plan, state.cache.fork(plan.text_start), observer=resumed).finish()
        torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
        expected = expected or list(whole.by_layer.values())
        for attention in (whole, resumed):
            torch.testing.assert_close(list(attention.by_layer.values()), expected, rtol=1e-4, atol=1e-6)


def test_recording_changes_no_bit_and_may_skip_layers(pair: Pair) -> None:
    plan, video = pair.ours.plan_prompt("?", len(FRAMES)), pair.ours.encode_frames(FRAMES)
    _, expected = pair.ours.start_prefill(plan, video).finish()
    attention = TextAttention(plan, layers={1})
    prefill = pair.ours.start_prefill(plan, video, observer=attention)
    prefill.run_layers(1)
    with pytest.raises(ValueError, match="no layer"):
        attention.mean()
    assert torch.equal(prefill.finish()[1], expected)
    assert list(attention.by_layer) == [1]


def test_a_pruned_prompt_is_recorded_for_the_tokens_it_has(pair: Pair) -> None:
    plan, video = pair.ours.plan_prompt("?", len(FRAMES)), pair.ours.encode_frames(FRAMES)
    pruned, whole = TextAttention(plan), TextAttention(plan)
    pair.ours.start_prefill(plan, video, keep=torch.tensor([1, 7, 8]), observer=pruned).finish()
    pair.ours.start_prefill(plan, video, keep=torch.arange(20), observer=whole).finish()
    assert pruned.mean().shape == (3,)
    assert whole.mean().shape == (20,)


def test_half_precision_is_recorded_in_full(pair: Pair) -> None:
    model = load_model(str(pair.path), dtype="bfloat16")
    plan = model.plan_prompt("?", len(FRAMES))
    rounded, full = TextAttention(plan, layers=[0]), TextAttention(plan, layers=[0])
    model.start_prefill(plan, model.encode_frames(FRAMES), observer=rounded).finish()
    pair.ours.start_prefill(plan, pair.ours.encode_frames(FRAMES), observer=full).finish()
    assert rounded.by_layer[0].dtype == torch.float32
    torch.testing.assert_close(rounded.mean(), full.mean(), rtol=0.2, atol=0.02)


def test_a_prompt_has_the_text_rows_it_has(pair: Pair) -> None:
    plan = pair.ours.plan_prompt("?", 1)
    with pytest.raises(IndexError):
        TextAttention(plan, text_rows=[plan.num_text_tokens])
    with pytest.raises(ValueError, match="at least one"):
        TextAttention(plan, text_rows=[])


def test_a_text_alone_pays_nothing_to_a_video_and_is_not_looked_at(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a film's summary, whose prompt may fill the context."""
    monkeypatch.setattr(TextAttention, "_add_shares", lambda *_: pytest.fail("there is no video"))
    plan = pair.ours.plan_text("What happens?")
    attention = TextAttention(plan)
    pair.ours.start_text(plan, observer=attention).finish()
    assert [recorded.shape for recorded in attention.by_layer.values()] == [(2, 0)] * 3
    assert attention.mean().shape == (0,)
