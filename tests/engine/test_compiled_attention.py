"""Compiled attention is the textbook's, and a row's bits depend on nothing but what the row sees."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.engine.attention import MatmulKernel
from slipstream.engine.compiled import blocked_attention as compiled
from slipstream.engine.compiled.blocked_attention import BLOCK, MIN_SHARED_KEYS, CompiledKernel
from slipstream.engine.compiled.code import Vectors, vectors_for
from slipstream.engine.kernels import get_kernel
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.segments import Segment
from slipstream.errors import ModelNotUsable
from slipstream.speculation.protocol import TokenTree
from tests.support.variants import one_in

CPU, SCALE = torch.device("cpu"), 0.25
pytestmark = pytest.mark.skipif(vectors_for(torch.float32) is None, reason="this processor has neither AVX2 nor more")


@pytest.fixture(params=["as wide as they are", "AVX2"])
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of the processor, and as on one with half the width and number of registers."""

    def narrow(dtype: torch.dtype) -> Vectors | None:
        wide = vectors_for(dtype)
        return None if wide is None else Vectors(wide.number, 32 * 8 // wide.num_bits, 2)

    if request.param == "AVX2":
        monkeypatch.setattr(compiled, "vectors_for", narrow)
    compiled.attention_for.cache_clear()
    yield
    compiled.attention_for.cache_clear()


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def never_torch(monkeypatch: pytest.MonkeyPatch) -> MatmulKernel:
    """Torch's products, which compiled attention does not fall back on."""
    torch_kernel, attend = MatmulKernel(), MatmulKernel.attend

    def refuse(kernel: MatmulKernel, *rest: object) -> Tensor:
        assert type(kernel) is MatmulKernel, "compiled attention was left to torch"
        return attend(kernel, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(MatmulKernel, "attend", refuse)
    return torch_kernel


def filled(segment: Segment, kv_heads: int, head_dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values as a cache shows them; what lies behind them is no number."""
    kernel, num_keys = CompiledKernel(), segment.num_keys
    cache = KVCache(1, capacity=num_keys, key_layout=kernel.key_layout, value_layout=kernel.value_layout)
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, kv_heads, num_keys, head_dim, dtype=segment.dtype, generator=generator)
    cache.write(0, keys, values)
    held = cache.opened(0)
    held.keys[:, num_keys:] = held.values[:, num_keys:] = float("nan")
    return held.keys[:, :num_keys], held.values[:, :num_keys]


def segment_of(num_rows: int, past: int, dtype: torch.dtype, tree: TokenTree | None = None) -> Segment:
    kernel = CompiledKernel()
    cache = KVCache(1, capacity=64, key_layout=kernel.key_layout, value_layout=kernel.value_layout)
    return Segment(0, num_rows, cache, past, CPU, dtype, tree)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Some of the nodes may be in the cache already."""
    num_nodes = draw(st.integers(1, 20))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(num_nodes))
    return TokenTree((1,) * num_nodes, parents, draw(st.integers(0, num_nodes - 1)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.usefixtures("vectors")
@one_in(2, "vectors", "num_threads")
def test_it_is_the_textbooks(never_torch: MatmulKernel, num_threads: int, data: st.DataObject) -> None:
    tree = data.draw(st.none() | trees(), label="tree")
    past = data.draw(st.integers(1, 90) | st.integers(BLOCK - 20, BLOCK + 20) | st.just(5 * BLOCK), label="past")
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 4)]), label="heads")
    head_dim = data.draw(st.sampled_from([16, 64, 80]), label="head_dim")
    num_rows = data.draw(st.integers(1, 70), label="rows") if tree is None else len(tree) - tree.num_cached
    segment = segment_of(num_rows, past, torch.float64, tree)
    keys, values = filled(segment, kv_heads, head_dim)
    query = torch.randn(num_rows, kv_heads * group, head_dim, dtype=torch.float64).transpose(0, 1)
    expected = never_torch.attend(query, keys, values, segment, SCALE)
    torch.testing.assert_close(
        CompiledKernel().attend(query, keys, values, segment, SCALE), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.usefixtures("vectors")
@one_in(2, "vectors", "num_threads")
def test_a_row_does_not_depend_on_the_others(never_torch: MatmulKernel, num_threads: int) -> None:
    past, num_rows = MIN_SHARED_KEYS + BLOCK - 3, 24  # the window goes over the end of a block
    segment = segment_of(num_rows, past, torch.float32)
    keys, values = filled(segment, 2, 64)
    query = torch.randn(4, num_rows, 64)
    whole = CompiledKernel().attend(query, keys, values, segment, SCALE)
    for first in range(num_rows):
        for last in {first + 1, min(first + 7, num_rows)}:
            part = segment_of(last - first, past + first, torch.float32)
            alone = CompiledKernel().attend(
                query[:, first:last], keys[:, : past + last], values[:, : past + last], part, SCALE
            )
            assert torch.equal(alone, whole[:, first:last])


@pytest.mark.usefixtures("vectors")
def test_large_scores_and_rows_without_keys_in_a_block(never_torch: MatmulKernel) -> None:
    """The largest score grows block by block, and the first rows see nothing of the last one."""
    num_rows = BLOCK + 10
    segment = segment_of(num_rows, BLOCK, torch.float32)
    keys, values = filled(segment, 1, 64)
    keys *= torch.linspace(0, 20, segment.num_keys)[:, None]
    query = torch.randn(2, num_rows, 64)
    wide = segment_of(num_rows, BLOCK, torch.float64)
    expected = never_torch.attend(query.double(), keys.double(), values.double(), wide, SCALE)
    actual = CompiledKernel().attend(query, keys, values, segment, SCALE)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["a narrow head", "16 bits", "keys by token", "an end without room"])
def test_what_it_cannot_read_is_torchs(what: str) -> None:
    dtype = torch.bfloat16 if what == "16 bits" else torch.float32
    segment = segment_of(2, 70, dtype)
    keys, values = filled(segment, 1, 4 if what == "a narrow head" else 64)
    if what == "keys by token":
        keys = keys.contiguous()
    if what == "an end without room":
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    query = torch.randn(2, 2, keys.shape[2]).to(dtype)
    expected = MatmulKernel().attend(query, keys, values, segment, SCALE)
    assert torch.equal(CompiledKernel().attend(query, keys, values, segment, SCALE), expected)


def test_it_is_what_a_cpu_gets() -> None:
    assert isinstance(get_kernel("auto", CPU, torch.float32), CompiledKernel)
    assert isinstance(get_kernel("auto", CPU, torch.float32, masked_ends=True), CompiledKernel)
    with pytest.raises(ModelNotUsable, match="AVX2 or AVX-512"):
        get_kernel("compiled", CPU, torch.bfloat16)


def test_without_its_compiler_torch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert type(get_kernel("auto", CPU, torch.float32)) is MatmulKernel
    with pytest.raises(ModelNotUsable, match="llvmlite"):
        get_kernel("compiled", CPU, torch.float32)
