"""Sessions: rollback leaves no trace, memory is counted and freed."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.conftest import Pair, random_frames

Edit = tuple[list[int], int]
"""Tokens to append, then how many of all answer tokens to take back."""

edits = st.lists(st.tuples(st.lists(st.integers(0, 300), min_size=1, max_size=9), st.integers(0, 12)), max_size=8)


@given(edits)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rollback_equals_never_having_seen_the_tokens(pair: Pair, edits: Sequence[Edit]) -> None:
    frames = random_frames(3, 1)
    _, state, _ = pair.prefill("Describe the video.", frames)
    num_prompt = state.num_tokens
    answer: list[int] = []
    for appended, taken_back in edits:
        pair.ours.step([(state, appended)])
        answer = (answer + appended)[: max(0, len(answer) + len(appended) - taken_back)]
        state.rollback(num_prompt + len(answer))
    (logits,) = pair.ours.step([(state, [42, 43])])

    _, fresh, _ = pair.prefill("Describe the video.", frames)
    expected = pair.ours.step([(fresh, [*answer, 42, 43])])[0][-2:]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(logits.argmax(dim=-1), expected.argmax(dim=-1))


@pytest.mark.parametrize("num_tokens", [-1, 0, 1, 10_000])
def test_rollback_stays_between_prompt_and_present(pair: Pair, num_tokens: int) -> None:
    _, state, _ = pair.prefill("?", random_frames(2, 0))
    with pytest.raises(ValueError, match="can keep"):
        state.rollback(num_tokens)


def test_an_answer_longer_than_its_headroom_is_decoded_alike(pair: Pair) -> None:
    frames = random_frames(2, 0)
    plan = pair.ours.plan_prompt("?", 2)
    video = pair.ours.encode_frames(frames)
    tokens = [3 + i % 250 for i in range(100)]
    roomy, _ = pair.ours.start_prefill(plan, video, headroom=200).finish()
    tight, _ = pair.ours.start_prefill(plan, video, headroom=0).finish()
    before = tight.kv_bytes
    for token in tokens:
        expected, got = pair.ours.step([(roomy, [token])])[0], pair.ours.step([(tight, [token])])[0]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert tight.kv_bytes > before


def test_memory_is_counted_and_freed(pair: Pair) -> None:
    _, state, _ = pair.prefill("?", random_frames(2, 0))
    text = pair.theirs.config.get_text_config()
    head_dim = text.hidden_size // text.num_attention_heads
    a_token = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * 4
    assert state.kv_bytes == a_token * state.cache.capacity
    state.close()
    assert state.kv_bytes == 0


def test_an_abandoned_prefill_frees_its_cache(pair: Pair) -> None:
    plan = pair.ours.plan_prompt("?", 2)
    prefill = pair.ours.start_prefill(plan, pair.ours.encode_frames(random_frames(2, 0)))
    prefill.run_layers(2)
    assert prefill.cache.num_bytes
    prefill.cache.clear()
    assert prefill.cache.num_bytes == 0
