"""Video tokens dropped in the middle of a prefill are to later layers as if they had never been."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.engine import DecodeState, Prefill, PromptPlan, VideoLM, load_model
from slipstream.engine.text_attention import TextAttention
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import Pair, load_pair, random_frames
from tests.engine.test_qwen2_5_vl import PROMPT, VIDEOS, load_qwen
from tests.support.masking import MaskingKernel, kernel_of
from tests.support.tiny_checkpoint import write_tiny_llava, write_tiny_qwen
from tests.support.variants import one_in

FRAMES = random_frames(5, 3)
"""20 video tokens."""
ANSWER = [11, 12, 13, 14, 15]
STAGES = {1: [0, 2, 3, 4, 9, 10, 15, 18, 19], 2: [1, 2, 6]}
"""Layer -> what is kept of what is there."""


def kept_after(stages: dict[int, list[int]], num_video: int) -> dict[int, list[int]]:
    """Layer -> kept tokens as indices into the whole video."""
    kept, still = {}, list(range(num_video))
    for layer in sorted(stages):
        still = [still[index] for index in stages[layer]]
        kept[layer] = still
    return kept


def prefill_dropping(prefill: Prefill, stages: dict[int, list[int]]) -> tuple[DecodeState, Tensor]:
    for layer in sorted(stages):
        prefill.run_layers(layer)
        prefill.keep_video(torch.tensor(stages[layer], dtype=torch.int64))
    return prefill.finish()


def masked_logits(
    model: VideoLM, plan: PromptPlan, video: Tensor, stages: dict[int, list[int]], answer: Sequence[int]
) -> Tensor:
    """Logits of the prompt's end and of the answer, by the reference; answers token by token, as chains."""
    unseen = torch.zeros(model.info.num_layers, 1, plan.num_tokens, dtype=torch.bool)
    for layer, kept in kept_after(stages, plan.num_video_tokens).items():
        gone = torch.ones(plan.num_video_tokens, dtype=torch.bool)
        gone[kept] = False
        unseen[layer:, 0, plan.video_start : plan.video_stop] = gone
    with kernel_of(model, MaskingKernel(unseen)):
        state, logits = model.start_prefill(plan, video).finish()
        rows = [logits[None], *(model.step([(state, [token])])[0] for token in answer)]
    return torch.cat(rows)


@pytest.mark.parametrize("attention", ["matmul", "sdpa", "joined"])
@pytest.mark.parametrize("stages", [{0: [4, 5]}, {1: []}, {1: [], 2: []}, {2: [0]}, {3: [1, 2]}, STAGES], ids=str)
@one_in(3, "attention", "stages")
def test_dropped_tokens_are_gone_from_the_layers_that_follow(
    pair: Pair, attention: str, stages: dict[int, list[int]]
) -> None:
    model = load_model(str(pair.path), attention=attention)
    plan, video = model.plan_prompt("What happens?", len(FRAMES)), model.encode_frames(FRAMES)
    expected = masked_logits(load_model(str(pair.path), attention="sdpa"), plan, video, stages, ANSWER)
    state, logits = prefill_dropping(model.start_prefill(plan, video), stages)
    assert state.num_tokens == state.num_prompt_tokens == state.next_position == plan.num_tokens
    (window,) = model.step([(state, ANSWER)])
    torch.testing.assert_close(torch.cat([logits[None], window]), expected, rtol=1e-4, atol=1e-4)

    state.rollback(plan.num_tokens)
    other = model.start_prefill(plan, video).finish()[0]
    rows = [model.step([(state, [token]), (other, [3, 4])])[0] for token in ANSWER]
    torch.testing.assert_close(torch.cat(rows), expected[1:], rtol=1e-4, atol=1e-4)

    state.rollback(plan.num_tokens)
    model.step([(state, TokenTree((7, ANSWER[0], 8, ANSWER[1]), (-1, -1, 0, 1)))])
    state.keep_path(plan.num_tokens, [1, 3])
    (rest,) = model.step([(state, ANSWER[2:])])
    torch.testing.assert_close(rest, expected[3:], rtol=1e-4, atol=1e-4)


