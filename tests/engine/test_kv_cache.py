"""The cache stores what was written, whatever its layout, growth and history."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.kv_cache import KVCache, Layout

KV_HEADS, HEAD_DIM, LAYERS = 2, 3, 2


def new_cache(capacity: int = 1, layout: Layout = Layout.HEAD_TOKEN_DIM) -> KVCache:
    return KVCache(LAYERS, capacity=capacity, key_layout=layout, value_layout=Layout.HEAD_TOKEN_DIM)


def append(cache: KVCache, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Append random rows, the same to every layer, and return the views of the last one."""
    keys, values = torch.randn(2, KV_HEADS, num_tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    cache.reserve(cache.length + num_tokens)
    views = [cache.write(layer, keys, values) for layer in range(LAYERS)]
    cache.advance(num_tokens)
    return views[-1]


@pytest.mark.parametrize("layout", list(Layout))
def test_layouts_differ_in_memory_only(layout: Layout) -> None:
    buffer = layout.allocate((2, 5, 3), torch.empty(0))
    assert buffer.shape == (2, 5, 3)
    slowest_to_fastest = sorted(range(3), key=buffer.stride, reverse=True)
    assert tuple(slowest_to_fastest) == layout.value
    assert buffer.stride(layout.value[-1]) == 1


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 100)), min_size=1, max_size=6), st.sampled_from(Layout))
@settings(max_examples=100, deadline=None)
def test_holds_what_a_concatenation_would(history: list[tuple[int, int]], layout: Layout) -> None:
    cache = new_cache(layout=layout)
    expected = torch.empty(KV_HEADS, 0, HEAD_DIM)
    for seed, (num_tokens, num_kept) in enumerate(history):
        keys, _ = append(cache, num_tokens, seed)
        fresh, _ = append(new_cache(), num_tokens, seed)
        expected = torch.cat([expected, fresh], dim=1)
        assert torch.equal(keys, expected)
        cache.rollback(min(num_kept, cache.length))
        expected = expected[:, : cache.length]


def test_growth_is_geometric_and_rollback_keeps_the_room() -> None:
    cache = new_cache(capacity=100)
    assert cache.capacity == 128
    append(cache, 129, 0)
    assert cache.capacity == 192
    cache.rollback(0)
    assert cache.capacity == 192


def test_bytes_follow_the_buffers() -> None:
    cache = new_cache(capacity=64)
    assert cache.num_bytes == 0, "buffers appear when written to"
    append(cache, 10, 0)
    assert cache.num_bytes == 2 * LAYERS * KV_HEADS * HEAD_DIM * 64 * 4
    cache.clear()
    assert (cache.num_bytes, cache.length) == (0, 0)


def test_an_unfinished_pass_leaves_no_trace() -> None:
    cache = new_cache()
    append(cache, 3, 0)
    cache.reserve(8)
    cache.write(0, torch.ones(KV_HEADS, 5, HEAD_DIM), torch.ones(KV_HEADS, 5, HEAD_DIM))
    assert cache.length == 3
    keys, _ = append(cache, 1, 1)
    assert keys.shape[1] == 4
    assert not (keys == 1).any()


@pytest.mark.parametrize("length", [-1, 4])
def test_rollback_goes_backwards_only(length: int) -> None:
    cache = new_cache()
    append(cache, 3, 0)
    with pytest.raises(AssertionError):
        cache.rollback(length)


def test_advance_stays_within_what_was_reserved() -> None:
    with pytest.raises(AssertionError):
        new_cache(capacity=64).advance(65)
