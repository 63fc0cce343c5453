"""A sparse cache is the dense one with a mask for each layer and head, and stays in step with it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.engine import DecodeState, PromptPlan, VideoLM, load_model
from slipstream.engine.sparse_drafter import SparseState
from slipstream.engine.text_attention import TextAttention
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import Pair, random_frames
from tests.engine.test_qwen2_5_vl import PROMPT, VIDEOS, load_qwen
from tests.support.masking import MaskingKernel, kernel_of
from tests.support.tiny_checkpoint import write_tiny_llava, write_tiny_qwen
from tests.support.variants import one_in

FRAMES = random_frames(6, 3)
"""24 video tokens."""
ANSWER = [11, 12, 13, 14, 15]


def prefilled(model: VideoLM, plan: PromptPlan, video: Tensor) -> tuple[DecodeState, TextAttention]:
    attention = TextAttention(plan)
    state, _ = model.start_prefill(plan, video, observer=attention).finish()
    return state, attention


def session(model: VideoLM) -> tuple[DecodeState, TextAttention]:
    return prefilled(model, model.plan_prompt("What happens?", len(FRAMES)), model.encode_frames(FRAMES))


def masked_logits(model: VideoLM, dense: DecodeState, attention: TextAttention, num_kept: int) -> Tensor:
    """Of the answer, which `dense` takes in under the masks; it is rolled back afterwards."""
    num_before = dense.num_tokens
    video = attention.video.tolist()
    unseen = []
    for scores in attention.by_layer.values():
        masked = torch.zeros(len(scores), dense.num_prompt_tokens, dtype=torch.bool)
        for head, of_head in enumerate(scores.tolist()):
            best_first = sorted(range(len(of_head)), key=lambda token: -of_head[token])
            masked[head, [video[token] for token in best_first[num_kept:]]] = True
        unseen.append(masked)
    with kernel_of(model, MaskingKernel(torch.stack(unseen))):
        (logits,) = model.step([(dense, ANSWER)])
    dense.rollback(num_before)
    return logits


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("num_kept", [0, 1, 7, 23])
@one_in(3, "num_kept", "heads")
def test_fewer_rows_equal_a_mask_for_each_layer_and_head(
    tmp_path: Path, heads: int, kv_heads: int, num_kept: int
) -> None:
    path = str(write_tiny_llava(tmp_path, seed=2, heads=heads, kv_heads=kv_heads))
    reference = load_model(path, attention="sdpa")
    expected = masked_logits(reference, *session(reference), num_kept)
    for attention in ("matmul", "sdpa"):
        model = load_model(path, attention=attention)
        sparse = SparseState(*session(model), num_kept)
        num_before = sparse.num_tokens
        (logits,) = model.step([(sparse, ANSWER)])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        sparse.rollback(num_before)
        rows = [model.step([(sparse, [token])])[0] for token in ANSWER]
        torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-4, atol=1e-4)


def test_heads_and_layers_choose_for_themselves(pair: Pair) -> None:
    _, attention = session(pair.ours)
    chosen = {tuple(head.topk(7).indices.sort().values.tolist()) for s in attention.by_layer.values() for head in s}
    assert len(chosen) > 1, "else the test above says nothing"


def test_three_axes_are_in_the_keys_already(tmp_path: Path) -> None:
    write_tiny_qwen(tmp_path, seed=5)
    qwen = load_qwen(tmp_path)
    reference = load_model(str(tmp_path), attention="sdpa")
    plan, video = qwen.plan(PROMPT, VIDEOS[3]), qwen.ours.encode_frames(VIDEOS[3].frames)
    expected = masked_logits(reference, *prefilled(reference, plan, video), 5)
    dense, attention = prefilled(qwen.ours, plan, video)
    sparse = SparseState(dense, attention, 5)
    assert sparse.next_position == dense.next_position
    torch.testing.assert_close(qwen.ours.step([(sparse, ANSWER)])[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_kept", [24, 10_000])
def test_all_rows_give_the_dense_logits_bit_by_bit(pair: Pair, num_kept: int) -> None:
    dense, attention = session(pair.ours)
    sparse = SparseState(dense, attention, num_kept)
    for window in (ANSWER, [9], TokenTree((3, 4, 5), (-1, 0, 0))):
        (expected,), (logits,) = pair.ours.step([(dense, window)]), pair.ours.step([(sparse, window)])
        assert torch.equal(logits, expected)


def test_rounds_of_drafting_stay_in_step_with_the_dense_state(pair: Pair) -> None:
    model = pair.ours
    dense, attention = session(model)
    sparse = SparseState(dense, attention, 5, headroom=0)
    committed = [21]
    for num_accepted in (0, 3, 1, 4, 2, *[4] * 15):
        draft: list[int] = []
        for _ in range(4):
            (logits,) = model.step([(sparse, [*committed[-1:], *draft][-1:])])
            draft.append(int(logits[-1].argmax()))
        model.step([(dense, [committed[-1], *draft])])
        dense.rollback(dense.num_prompt_tokens + len(committed) + num_accepted)
        committed += [*draft[:num_accepted], 30 + num_accepted]
        sparse.sync(dense)
        assert sparse.num_tokens == dense.num_tokens
        assert sparse.next_position == dense.next_position

    fresh, attention = session(model)
    model.step([(fresh, committed[:-1])])
    expected = SparseState(fresh, attention, 5)
    rows = [model.step([(state, [committed[-1], 8])])[0] for state in (sparse, expected)]
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)


def test_both_states_share_a_pass_and_die_apart(pair: Pair) -> None:
    dense, attention = session(pair.ours)
    sparse = SparseState(dense, attention, 5)
    together = pair.ours.step([(dense, ANSWER), (sparse, ANSWER)])
    dense.rollback(dense.num_prompt_tokens)
    sparse.sync(dense)
    torch.testing.assert_close(pair.ours.step([(dense, ANSWER)])[0], together[0], rtol=1e-4, atol=1e-4)
    dense.close()
    torch.testing.assert_close(pair.ours.step([(sparse, ANSWER)])[0], together[1], rtol=1e-4, atol=1e-4)


def test_a_strict_width_drafts_alike(pair: Pair) -> None:
    rows = []
    for model in (pair.ours, load_model(str(pair.path), strict_width=3)):
        sparse = SparseState(*session(model), 7)
        rows.append(torch.cat([model.step([(sparse, [token])])[0] for token in range(20, 90)]))
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-4, atol=1e-4)


def test_memory_is_that_of_the_rows_it_holds(pair: Pair) -> None:
    plan = pair.ours.plan_prompt("?", 100)
    dense, attention = prefilled(pair.ours, plan, pair.ours.encode_frames(random_frames(100, 0)))
    sparse = SparseState(dense, attention, 40, headroom=16)
    num_rows = plan.num_tokens - plan.num_video_tokens + 40 + 16
    assert sparse.kv_bytes <= pair.ours.kv_bytes(num_rows + 64)
    assert sparse.kv_bytes < dense.kv_bytes / 2
    before = sparse.kv_bytes
    for _ in range(3):
        pair.ours.step([(sparse, ANSWER)])
        sparse.sync(dense)
    assert sparse.kv_bytes == before, "a round allocates nothing"


def test_what_was_not_recorded_cannot_be_chosen(pair: Pair) -> None:
    plan, video = pair.ours.plan_prompt("?", len(FRAMES)), pair.ours.encode_frames(FRAMES)
    dense, attention = session(pair.ours)
    with pytest.raises(ValueError, match="0 or more"):
        SparseState(dense, attention, -1)
    partial = TextAttention(plan, layers=[0, 1])
    dense, _ = pair.ours.start_prefill(plan, video, observer=partial).finish()
    with pytest.raises(ValueError, match="layer 2"):
        SparseState(dense, partial, 3)
    dropping = TextAttention(plan)
    prefill = pair.ours.start_prefill(plan, video, observer=dropping)
    prefill.run_layers(1)
    prefill.keep_video(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="layer 0"):
        SparseState(prefill.finish()[0], dropping, 3)


def test_a_pruned_prompt_may_be_thinned_further(pair: Pair) -> None:
    plan, video = pair.ours.plan_prompt("?", len(FRAMES)), pair.ours.encode_frames(FRAMES)
    attention = TextAttention(plan)
    dense, _ = pair.ours.start_prefill(plan, video, keep=torch.arange(0, 24, 2), observer=attention).finish()
    sparse = SparseState(dense, attention, 12)
    assert torch.equal(pair.ours.step([(sparse, ANSWER)])[0], pair.ours.step([(dense, ANSWER)])[0])
