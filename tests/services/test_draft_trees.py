"""The draft's trees: the static tree of the paper grows right, and what was accepted of it need not be run again."""

import random
from collections.abc import Sequence

import pytest
import torch

from slipstream.engine.static_tree import PARENTS, STATIC_TREE, WIDTHS, StaticTree
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import DraftSampler

VOCAB = 50


def logits_after(text: Sequence[int]) -> torch.Tensor:
    """A toy model: its logits are a function of the text."""
    generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**31)
    return torch.randn(VOCAB, generator=generator)


def grown(text: list[int], depth: int, sampler: DraftSampler) -> StaticTree:
    static = StaticTree(tuple(text), depth)
    rows = logits_after(text)[None]
    while True:
        static.grow(rows, sampler.rank)
        if static.is_complete:
            return static
        fed = static.fed
        assert fed is not None
        texts = [[*text, *(fed.token_ids[n] for n in fed.path(node))] for node in range(fed.num_cached, len(fed))]
        rows = torch.stack([logits_after(behind) for behind in texts])


def test_the_static_tree_is_that_of_the_paper() -> None:
    assert len(STATIC_TREE) == 25
    assert [sum(len(path) == depth for path in STATIC_TREE) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    assert all(parent < node for node, parent in enumerate(PARENTS))
    assert all(path[-1] < WIDTHS[parent] for path, parent in zip(STATIC_TREE, PARENTS, strict=True))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, seed=5)])
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 9])
def test_every_node_is_the_candidate_of_its_rank(params: SamplingParams, depth: int) -> None:
    sampler = DraftSampler(params, (), VOCAB)
    text = [3, 1, 4]
    static = grown(text, depth, sampler)
    tree = static.tree
    paths = [path for path in STATIC_TREE if len(path) <= depth]
    assert len(tree) == len(paths) and static.num_levels == min(depth, 5)
    for node, path in enumerate(paths):
        behind = [*text, *(tree.token_ids[above] for above in tree.path(node)[:-1])]
        best = sampler.rank(logits_after(behind), behind, 4)
        assert tree.token_ids[node] == best[path[-1]]
        if path[-1] == 0:
            assert tree.token_ids[node] == sampler.choose(logits_after(behind), behind)[0]


def test_only_nodes_with_candidates_behind_them_are_run() -> None:
    static = grown([1], 5, DraftSampler(SamplingParams(), (), VOCAB))
    assert static.fed is not None
    assert len(static.fed) == len([parent for parent in WIDTHS if parent >= 0])


@pytest.mark.parametrize("seed", range(20))
def test_what_was_accepted_is_found_in_the_cache(seed: int) -> None:
    order = random.Random(seed)
    static = grown([seed], 5, DraftSampler(SamplingParams(), (), VOCAB))
    tree, fed = static.tree, static.fed
    assert fed is not None
    node = order.randrange(len(tree))
    accepted = [tree.token_ids[above] for above in tree.path(node)]
    path = static.cached_path([*accepted, VOCAB + 1], len(fed))
    assert [fed.token_ids[row] for row in path] == accepted[: len(path)]
    assert len(path) >= len(accepted) - 1, "at most a leaf was never run"
    assert list(path) == sorted(path)
    assert static.cached_path(accepted, 0) == ()
    assert len(static.cached_path(accepted, len(fed))) < len(accepted), "the next tree follows what the last token says"


def test_a_small_vocabulary_has_fewer_candidates() -> None:
    sampler = DraftSampler(SamplingParams(), (), 2)
    static = StaticTree((), 5)
    static.grow(torch.tensor([[0.0, 1.0]]), sampler.rank)
    assert static.tree.token_ids == (1, 0)
