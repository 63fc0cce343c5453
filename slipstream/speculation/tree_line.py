"""A draft that branches, against the committed text: each of its lines is one tree, written at once and judged whole.

It keeps the books that `line.Line` keeps for a chain, so that one pipeline drives both. Draft and target take turns:
every verdict ends the tree, and the next one grows from the text that the draft is then told. Pure.
"""

from collections.abc import Iterable, Sequence

from slipstream.errors import DraftFault
from slipstream.speculation.line import Comparison
from slipstream.speculation.tree import TokenTree

MAX_NODES = 256


class TreeLine:
    """Bookkeeping of one tree after the other. Positions count output tokens from 0."""

    def __init__(self) -> None:
        self.epoch = 0
        self.write_until = 0
        self.fresh = True
        self.num_in_flight = 0
        """Depth of the tree that is being judged."""
        self.parents: tuple[int, ...] = ()
        """Of the window taken last."""
        self._tree: TokenTree | None = None
        self._debt: list[int] = []
        self._room = 0

    @property
    def num_pending(self) -> int:
        """Positions that the waiting tree stands for: all that the line may write, or none."""
        return self._room if self._tree is not None else 0

    @property
    def debt(self) -> tuple[int, ...]:
        """Committed tokens that the draft has not been told of."""
        return tuple(self._debt)

    def next_position(self, num_committed: int) -> int:
        """Output position of the roots of the tree that the line writes next, or where a written one ends."""
        return num_committed + max(self.num_pending, self.num_in_flight) - len(self._debt)

    def begin(self, write_until: int, num_committed: int) -> None:
        """A new line behind the committed text."""
        self.epoch += 1
        self.write_until = write_until
        self.fresh = True
        self._room = write_until - num_committed
        self._tree = None
        self._debt.clear()

    def drop(self) -> None:
        """The draft is gone, and its unjudged tree with it."""
        self.begin(0, 0)
        self.num_in_flight = 0

    def owe(self, tokens: Iterable[int]) -> None:
        """Tokens were committed that the draft does not know."""
        self._debt.extend(tokens)

    def take(self, window_len: int) -> tuple[int, ...]:
        """The nodes of the tree, in flight from now on; none for a pass without a window."""
        tree = self._tree if window_len else None
        if tree is None:
            self.num_in_flight, self.parents = 0, ()
            return ()
        self.num_in_flight, self.parents = max(tree.depths) + 1, tree.parents
        self._tree = None
        return tree.token_ids

    def write(self, token_ids: Sequence[int], parents: Sequence[int] = ()) -> Comparison:
        """The draft wrote its tree."""
        self._tree = TokenTree(tuple(token_ids), tuple(parents))
        return Comparison()

    def commit(self, tokens: Sequence[int], num_accepted: int) -> Comparison:
        """Any verdict ends the line: the draft is told all of the new text and finds its own nodes in it."""
        depth, self.num_in_flight = self.num_in_flight, 0
        self._tree = None
        self._debt.extend(tokens)
        return Comparison(died=num_accepted < depth)

    def check(
        self,
        epoch: int,
        position: int,
        token_ids: Sequence[int],
        num_committed: int,
        vocab_size: int,
        parents: Sequence[int] = (),
    ) -> None:
        """Raises `DraftFault` for a message that the living line cannot have sent."""
        if epoch > self.epoch:
            raise DraftFault(f"the draft wrote for line {epoch}, which was never started")
        if self._tree is not None or self.num_in_flight:
            raise DraftFault("the draft wrote a second tree")
        if position != self.next_position(num_committed):
            raise DraftFault(f"the draft wrote a tree at output position {position}, not where the text ends")
        if not 0 < len(token_ids) <= MAX_NODES:
            raise DraftFault(f"the draft wrote a tree of {len(token_ids)} nodes; 1 to {MAX_NODES} are taken")
        try:
            depth = max(TokenTree(tuple(token_ids), tuple(parents)).depths) + 1
        except ValueError as error:
            raise DraftFault(f"the draft wrote no tree: {error}") from None
        if depth > self._room:
            raise DraftFault(f"the draft wrote past output position {self.write_until}")
        if any(not 0 <= token < vocab_size for token in token_ids):
            raise DraftFault(f"the draft wrote a token id outside the vocabulary of {vocab_size}")
