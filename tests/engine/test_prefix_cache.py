"""A prefix is the prefill up to the text: the same to the text's rows as if it had just been computed."""

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.budget import MIB
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.prefix_cache import (
    ByteLru,
    PrefixCache,
    PrefixKey,
    VideoPrefix,
    frames_digest,
    share_of_keys,
)
from tests.engine.conftest import Pair, random_frames

PROMPTS = ("Describe the video.", "What happens here?")


@pytest.mark.parametrize("attention_rows", [1, 30])
def test_a_resumed_prefill_equals_a_fresh_one(pair: Pair, attention_rows: int) -> None:
    frames = random_frames(5, 1)
    _, first, _ = pair.prefill(PROMPTS[0], frames)
    prompt = "?" * attention_rows
    plan, fresh, expected = pair.prefill(prompt, frames)
    assert plan.text_start < first.num_prompt_tokens
    prefill = pair.ours.resume_prefill(plan, first.cache.fork(plan.text_start, plan.num_tokens + 8))
    state, logits = prefill.finish()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (state.num_tokens, state.next_position) == (fresh.num_tokens, fresh.next_position)
    ours, theirs = (pair.ours.step([(one, [11, 12])])[0] for one in (state, fresh))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_text_states_of_a_resumed_prefill_equal_a_fresh_one(pair: Pair) -> None:
    frames = random_frames(5, 1)
    _, first, _ = pair.prefill(PROMPTS[0], frames)
    plan = pair.ours.plan_prompt(PROMPTS[1], 5)
    fresh = pair.ours.start_prefill(plan, pair.ours.encode_frames(frames))
    resumed = pair.ours.resume_prefill(plan, first.cache.fork(plan.text_start))
    for layer in range(pair.ours.info.num_layers + 1):
        fresh.run_layers(layer)
        resumed.run_layers(layer)
        torch.testing.assert_close(resumed.text_states(), fresh.text_states(), rtol=1e-4, atol=1e-4)


def test_kv_bytes_are_those_of_the_cache(pair: Pair) -> None:
    plan = pair.ours.plan_prompt("?", 3)
    state, _ = pair.ours.start_prefill(plan, pair.ours.encode_frames(random_frames(3, 0)), headroom=40).finish()
    assert state.kv_bytes == pair.ours.kv_bytes(plan.num_tokens + 40)


def test_keys_and_values_take_their_share_of_a_prefix(pair: Pair) -> None:
    """Only that share is room in the pool of static steps."""
    _, state, _ = pair.prefill(PROMPTS[0], random_frames(5, 1))
    per_token = pair.ours.runner.kv_bytes_per_token
    states = [torch.zeros(state.num_tokens, pair.ours.info.hidden_size, dtype=torch.bfloat16) for _ in range(2)]
    num_bytes = sum(each.nbytes for each in states) + state.num_tokens * per_token
    share = share_of_keys(per_token, pair.ours.info.hidden_size)
    assert share * num_bytes == pytest.approx(state.num_tokens * per_token) and 0.5 < share < 1


def test_the_digest_is_of_pixels_and_geometry() -> None:
    frames = random_frames(2, 1, (24, 40))
    assert frames_digest(frames) == frames_digest(frames.copy())
    assert frames_digest(frames) != frames_digest(frames.reshape(2, 40, 24, 3))
    changed = frames.copy()
    changed[-1, -1, -1, -1] ^= 1
    assert frames_digest(frames) != frames_digest(changed)


def test_the_key_is_all_but_the_text(pair: Pair) -> None:
    plans = [pair.ours.plan_prompt(prompt, 3) for prompt in PROMPTS]
    assert PrefixKey.of(plans[0], b"a") == PrefixKey.of(plans[1], b"a")
    assert PrefixKey.of(plans[0], b"a") != PrefixKey.of(plans[0], b"b")
    assert PrefixKey.of(plans[0], b"a") != PrefixKey.of(pair.ours.plan_prompt(PROMPTS[0], 4), b"a")


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 60)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_an_lru_never_holds_more_than_its_limit(puts: list[tuple[int, int]]) -> None:
    evicted: list[object] = []
    lru: ByteLru[int, object] = ByteLru(100, "--limit", evicted.append)
    put: list[object] = []
    for key, num_bytes in puts:
        put.append(object())
        lru.put(key, put[-1], num_bytes)
        assert lru.num_bytes <= 100
    assert len(put) == len(evicted) + len(lru)
    assert len(set(map(id, evicted))) == len(evicted)


