"""How many nodes of a tree a pass takes in: rule R of the draft's passes, rule M of the target's windows. Pure."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

NodeT = TypeVar("NodeT")
PassTime = Callable[[int], float]
"""Seconds of a pass over so many nodes."""


def best_first(
    roots: Iterable[tuple[float, int]], children: Callable[[int, float], Iterable[tuple[float, int]]]
) -> Iterator[tuple[float, int]]:
    """The nodes of a tree by their chance to become text, the likeliest first, and every parent before its children.

    Args:
        roots: chance and number of each node to begin with.
        children: of a node by its number and chance: chances, which are at most its, and numbers, which are larger.
    """
    waiting = [(-chance, node) for chance, node in roots]
    heapq.heapify(waiting)
    while waiting:
        negative, node = heapq.heappop(waiting)
        yield -negative, node
        for chance, child in children(node, -negative):
            heapq.heappush(waiting, (-chance, child))


def paying_rows(
    nodes: Iterable[tuple[float, NodeT]], pass_s: PassTime, token_s: float, max_rows: int, num_before: int = 0
) -> list[NodeT]:
    """Rule M: the nodes that a window takes on top of `num_before`, of those offered in descending chance.

    The next one is taken while `chance / throughput >= T_p(k+1) - T_p(k)`: a token is worth the seconds that one takes.
    The first of a window always is, since a pass is due anyway.

    Args:
        token_s: seconds that a token takes now, 1 / throughput.
        max_rows: of the whole window.
    """
    taken: list[NodeT] = []
    for chance, node in nodes:
        k = num_before + len(taken)
        if k >= max_rows or (k > 0 and chance * token_s < pass_s(k + 1) - pass_s(k)):
            break
        taken.append(node)
    return taken


def num_draft_rows(chances: Sequence[float], pass_s: PassTime, max_rows: int) -> int:
    """Rule R: how many nodes a pass of the draft extends, of those whose chances descend.

    The next one is taken while `P (1 + rho (r - 1)) > rho sum(P taken)`, that is while chance per second of pass rises.
    Where a row costs as much as a pass, that is one: the likeliest node, wherever it is.
    """
    num_rows, total = 1, chances[0]
    for chance in chances[1:max_rows]:
        if chance * pass_s(num_rows) <= total * (pass_s(num_rows + 1) - pass_s(num_rows)):
            break
        num_rows, total = num_rows + 1, total + chance
    return num_rows


def share_s(pass_s: PassTime, num_sharing: int, num_rows: int) -> float:
    """Seconds of a draft's pass that count for one of the lines that share it, which has so many rows in it: each
    further row is paid in full.

    Args:
        pass_s: of a pass by its rows beyond one a line.
    """
    one_s = pass_s(0)
    return one_s / num_sharing + max(pass_s(num_rows - 1) - one_s, 0.0)
