"""A draft's line against the committed text, as a chain (`Line`) or as one tree after the other (`TreeLine`), and
what becomes of a draft that breaks the protocol (`Standing`). Pure.

What the draft has written falls into three parts, in this order:

    committed ... [in flight: being judged] [pending: to be judged next]

and when the target is ahead of the draft there is *debt* instead: committed tokens that the line must still
reproduce to live on.
"""

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from slipstream.errors import DraftFault, FaultKind
from slipstream.speculation.pacing import Moment
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


@dataclass(frozen=True)
class Reach:
    """What may still come of a line: the tokens from `next_position` on, before `write_until`."""

    next_position: int = 0
    write_until: int = 0


class DraftLines(ABC):
    """What chains and trees share: how far each line may write, and how far it was heard.

    A draft says everything in order, so each of its messages has one place where it may stand: behind what was heard of
    its line, and before any message of a later one. That holds for lines that ended, too, whose tokens may be on their
    way. So all that a draft can ever say is bounded by what it was asked for.
    """

    _place: ClassVar[str] = "output position"
    """What a message's position counts, in the words of a fault."""
    counts_tokens: ClassVar[bool] = False
    """It tells its costs itself which tokens were right; else whoever drives it does."""

    def __init__(self) -> None:
        self.epoch = 0
        self.fresh = True
        """The line was restarted, and no pass has run since."""
        self.num_in_flight = 0
        """Tokens that are being judged; of a tree its depth."""
        self.parents: tuple[int, ...] = ()
        """Of the window taken last; a chain has none."""
        self._reach = Reach()
        self._ended: dict[int, Reach] = {}
        """Of lines that ended before they were heard to their limit, by epoch, the oldest first."""

    @property
    def next_position(self) -> int:
        """Output position of the token that the line writes next."""
        return self._reach.next_position

    @property
    def write_until(self) -> int:
        """The line's limit: an output position, exclusive."""
        return self._reach.write_until

    @property
    def owes(self) -> bool:
        """More is to come of the line without another word."""
        return self.next_position < self.write_until

    def advance(self, write_until: int) -> None:
        """Moves the line's limit."""
        self._reach = Reach(self.next_position, write_until)

    def moment(self, max_window: int) -> Moment:
        """What a policy is to know."""
        return Moment(self.num_pending, self.fresh, max_window)

    def take_move(self) -> int | None:
        """The node at which the line has begun anew, if the draft is still to be told."""
        return None

    def begin(self, write_until: int, num_committed: int) -> None:
        """A new line behind the committed text, all of whose predecessors' tokens and debts are settled."""
        if self._reach.next_position < self._reach.write_until:
            self._ended[self.epoch] = self._reach
        self.epoch += 1
        self.fresh = True
        self._reach = Reach(num_committed, write_until)

    def drop(self) -> None:
        """The draft is gone, and its unjudged tokens with it. Nothing of it can come any more."""
        self.begin(0, 0)
        self._ended.clear()
        self.num_in_flight = 0

    def hear(
        self,
        epoch: int,
        position: int,
        token_ids: Sequence[int],
        parents: Sequence[int],
        vocab_size: int,
        chances: Sequence[float] = (),
    ) -> bool:
        """The draft says something: True when it is of the living line, which is to `write` it; False when it is of one
        that has ended. Raises `DraftFault` for what none of the draft's lines can have sent."""
        if epoch > self.epoch:
            raise DraftFault(f"the draft wrote for line {epoch}, which was never started", FaultKind.ORDER)
        reach = self._reach if epoch == self.epoch else self._ended.get(epoch)
        if reach is None:
            raise DraftFault(f"the draft wrote for line {epoch}, of which nothing was to come", FaultKind.ORDER)
        length = self._check(token_ids, parents, reach)
        if position != reach.next_position:
            message = f"the draft wrote at {self._place} {position}; {reach.next_position} was next"
            raise DraftFault(message, FaultKind.ORDER)
        if position + length > reach.write_until:
            raise DraftFault(f"the draft wrote past {self._place} {reach.write_until}", FaultKind.ORDER)
        if any(not 0 <= token < vocab_size for token in token_ids):
            raise DraftFault(f"the draft wrote a token id outside the vocabulary of {vocab_size}")
        self._note(epoch, self._reach_after(reach, length))
        return epoch == self.epoch

    @property
    @abstractmethod
    def num_pending(self) -> int:
        """Positions that wait to be judged."""

    @property
    @abstractmethod
    def debt(self) -> tuple[int, ...]:
        """Committed tokens that the line must still write to live on."""

    @property
    def untold(self) -> tuple[int, ...]:
        """Committed tokens that a restart must tell."""
        return self.debt

    @abstractmethod
    def owe(self, tokens: Iterable[int]) -> None:
        """Tokens were committed that the draft does not know."""

    @abstractmethod
    def take(self, window_len: int) -> tuple[int, ...]:
        """The next window, in flight from now on."""

    @abstractmethod
    def write(self, token_ids: Sequence[int], parents: Sequence[int] = (), chances: Sequence[float] = ()) -> Comparison:
        """The living line's next tokens, which were heard."""

    @abstractmethod
    def commit(self, tokens: Sequence[int], num_accepted: int) -> Comparison:
        """What newly committed tokens, of which the target accepted so many in the window, mean for the line."""

    @abstractmethod
    def _check(self, token_ids: Sequence[int], parents: Sequence[int], reach: Reach) -> int:
        """How many output positions a message covers. Raises `DraftFault` for one of the wrong shape."""

    def _reach_after(self, reach: Reach, length: int) -> Reach:
        """What may come of a line once a message of so many positions did."""
        return Reach(reach.next_position + length, reach.write_until)

    def _note(self, epoch: int, reach: Reach) -> None:
        """Lines before `epoch` have nothing more to say, nor has one that was heard to its limit."""
        self._ended = {number: ended for number, ended in self._ended.items() if number > epoch}
        if epoch == self.epoch:
            self._reach = reach
        elif reach.next_position < reach.write_until:
            self._ended = {epoch: reach, **self._ended}