def test_the_least_recently_used_leaves() -> None:
    lru: ByteLru[str, str] = ByteLru(30, "--limit")
    for key in "abc":
        lru.put(key, key, 10)
    assert lru.get("a") == "a"
    lru.put("d", "d", 10)
    assert [lru.get(key) for key in "abcd"] == ["a", None, "c", "d"]
    lru.put("huge", "huge", 31)
    assert (lru.get("huge"), len(lru)) == (None, 3)


def test_what_is_too_large_is_told_once_a_size() -> None:
    lru: ByteLru[int, str] = ByteLru(2 * MIB, "--limit")
    with structlog.testing.capture_logs() as events:
        for number, size in enumerate((3, 3, 2, 5, 4)):
            lru.put(number, "", size * MIB)
        ByteLru[int, str](0, "--limit").put(1, "", MIB)
    assert [(event["needs_mb"], event["has_mb"], event["flag"]) for event in events] == [
        (3, 2, "--limit"),
        (5, 2, "--limit"),
    ]


def prefix_of(pair: Pair, seed: int, headroom: int = 8) -> tuple[VideoPrefix, KVCache]:
    frames = random_frames(20, seed)
    plan = pair.ours.plan_prompt("?", 20)
    embeddings = pair.ours.encode_frames(frames)
    state, _ = pair.ours.start_prefill(plan, embeddings, headroom=headroom).finish()
    states = embeddings.to(torch.bfloat16), embeddings.to(torch.bfloat16)
    return VideoPrefix(PrefixKey.of(plan, frames_digest(frames)), state.cache, states), state.cache


def test_an_ended_sessions_cache_is_kept_cut_and_counted(pair: Pair) -> None:
    prefixes = PrefixCache(10**7)
    prefix, cache = prefix_of(pair, 1, headroom=300)
    prefixes.share(prefix)
    states_bytes = sum(states.nbytes for states in prefix.video_states)
    assert prefixes.num_bytes == states_bytes, "the rows are the session's while it runs"
    prefixes.retire(prefix)
    assert prefixes.find(prefix.key) is prefix
    assert cache.num_bytes == 0 and prefix.cache.length == prefix.num_tokens
    assert prefixes.num_bytes == states_bytes + pair.ours.kv_bytes(prefix.num_tokens)


def test_what_leaves_is_freed(pair: Pair) -> None:
    first, second = prefix_of(pair, 1)[0], prefix_of(pair, 2)[0]
    size = sum(states.nbytes for states in first.video_states) + first.cache.num_bytes
    prefixes = PrefixCache(size * 3 // 2)
    for prefix in (first, second):
        prefixes.share(prefix)
        prefixes.retire(prefix)
    assert prefixes.find(first.key) is None and first.cache.num_bytes == 0
    assert prefixes.find(second.key) is second and second.cache.num_bytes > 0


def test_a_running_sessions_cache_outlives_its_entry(pair: Pair) -> None:
    prefixes = PrefixCache(1)
    prefix, cache = prefix_of(pair, 1)
    prefixes.share(prefix)
    assert prefixes.find(prefix.key) is None and cache.num_bytes > 0
    prefixes.retire(prefix)
    assert cache.num_bytes == 0


def test_of_two_prefills_of_one_video_one_is_kept(pair: Pair) -> None:
    prefixes = PrefixCache(10**7)
    (first, _), (second, second_cache) = prefix_of(pair, 1), prefix_of(pair, 1)
    prefixes.share(first)
    prefixes.share(second)
    assert prefixes.find(first.key) is first
    prefixes.retire(second)
    prefixes.retire(first)
    assert second_cache.num_bytes == 0 and first.cache.num_bytes > 0


def test_a_prefix_without_memory_for_its_copy_is_not_kept(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = PrefixCache(10**7)
    prefix, cache = prefix_of(pair, 1, headroom=300)
    prefixes.share(prefix)
    monkeypatch.setattr(KVCache, "trimmed", lambda *asked: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        prefixes.retire(prefix)
    assert prefixes.find(prefix.key) is None and (cache.num_bytes, prefixes.num_bytes) == (0, 0)
