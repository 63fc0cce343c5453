"""Trees know their depths, paths and what their nodes see."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.speculation.protocol import TokenTree

#        0
#      1   2
#     3 4  5
TREE = TokenTree((10, 11, 12, 13, 14, 15), (-1, 0, 0, 1, 1, 2))


def test_depths_and_paths() -> None:
    assert TREE.depths == (0, 1, 1, 2, 2, 2)
    assert TREE.path(4) == (0, 1, 4)
    assert TREE.path(0) == (0,)


def test_nodes_see_themselves_and_those_above() -> None:
    rows, columns = TREE.visible()
    seen = {node: [column for row, column in zip(rows, columns, strict=True) if row == node] for node in range(6)}
    assert seen == {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 1, 3], 4: [0, 1, 4], 5: [0, 2, 5]}


def test_a_tree_grows_behind_what_is_cached() -> None:
    small = TokenTree(TREE.token_ids[:3], TREE.parents[:3])
    grown = small.grown(TREE.token_ids[3:], TREE.parents[3:])
    assert (grown.token_ids, grown.parents, grown.num_cached) == (TREE.token_ids, TREE.parents, 3)
    assert grown.new_token_ids == (13, 14, 15)
    assert grown.visible() == ([0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 3, 0, 1, 4, 0, 2, 5])


@given(st.integers(1, 20))
def test_a_chain_sees_what_is_before_it(length: int) -> None:
    chain = TokenTree(tuple(range(length)), tuple(range(-1, length - 1)))
    assert chain.depths == tuple(range(length))
    assert set(zip(*chain.visible(), strict=True)) == {(row, seen) for row in range(length) for seen in range(row + 1)}


@pytest.mark.parametrize(
    ("token_ids", "parents", "num_cached", "problem"),
    [
        ((1, 2), (-1,), 0, "one parent a token"),
        ((1, 2), (-1, 1), 0, "node 1 of a tree follows 1"),
        ((1, 2), (-1, -2), 0, "node 1 of a tree follows -2"),
        ((), (), 0, "new nodes"),
        ((1, 2), (-1, 0), 2, "new nodes"),
        ((1, 2), (-1, 0), -1, "new nodes"),
    ],
)
def test_what_is_no_tree_is_refused(
    token_ids: tuple[int, ...], parents: tuple[int, ...], num_cached: int, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        TokenTree(token_ids, parents, num_cached)
