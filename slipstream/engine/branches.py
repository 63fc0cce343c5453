"""A line that is a dynamic tree: which nodes the draft's model reads next, and which rows of its cache they are."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.engine.draft_session import Ahead, Chain, ChosenAhead, DraftLine, PassCosts
from slipstream.engine.forward import DecodeState
from slipstream.engine.segments import Window
from slipstream.engine.written_tree import Ranked, WrittenTree
from slipstream.sampling.sampler import DraftSampler
from slipstream.session_messages import DraftTokens
from slipstream.speculation.protocol import ROOT, JoinPoint, RestartLine, TokenTree, num_common
from slipstream.speculation.trees.calibration import Calibration
from slipstream.speculation.trees.growth import Growth, said_log
from slipstream.speculation.trees.rows import PassTime, num_draft_rows

Candidates = Callable[[Tensor, Sequence[int], int], tuple[list[int], list[float]]]
"""Logits [vocab], the text before, how many: the best tokens, and how sure the draft is of each."""


@dataclass(frozen=True, slots=True)
class Place:
    """How likely a node is, and where its children stand."""

    log_chance: float
    """Natural logarithm of its chance, as of when the epoch began."""
    log_said: float
    """The same as the draft itself says it."""
    end: int
    """Output position of what follows it."""


class Branches:
    """Grows one epoch's tree behind `text`, which follows its root. The rows behind those of the text in the model's
    cache are the nodes `read`, in their order."""

    def __init__(self, tree: WrittenTree, text: list[int], width: int, calibration: Calibration) -> None:
        self.tree = tree
        self.text = text
        self._width = width
        self._calibration = calibration
        self._read: list[int] = []
        self._reading: list[int] = []
        self._places = {tree.root: Place(0.0, 0.0, len(text))}
        self._unread = {tree.root}

    @property
    def has_chosen(self) -> bool:
        """It is known what the next pass reads; nothing was read since, and the root did not move."""
        return bool(self._reading)

    @property
    def chance(self) -> float:
        """Of what was chosen, that the likeliest node becomes text."""
        return max(math.exp(self._log(node)) for node in self._reading)

    def _log(self, node: int) -> float:
        """Natural logarithm of the chance that a node becomes text, as things are."""
        return self._places[node].log_chance - self._places[self.tree.root].log_chance

    def choose(
        self, pass_s: PassTime, ahead_s: float, max_rows: int, write_until: int, least_log: float = -math.inf
    ) -> bool:
        """Decides by rule R what the next pass reads: at most `max_rows` nodes. False when nothing that is likely
        enough is left before `write_until`, or the tree is full.

        Args:
            pass_s: seconds of a pass by the nodes that it reads.
            ahead_s: of a token that is written on from the end of a chain; infinite where none can be.
            least_log: natural logarithm of the least chance of a node that is read, see `Growth`.
        """
        self._reading = []
        least = self._places[self.tree.root].log_said + least_log
        unread = ((node, self._places[node]) for node in self._unread)
        open_nodes = {node for node, place in unread if place.end < write_until and place.log_said >= least}
        likeliest = heapq.nlargest(max_rows, ((self._log(node), -node) for node in open_nodes))
        if not likeliest or not self.tree.room:
            return False
        best = likeliest[0][0]
        chances = [math.exp(log - best) for log, _ in likeliest]
        num_rows = num_draft_rows(chances, pass_s, max_rows)
        rate = sum(chances[:num_rows]) / pass_s(num_rows)
        self._reading = sorted(-node for _, node in likeliest[:num_rows])
        following = self._next_of_chain()
        if following in open_nodes and math.exp(self._log(following) - best) >= rate * ahead_s:
            self._reading = [following]
        return True

    def window(self, num_known: int) -> Window:
        """What the next pass takes in: nodes, or behind a root that was not read the text after `num_known` tokens."""
        if self._reading == [self.tree.root]:
            return self.text[num_known:]
        nodes = [*self._read, *self._reading]
        places = {self.tree.root: ROOT} | {node: place for place, node in enumerate(nodes)}
        of = self.tree.nodes
        tokens, parents = (of[node].token_id for node in nodes), (places[of[node].parent] for node in nodes)
        return TokenTree(tuple(tokens), tuple(parents), num_cached=len(self._read))

    def grow(self, rows: Tensor, candidates: Candidates) -> None:
        """Takes the logits [n, vocab] behind what was read."""
        for node, logits in zip(self._reading, rows, strict=True):
            above = [self.tree.nodes[each].token_id for each in self.tree.path(node)]
            self._hang(node, *candidates(logits, [*self.text, *above], self._width))
        self._reading = []
        self.tree.passed()

    def _hang(self, node: int, token_ids: Sequence[int], said: Sequence[float]) -> int:
        """A node was read: what follows it, the first of which is the result."""
        self._unread.discard(node)
        place = self._places[node]
        first = self.tree.add(node, token_ids, said)
        for rank, each in enumerate(said):
            log = place.log_chance + math.log(self._calibration.chance(rank, each))
            self._places[first + rank] = Place(log, place.log_said + said_log(each), place.end + 1)
            self._unread.add(first + rank)
        if node != self.tree.root:
            self._read.append(node)
        return first

    def _next_of_chain(self) -> int | None:
        """The likeliest node behind all those that were read, if these are a chain."""
        end = self._read[-1] if self._read else self.tree.root
        if end in self._unread:
            return end
        below = self.tree.children(end)
        return below[0] if below and self.tree.path(end) == self._read else None

    def end_of_chain(self, num_known: int, write_until: int) -> tuple[int, int]:
        """Where the next pass reads one node, and all nodes read so far are above it, as in a chain: the node's token,
        and how many tokens may follow before `write_until`. None may, where it is otherwise.

        Args:
            num_known: tokens of the text, or nodes behind it, that the cache holds.
        """
        (node, *others), root = self._reading, self.tree.root
        num_unread = len(self.text) + len(self._read) - num_known
        if others or self.tree.path(node)[:-1] != self._read or num_unread != int(node == root):
            return 0, 0
        token = self.text[-1] if node == root else self.tree.nodes[node].token_id
        return token, min(write_until - self._places[node].end, self.tree.room)

    @property
    def text_of_chain(self) -> list[int]:
        """There, the text and all nodes down to that one."""
        (node,) = self._reading
        return [*self.text, *(self.tree.nodes[each].token_id for each in self.tree.path(node))]

    def go_on(self, token_ids: Sequence[int], candidates: Sequence[Ranked], vocab_size: int) -> None:
        """That was done: the tokens that follow, each of which was read but for the last, and what else was likely."""
        (node,) = self._reading
        for token, found in zip(token_ids, candidates, strict=False):
            node = self._hang(node, *found.led_by(token, self._width, vocab_size))
            self.tree.passed()
        self._reading = []

    def move(self, root: int) -> list[int]:
        """The text goes on down to `root`, and what is not below it is gone. The result: which of the rows behind the
        text stay in the cache, ascending; the first of them are text from now on."""
        above = self.tree.path(root) if root in self.tree.nodes else []
        tokens = [self.tree.nodes[node].token_id for node in above]
        self._learn(tokens)
        lives = {*self.tree.move(root), *self.tree.nodes}
        self.text += tokens
        rows = [row for row, node in enumerate(self._read) if node in lives]
        self._read = [node for node in self._read if node in self.tree.nodes]
        self._places = {node: each for node, each in self._places.items() if node in self.tree.nodes or node == root}
        self._unread &= self._places.keys()
        self._reading = []
        return rows

    def rows_of(self, suffix: Sequence[int]) -> list[int]:
        """Of the rows behind the text those of the beginning of `suffix`, which becomes text. The last token of it is
        never among them."""
        self._learn(suffix)
        rows: list[int] = []
        node: int | None = self.tree.root
        for token in suffix[:-1]:
            node = self.tree.child(node, token) if node is not None else None
            if node is None or node not in self._read:
                break
            rows.append(self._read.index(node))
        return rows

    def _learn(self, tokens: Sequence[int]) -> None:
        """These follow the root: which candidates were right."""
        node = self.tree.root
        for token in tokens:
            below = self.tree.children(node)
            if not below:
                return
            hit = self.tree.child(node, token)
            said = [self.tree.nodes[child].said for child in below]
            self._calibration.observe(said, None if hit is None else below.index(hit))
            if hit is None:
                return
            node = hit


# -- lines ------------------------------------------------------------------------------------------------------------


class MainPath(Chain):
    """A tree of which only the likeliest path is read, as a chain is: what else was likely beside it is sent, too."""

    def __init__(self, growth: Growth, start: JoinPoint, sampler: DraftSampler) -> None:
        super().__init__(start, sampler)
        self._growth = growth
        self._tree = WrittenTree(start.epoch, growth)

    @property
    def width(self) -> int:
        """As the tree's."""
        return self._growth.width

    def goes_on(self, write_until: int, costs: Callable[[], PassCosts]) -> bool:
        """While the tree has room, too."""
        return super().goes_on(write_until, costs) and self._tree.room > 0

    def end_of_chain(self, num_known: int, write_until: int) -> tuple[int, int]:
        """No longer than the tree has room."""
        token, room = super().end_of_chain(num_known, write_until)
        return token, min(room, self._tree.room)

    def go_on(self, token_ids: Sequence[int], ahead: Ahead) -> None:
        """With the candidates beside each."""
        self._tree.go_on(token_ids, ahead.candidates, self.sampler.vocab_size)
        super().go_on(token_ids, ahead)

    def move(self, state: DecodeState, root: int) -> None:
        """The nodes down to it are text already."""
        self._tree.move_along(root)

    def _num_foreseen(self, order: RestartLine) -> int:
        return num_common(self.output[order.keep :], order.suffix)

    @property
    def has_unsent(self) -> bool:
        """A node may be sent, too, that is no token of the path."""
        return self._tree.has_unsent

    def take(self, seconds: float) -> DraftTokens:
        """Nodes and their chances."""
        self._num_sent = len(self.output)
        return self._tree.take(seconds)


