"""A toy draft that writes dynamic trees, and a stage that plays it and a toy target against a real `Pipeline`."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.speculation.gate import Gate
from slipstream.speculation.lines import MAX_NODES, DraftPhase
from slipstream.speculation.methods import Shape
from slipstream.speculation.pacing import Policy
from slipstream.speculation.pipeline import Pipeline
from slipstream.speculation.protocol import (
    ROOT,
    Action,
    AdvanceLine,
    Commit,
    Finish,
    JudgeWindow,
    MoveLine,
    RestartLine,
    StopRule,
)
from slipstream.speculation.trees.confidence import TreeCosts
from slipstream.speculation.trees.growth import GROWTHS
from tests.speculation.toys import EOS, Played, measured_costs, toy_target
from tests.support.plain_decoding import NextToken

TreeMessage = tuple[int, int, tuple[int, ...], tuple[int, ...], float, tuple[float, ...]]
"""Epoch, number of the first node, tokens, parents, seconds of a pass, chances."""


def tree_costs(speed_ratio: float, tau: float, *, slope: float = 0.0) -> TreeCosts:
    """`measured_costs` for trees."""
    costs = TreeCosts(**vars(measured_costs(speed_ratio, tau, slope=slope)))
    costs.observe_round(3, 1.5)
    return costs


@dataclass
class TreeDraft:
    """Knows a text and a tree behind it, obeys its instructions in order, and writes what the test wants."""

    text: list[int]
    epoch: int
    write_until: int
    ready: bool = False
    inbox: deque[tuple[RestartLine | AdvanceLine | MoveLine, list[int]]] = field(default_factory=deque)
    """Each instruction with the committed text when it was given."""
    outbox: deque[TreeMessage] = field(default_factory=deque)
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Token and parent of those that live."""
    read: set[int] = field(default_factory=set)
    """Those, and the root, whose candidates were written."""
    said: dict[int, float] = field(default_factory=dict)
    """What the draft says of nodes and all above them."""
    root: int = ROOT
    num_written: int = 0

    def obey(self) -> None:
        order, committed = self.inbox.popleft()
        match order:
            case RestartLine():
                assert order.epoch > self.epoch
                assert order.keep <= len(self.text)
                self.text = [*self.text[: order.keep], *order.suffix]
                assert self.text == committed
                self.epoch, self.root, self.num_written = order.epoch, ROOT, 0
                self.nodes.clear()
                self.read.clear()
                self.said.clear()
            case MoveLine():
                assert order.epoch == self.epoch
                self.text += self.path(order.root)
                assert self.text == committed[: len(self.text)]
                self.nodes = {node: self.nodes[node] for node in self.nodes if order.root in self.above(node)}
                self.root = order.root
            case AdvanceLine():
                assert order.epoch == self.epoch
                assert order.write_until > self.write_until
        self.write_until = order.write_until

    def above(self, node: int) -> list[int]:
        """The nodes over a node, from the root's child to its parent, and the root."""
        found = []
        while node != self.root:
            node = self.nodes[node][1]
            found.append(node)
        return found[::-1]

    def path(self, node: int) -> list[int]:
        """Tokens below the root, down to a node."""
        return [self.nodes[each][0] for each in [*self.above(node)[1:], node]] if node != self.root else []

    def may_read(self, width: int, least_chance: float = 0.0) -> list[int]:
        """Nodes whose candidates it may write; of such a chance, if it goes by that."""
        if not self.ready or len(self.nodes) + width > MAX_NODES:
            return []
        least = least_chance * self.said.get(self.root, 1.0)
        return [
            node
            for node in [self.root, *self.nodes]
            if node not in self.read
            and len(self.text) + len(self.path(node)) < self.write_until
            and self.said.get(node, 1.0) >= least
        ]

    def write(self, candidates: Sequence[tuple[int, Sequence[int], Sequence[float]]]) -> None:
        """One message: of every node that was read its candidates and their chances."""
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        first = self.num_written
        for node, behind, says in candidates:
            self.read.add(node)
            for token, chance in zip(behind, says, strict=True):
                self.nodes[self.num_written] = (token, node)
                self.said[self.num_written] = self.said.get(node, 1.0) * chance
                self.num_written += 1
            tokens += behind
            parents += [node] * len(behind)
            chances += says
        self.outbox.append((self.epoch, first, tuple(tokens), tuple(parents), 0.0, tuple(chances)))


