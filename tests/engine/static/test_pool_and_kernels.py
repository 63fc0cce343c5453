"""Steps over a pool attend as a cache of one's own and two matrix products do, in fp64, whatever happened before: other
sessions' steps, chains and trees, what is rolled back, kept and forked, and rows that moved to make room.
"""

from typing import ClassVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from slipstream.engine.attention import MatmulKernel
from slipstream.engine.kv_cache import KVCache, Layout
from slipstream.engine.segments import Segment
from slipstream.engine.static.pool import KVPool, PooledCache
from slipstream.engine.static.step import Entry, _Inputs
from slipstream.engine.static.windows import StepShape
from slipstream.speculation.protocol import TokenTree
from tests.engine.static.test_kv_pool import HEAD_DIM, KV_HEADS, LAYERS, LIKE, write
from tests.engine.static.test_static_windows import KINDS, trees

GROUP, SCALE, MOST_ROWS = 3, 0.4, 6
POOL_ROWS, CAPACITY = 7 * 64, 512
CPU = torch.device("cpu")
Pair = tuple[PooledCache, KVCache]


class Steps(RuleBasedStateMachine):
    """Caches in a pool that is too small for all of them, each beside one that has its own memory."""

    kind: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(LAYERS, POOL_ROWS, KV_HEADS, HEAD_DIM, LIKE)
        self.pairs: list[Pair] = []
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=self.generator)

    @precondition(lambda self: len(self.pairs) < 6)
    @rule(num_tokens=st.integers(1, 90))
    def prompt(self, num_tokens: int) -> None:
        layouts = {"key_layout": Layout.HEAD_DIM_TOKEN, "value_layout": Layout.HEAD_TOKEN_DIM}
        pair = PooledCache(LAYERS, capacity=num_tokens, pool=self.pool), KVCache(LAYERS, capacity=1, **layouts)
        rows = self.random(2, LAYERS, KV_HEADS, num_tokens, HEAD_DIM)
        for cache in pair:
            write(cache, rows)
        self.pairs.append(pair)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        asked = data.draw(st.lists(st.sampled_from(self.pairs), min_size=1, max_size=3, unique_by=id))
        windows = [data.draw(st.integers(1, MOST_ROWS) | trees(MOST_ROWS)) for _ in asked]
        sizes = [len(window) if isinstance(window, TokenTree) else window for window in windows]
        for (ours, theirs), size in zip(asked, sizes, strict=True):
            for cache in (ours, theirs):
                cache.reserve(cache.length + size)
        batch = [each for each in zip(asked, windows, sizes, strict=True) if each[0][0].extent and each[0][0].length]
        if not batch:
            return
        shape = StepShape(data.draw(st.integers(len(batch), 4)), max(size for *_, size in batch), CAPACITY)
        made = [self.random(heads, shape.num_all_rows, HEAD_DIM) for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)]
        inputs, entries = _Inputs(shape, CPU), []
        for (ours, _), window, size in batch:
            assert ours.extent is not None
            tree = window if isinstance(window, TokenTree) else None
            entries.append(Entry(ours.extent, ours.length, [1] * size, range(size), tree))
        inputs.fill(entries)
        attend = KINDS[self.kind](self.pool, inputs.places)
        with torch.inference_mode():
            attend.begin()
            for layer in range(LAYERS):
                output = attend(layer, *made, SCALE).split(shape.num_rows)
                for found, session in zip(output, range(len(batch)), strict=False):
                    own = slice(session * shape.num_rows, session * shape.num_rows + batch[session][2])
                    expected = self.expected(batch[session], layer, *(each[:, own] for each in made))
                    torch.testing.assert_close(found[: batch[session][2]], expected, rtol=1e-12, atol=1e-12)
        for pair, window, size in batch:
            path = window.path(data.draw(st.integers(0, size - 1))) if isinstance(window, TokenTree) else None
            for cache in pair:
                cache.advance(size)
                if path is not None:
                    cache.keep(cache.length - size, path)

    def expected(
        self, asked: tuple[Pair, TokenTree | int, int], layer: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        (_, cache), window, size = asked
        tree = window if isinstance(window, TokenTree) else None
        segment = Segment(0, size, cache, cache.length, CPU, query.dtype, tree)
        held = cache.write(layer, keys, values)
        return MatmulKernel().attend(query, *held, segment, SCALE).transpose(0, 1)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), share=st.floats(0, 1))
    def roll_back(self, data: st.DataObject, share: float) -> None:
        for cache in data.draw(st.sampled_from(self.pairs)):
            cache.rollback(int(share * cache.length))

    @precondition(lambda self: 0 < len(self.pairs) < 6)
    @rule(data=st.data(), share=st.floats(0, 1), capacity=st.integers(0, 200))
    def fork(self, data: st.DataObject, share: float, capacity: int) -> None:
        ours, theirs = data.draw(st.sampled_from(self.pairs))
        num_tokens = int(share * ours.length)
        forked = ours.fork(num_tokens, capacity)
        assert isinstance(forked, PooledCache)
        self.pairs.append((forked, theirs.fork(num_tokens, capacity)))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        self.pairs.remove(pair)
        pair[0].clear()

    @invariant()
    def both_hold_the_same(self) -> None:
        for ours, theirs in self.pairs:
            assert ours.length == theirs.length
            for layer in range(LAYERS) if ours.length else ():
                assert all(map(torch.equal, ours.read(layer), theirs.read(layer)))


class WholeSteps(Steps):
    kind = "whole"


class JoinedSteps(Steps):
    kind = "joined"


class VarlenSteps(Steps):
    kind = "varlen"


OFTEN = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestWholeSteps, TestJoinedSteps, TestVarlenSteps = (each.TestCase for each in (WholeSteps, JoinedSteps, VarlenSteps))
TestWholeSteps.settings = TestJoinedSteps.settings = TestVarlenSteps.settings = OFTEN