class BranchedLine(DraftLine):
    """A tree that grows where its next nodes are likeliest to become text."""

    def __init__(self, growth: Growth, calibration: Calibration, start: JoinPoint, sampler: DraftSampler) -> None:
        """`calibration`: what this process has learnt of its candidates."""
        super().__init__(start, sampler)
        self._growth = growth
        self._tree = WrittenTree(start.epoch, growth)
        self._branches = Branches(self._tree, self.output, growth.width, calibration)

    @property
    def width(self) -> int:
        """As the tree's."""
        return self._growth.width

    def goes_on(self, write_until: int, costs: Callable[[], PassCosts]) -> bool:
        """Then it is known what the next pass reads."""
        if self._branches.has_chosen:
            return True
        now = costs()
        least_log = self._growth.least_log if now.is_thrifty else -math.inf
        return self._branches.choose(now.pass_s, now.ahead_s, self._growth.rows, write_until, least_log)

    def unseen(self, num_known: int) -> Window:
        """The nodes that were chosen."""
        return self._branches.window(num_known)

    @property
    def chance(self) -> float | None:
        """Of the likeliest of them."""
        return self._branches.chance

    def read(self, rows: Tensor) -> None:
        """Candidates hang behind each of them."""
        self._branches.grow(rows, self.sampler.candidates)

    def end_of_chain(self, num_known: int, write_until: int) -> tuple[int, int]:
        """Where one node was chosen, and all above it are those that were read."""
        return self._branches.end_of_chain(num_known, write_until)

    def choosing(self) -> ChosenAhead:
        """Behind that node."""
        return ChosenAhead(self.sampler, self._branches.text_of_chain, self.width)

    def go_on(self, token_ids: Sequence[int], ahead: Ahead) -> None:
        """Nodes, of which all but the last are read."""
        self._branches.go_on(token_ids, ahead.candidates, self.sampler.vocab_size)

    def move(self, state: DecodeState, root: int) -> None:
        """What is not below it leaves the cache."""
        num_text = min(state.num_tokens, state.num_prompt_tokens + len(self.output))
        state.keep_path(num_text, self._branches.move(root))

    def _rows_foreseen(self, num_output: int, suffix: Sequence[int], num_behind: int) -> Sequence[int]:
        return self._branches.rows_of(suffix) if len(self.output) == num_output else ()

    @property
    def num_unsent(self) -> int:
        """Of the path from its root, some of which may be sent."""
        return self._tree.main_length

    @property
    def has_unsent(self) -> bool:
        """A node was added."""
        return self._tree.has_unsent

    def take(self, seconds: float) -> DraftTokens:
        """Nodes and their chances."""
        return self._tree.take(seconds)