class DynamicStage(Played):
    """Drives a pipeline the way the gateway does and checks what it does."""

    def __init__(self, pipeline: Pipeline, next_token: NextToken, rule: StopRule) -> None:
        super().__init__(pipeline, next_token, rule)
        self.draft: TreeDraft | None = None
        self.passes: deque[tuple[tuple[int, ...], tuple[int, ...]]] = deque([((), ())])
        self.actions: list[Action] = []
        self.least_chance = 0.0
        """Of nodes that the draft goes on behind; behind others it rests."""

    def carry_out(self, actions: Sequence[Action]) -> None:
        self.actions += actions
        for action in actions:
            assert self.finish_reason is None, f"{action} after the end"
            match action:
                case JudgeWindow(window, num_passes, parents):
                    assert not self.passes, "one window at a time"
                    assert len(window) <= self.pipeline.max_window
                    assert num_passes >= 1
                    self.passes.extend([(window, parents), *[((), ())] * (num_passes - 1)])
                case RestartLine() | AdvanceLine() | MoveLine():
                    assert self.draft is not None
                    self.draft.inbox.append((action, list(self.pipeline.committed)))
                case Commit(tokens, _):
                    self.output.extend(tokens)
                case Finish(reason):
                    self.finish_reason = reason
        assert self.output == self.pipeline.committed
        if self.finish_reason is None and self.pipeline.holding:
            assert self.pipeline.draft_phase is DraftPhase.WRITING

    def judge(self, round_s: float = 1.0, held_s: float = 0.0) -> None:
        """The target runs its next pass, and its verdict arrives."""
        window, parents = self.passes.popleft()
        verdict = self.tree_verdict(window, parents) if parents else self.chain_verdict(window)
        if verdict.finish_reason is not None:
            self.passes.clear()
        self.carry_out(self.pipeline.on_verdict(verdict, round_s, held_s))

    def join(self) -> None:
        point = self.pipeline.on_draft_joining()
        assert list(point.committed) == self.output
        self.draft = TreeDraft(list(point.committed), point.epoch, point.write_until)

    def ready(self) -> None:
        assert self.draft is not None
        self.draft.ready = True
        self.carry_out(self.pipeline.on_draft_ready(len(self.draft.text)))

    def write(self, nodes: Sequence[int], ranks: Sequence[int], width: int, chances: Sequence[float]) -> None:
        """Candidates behind these nodes: the right one at each rank, if that is below `width`."""
        assert self.draft is not None
        vocab_size, written = self.pipeline.vocab_size, []
        for node, rank in zip(nodes, ranks, strict=True):
            right = self.next_token([*self.draft.text, *self.draft.path(node)])
            tokens = [(right + 1 + other) % vocab_size for other in range(min(width, vocab_size))]
            if rank < len(tokens):
                tokens = [token for token in tokens if token != right][: len(tokens) - 1]
                tokens.insert(rank, right)
            written.append((node, tokens, [chances[index % len(chances)] for index in range(len(tokens))]))
        self.draft.write(written)

    def deliver(self) -> None:
        assert self.draft is not None
        self.carry_out(self.pipeline.on_draft_tokens(*self.draft.outbox.popleft()))

    def lose(self) -> None:
        self.draft = None
        self.carry_out(self.pipeline.on_draft_lost())

    def lose_target(self) -> None:
        self.draft = None
        self.passes = deque([((), ())])
        self.pipeline.on_target_lost()

    def expire_hold(self) -> None:
        self.carry_out(self.pipeline.on_hold_expired())

    def act(self, order: random.Random, agreement: float, width: int, max_rows: int) -> None:
        """One event of an honest draft and the target that may happen now."""
        draft, choices = self.draft, [self.judge] * 2 if self.passes else []
        if draft is not None:
            choices += [] if draft.ready else [self.ready]
            choices += [draft.obey] * 2 if draft.inbox else []
            choices += [self.deliver] * 4 if draft.outbox else []
            open_nodes = draft.may_read(width * max_rows, self.least_chance)
            choices += (
                [lambda: self.write_some(order, open_nodes, agreement, width, max_rows)] * 6 if open_nodes else []
            )
        order.choice(choices or [self.expire_hold])()

    def write_some(
        self, order: random.Random, open_nodes: Sequence[int], agreement: float, width: int, max_rows: int
    ) -> None:
        """A pass over some nodes; the first candidate is right with that chance."""
        nodes = order.sample(open_nodes, min(order.randint(1, max_rows), len(open_nodes)))
        ranks = [0 if order.random() < agreement else order.randint(1, 4) for _ in nodes]
        self.write(nodes, ranks, width, [order.random() for _ in range(width)])


def new_dynamic_stage(
    policy: Policy,
    costs: TreeCosts,
    *,
    shape: Shape = Shape.SIBLINGS,
    max_window: int,
    vocab_size: int,
    salt: int,
    max_new_tokens: int,
    gated: bool = False,
) -> DynamicStage:
    """A caption that has just been sent to the target."""
    assert shape in GROWTHS
    gate = Gate(costs) if gated else None
    pipeline = Pipeline(policy, costs, max_window=max_window, vocab_size=vocab_size, gate=gate, shape=shape)
    return DynamicStage(pipeline, toy_target(vocab_size, salt), StopRule((EOS,), max_new_tokens))
