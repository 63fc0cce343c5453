"""Candidates become one tree of rows, the likeliest first, for as long as a row is worth what it costs. Pure."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.speculation.hints.index import BREAK, HintIndex
from slipstream.speculation.protocol import ROOT, TokenTree


@dataclass(frozen=True)
class Candidate:
    """A place in the hints from which the text may go on."""

    place: int
    chance: float
    """That the text's next token is the one there."""
    survival: float = 1.0
    """That a token behind an accepted one is accepted, too."""


@dataclass(frozen=True)
class TreeLimits:
    """What one pass may take: `max_depth` levels, `max_rows` rows, and rows for as long as they pay."""

    max_depth: int
    max_rows: int
    pass_s: Callable[[int], float] = lambda num_rows: 1.0
    """Seconds of a pass over so many rows of the tree, beside that of the last committed token: T_p(k)."""
    as_chain: bool = False
    """The tree must not branch: the likeliest candidate is followed alone."""
    line: tuple[int, ...] = ()
    """A draft's chain, which the pass judges in any case: it is in the tree, and in its depth and rows."""
    line_survival: float = 0.0
    """That a token of the line is accepted behind accepted ones."""


def grow_tree(index: HintIndex, candidates: Sequence[Candidate], limits: TreeLimits) -> TokenTree | None:
    """The candidates as one tree, in which equal beginnings are one path; None where no row is worth its cost. Where
    there is a draft's line the tree begins with it, and hints are hung beside it.

    Nodes are taken in the order of their chance, `chance * survival^depth`, and at equal chance level by level. A pass
    over k rows takes T_p(k) and is expected to commit 1 + (sum of their chances) tokens, so one more row raises the
    rate while

        chance * T_p(k) > (T_p(k + 1) - T_p(k)) * (1 + sum of chances).

    The first row is no row more but another kind of pass, as one row takes another kernel than several: so the tree as
    a whole must promise more than a plain pass. Where rows cost nothing, as on a device that waits for its memory, only
    `max_rows` ends it.
    """
    tokens = list(limits.line[: limits.max_depth])
    parents = list(range(ROOT, len(tokens) - 1))
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    expected = 1.0 + sum(limits.line_survival**depth for depth in range(1, len(tokens) + 1))
    queue = [(-each.chance, 0, order, ROOT) for order, each in enumerate(candidates) if each.chance > 0]
    heapq.heapify(queue)
    if limits.as_chain:
        del queue[0 if tokens else 1 :]
    while queue:
        negative, depth, order, parent = heapq.heappop(queue)
        candidate, chance = candidates[order], -negative
        token = index.token(candidate.place + depth)
        if token == BREAK or depth >= limits.max_depth:
            continue
        node = children.get((parent, token))
        if node is None:
            if len(tokens) >= limits.max_rows or not _pays(chance, len(tokens), expected, limits):
                continue
            node = children[parent, token] = len(tokens)
            tokens.append(token)
            parents.append(parent)
            expected += chance
        heapq.heappush(queue, (negative * candidate.survival, depth + 1, order, node))
    if not tokens or (not limits.line and expected * limits.pass_s(0) <= limits.pass_s(len(tokens))):
        return None
    return TokenTree(tuple(tokens), tuple(parents))


def _pays(chance: float, num_rows: int, expected: float, limits: TreeLimits) -> bool:
    if not num_rows:
        return True
    pass_s = limits.pass_s(num_rows)
    return chance * pass_s > (limits.pass_s(num_rows + 1) - pass_s) * expected
