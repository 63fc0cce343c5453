"""A cache in a pool holds what any other holds, whatever happens to it and to its neighbours."""

import gc

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from slipstream.engine.kv_cache import KVCache, Layout
from slipstream.engine.static.pool import NUM_SCRATCH_ROWS, KVPool, PooledCache, SharedPool

KV_HEADS, HEAD_DIM, LAYERS = 2, 3, 2
LIKE = torch.empty(0, dtype=torch.float64)


def new_pool(num_rows: int) -> KVPool:
    return KVPool(LAYERS, num_rows, KV_HEADS, HEAD_DIM, LIKE)


def ordinary(capacity: int) -> KVCache:
    return KVCache(LAYERS, capacity=capacity, key_layout=Layout.HEAD_TOKEN_DIM, value_layout=Layout.HEAD_TOKEN_DIM)


def write(cache: KVCache, rows: Tensor) -> None:
    """[2, layers, kv_heads, n, head_dim]"""
    cache.reserve(cache.length + rows.shape[3])
    with torch.inference_mode():  # as all passes are
        for layer in range(LAYERS):
            cache.write(layer, rows[0, layer], rows[1, layer])
    cache.advance(rows.shape[3])


class TwoKinds(RuleBasedStateMachine):
    """Caches in a pool that is too small for all of them, each beside one that has its own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool(5 * 64)
        self.caches: list[tuple[PooledCache, KVCache]] = []
        self.generator = torch.Generator().manual_seed(0)

    def any_one(self, data: st.DataObject) -> tuple[PooledCache, KVCache]:
        return data.draw(st.sampled_from(self.caches))

    @rule(capacity=st.integers(1, 150))
    def open(self, capacity: int) -> None:
        self.caches.append((PooledCache(LAYERS, capacity=capacity, pool=self.pool), ordinary(capacity)))

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), num_tokens=st.integers(1, 90))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        rows = torch.randn(2, LAYERS, KV_HEADS, num_tokens, HEAD_DIM, dtype=torch.float64, generator=self.generator)
        for cache in self.any_one(data):
            write(cache, rows)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), share=st.floats(0, 1))
    def roll_back(self, data: st.DataObject, share: float) -> None:
        for cache in self.any_one(data):
            cache.rollback(int(share * cache.length))

    @precondition(lambda self: any(ours.length for ours, _ in self.caches))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        pair = self.any_one(data)
        num_new = data.draw(st.integers(0, min(pair[0].length, 12)))
        rows = sorted(data.draw(st.sets(st.integers(0, num_new - 1)))) if num_new else []
        if pair[0].length:
            for cache in pair:
                cache.keep(cache.length - num_new, rows)

    @precondition(lambda self: any(ours.length for ours, _ in self.caches))
    @rule(data=st.data(), share=st.floats(0, 1), capacity=st.integers(0, 200))
    def fork(self, data: st.DataObject, share: float, capacity: int) -> None:
        ours, theirs = self.any_one(data)
        num_tokens = int(share * ours.length)
        forked = ours.fork(num_tokens, capacity)
        assert isinstance(forked, PooledCache)
        self.caches.append((forked, theirs.fork(num_tokens, capacity)))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        pair = self.any_one(data)
        self.caches.remove(pair)
        pair[0].clear()

    @invariant()
    def both_hold_the_same(self) -> None:
        for ours, theirs in self.caches:
            assert ours.length == theirs.length
            for layer in range(LAYERS) if ours.length else ():
                for held, expected in zip(ours.read(layer), theirs.read(layer), strict=True):
                    assert torch.equal(held, expected)

    @invariant()
    def rows_belong_to_one(self) -> None:
        extents = sorted((ours.extent.start, ours.extent.end) for ours, _ in self.caches if ours.extent)
        ends = [NUM_SCRATCH_ROWS, *(end for _, end in extents)]
        assert all(start >= end for end, (start, _) in zip(ends, extents, strict=False))
        assert self.pool.num_free == 5 * 64 - sum(end - start for start, end in extents) >= 0


TestTwoKinds = TwoKinds.TestCase
TestTwoKinds.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_rows_move_together_when_there_is_no_gap() -> None:
    pool = new_pool(4 * 64)
    extents = [pool.take(64, pool) for _ in range(4)]
    assert pool.take(1, pool) is None and pool.num_free == 0
    for extent in extents[::2]:
        assert extent is not None
        pool.give_back(extent)
    last = extents[3]
    assert last is not None
    pool.view(1, last).keys.fill_(7.0)
    assert pool.take(128, pool) is not None
    assert (pool.view(1, last).keys == 7.0).all() and last.start == NUM_SCRATCH_ROWS + 64


def test_rows_of_a_cache_that_is_gone_are_free() -> None:
    pool = new_pool(256)
    cache = PooledCache(LAYERS, capacity=100, pool=pool)
    write(cache, torch.zeros(2, LAYERS, KV_HEADS, 3, HEAD_DIM, dtype=torch.float64))
    assert pool.num_free == 128
    del cache
    assert pool.num_free == 256


def test_bytes_are_those_of_the_extent() -> None:
    pool = new_pool(512)
    cache = PooledCache(LAYERS, capacity=100, pool=pool)
    assert cache.num_bytes == 0
    write(cache, torch.zeros(2, LAYERS, KV_HEADS, 3, HEAD_DIM, dtype=torch.float64))
    assert cache.num_bytes == 128 * pool.row_bytes == 128 * 2 * LAYERS * KV_HEADS * HEAD_DIM * 8
    cache.clear()
    assert cache.num_bytes == 0 and pool.num_free == 512


@pytest.mark.parametrize("num_before", [10, 64])
def test_layers_may_hold_fewer_rows(num_before: int) -> None:
    """As where video tokens were dropped in the middle of a prefill."""
    ours, theirs = PooledCache(LAYERS, capacity=num_before, pool=new_pool(128)), ordinary(num_before)
    rows = torch.randn(2, LAYERS, KV_HEADS, num_before, HEAD_DIM, dtype=torch.float64)
    for cache in (ours, theirs):
        with torch.inference_mode():
            cache.reserve(num_before)
            cache.write(0, rows[0, 0], rows[1, 0])
            cache.leave_out(4, from_layer=1)
            cache.write(1, rows[0, 1, :, 4:], rows[1, 1, :, 4:])
        cache.advance(num_before)
        write(cache, rows[:, :, :, :3])
    assert not ours.is_whole
    for layer in range(LAYERS):
        assert all(map(torch.equal, ours.read(layer), theirs.read(layer)))


def test_a_shared_pool_frees_what_has_no_owner_when_it_is_told() -> None:
    pool = SharedPool(LAYERS, 2 * 64, KV_HEADS, HEAD_DIM, LIKE)
    kept, gone = (PooledCache(LAYERS, capacity=64, pool=pool) for _ in range(2))
    kept.reserve(1), gone.reserve(1)
    del gone
    gc.collect()
    assert pool.num_free == 0 and pool.take(1, kept) is None
    assert pool.ownerless() == [NUM_SCRATCH_ROWS + 64]
    pool.free(pool.ownerless())
    assert pool.num_free == 64 and kept.extent is not None


def test_a_cache_says_whether_it_has_room() -> None:
    pool = new_pool(64)
    placed, other = (PooledCache(LAYERS, capacity=64, pool=pool) for _ in range(2))
    assert not placed.has_room(1), "it has no place yet"
    placed.reserve(1)
    assert placed.has_room(64) and not placed.has_room(65)
    write(other, torch.zeros(2, LAYERS, KV_HEADS, 3, HEAD_DIM, dtype=torch.float64))
    assert other.extent is None and other.has_room(64), "it has memory of its own"
