"""Attention over the past joined to that over the window: what one softmax over both gives, in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.attention import JoinedKernel, MatmulKernel, PastAttention, by_flash, by_matmul
from slipstream.engine.kernels import get_kernel
from slipstream.engine.kv_cache import KVCache, Layout
from slipstream.engine.segments import Segment
from slipstream.errors import ModelNotUsable
from slipstream.speculation.protocol import TokenTree

HEAD_DIM, CPU = 16, torch.device("cpu")


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Chains among them; some of the nodes may be in the cache already."""
    num_nodes = draw(st.integers(1, 12))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(num_nodes))
    return TokenTree((1,) * num_nodes, parents, draw(st.integers(0, num_nodes - 1)))


@settings(max_examples=60)
@given(st.data())
@pytest.mark.parametrize("attend_past", [by_matmul, by_flash])
def test_two_parts_are_one_attention(attend_past: PastAttention, data: st.DataObject) -> None:
    tree = data.draw(st.none() | trees(), label="tree")
    past = data.draw(st.integers(0, 90), label="past")
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 4)]), label="heads")
    num_rows = data.draw(st.integers(1, 16), label="rows") if tree is None else len(tree) - tree.num_cached
    cache = KVCache(1, capacity=64, key_layout=Layout.HEAD_TOKEN_DIM, value_layout=Layout.HEAD_TOKEN_DIM)
    segment = Segment(0, num_rows, cache, past, CPU, torch.float64, tree)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
    query = torch.randn(kv_heads * group, num_rows, HEAD_DIM, dtype=torch.float64, generator=generator)
    keys, values = torch.randn(2, kv_heads, segment.num_keys, HEAD_DIM, dtype=torch.float64, generator=generator)
    joined = JoinedKernel(attend_past).attend(query, keys, values, segment, 0.25)
    expected = MatmulKernel().attend(query, keys, values, segment, 0.25)
    torch.testing.assert_close(joined, expected, rtol=1e-12, atol=1e-12)


def test_it_has_no_strict_width() -> None:
    assert isinstance(get_kernel("joined", CPU, torch.float32), JoinedKernel)
    with pytest.raises(ModelNotUsable, match="has no strict width"):
        get_kernel("joined", CPU, torch.float32, masked_ends=True)