def test_three_axes_stay_where_they_were(tmp_path: Path) -> None:
    qwen = load_qwen(write_tiny_qwen(tmp_path, seed=5))
    plan, video = qwen.plan(PROMPT, VIDEOS[3]), qwen.ours.encode_frames(VIDEOS[3].frames)
    expected = masked_logits(load_model(str(tmp_path), attention="sdpa"), plan, video, STAGES, ANSWER)
    state, logits = prefill_dropping(qwen.ours.start_prefill(plan, video), STAGES)
    (window,) = qwen.ours.step([(state, ANSWER)])
    torch.testing.assert_close(torch.cat([logits[None], window]), expected, rtol=1e-4, atol=1e-4)


def test_a_strict_width_drops_alike(pair: Pair) -> None:
    strict = load_model(str(pair.path), strict_width=8)
    plan, video = pair.ours.plan_prompt("?", len(FRAMES)), pair.ours.encode_frames(FRAMES)
    rows = []
    for model in (pair.ours, strict):
        state, logits = prefill_dropping(model.start_prefill(plan, video, headroom=0), STAGES)
        rows.append(torch.cat([logits[None], *(model.step([(state, ANSWER)])[0] for _ in range(20))]))
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-4, atol=1e-4)


def test_keeping_all_changes_no_bit(pair: Pair) -> None:
    plan, video = pair.ours.plan_prompt("?", len(FRAMES)), pair.ours.encode_frames(FRAMES)
    plain, expected = pair.ours.start_prefill(plan, video).finish()
    state, logits = prefill_dropping(pair.ours.start_prefill(plan, video), {1: list(range(20)), 2: list(range(20))})
    assert torch.equal(logits, expected)
    assert torch.equal(pair.ours.step([(state, ANSWER)])[0], pair.ours.step([(plain, ANSWER)])[0])


def test_states_and_attention_are_of_what_is_left(pair: Pair) -> None:
    plan, video = pair.ours.plan_prompt("?", len(FRAMES)), pair.ours.encode_frames(FRAMES)
    attention = TextAttention(plan, text_rows=[-1])
    prefill = pair.ours.start_prefill(plan, video, observer=attention)
    prefill.run_layers(1)
    before, text = prefill.video_states(), prefill.text_states()
    prefill.keep_video(torch.tensor(STAGES[1]))
    assert torch.equal(prefill.video_states(), before[STAGES[1]])
    assert torch.equal(prefill.text_states(), text)
    prefill.finish()
    assert [recorded.shape[1] for recorded in attention.by_layer.values()] == [20, 9, 9]


def test_later_layers_need_less_memory(tmp_path: Path) -> None:
    pair = load_pair(write_tiny_llava(tmp_path, seed=7))
    frames = random_frames(100, 1)
    plan, video = pair.ours.plan_prompt("?", 100), pair.ours.encode_frames(frames)
    full, _ = pair.ours.start_prefill(plan, video).finish()
    dropped, _ = prefill_dropping(pair.ours.start_prefill(plan, video), {1: []})
    assert dropped.kv_bytes < full.kv_bytes
    a_layer, saved = full.kv_bytes // 3, 400 // 64 * 64
    assert dropped.kv_bytes == full.kv_bytes - 2 * a_layer * saved // full.cache.capacity
    for _ in range(10):
        pair.ours.step([(state, [5] * 8) for state in (full, dropped)])
    assert dropped.kv_bytes < full.kv_bytes


def test_a_copy_lacks_the_same_rows(pair: Pair) -> None:
    plan, video = pair.ours.plan_prompt("?", len(FRAMES)), pair.ours.encode_frames(FRAMES)
    state, _ = prefill_dropping(pair.ours.start_prefill(plan, video), STAGES)
    fork = DecodeState(state.cache.fork(state.num_tokens), num_prompt_tokens=plan.num_tokens, position_offset=0)
    assert torch.equal(pair.ours.step([(fork, ANSWER)])[0], pair.ours.step([(state, ANSWER)])[0])


@pytest.mark.parametrize("keep", [[-1], [1, 1], [20]])
def test_what_is_no_choice_is_refused(pair: Pair, keep: list[int]) -> None:
    plan, video = pair.ours.plan_prompt("?", len(FRAMES)), pair.ours.encode_frames(FRAMES)
    prefill = pair.ours.start_prefill(plan, video)
    with pytest.raises(AssertionError):
        prefill.keep_video(torch.tensor(keep))


def test_a_prompt_resumed_behind_the_video_keeps_it(pair: Pair) -> None:
    plan, state, _ = pair.prefill("?", FRAMES)
    prefill = pair.ours.resume_prefill(plan, state.cache.fork(plan.text_start))
    with pytest.raises(ValueError, match="resumes behind the video"):
        prefill.keep_video(torch.tensor([1]))
