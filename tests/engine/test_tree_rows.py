"""A tree judges each of its paths as a chain would be judged, and leaves the chain that was kept."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.engine import DecodeState, VideoLM, load_model
from slipstream.engine.attention import FlashKernel, SdpaKernel
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.segments import Segment
from slipstream.errors import InvalidRequest, LimitExceeded
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import Pair, load_pair, random_frames
from tests.engine.test_qwen2_5_vl import PROMPT, VIDEOS, load_qwen
from tests.support.tiny_checkpoint import write_tiny_qwen

FRAMES = random_frames(4, 2)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> TokenTree:
    """Any tree, with any number of roots."""
    num_nodes = draw(st.integers(1, max_nodes))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(num_nodes))
    return TokenTree(tuple(draw(st.integers(3, 290)) for _ in range(num_nodes)), parents)


TREE = TokenTree((20, 31, 42, 53, 64, 75, 86), (-1, 0, 0, 1, 2, 2, 5))


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax(dim=-1), expected.argmax(dim=-1))


def check_paths(model: VideoLM, state: DecodeState, tree: TokenTree, logits: Tensor, num_before: int) -> None:
    """Every node's row equals that of the chain that leads to it. `state` is rolled back to before the tree."""
    for node in set(range(len(tree))) - set(tree.parents):
        state.rollback(num_before)
        path = tree.path(node)
        (expected,) = model.step([(state, [tree.token_ids[node] for node in path])])
        close(logits[list(path)], expected)
    state.rollback(num_before)


@given(trees(), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_judges_its_paths_as_chains_and_keeps_one(pair: Pair, tree: TokenTree, chosen: int) -> None:
    state = pair.prefill("?", FRAMES)[1]
    num_before = state.num_tokens
    (logits,) = pair.ours.step([(state, tree)])
    assert logits.shape[0] == len(tree) == state.num_tokens - num_before
    path = tree.path(chosen % len(tree))
    state.keep_path(num_before, path)
    assert state.num_tokens == num_before + len(path)
    (after,) = pair.ours.step([(state, [7, 8])])
    state.rollback(num_before)
    (expected,) = pair.ours.step([(state, [*(tree.token_ids[node] for node in path), 7, 8])])
    close(after, expected[-2:])
    check_paths(pair.ours, state, tree, logits, num_before)


@given(trees(), st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tree_may_grow_pass_by_pass(pair: Pair, tree: TokenTree, data: st.DataObject) -> None:
    state = pair.prefill("?", FRAMES)[1]
    num_before = state.num_tokens
    num_first = data.draw(st.integers(1, len(tree)))
    parts = [TokenTree(tree.token_ids[:num_first], tree.parents[:num_first])]
    if num_first < len(tree):
        parts.append(parts[0].grown(tree.token_ids[num_first:], tree.parents[num_first:]))
    logits = torch.cat([pair.ours.step([(state, part)])[0] for part in parts])
    check_paths(pair.ours, state, tree, logits, num_before)


@pytest.mark.parametrize("attention", ["matmul", "sdpa", "joined"])
def test_trees_and_chains_of_several_sessions_share_a_pass(pair: Pair, attention: str) -> None:
    pair = load_pair(pair.path, attention)
    videos = [random_frames(2, 1), random_frames(7, 2), FRAMES]
    states = [pair.prefill("?", frames)[1] for frames in videos]
    starts = [state.num_tokens for state in states]
    other = TokenTree((9, 8), (-1, -1))
    rows = pair.ours.step([(states[0], TREE), (states[1], [5, 6, 7]), (states[2], other)])
    states[1].rollback(starts[1])
    close(rows[1], pair.ours.step([(states[1], [5, 6, 7])])[0])
    check_paths(pair.ours, states[0], TREE, rows[0], starts[0])
    check_paths(pair.ours, states[2], other, rows[2], starts[2])


def test_a_tree_behind_a_video_with_three_axes(tmp_path: Path) -> None:
    qwen = load_qwen(write_tiny_qwen(tmp_path, seed=11))
    state, _ = qwen.prefill(PROMPT, VIDEOS[4])
    num_before = state.num_tokens
    (logits,) = qwen.ours.step([(state, TREE)])
    check_paths(qwen.ours, state, TREE, logits, num_before)


def test_no_path_is_a_rollback_and_a_prefix_moves_nothing(pair: Pair) -> None:
    state = pair.prefill("?", FRAMES)[1]
    num_before = state.num_tokens
    for rows in ([0, 1, 3], [0], []):
        pair.ours.step([(state, TREE)])
        state.keep_path(num_before, rows)
        assert state.num_tokens == num_before + len(rows)
        state.rollback(num_before)


@pytest.mark.parametrize("rows", [[-1], [1, 1], [2, 1], [0, 7]])
def test_rows_that_are_no_path_are_refused(pair: Pair, rows: list[int]) -> None:
    state = pair.prefill("?", FRAMES)[1]
    num_before = state.num_tokens
    pair.ours.step([(state, TREE)])
    with pytest.raises(ValueError, match="no ascending rows"):
        state.keep_path(num_before, rows)
    with pytest.raises(ValueError, match="can keep"):
        state.keep_path(num_before - 1, [0])
    assert state.num_tokens == num_before + len(TREE)


def test_a_strict_width_judges_no_trees(pair: Pair) -> None:
    strict = load_model(str(pair.path), strict_width=8)
    plan = strict.plan_prompt("?", len(FRAMES))
    states = [strict.start_prefill(plan, strict.encode_frames(FRAMES)).finish()[0] for _ in range(2)]
    with pytest.raises(InvalidRequest, match="strict width"):
        strict.step([(states[0], [3]), (states[1], TREE)])
    assert states[0].num_tokens == plan.num_tokens, "no state has changed"


def test_the_context_limits_the_depth_of_a_tree_not_its_width(pair: Pair) -> None:
    info = pair.ours.info
    plan, state, _ = pair.prefill("?", random_frames(info.max_frames, 0))
    room = info.max_context - plan.num_tokens
    pair.ours.step([(state, [9] * (room - 1))])
    pair.ours.step([(state, TokenTree((3, 4, 5), (-1, -1, -1)))])
    with pytest.raises(LimitExceeded, match="512"):
        pair.ours.step([(state, TokenTree((3, 4, 5, 6), (-1, -1, -1, 0), num_cached=3))])


def test_flash_attention_leaves_trees_to_sdpa() -> None:
    flash = object.__new__(FlashKernel)  # its package needs a GPU
    flash._masked = SdpaKernel()
    query, (keys, values) = torch.randn(4, 7, 8), torch.randn(2, 2, 12, 8)
    cache = KVCache(1, capacity=12, key_layout=flash.key_layout, value_layout=flash.value_layout)
    segment = Segment(0, 7, cache, 5, query.device, query.dtype, TREE)
    expected = SdpaKernel().attend(query, keys, values, segment, 0.3)
    torch.testing.assert_close(flash.attend(query, keys, values, segment, 0.3), expected)
