"""One caption at the draft: what was asked, its line or its trees, what is chosen of it, and what is sent."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.budget import Reservation
from slipstream.engine.branches import Branches
from slipstream.engine.segments import Window
from slipstream.engine.session_work import SessionWork
from slipstream.engine.video_lm import PromptPlan
from slipstream.engine.written_tree import Ranked, WrittenTree
from slipstream.errors import InvalidRequest
from slipstream.sampling.params import Proposal
from slipstream.sampling.sampler import DraftSampler
from slipstream.session_messages import DraftStart, DraftTokens
from slipstream.speculation.lines import MAX_NODES
from slipstream.speculation.protocol import ROOT, LineAction, RestartLine, TokenTree, num_common
from slipstream.speculation.trees.calibration import Calibration
from slipstream.speculation.trees.growth import Growth

# -- trees ------------------------------------------------------------------------------------------------------------

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


# -- tokens that the model writes by itself ---------------------------------------------------------------------------

# What is noted of them, or chosen, while it goes on.


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was found out of one session's tokens. Of what it has, one for each of them."""

    candidates: Sequence[Ranked] = ()
    proposals: Sequence[Proposal] = ()


class LargestAhead:
    """The model goes on with the largest of the logits. The likeliest tokens at each place are kept, which nobody waits
    for meanwhile."""

    def __init__(self, num_sessions: int, width: int) -> None:
        """`width`: tokens to keep of each place."""
        self._num_sessions, self._width = num_sessions, width
        self._found: list[tuple[Tensor, Tensor]] = []

    def note(self, logits: Tensor) -> None:
        """Of the next place, [sessions, vocab]."""
        if self._width:
            sure, token_ids = logits.softmax(-1).topk(min(self._width, logits.shape[-1]))
            self._found.append((sure, token_ids))

    def read(self) -> list[Ahead]:
        """By session."""
        if not self._found:
            return [Ahead()] * self._num_sessions
        sure, token_ids = (torch.stack(each, 1).tolist() for each in zip(*self._found, strict=True))
        return [Ahead(list(map(Ranked, *of_session))) for of_session in zip(token_ids, sure, strict=True)]


@dataclass
class ChosenAhead:
    """One session's sampler chooses each token itself, behind `text`, which grows by it: they are drawn, or penalised
    for what was written before."""

    sampler: DraftSampler
    text: list[int]
    width: int
    """Candidates to keep of each place; 0: what a chain needs."""
    _candidates: list[Ranked] = field(default_factory=list)
    _proposals: list[Proposal] = field(default_factory=list)

    def note(self, logits: Tensor) -> int:
        """The token by the next logits, [1, vocab]. Raises as the sampler."""
        if self.width:
            found = Ranked(*self.sampler.candidates(logits[0], self.text, self.width))
            self._candidates.append(found)
            token = found.token_ids[0]
        else:
            token, proposal = self.sampler.choose(logits[0], self.text)
            if proposal is not None:
                self._proposals.append(proposal)
        self.text.append(token)
        return token

    def read(self) -> list[Ahead]:
        """Of the one session."""
        return [Ahead(self._candidates, self._proposals)]


# -- session ----------------------------------------------------------------------------------------------------------

# One caption at the draft: what was asked, its line, and what is sent of it.


@dataclass
class DraftLine:
    """Where the draft writes. `output` holds committed tokens and, after them, what it wrote itself."""

    epoch: int
    write_until: int
    first_chunk: int
    output: list[int]
    begins: int = field(init=False)
    """Tokens that were there before it."""

    def __post_init__(self) -> None:
        self.begins = len(self.output)

    @property
    def may_write(self) -> bool:
        """The caption takes drafts; where its gate is closed, the line may not grow."""
        return self.write_until > self.begins