class Line(DraftLines):
    """Bookkeeping of one chain after the other. Positions count output tokens from 0."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[int] = deque()
        self._debt: deque[int] = deque()

    @property
    def num_pending(self) -> int:
        """Tokens that wait to be judged."""
        return len(self._pending)

    @property
    def debt(self) -> tuple[int, ...]:
        """Committed tokens that the draft lacks; once the line has died, from the first that differs."""
        return tuple(self._debt)

    def begin(self, write_until: int, num_committed: int) -> None:
        """A new line behind the committed text, all of whose predecessors' tokens and debts are settled."""
        super().begin(write_until, num_committed)
        self._pending.clear()
        self._debt.clear()

    def owe(self, tokens: Iterable[int]) -> None:
        """Tokens were committed that the draft does not know."""
        self._debt.extend(tokens)

    def take(self, window_len: int) -> tuple[int, ...]:
        """The next window: pending tokens that are in flight from now on."""
        self.num_in_flight = window_len
        return tuple(self._pending.popleft() for _ in range(window_len))

    def write(self, token_ids: Sequence[int], parents: Sequence[int] = (), chances: Sequence[float] = ()) -> Comparison:
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

        `num_accepted` of them are those of the line that were in flight, which were compared by the target itself. (A
        window of an earlier draft, whose successor joined meanwhile, counts as none of this line's.)
        """
        num_in_flight, self.num_in_flight = self.num_in_flight, 0
        if num_accepted < num_in_flight:
            return self._die(tokens[num_accepted:], Comparison(died=True))
        for index in range(num_in_flight, len(tokens)):
            if not self._pending:
                self._debt.extend(tokens[index:])
                return Comparison(index - num_in_flight)
            if self._pending[0] != tokens[index]:
                return self._die(tokens[index:], Comparison(index - num_in_flight, mismatched=True, died=True))
            self._pending.popleft()
        return Comparison(len(tokens) - num_in_flight)

    def _check(self, token_ids: Sequence[int], parents: Sequence[int], reach: Reach) -> int:
        if not token_ids or parents:
            raise DraftFault("the draft sent a message without tokens, or a tree that nobody asked for")
        return len(token_ids)

    def _die(self, suffix: Sequence[int], comparison: Comparison) -> Comparison:
        self._pending.clear()
        self._debt = deque(suffix)
        return comparison


# -- tree line --------------------------------------------------------------------------------------------------------

# A draft that branches, against the committed text: each of its lines is one tree, written at once and judged whole.
#
# It keeps the books that `Line` keeps for a chain, so that one pipeline drives both. Draft and target take
# turns: every verdict ends the tree, and the next one grows from the text that the draft is then told. Pure.

MAX_NODES = 256


class TreeLine(DraftLines):
    """Bookkeeping of one tree after the other. Positions count output tokens from 0."""

    def __init__(self) -> None:
        super().__init__()
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

    def begin(self, write_until: int, num_committed: int) -> None:
        """A new line behind the committed text."""
        super().begin(write_until, num_committed)
        self._room = write_until - num_committed
        self._tree = None
        self._debt.clear()

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

    def write(self, token_ids: Sequence[int], parents: Sequence[int] = (), chances: Sequence[float] = ()) -> Comparison:
        """The draft wrote its tree."""
        self._tree = TokenTree(tuple(token_ids), tuple(parents))
        return Comparison()

    def commit(self, tokens: Sequence[int], num_accepted: int) -> Comparison:
        """Any verdict ends the line: the draft is told all of the new text and finds its own nodes in it."""
        depth, self.num_in_flight = self.num_in_flight, 0
        self._tree = None
        self._debt.extend(tokens)
        return Comparison(died=num_accepted < depth)

    def _check(self, token_ids: Sequence[int], parents: Sequence[int], reach: Reach) -> int:
        if reach.next_position == reach.write_until:
            raise DraftFault("the draft wrote a second tree", FaultKind.ORDER)
        if not 0 < len(token_ids) <= MAX_NODES:
            raise DraftFault(f"the draft wrote a tree of {len(token_ids)} nodes; 1 to {MAX_NODES} are taken")
        try:
            return max(TokenTree(tuple(token_ids), tuple(parents)).depths) + 1
        except ValueError as error:
            raise DraftFault(f"the draft wrote no tree: {error}") from None

    def _reach_after(self, reach: Reach, length: int) -> Reach:
        """A tree comes whole, however deep it is."""
        return Reach(reach.write_until, reach.write_until)


# -- standing ---------------------------------------------------------------------------------------------------------

# What becomes of a draft that says what no line of it can have said.

MAX_FAULTS, FAULT_MEMORY_S = 3, 600.0
"""After so many within that time a draft is left alone."""


class Standing:
    """What a draft's behaviour has earned it: after three faults within ten minutes it is left alone for `away_s`, and
    then after each further one."""

    def __init__(self, away_s: float, clock: Callable[[], float]) -> None:
        self._away_s = away_s
        self._clock = clock
        self._faults: deque[float] = deque(maxlen=MAX_FAULTS)
        self._back_at = clock()

    def fault(self) -> None:
        """It broke the protocol."""
        now = self._clock()
        self._faults.append(now)
        if len(self._faults) == MAX_FAULTS and now - self._faults[0] <= FAULT_MEMORY_S:
            self._back_at = now + self._away_s

    @property
    def left_s(self) -> float:
        """Seconds until it is asked again; 0: it may be asked now."""
        return max(self._back_at - self._clock(), 0.0)
