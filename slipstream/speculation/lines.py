"""A draft's line against the committed text, as a chain (`Line`) or as one tree after the other (`TreeLine`). Pure.

What the draft has written falls into three parts, in this order:

    committed ... [in flight: being judged] [pending: to be judged next]

and when the target is ahead of the draft there is *debt* instead: committed tokens that the line must still
reproduce to live on.
"""

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.errors import DraftFault
from slipstream.speculation.protocol import TokenTree

# -- line -------------------------------------------------------------------------------------------------------------


class DraftPhase(enum.Enum):
    """Where the draft stands in this caption."""

    ABSENT = enum.auto()
    JOINING = enum.auto()
    WRITING = enum.auto()
    RESTING = enum.auto()
    """Ready, and asked for nothing while the gate is closed."""


@dataclass(frozen=True)
class Comparison:
    """How tokens of the line compared with committed ones, outside any window that the target judged."""

    num_matched: int = 0
    mismatched: bool = False
    died: bool = False
    """A token of the line differs from the text: compared here, or rejected in the window that was in flight."""


class Line:
    """Bookkeeping of one line after the other. Positions count output tokens from 0."""

    def __init__(self) -> None:
        self.epoch = 0
        self.write_until = 0
        self.fresh = True
        """The line was restarted, and no pass has run since."""
        self.num_in_flight = 0
        self._pending: deque[int] = deque()
        self._debt: deque[int] = deque()

        self.parents: tuple[int, ...] = ()
        """A chain's windows have none."""

    @property
    def num_pending(self) -> int:
        """Tokens that wait to be judged."""
        return len(self._pending)

    @property
    def debt(self) -> tuple[int, ...]:
        """Committed tokens that the draft lacks; once the line has died, from the first that differs."""
        return tuple(self._debt)

    def next_position(self, num_committed: int) -> int:
        """Output position of the token that the line writes next."""
        return num_committed + self.num_in_flight + len(self._pending) - len(self._debt)

    def begin(self, write_until: int, num_committed: int) -> None:
        """A new line behind the committed text, all of whose predecessors' tokens and debts are settled."""
        self.epoch += 1
        self.write_until = write_until
        self.fresh = True
        self._pending.clear()
        self._debt.clear()

    def drop(self) -> None:
        """The draft is gone, and its unjudged tokens with it."""
        self.begin(0, 0)
        self.num_in_flight = 0

    def owe(self, tokens: Iterable[int]) -> None:
        """Tokens were committed that the draft does not know."""
        self._debt.extend(tokens)

    def take(self, window_len: int) -> tuple[int, ...]:
        """The next window: pending tokens that are in flight from now on."""
        self.num_in_flight = window_len
        return tuple(self._pending.popleft() for _ in range(window_len))

    def write(self, token_ids: Sequence[int], parents: Sequence[int] = ()) -> Comparison:
        """The draft wrote: first what it owed, then what will be judged."""
        for index, token in enumerate(token_ids):
            if not self._debt:
                self._pending.extend(token_ids[index:])
                return Comparison(index)
            if token != self._debt[0]:
                return Comparison(index, mismatched=True, died=True)
            self._debt.popleft()
        return Comparison(len(token_ids))

    def commit(self, tokens: Sequence[int], num_accepted: int) -> Comparison:
        """Compares newly committed tokens with the line, which dies where they differ and owes what it has not written.

        Tokens of the line that were in flight were compared by the target itself. (A window of an earlier draft, whose
        successor joined meanwhile, counts as none of this line's.)
        """
        num_in_flight, self.num_in_flight = self.num_in_flight, 0
        if num_accepted < num_in_flight:
            return self._die(tokens[-1:], Comparison(died=True))
        for index in range(num_in_flight, len(tokens)):
            if not self._pending:
                self._debt.extend(tokens[index:])
                return Comparison(index - num_in_flight)
            if self._pending[0] != tokens[index]:
                return self._die(tokens[index:], Comparison(index - num_in_flight, mismatched=True, died=True))
            self._pending.popleft()
        return Comparison(len(tokens) - num_in_flight)

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
        next_position = self.next_position(num_committed)
        if epoch > self.epoch:
            raise DraftFault(f"the draft wrote for line {epoch}, which was never started")
        if not token_ids or parents:
            raise DraftFault("the draft sent a message without tokens, or a tree that nobody asked for")
        if position != next_position:
            raise DraftFault(f"the draft wrote at output position {position}; {next_position} was next")
        if position + len(token_ids) > self.write_until:
            raise DraftFault(f"the draft wrote past output position {self.write_until}")
        if any(not 0 <= token < vocab_size for token in token_ids):
            raise DraftFault(f"the draft wrote a token id outside the vocabulary of {vocab_size}")

    def _die(self, suffix: Sequence[int], comparison: Comparison) -> Comparison:
        self._pending.clear()
        self._debt = deque(suffix)
        return comparison


# -- tree line --------------------------------------------------------------------------------------------------------

# A draft that branches, against the committed text: each of its lines is one tree, written at once and judged whole.
#
# It keeps the books that `line.Line` keeps for a chain, so that one pipeline drives both. Draft and target take
# turns: every verdict ends the tree, and the next one grows from the text that the draft is then told. Pure.

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