@dataclass(eq=False)
class DraftSession:
    """One caption at the draft. All but `orders` and `chunks` is touched on the model's thread only, once it writes."""

    request: DraftStart
    plan: PromptPlan
    work: SessionWork
    place: Reservation
    sampler: DraftSampler
    line: DraftLine
    calibration: Calibration
    """What this process has learnt of its candidates."""
    orders: deque[LineAction] = field(default_factory=deque)
    """What the thread has not carried out. All is, in order: each restart builds on the one before."""
    chunks: asyncio.Queue[DraftTokens | Exception | None] = field(default_factory=asyncio.Queue)
    """What was written; None, or what went wrong, at the end."""
    prompt_logits: torch.Tensor | None = None
    """[vocab], after the prefill."""
    num_sent: int = 0
    """Tokens of the line's output that are in a chunk already, or were committed before the line."""
    proposals: list[Proposal] = field(default_factory=list)
    """Of the tokens that are not sent yet, where the sampling rule needs them."""
    chunk_started_s: float = 0.0
    """When the first pass of the chunk began that is being written."""
    static_tree: StaticTree | None = None
    """The line's tree, where trees are asked for; None until there is room for one."""
    growth: Growth | None = None
    """How the line branches, where dynamic trees are asked for."""
    dynamic_tree: WrittenTree | None = None
    """The line's dynamic tree."""
    branches: Branches | None = None
    """Which of its nodes are read, where that is not its main path alone."""

    def plant(self) -> None:
        """The line begins behind its output."""
        if self.growth is None:
            return
        self.dynamic_tree = WrittenTree(self.line.epoch, self.growth)
        if self.growth.extends_branches:
            self.branches = Branches(self.dynamic_tree, self.line.output, self.growth.width, self.calibration)

    def keep_rows(self, old: Sequence[int], order: RestartLine) -> None:
        """Of the model's cache what a new line begins with: the `old` output may have foreseen what it is told."""
        state, branches, keep = self.work.state, self.branches, order.keep
        static_tree, self.static_tree = self.static_tree, None
        if self.dynamic_tree is not None and branches is None:
            keep += num_common(old[keep:], order.suffix)
        keep = min(keep, max(order.keep + len(order.suffix) - 1, 0))  # what follows the last token is still to be said
        num_kept = min(state.num_tokens, state.num_prompt_tokens + keep)
        if branches is not None and len(old) == keep:
            state.keep_path(num_kept, branches.rows_of(order.suffix))
        elif static_tree is None or len(static_tree.text) != keep:
            state.rollback(num_kept)
        else:
            state.keep_path(num_kept, static_tree.cached_path(order.suffix, state.num_tokens - num_kept))

    @property
    def num_unsent(self) -> int:
        """Tokens of the line, or of the tree's main path, that are not sent yet."""
        if self.branches is not None:
            return self.branches.tree.main_length
        return len(self.line.output) - self.num_sent

    def choosing(self) -> ChosenAhead:
        """Chooses the tokens that go on behind the line's end, or behind that of a tree's chain."""
        text = [*self.line.output] if self.branches is None else self.branches.text_of_chain
        return ChosenAhead(self.sampler, text, self.growth.width if self.growth is not None else 0)

    @property
    def unseen(self) -> Window:
        """What the model has not taken in of the line, or of its tree; nothing where the prompt's own logits come
        next."""
        num_known = self.work.state.num_tokens - self.work.state.num_prompt_tokens
        if self.branches is not None:
            return self.branches.window(num_known)
        if self.static_tree is not None and self.static_tree.fed is not None:
            return self.static_tree.fed
        return self.line.output[num_known:]

    @property
    def chance(self) -> float:
        """That what is read next becomes text; 1 where that is not known."""
        return self.branches.chance if self.branches is not None else 1.0

    @property
    def has_unsent(self) -> bool:
        """There is something to send."""
        return self.dynamic_tree.has_unsent if self.dynamic_tree is not None else self.num_unsent > 0


def checked_growth(request: DraftStart) -> Growth | None:
    """How the line of a request branches; None where it is no dynamic tree. Raises `InvalidRequest` for one that no
    gateway asks for."""
    if not request.width:
        return None
    growth = Growth(request.width, max(request.max_rows, 1), least_chance=request.least_chance)
    if request.tree or growth.nodes_per_pass > MAX_NODES:
        raise InvalidRequest(f"a dynamic tree is no static one, and a pass adds at most {MAX_NODES} nodes to it")
    if not 0.0 <= growth.least_chance <= 1.0:  # so NaN is
        raise InvalidRequest(f"no node has a chance of {growth.least_chance:g}; least_chance is from 0 to 1")
    return growth


def ahead_of(sessions: Sequence[DraftSession]) -> LargestAhead | ChosenAhead:
    """What is noted, or chosen, of the tokens of these while the model writes on by itself: of several, the largest."""
    if not all(session.sampler.takes_largest for session in sessions):
        (session,) = sessions
        return session.choosing()
    width = max((session.growth.width for session in sessions if session.growth is not None), default=0)
    return LargestAhead(len(sessions), width)
