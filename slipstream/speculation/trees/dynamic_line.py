"""A dynamic tree against the committed text: the third kind of line, which branches and lives on where a branch is
right. Pure.

Nodes are numbered as the draft writes them, 0, 1, ... in every epoch; -1 is the last token that was committed when the
epoch began. What becomes text is walked from the *root*, the last committed token that the draft knows of: it moves
down with every committed token that is among its candidates, and what does not hang below it is dropped. A token that
is not among them is a miss, and ends the line; where the draft has not written a node's candidates yet, there is debt.
Only then is anything compared: it makes no difference which nodes a window had.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from slipstream.errors import DraftFault, FaultKind
from slipstream.speculation.lines import MAX_NODES, Comparison, DraftLines, Reach
from slipstream.speculation.pacing import Moment
from slipstream.speculation.protocol import ROOT
from slipstream.speculation.trees.confidence import TreeCosts, TreeMoment, survival
from slipstream.speculation.trees.growth import Growth, said_log
from slipstream.speculation.trees.rows import best_first, paying_rows

RESTS_BELOW_LOG = math.log(1.01)
"""On top of the least chance of what the draft reads: nearer to it, numbers that are rounded elsewhere may decide."""


@dataclass(slots=True)
class Node:
    """One candidate token of the draft."""

    token_id: int
    position: int
    """Of its token in the output."""
    said: float = 1.0
    """What the draft says of it, given the node before."""
    chance: float = 1.0
    """What that is worth, see `Calibration`."""
    log_said: float = 0.0
    """Natural logarithm of what the draft says of it and all above it, as of when the epoch began."""
    children: list[int] = field(default_factory=list)
    """Its candidates, the best first; none: the draft has not been there yet."""


class DynamicLine(DraftLines):
    """Bookkeeping of one dynamic tree after the other."""

    _place: ClassVar[str] = "node"
    counts_tokens: ClassVar[bool] = True

    def __init__(self, growth: Growth, costs: TreeCosts, max_window: int) -> None:
        """`max_window`: most nodes that a window may have."""
        super().__init__()
        self._growth = growth
        self._costs = costs
        self._max_window = max_window
        self._write_until = 0
        self._debt: deque[int] = deque()
        self._untold: list[int] = []
        self._is_confident = False
        self._has_moved = False
        self._plant(0)

    # -- what is to come ----------------------------------------------------------------------------------------------

    @property
    def write_until(self) -> int:
        return self._write_until

    @property
    def owes(self) -> bool:
        unread = (node for node in self._nodes.values() if not node.children)
        return any(map(self._is_due, unread if self._growth.extends_branches else [self._main_end()]))

    def _is_due(self, node: Node) -> bool:
        """The draft goes on behind an unread node before it hears anything, if it goes on there at all."""
        has_room = len(self._nodes) - 1 + self._growth.nodes_per_pass <= MAX_NODES
        least = self._nodes[self._root].log_said + self._growth.least_log + RESTS_BELOW_LOG
        return has_room and node.position + 1 < self._write_until and node.log_said >= least

    def advance(self, write_until: int) -> None:
        self._write_until = write_until
        self._reach = Reach(self._reach.next_position, max(self._reach.write_until, MAX_NODES))

    def begin(self, write_until: int, num_committed: int) -> None:
        super().begin(write_until, num_committed)
        self._write_until = write_until
        self._debt.clear()
        self._untold.clear()
        self._plant(num_committed)

    def hear(
        self,
        epoch: int,
        position: int,
        token_ids: Sequence[int],
        parents: Sequence[int],
        vocab_size: int,
        chances: Sequence[float] = (),
    ) -> bool:
        if len(chances) not in (0, len(token_ids)) or not all(0.0 <= chance <= 1.0 for chance in chances):  # so NaN is
            raise DraftFault(f"the draft sent {len(token_ids)} nodes with chances that are none")
        if not all(ROOT <= parent < position + index for index, parent in enumerate(parents)):
            raise DraftFault(f"the draft wrote no tree: one of its nodes from {position} on does not follow its parent")
        return super().hear(epoch, position, token_ids, parents, vocab_size)

    def _check(self, token_ids: Sequence[int], parents: Sequence[int], reach: Reach) -> int:
        if not 0 < len(token_ids) == len(parents):
            raise DraftFault(f"the draft wrote no tree: {len(token_ids)} nodes with {len(parents)} parents")
        return len(token_ids)

    # -- the tree -----------------------------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Tokens of the main path, which the draft holds for the likeliest, that wait to be judged."""
        return sum(1 for _ in self._main_path())

    @property
    def debt(self) -> tuple[int, ...]:
        return tuple(self._debt)

    @property
    def untold(self) -> tuple[int, ...]:
        return tuple(self._untold)

    def owe(self, tokens: Iterable[int]) -> None:
        tokens = tuple(tokens)
        self._debt.extend(tokens)
        self._untold.extend(tokens)

    def moment(self, max_window: int) -> Moment:
        path = list(self._main_path())
        chances = tuple(self._nodes[node].chance for node in path) if self._is_confident else ()
        return TreeMoment(len(path), self.fresh, max_window, chances, is_due=self._is_due(self._main_end()))

    def take_move(self) -> int | None:
        if not self._has_moved:
            return None
        self._has_moved = False
        self._untold = list(self._debt)
        self._reach = Reach(self._reach.next_position, self._reach.write_until + MAX_NODES)
        return self._root

    def write(self, token_ids: Sequence[int], parents: Sequence[int] = (), chances: Sequence[float] = ()) -> Comparison:
        """The draft wrote some nodes, each with all of its siblings. Those behind a node that was dropped crossed a
        verdict, and are let pass. Raises `DraftFault` for what the living line cannot have."""
        first = self._reach.next_position - len(token_ids)
        for index, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            above = self._nodes.get(parent)
            if above is None:
                continue
            if above.children and above.children[0] < first:
                raise DraftFault(f"the draft wrote a second time what follows its node {parent}", FaultKind.ORDER)
            if above.position + 1 >= self._write_until:
                raise DraftFault(f"the draft wrote past output position {self._write_until}", FaultKind.ORDER)
            p = chances[index] if chances else 1.0
            chance = self._costs.calibration.chance(len(above.children), p)
            self._nodes[first + index] = Node(token, above.position + 1, p, chance, above.log_said + said_log(p))
            above.children.append(first + index)
        if len(self._nodes) - 1 > MAX_NODES:
            raise DraftFault(f"the draft's tree has {len(self._nodes) - 1} nodes; {MAX_NODES} may live at once")
        self._is_confident = bool(chances)
        return self._walk()

    def take(self, window_len: int) -> tuple[int, ...]:
        """The next window: of the main path at most `window_len` tokens, and branches, as many as pay."""
        nodes = self._window(window_len) if window_len else []
        places = {self._root: ROOT} | {node: place for place, node in enumerate(nodes)}
        above = {child: node for node in places for child in self._nodes[node].children}
        parents = tuple(places[above[node]] for node in nodes)
        self.parents = () if parents == tuple(range(ROOT, len(nodes) - 1)) else parents
        root_position = self._nodes[self._root].position
        self.num_in_flight = max((self._nodes[node].position - root_position for node in nodes), default=0)
        return tuple(self._nodes[node].token_id for node in nodes)

    def commit(self, tokens: Sequence[int], num_accepted: int) -> Comparison:
        """All that is committed is walked, whatever window it was in; so is the window of an earlier draft."""
        self.num_in_flight = 0
        self.owe(tokens)
        return self._walk()

    # -- within -------------------------------------------------------------------------------------------------------

    def _plant(self, num_committed: int) -> None:
        """A new tree behind so many tokens."""
        self._root, self._has_moved = ROOT, False
        self._nodes = {ROOT: Node(ROOT, num_committed - 1)}
        self._reach = Reach(0, MAX_NODES if self._write_until > num_committed else 0)

    def _main_path(self) -> Iterator[int]:
        node = self._nodes[self._root]
        while node.children:
            yield node.children[0]
            node = self._nodes[node.children[0]]

    def _main_end(self) -> Node:
        """The last node of the main path, or the root."""
        return self._nodes[[self._root, *self._main_path()][-1]]

    def _walk(self) -> Comparison:
        """The root follows the committed tokens as far as the draft has been."""
        num_matched, is_beside = 0, False
        while self._debt:
            above = self._nodes[self._root]
            if not above.children:
                break
            token = self._debt[0]
            tokens = [self._nodes[child].token_id for child in above.children]
            hit = tokens.index(token) if token in tokens else None
            self._costs.observe_match(hit == 0)
            if self._is_confident:
                self._costs.calibration.observe([self._nodes[child].said for child in above.children], hit)
            if hit is None:
                self._drop_others()
                return Comparison(num_matched, mismatched=True, died=True)
            self._root, self._has_moved = above.children[hit], True
            self._debt.popleft()
            num_matched += 1
            is_beside = hit > 0
        if num_matched:
            self._drop_others()
        return Comparison(num_matched, died=is_beside and not self._growth.extends_branches)

    def _drop_others(self) -> None:
        """Only what hangs below the root lives."""
        kept, waiting = {}, [self._root]
        while waiting:
            number = waiting.pop()
            kept[number] = self._nodes[number]
            waiting += kept[number].children
        self._nodes = kept

    # -- windows ------------------------------------------------------------------------------------------------------

    def _window(self, window_len: int) -> list[int]:
        """Numbers of the nodes to judge, parents first. Rule M decides how many they are."""
        main = list(islice(self._main_path(), window_len))
        if not self._is_confident:
            return main
        pass_s, token_s = self._costs.target_pass_s.price(), self._costs.token_s
        if self._growth.whole_windows:
            return paying_rows(best_first(self._below(self._root, 1.0), self._below), pass_s, token_s, self._max_window)
        survives = survival([self._nodes[node].chance for node in main])
        taken = paying_rows(zip(survives[1:], main, strict=True), pass_s, token_s, self._max_window)
        max_rows = min(self._max_window, len(taken) + self._growth.siblings)
        beside = self._siblings(survives, taken)
        return taken + paying_rows(beside, pass_s, token_s, max_rows, num_before=len(taken))

    def _siblings(self, survives: Sequence[float], main: Sequence[int]) -> list[tuple[float, int]]:
        """The second best candidates behind the root and each node of the main path, the likeliest first."""
        found = []
        for survived, number in zip(survives, (self._root, *main), strict=False):
            for sibling in self._nodes[number].children[1:2]:
                found.append((survived * self._nodes[sibling].chance, sibling))
        return sorted(found, reverse=True)

    def _below(self, node: int, chance: float) -> list[tuple[float, int]]:
        """The candidates behind a node of that chance, with theirs."""
        return [(chance * self._nodes[child].chance, child) for child in self._nodes[node].children]
