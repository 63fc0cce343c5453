"""What the protocol speaks of: trees of candidates, verdicts, the end of a text, the actions of its state machine, and
the passes that the target was asked for.

Pure: no I/O, no clock.
"""

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from slipstream.errors import ProtocolViolation

# -- tree -------------------------------------------------------------------------------------------------------------

# Drafts that branch: tokens, each behind another one. Pure.

ROOT = -1
"""Parent of the nodes that follow the committed text."""


@dataclass(frozen=True)
class TokenTree:
    """Tokens and the node that each follows; nodes are numbered so that parents come first.

    A chain is the tree whose parents are -1, 0, 1, ... A tree may grow pass by pass: the first `num_cached` nodes have
    then been through the model already, and their rows are the last ones in its cache.

    Raises:
        ValueError: lists of different lengths, no new node, or a parent that does not come before its child.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    """Per node the index of the node it follows; -1: the last token that is no part of the tree."""
    num_cached: int = 0

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"a tree has one parent a token, not {len(self.parents)} for {len(self.token_ids)}")
        if not 0 <= self.num_cached < len(self.token_ids):
            raise ValueError(f"a pass needs new nodes; {self.num_cached} of {len(self.token_ids)} are in the cache")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} of a tree follows {parent}; parents come first, and -1 is none")

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> "TokenTree":
        """Tokens one after the other."""
        return cls(tuple(token_ids), tuple(range(ROOT, len(token_ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """What the next pass takes in."""
        return self.token_ids[self.num_cached :]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Per node its distance from the roots, which have 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def is_chain(self) -> bool:
        """It does not branch."""
        return self.parents == tuple(range(ROOT, len(self) - 1))

    def child(self, node: int, token_id: int) -> int | None:
        """The first node with that token behind `node` (-1: among the roots), if there is one."""
        for child, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if parent == node and token == token_id:
                return child
        return None

    def children(self, node: int) -> list[int]:
        """The nodes behind `node` (-1: the roots), ascending."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from a root to `node`, both included, ascending."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    @property
    def first_path(self) -> tuple[int, ...]:
        """The nodes from the first root down, by the first child of each: the likeliest ones, where the better of two
        was written first."""
        nodes: list[int] = []
        while children := self.children(nodes[-1] if nodes else ROOT):
            nodes.append(children[0])
        return tuple(nodes)

    def shallow(self, depth: int, most: int | None = None) -> tuple["TokenTree | None", tuple[int, ...]]:
        """The tree without nodes at `depth` and below, and of the others the first ones, at most so many; None if none
        is left. And which nodes are left."""
        kept = tuple(node for node in range(len(self)) if self.depths[node] < depth)[:most]
        if not kept:
            return None, ()
        places = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
        tokens = tuple(self.token_ids[node] for node in kept)
        return TokenTree(tokens, tuple(places[self.parents[node]] for node in kept)), kept

    def visible(self) -> tuple[list[int], list[int]]:
        """What each new node sees of the tree, itself and the nodes above it: rows (new nodes) and columns (nodes)."""
        pairs = [
            (node - self.num_cached, seen) for node in range(self.num_cached, len(self)) for seen in self.path(node)
        ]
        return [row for row, _ in pairs], [column for _, column in pairs]

    def grown(self, token_ids: Sequence[int], parents: Sequence[int]) -> "TokenTree":
        """The tree with more nodes, for the pass that follows the one which took in this tree."""
        return TokenTree((*self.token_ids, *token_ids), (*self.parents, *parents), num_cached=len(self))


# -- acceptance -------------------------------------------------------------------------------------------------------


