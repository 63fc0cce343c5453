"""Static attention over a pool is the attention of any kernel, in fp64, whoever else is in the step."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.engine.attention import MatmulKernel
from slipstream.engine.kv_cache import KVCache, Layout
from slipstream.engine.segments import Segment
from slipstream.engine.static.pool import Extent, KVPool
from slipstream.engine.static.trials import _places
from slipstream.engine.static.windows import (
    JoinedWindows,
    MakeWindows,
    StepPlaces,
    StepShape,
    WholeWindows,
    past_by_copy,
    past_by_varlen,
)
from slipstream.speculation.protocol import TokenTree

HEAD_DIM, SCALE, CAPACITY = 4, 0.3, 256


def varlen(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, starts: Tensor, most: int, used: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """A `VarlenKernel` as flash attention's is documented: heads share a KV head with their neighbours."""
    assert rows.tolist() == [*range(len(query) + 1)] and len(starts) == len(query) + 1 and int(used.max()) <= most
    outputs, lses = [], []
    for one, start, count in zip(query, starts.tolist(), used.tolist(), strict=False):
        grouped = one.unflatten(0, (keys.shape[1], -1))
        scores = grouped @ keys[start : start + count].permute(1, 2, 0) * scale
        outputs.append((scores.softmax(-1) @ values[start : start + count].transpose(0, 1)).flatten(0, 1))
        lses.append(scores.logsumexp(-1).flatten())
    return torch.stack(outputs), torch.stack(lses, dim=1)


KINDS: dict[str, MakeWindows] = {
    "whole": WholeWindows,
    "joined": lambda pool, places: JoinedWindows(pool, places, past_by_copy),
    "varlen": lambda pool, places: JoinedWindows(pool, places, partial(past_by_varlen, varlen)),
}


@st.composite
def trees(draw: st.DrawFn, num_nodes: int) -> TokenTree:
    return TokenTree((1,) * num_nodes, tuple(draw(st.integers(-1, node - 1)) for node in range(num_nodes)))


def visible(tree: TokenTree | None, num_rows: int) -> Tensor:
    if tree is None:
        return torch.ones(num_rows, num_rows, dtype=torch.int64).tril()
    seen = torch.zeros(num_rows, num_rows, dtype=torch.int64)
    seen[tree.visible()] = 1
    return seen


def expected(query: Tensor, keys: Tensor, values: Tensor, past: int, tree: TokenTree | None) -> Tensor:
    """[heads, rows, d] over [kv_heads, past + rows, d] -> [rows, heads, d]."""
    cache = KVCache(1, capacity=1, key_layout=Layout.HEAD_TOKEN_DIM, value_layout=Layout.HEAD_TOKEN_DIM)
    segment = Segment(0, query.shape[1], cache, past, query.device, query.dtype, tree)
    return MatmulKernel().attend(query, keys, values, segment, SCALE).transpose(0, 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_every_session_has_its_own_attention(kind: str, data: st.DataObject) -> None:
    sessions, rows = data.draw(st.integers(1, 3), label="sessions"), data.draw(st.integers(1, 8), label="rows")
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 3)]), label="heads")
    shape = StepShape(sessions, rows, CAPACITY)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))

    def random(*size: int) -> Tensor:
        return torch.randn(*size, HEAD_DIM, dtype=torch.float64, generator=generator)

    pool = KVPool(1, CAPACITY * 3, kv_heads, HEAD_DIM, torch.empty(0, dtype=torch.float64))
    for held in (pool.keys[0], pool.values[0]):
        held.copy_(random(*held.shape[:2]))  # whatever others have there
    extents: list[Extent] = []
    for _ in range(sessions):
        extent = pool.take(data.draw(st.integers(rows + 1, CAPACITY), label="room"), pool)
        assert extent is not None
        extents.append(extent)
    past = [data.draw(st.integers(1, extent.length - rows), label="past") for extent in extents]
    seen_by = [data.draw(st.none() | trees(rows), label="tree") for _ in extents]
    for extent in extents:
        for buffer in (pool.view(0, extent).keys, pool.view(0, extent).values):
            buffer.copy_(random(kv_heads, extent.length))
    query, key, value = random(kv_heads * group, sessions * rows), *random(2, kv_heads, sessions * rows)
    places = StepPlaces(
        shape,
        torch.tensor([extent.start for extent in extents]),
        torch.tensor([extent.length for extent in extents]),
        torch.tensor(past),
        torch.cat([torch.arange(rows) + extent.start + at for extent, at in zip(extents, past, strict=True)]),
        torch.stack([visible(tree, rows) for tree in seen_by]),
    )
    windows = KINDS[kind](pool, places)
    windows.begin()
    output = windows(0, query, key, value, SCALE)
    for session, (extent, at, tree) in enumerate(zip(extents, past, seen_by, strict=True)):
        held = pool.view(0, extent)
        own = slice(session * rows, (session + 1) * rows)
        assert torch.equal(held.keys[:, at : at + rows], key[:, own]), "the pool has the new rows"
        right = expected(query[:, own], held.keys[:, : at + rows], held.values[:, : at + rows], at, tree)
        torch.testing.assert_close(output[own], right, rtol=1e-12, atol=1e-12)


class Counted(TorchDispatchMode):
    """Operations, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 8])
def test_what_layers_share_is_made_once_a_step(rows: int) -> None:
    """A layer writes its keys and values and asks the kernel; a row that is alone sees itself there, too."""
    asked: list[list[int]] = []

    def kernel(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        asked.append(rest[5].tolist())
        return query, query[:, :, 0].T

    pool, past = KVPool(4, 2 * CAPACITY, 2, HEAD_DIM, torch.empty(0)), [7, 8]
    extents = [extent for _ in range(2) if (extent := pool.take(100, pool)) is not None]
    places = _places(StepShape(2, rows, CAPACITY), extents, past, torch.device("cpu"))
    windows = JoinedWindows(pool, places, partial(past_by_varlen, kernel), lambda of_past, *_: of_past[0])
    query, key = torch.randn(6, 2 * rows, HEAD_DIM), torch.randn(2, 2 * rows, HEAD_DIM)
    windows.begin()
    counts = []
    for layer in range(4):
        with Counted() as counted:
            windows(layer, query, key, key, SCALE)
        counts.append(counted.count)
    assert counts[1:] == [counts[1]] * 3 and (counts[0] > counts[1]) == (rows > 1), "the mask of a group's rows"
    assert asked == [past if rows > 1 else [8, 9]] * 4
