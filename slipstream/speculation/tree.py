"""Drafts that branch: tokens, each behind another one. Pure; knows no model and no wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT = -1
"""Parent of the nodes that follow the committed text."""


@dataclass(frozen=True)
class TokenTree:
    """Tokens and the node that each follows; nodes are numbered so that parents come first.

    A chain is the tree whose parents are -1, 0, 1, ... A tree may grow pass by pass: the first `num_cached` nodes have
    then been through the model already, and their rows are the last ones in its cache.

    Raises:
        ValueError: lists of different lengths, no new node, or a parent that does not come before its child.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    """Per node the index of the node it follows; -1: the last token that is no part of the tree."""
    num_cached: int = 0

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"a tree has one parent a token, not {len(self.parents)} for {len(self.token_ids)}")
        if not 0 <= self.num_cached < len(self.token_ids):
            raise ValueError(f"a pass needs new nodes; {self.num_cached} of {len(self.token_ids)} are in the cache")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} of a tree follows {parent}; parents come first, and -1 is none")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """What the next pass takes in."""
        return self.token_ids[self.num_cached :]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Per node its distance from the roots, which have 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def child(self, node: int, token_id: int) -> int | None:
        """The first node with that token behind `node` (-1: among the roots), if there is one."""
        for child, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if parent == node and token == token_id:
                return child
        return None

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from a root to `node`, both included, ascending."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def shallow(self, depth: int) -> tuple["TokenTree | None", tuple[int, ...]]:
        """The tree without nodes at `depth` and below, None if none is left; and which nodes are left."""
        kept = tuple(node for node in range(len(self)) if self.depths[node] < depth)
        if not kept:
            return None, ()
        places = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
        tokens = tuple(self.token_ids[node] for node in kept)
        return TokenTree(tokens, tuple(places[self.parents[node]] for node in kept)), kept

    def visible(self) -> tuple[list[int], list[int]]:
        """What each new node sees of the tree, itself and the nodes above it: rows (new nodes) and columns (nodes)."""
        pairs = [
            (node - self.num_cached, seen) for node in range(self.num_cached, len(self)) for seen in self.path(node)
        ]
        return [row for row, _ in pairs], [column for _, column in pairs]

    def grown(self, token_ids: Sequence[int], parents: Sequence[int]) -> "TokenTree":
        """The tree with more nodes, for the pass that follows the one which took in this tree."""
        return TokenTree((*self.token_ids, *token_ids), (*self.parents, *parents), num_cached=len(self))
