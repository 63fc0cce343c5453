"""What the draft has written of one dynamic tree: its nodes by number, those that live, and those that are not sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.errors import ProtocolViolation
from slipstream.session_messages import DraftTokens
from slipstream.speculation.lines import MAX_NODES
from slipstream.speculation.protocol import ROOT
from slipstream.speculation.trees.growth import Growth


@dataclass(frozen=True, slots=True)
class Ranked:
    """The likeliest tokens of a place, the first before all, and the draft's own chance of each."""

    token_ids: list[int]
    said: list[float]

    def led_by(self, token_id: int, count: int, vocab_size: int) -> tuple[list[int], list[float]]:
        """At most `count`, first the token that the model went on with: of equals it may have taken another one."""
        pairs = zip(self.token_ids, self.said, strict=True)
        others = [(each, said) for each, said in pairs if each != token_id and each < vocab_size]
        kept = [(token_id, self.said[0]), *others[: count - 1]]
        return [each for each, _ in kept], [said for _, said in kept]


@dataclass(slots=True)
class WrittenNode:
    """A candidate token behind another node."""

    token_id: int
    parent: int
    said: float
    """The draft's own chance of it, given the node before."""
    children: list[int] = field(default_factory=list)


class WrittenTree:
    """One epoch's tree."""

    def __init__(self, epoch: int, growth: Growth) -> None:
        self.root = ROOT
        self.nodes: dict[int, WrittenNode] = {}
        """Those that live: all below the root."""
        self.roots: list[int] = []
        """The root's candidates."""
        self.tip = ROOT
        """The last node of a main path that is written one by one."""
        self._epoch = epoch
        self._growth = growth
        self._num_written = self._num_sent = 0
        self._unsent: list[WrittenNode] = []
        self._num_passes = 0

    @property
    def room(self) -> int:
        """Passes that cannot add more nodes than may live."""
        return (MAX_NODES - len(self.nodes)) // self._growth.nodes_per_pass

    def extend(self, token_ids: Sequence[int], said: Sequence[float]) -> None:
        """A pass has read the main path's end: its candidates, of which the first is the next one."""
        self.tip = self.add(self.tip, token_ids, said)
        self.passed()

    def go_on(self, token_ids: Sequence[int], candidates: Sequence[Ranked], vocab_size: int) -> None:
        """The model went on by itself behind the main path's end: the tokens that follow, and what else was likely."""
        for token_id, found in zip(token_ids, candidates, strict=False):
            self.extend(*found.led_by(token_id, self._growth.width, vocab_size))

    def add(self, parent: int, token_ids: Sequence[int], said: Sequence[float]) -> int:
        """The candidates behind a node, the best first, whose number is the result."""
        first = self._num_written
        for token_id, each in zip(token_ids, said, strict=True):
            node = self.nodes[self._num_written] = WrittenNode(token_id, parent, each)
            self._unsent.append(node)
            self._num_written += 1
        self.children(parent).extend(range(first, self._num_written))
        return first

    def children(self, node: int) -> list[int]:
        """The candidates behind a node, or behind the root."""
        return self.roots if node == self.root else self.nodes[node].children

    def child(self, node: int, token_id: int) -> int | None:
        """The candidate with that token, if there is one."""
        return next((child for child in self.children(node) if self.nodes[child].token_id == token_id), None)

    @property
    def has_unsent(self) -> bool:
        """There is something to send."""
        return bool(self._unsent)

    @property
    def main_length(self) -> int:
        """Tokens of the main path, from the root down."""
        length, below = 0, self.roots
        while below:
            length, below = length + 1, self.nodes[below[0]].children
        return length

    def passed(self) -> None:
        """The model has run once more for this tree."""
        self._num_passes += 1

    def path(self, node: int) -> list[int]:
        """The nodes below the root, down to and with `node`."""
        found: list[int] = []
        while node != self.root:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def move(self, root: int) -> list[int]:
        """The root moves to a node below it: its path from the old one. Nodes that are not below it are gone. Raises
        `ProtocolViolation` for a node that does not live."""
        if root == self.root:
            return []
        if root not in self.nodes:
            raise ProtocolViolation(f"a move to node {root}, which the tree does not have")
        path = self.path(root)
        self.roots = self.nodes[root].children
        below = {root}
        for number, node in self.nodes.items():  # parents first, as they were written
            if node.parent in below:
                below.add(number)
        self.root = root
        self.nodes = {number: self.nodes[number] for number in sorted(below - {root})}
        return path

    def move_along(self, root: int) -> None:
        """The same of a tree that is written on behind its main path alone: elsewhere a line is begun anew. Raises
        `ProtocolViolation` for a node beside that path, too."""
        if root != self.root and root not in self.path(self.tip):
            raise ProtocolViolation(f"a move to node {root}, which is not on the main path of a tree without branches")
        self.move(root)

    def take(self, pass_s: float) -> DraftTokens:
        """What was written since this was asked last, for the wire. `pass_s`: seconds since then."""
        nodes, self._unsent = self._unsent, []
        first, self._num_sent = self._num_sent, self._num_written
        num_passes, self._num_passes = max(self._num_passes, 1), 0
        return DraftTokens(
            self._epoch,
            first,
            tuple(node.token_id for node in nodes),
            pass_s / num_passes,
            parents=tuple(node.parent for node in nodes),
            chances=tuple(node.said for node in nodes),
            num_passes=num_passes,
        )