class FinishReason(enum.Enum):
    """Why a text ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Verdict:
    """What the target says of a window. `window[:num_accepted]`, then `own_token`, are committed for good."""

    num_accepted: int
    own_token: int | None
    """The correction or bonus token; None when the text ended inside the accepted tokens."""
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    """The stop string that ended the text, if one did."""
    path: tuple[int, ...] = ()
    """Of a tree: the nodes that were accepted, `num_accepted` of them, from the committed text down."""
    drafted: tuple[int, ...] = ()
    """Where the target drafted itself, alone or beside a window: the tokens accepted, `num_accepted` of them."""

    def committed(self, window: Sequence[int]) -> tuple[int, ...]:
        """The tokens that this verdict adds to the text."""
        accepted = self.drafted or tuple(window[node] for node in self.path or range(self.num_accepted))
        return accepted if self.own_token is None else (*accepted, self.own_token)

    def num_of(self, window: Sequence[int]) -> int:
        """How many of the accepted tokens a window that is no tree foresaw."""
        return num_common(window, self.drafted) if self.drafted else self.num_accepted

    def ended_at(self, index: int, reason: FinishReason, stop_string: str = "") -> "Verdict":
        """The verdict cut behind its committed token `index`, which ends the text."""
        if index < self.num_accepted:
            return Verdict(index + 1, None, reason, stop_string, self.path[: index + 1], self.drafted[: index + 1])
        return replace(self, finish_reason=reason, stop_string=stop_string)


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


@dataclass(frozen=True)
class StopRule:
    """When the text ends: at an end-of-text token (kept as the last token), or at `max_new_tokens`."""

    eos_token_ids: Collection[int]
    max_new_tokens: int


def accept_greedy(window: Sequence[int], target_choices: Sequence[int]) -> tuple[int, int]:
    """Length of the accepted prefix and the target's own next token.

    `target_choices` [len(window) + 1] holds the target's argmax after the committed text, after `window[:1]`, and so on
    (ParallelVLM, section 2.2, with p and q one-hot).
    """
    if len(target_choices) != len(window) + 1:
        raise ValueError(f"a window of {len(window)} needs {len(window) + 1} choices, not {len(target_choices)}")
    num_accepted = 0
    while num_accepted < len(window) and window[num_accepted] == target_choices[num_accepted]:
        num_accepted += 1
    return num_accepted, target_choices[num_accepted]


def accept_tree(tree: TokenTree, choose: Callable[[int, tuple[int, ...]], int]) -> tuple[tuple[int, ...], int]:
    """The path of a tree that the target takes, and its own next token (SpecVLM, section 3.2; SpecInfer).

    `choose(row, path)` is the target's choice behind the nodes `path`: row 0 is behind the committed text, row i + 1
    behind node i. It is asked once a step, from the text down.
    """
    path: tuple[int, ...] = ()
    while True:
        last = path[-1] if path else ROOT
        token = choose(last + 1, path)
        child = tree.child(last, token)
        if child is None:
            return path, token
        path = (*path, child)


def end_verdict(
    window: Sequence[int],
    num_accepted: int,
    own_token: int,
    num_committed: int,
    rule: StopRule,
    path: tuple[int, ...] = (),
) -> Verdict:
    """The verdict on a window of which a sampler accepted `num_accepted` tokens (of a tree: `path`), cut where the text
    ends.

    No token after an end-of-text token or past the limit leaves here. Stop strings end the text later still: see
    `families.adapter.StopMatcher`.
    """
    verdict = Verdict(num_accepted, own_token, path=path)
    for index, token in enumerate(verdict.committed(window)):
        reason = _end_at(token, num_committed + index + 1, rule)
        if reason is not None:
            return verdict.ended_at(index, reason)
    return verdict


def judge_window(window: Sequence[int], target_choices: Sequence[int], num_committed: int, rule: StopRule) -> Verdict:
    """Acceptance by equality with the target's choices, cut where the text ends."""
    return end_verdict(window, *accept_greedy(window, target_choices), num_committed, rule)


def _end_at(token: int, length: int, rule: StopRule) -> FinishReason | None:
    if token in rule.eos_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= rule.max_new_tokens else None


# -- actions ----------------------------------------------------------------------------------------------------------

# What the protocol's state machine tells its driver to do, and what a draft that joins must be told. Pure data.


@dataclass(frozen=True)
class JudgeWindow:
    """Run `num_passes` target passes: the first over `window`, the others over nothing."""

    window: tuple[int, ...]
    num_passes: int
    parents: tuple[int, ...] = ()
    """Of a window that is a tree, see `TokenTree`."""
    self_draft: int = 0
    """Tokens that the target drafts itself for every pass, of a tree its levels; a window beside it is a chain."""


