"""A line that is one tree of a fixed shape, as at SpecVLM's; then it ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slipstream.engine.draft_session import Ahead, DraftLine, PassCosts
from slipstream.engine.segments import Window
from slipstream.session_messages import DraftTokens
from slipstream.speculation.protocol import ROOT, TokenTree

STATIC_TREE: tuple[tuple[int, ...], ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""Nodes as paths of ranks: (1, 0) is the best token behind the second best one. Level by level, parents first."""
_PLACES = {path: node for node, path in enumerate(STATIC_TREE)}
PARENTS = tuple(_PLACES.get(path[:-1], ROOT) for path in STATIC_TREE)
WIDTHS = {parent: PARENTS.count(parent) for parent in set(PARENTS)}
"""Candidates behind each node that has any; behind -1, the roots."""

RankTokens = Callable[[Tensor, Sequence[int], int], list[int]]
"""Logits [vocab], the text before, how many: the best tokens, best first."""


@dataclass
class StaticTree:
    """One tree being written behind `text`: it takes the logits of the text's last row, then those of each `fed`."""

    text: Sequence[int]
    depth: int
    """Levels that it may have."""
    token_ids: dict[int, int] = field(default_factory=dict)
    """By node of the static tree; nodes come in ascending order."""
    fed: TokenTree | None = None
    """The nodes that the model takes in: those with candidates behind them. Its new ones are the next window."""
    is_complete: bool = False
    started_s: float = 0.0
    _level: int = 0
    _fed_nodes: list[int] = field(default_factory=list)

    @property
    def num_levels(self) -> int:
        """Levels so far, each of which took a pass."""
        return self._level

    def grow(self, rows: Tensor, rank: RankTokens) -> None:
        """Takes the logits [n, vocab] behind the nodes of the last window: the candidates of the next level. Then there
        is either another window, or the tree is complete."""
        num_new = 1 if self.fed is None else len(self.fed) - self.fed.num_cached
        parents = [ROOT] if self.fed is None else self._fed_nodes[-num_new:]
        for parent, logits in zip(parents, rows, strict=True):
            best = rank(logits, [*self.text, *self._path(parent)], WIDTHS[parent])
            children = [node for node in range(len(STATIC_TREE)) if PARENTS[node] == parent]
            self.token_ids.update(zip(children, best, strict=False))
        self._level += 1
        new = [node for node in self.token_ids if len(STATIC_TREE[node]) == self._level and node in WIDTHS]
        self.is_complete = not new or self._level >= self.depth
        if not self.is_complete:
            self._feed(new)

    def _feed(self, new: list[int]) -> None:
        self._fed_nodes += new
        places = {ROOT: ROOT} | {node: place for place, node in enumerate(self._fed_nodes)}
        tokens, parents = [self.token_ids[node] for node in new], [places[PARENTS[node]] for node in new]
        self.fed = TokenTree(tuple(tokens), tuple(parents)) if self.fed is None else self.fed.grown(tokens, parents)

    @property
    def tree(self) -> TokenTree:
        """All candidates."""
        nodes = sorted(self.token_ids)
        places = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
        return TokenTree(tuple(self.token_ids[n] for n in nodes), tuple(places[PARENTS[n]] for n in nodes))

    def cached_path(self, suffix: Sequence[int], num_cached: int) -> tuple[int, ...]:
        """Of the `num_cached` rows that the model's cache holds behind the text, those of the beginning of `suffix`, of
        which the last token is never one: the next tree begins with what the model says behind it."""
        path: list[int] = []
        node: int | None = ROOT
        for token in suffix[:-1]:
            node = self.fed.child(node, token) if self.fed is not None and node is not None else None
            if node is None or node >= num_cached:
                break
            path.append(node)
        return tuple(path)

    def _path(self, node: int) -> list[int]:
        if node == ROOT:
            return []
        return [self.token_ids[_PLACES[STATIC_TREE[node][:length]]] for length in range(1, len(STATIC_TREE[node]) + 1)]


class StaticTreeLine(DraftLine):
    """One tree behind committed text, which is sent when it is complete."""

    _tree: StaticTree | None = None
    """None until there is room for one."""
    _is_sent = False

    def goes_on(self, write_until: int, costs: Callable[[], PassCosts]) -> bool:
        """Until its one tree is complete."""
        if self._tree is None:
            depth = write_until - len(self.output)
            if depth <= 0:
                return False
            self._tree = StaticTree(tuple(self.output), depth, started_s=time.perf_counter())
        return not self._tree.is_complete

    def unseen(self, num_known: int) -> Window:
        """The next level's nodes that have candidates behind them; before the first the text."""
        if self._tree is not None and self._tree.fed is not None:
            return self._tree.fed
        return super().unseen(num_known)

    def read(self, rows: Tensor) -> None:
        """The next level follows."""
        assert self._tree is not None, "it has begun where it goes on"
        self._tree.grow(rows, self.sampler.rank)

    def go_on(self, token_ids: Sequence[int], ahead: Ahead) -> None:
        """None do: it has no such end."""
        assert not token_ids, "a level of a tree takes a pass"

    def _rows_foreseen(self, num_output: int, suffix: Sequence[int], num_behind: int) -> Sequence[int]:
        if self._tree is None or len(self._tree.text) != num_output:
            return ()
        return self._tree.cached_path(suffix, num_behind)

    @property
    def num_unsent(self) -> int:
        """Its levels, once they are complete."""
        tree = self._tree
        return tree.num_levels if tree is not None and tree.is_complete and not self._is_sent else 0

    def take(self, seconds: float) -> DraftTokens:
        """The whole tree; its passes are counted from its own beginning."""
        assert self._tree is not None, "it is complete"
        self._is_sent, tree = True, self._tree.tree
        pass_s = (time.perf_counter() - self._tree.started_s) / self._tree.num_levels
        return DraftTokens(self.epoch, len(self._tree.text), tree.token_ids, pass_s, parents=tree.parents)