@dataclass(frozen=True)
class RestartLine:
    """The draft keeps its first `keep` output tokens, appends `suffix` and writes until `write_until` (exclusive).

    A line that may not write at all (`write_until` is where it starts) costs the draft nothing: it rests.
    """

    epoch: int
    keep: int
    suffix: tuple[int, ...]
    write_until: int
    first_chunk: int

    @property
    def may_write(self) -> bool:
        """Whether the draft has anything to do."""
        return self.write_until > self.keep + len(self.suffix)


@dataclass(frozen=True)
class AdvanceLine:
    """The line lives; the draft may write until `write_until` (exclusive)."""

    epoch: int
    write_until: int


@dataclass(frozen=True)
class MoveLine:
    """The dynamic tree lives on below `root`, the node of the last committed token: all else of it is dropped. The
    draft may write until `write_until` (exclusive)."""

    epoch: int
    root: int
    write_until: int


@dataclass(frozen=True)
class Commit:
    """These tokens are text from now on; the first `num_from_draft` were the draft's."""

    tokens: tuple[int, ...]
    num_from_draft: int


@dataclass(frozen=True)
class Finish:
    """The text is complete."""

    reason: FinishReason


LineAction = RestartLine | AdvanceLine | MoveLine
"""What the draft is told."""
Action = JudgeWindow | LineAction | Commit | Finish


@dataclass(frozen=True)
class JoinPoint:
    """What a draft that joins must be told: where its first line starts and how far it may go."""

    epoch: int
    committed: tuple[int, ...]
    write_until: int
    first_chunk: int


# -- passes -----------------------------------------------------------------------------------------------------------

# What the target has been asked for: the window in flight and the plain passes behind it.


class PassKind(enum.Enum):
    """Why passes were asked for, which decides what their seconds say."""

    PREFILL = enum.auto()
    SPECULATIVE = enum.auto()
    PLAIN = enum.auto()
    SELF = enum.auto()
    """The target drafts every window itself."""


class PassRequest:
    """The passes of one request to the target. At first that is the prefill, which answers like a plain pass."""

    def __init__(self) -> None:
        self.window: tuple[int, ...] | None = ()
        """The window that the next verdict is about; None while nothing runs."""
        self.depth = 0
        """Tokens that the window can commit: its length, or the depth of a tree."""
        self.kind = PassKind.PREFILL
        self.num_asked = self.num_left = 1

    @property
    def running(self) -> bool:
        """A verdict is still to come."""
        return self.window is not None

    @property
    def follows_another(self) -> bool:
        """The pass whose verdict comes next was not the first of its request: no round trip is in its seconds."""
        return self.num_left < self.num_asked

    @property
    def most_tokens(self) -> int:
        """How many tokens the passes that run (or else the next one) can commit beside what is pending."""
        num_windows = max(self.num_left, 1) if self.kind is PassKind.SELF else 1
        return self.depth * num_windows + max(self.num_left, 1)

    def ask(self, window: tuple[int, ...], depth: int, kind: PassKind, num_passes: int) -> None:
        """A new request: the first pass over `window`, the others over nothing."""
        self.window, self.depth, self.kind = window, depth, kind
        self.num_asked = self.num_left = num_passes

    def answer(self, verdict: Verdict) -> tuple[tuple[int, ...], int]:
        """Takes the verdict over the window in flight, which is returned with its depth. Raises `ProtocolViolation` for
        a verdict that answers nothing."""
        window, depth = self.window, self.depth
        nodes = verdict.path or range(0 if verdict.drafted else verdict.num_accepted)
        if window is None or verdict.num_accepted > depth or any(node >= len(window) for node in nodes):
            raise ProtocolViolation("the target sent a verdict that no window was waiting for")
        if verdict.own_token is None and verdict.finish_reason is None:
            raise ProtocolViolation("the target sent a verdict without its own token, and the text goes on")
        self.num_left = 0 if verdict.finish_reason is not None else self.num_left - 1
        self.window = () if self.num_left else None
        self.depth = depth if self.kind is PassKind.SELF else 0
        return window, depth
