"""Dynamic trees in simulated time: the real `Pipeline`, line, rules and costs; draft, target and messages are times.

What is right is drawn by output position, as runs of easy and hard ones: the rank of the target's token among the
draft's candidates, and how sure the draft is of each. Behind a wrong token candidates are as sure and never right. A
pass of the draft goes on to its end, whatever is ordered meanwhile, unless it is `interruptible`.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median

from bench.common import make_parser
from bench.output import finish
from bench.simulator import (
    AGREED,
    NS,
    SimulatedCaption,
    SimulatedClock,
    SimulationInput,
    known_costs,
    pass_cost_table,
)
from bench.tables import print_rows
from slipstream.session_messages import DraftTokens
from slipstream.speculation.lines import MAX_NODES
from slipstream.speculation.methods import Shape
from slipstream.speculation.pacing import get_policy
from slipstream.speculation.pipeline import Pipeline
from slipstream.speculation.protocol import (
    ROOT,
    JudgeWindow,
    LineAction,
    MoveLine,
    RestartLine,
    TokenTree,
    Verdict,
    accept_tree,
    end_verdict,
)
from slipstream.speculation.trees.confidence import Confident, TreeCosts
from slipstream.speculation.trees.growth import GROWTHS, Growth
from slipstream.speculation.trees.rows import num_draft_rows

FLUSH_S = 0.005
"""What is written leaves after this long, as `slipstream.engine.line_writer` does."""


@dataclass(frozen=True)
class TreeTrace:
    """What is right of a text, by output position; repeated when the text is longer."""

    ranks: tuple[int, ...]
    """Of the target's token among the candidates, from 0; larger than any width: none is right."""
    sure: tuple[tuple[float, ...], ...]
    """What the draft says of its candidates."""

    @property
    def tau(self) -> float:
        """Share of positions at which the first candidate is right."""
        return self.ranks.count(0) / len(self.ranks)


def draw_trace(tau: float, num_tokens: int = 4000, seed: int = 1) -> TreeTrace:
    """Hard positions (0.4 of all, in runs) carry 78% of the misses; given one, the second candidate is right with 0.45
    and the third with 0.17, as recorded of pocket pairs and of English. The draft's confidence is calibrated."""
    chance, hard_share, stays = random.Random(seed), 0.4, 0.5
    means = {True: 1 - 0.78 * (1 - tau) / hard_share, False: 1 - 0.22 * (1 - tau) / (1 - hard_share)}
    begins, is_hard = hard_share * (1 - stays) / (1 - hard_share), False
    ranks, sure = [], []
    for _ in range(num_tokens):
        is_hard = chance.random() < (stays if is_hard else begins)
        middle = min(max(means[is_hard], 0.03), 0.998)
        p = min(max(chance.betavariate(5 * middle, 5 * (1 - middle)), 0.01), 0.999)
        is_right, other = chance.random() < p, chance.random()
        ranks.append(0 if is_right else 1 if other < 0.45 else 2 if other < 0.62 else 9)
        sure.append((p, 0.45 * (1 - p), 0.17 * (1 - p)))
    return TreeTrace(tuple(ranks), tuple(sure))


@dataclass(frozen=True)
class TreeInput:
    """One simulated caption."""

    base: SimulationInput
    trace: TreeTrace
    shape: Shape | None = None
    """None: a chain, by `self_clocked`."""
    row_share: float = 0.05
    """What a further row of a draft's pass costs, as a share of the pass."""


@dataclass(slots=True)
class _Node:
    position: int
    parent: int
    is_true: bool
    log: float
    is_read: bool = False
    children: list[int] = field(default_factory=list)


class SimulatedTreeDraft:
    """Reads nodes pass by pass and sends their candidates."""

    def __init__(
        self, clock: SimulatedClock, send: Callable[[DraftTokens], None], setup: TreeInput, growth: Growth
    ) -> None:
        self._clock, self._send, self._setup, self._growth = clock, send, setup, growth
        self._orders: deque[LineAction] = deque()
        self._epoch = self._write_until = self._number = self._first_chunk = 0
        self._nodes: dict[int, _Node] = {}
        self._root = ROOT
        self._reading: list[int] = []
        self._unsent: list[tuple[int, int, float]] = []
        self._num_passes = self._since_ns = self._pass = 0

    def pass_s(self, num_rows: int) -> float:
        return self._setup.base.draft_pass_s * (1 + self._setup.row_share * (num_rows - 1))

    def order(self, action: LineAction) -> None:
        self._orders.append(action)
        if self._setup.base.interruptible and isinstance(action, RestartLine):
            self._reading, self._pass = [], self._pass + 1
        self._go_on()

    def _obey(self, order: LineAction) -> int:
        """Nanoseconds that it takes."""
        if isinstance(order, RestartLine):
            self._epoch, self._write_until, self._first_chunk = order.epoch, order.write_until, order.first_chunk
            self._root, self._number = ROOT, 0
            self._nodes = {ROOT: _Node(order.keep + len(order.suffix) - 1, ROOT, True, 0.0)}
            self._unsent.clear()
            return round(self._setup.base.restart_s * NS)
        if order.epoch == self._epoch:
            self._write_until = order.write_until
            if isinstance(order, MoveLine):
                self._move(order.root)
        return 0

    def _move(self, root: int) -> None:
        kept, waiting = {}, [root]
        while waiting:
            number = waiting.pop()
            kept[number] = self._nodes[number]
            waiting += kept[number].children
        self._root, self._nodes = root, kept

    def _go_on(self) -> None:
        if self._reading:
            return
        delay_ns = 0
        while self._orders:
            delay_ns += self._obey(self._orders.popleft())
        open_nodes = [
            (node.log, -number)
            for number, node in self._nodes.items()
            if not node.is_read
            and node.position + 1 < self._write_until
            and (self._growth.rows > 1 or self._is_main(node))
        ]
        if not open_nodes or len(self._nodes) + self._growth.nodes_per_pass > MAX_NODES:
            self._flush()
            return
        if not self._unsent:
            self._since_ns = self._clock.now_ns
        likeliest = heapq.nlargest(self._growth.rows, open_nodes)
        rows = num_draft_rows([math.exp(log - likeliest[0][0]) for log, _ in likeliest], self.pass_s, self._growth.rows)
        self._reading = [-number for _, number in likeliest[:rows]]
        self._pass += 1
        self._clock.after(delay_ns + round(self.pass_s(rows) * NS), partial(self._wrote, self._pass))

    def _is_main(self, node: _Node) -> bool:
        """A chain's last token, or the root: nothing else was the first candidate all the way."""
        while node.position > self._nodes[self._root].position:
            above = self._nodes[node.parent]
            if self._nodes[above.children[0]] is not node:
                return False
            node = above
        return True

    def _wrote(self, number: int) -> None:
        if number != self._pass:
            return
        trace = self._setup.trace
        for parent in self._reading:
            above = self._nodes[parent]
            place = (above.position + 1) % len(trace.ranks)
            above.is_read = True
            for rank, p in enumerate(trace.sure[place][: self._growth.width]):
                is_true = above.is_true and trace.ranks[place] == rank
                node = _Node(above.position + 1, parent, is_true, above.log + math.log(max(p, 1e-6)))
                self._nodes[self._number] = node
                above.children.append(self._number)
                self._unsent.append((AGREED if trace.ranks[place] == rank else rank + 2, parent, p))
                self._number += 1
        self._reading = []
        self._num_passes += 1
        is_first = 0 < self._first_chunk <= self._main_length()
        if is_first or self._clock.now_ns - self._since_ns > FLUSH_S * NS:
            self._flush()
        self._go_on()

    def _main_length(self) -> int:
        length, node = 0, self._nodes[self._root]
        while node.children:
            length, node = length + 1, self._nodes[node.children[0]]
        return length

    def _flush(self) -> None:
        if not self._unsent:
            return
        tokens, parents, sure = zip(*self._unsent, strict=True)
        pass_s = (self._clock.now_ns - self._since_ns) / NS / max(self._num_passes, 1)
        first = self._number - len(tokens)
        said = DraftTokens(self._epoch, first, tokens, pass_s, (), parents, sure, self._num_passes)
        self._send(said)
        self._unsent.clear()
        self._num_passes = self._first_chunk = 0


class SimulatedTrees(SimulatedCaption):
    """The gateway and the target of a caption whose lines are dynamic trees."""

    def __init__(self, setup: TreeInput, shape: Shape) -> None:
        super().__init__(setup.base)
        costs, max_window = known_costs(setup.base, TreeCosts()), setup.base.max_window
        self.pipeline = Pipeline(Confident(), costs, max_window=max_window, vocab_size=32, shape=shape)
        self._draft = SimulatedTreeDraft(self._clock, self._post_nodes, setup, GROWTHS[shape])

    def _verdict_on(self, judge: JudgeWindow) -> Verdict:
        if not judge.parents:
            return super()._verdict_on(judge)
        path, own = accept_tree(TokenTree(judge.window, judge.parents), lambda _, __: AGREED)
        return end_verdict(judge.window, len(path), own, len(self.pipeline.committed), self._rule, path)

    def _post_nodes(self, said: DraftTokens) -> None:
        self._clock.after(self._message_ns, partial(self._nodes_arrive, said))

    def _nodes_arrive(self, said: DraftTokens) -> None:
        self._heard(said.epoch, said.num_passes * said.pass_s)
        actions = self.pipeline.on_draft_tokens(
            said.epoch, said.position, said.token_ids, said.parents, said.pass_s, said.chances
        )
        self._carry_out(actions)


def speed(setup: TreeInput) -> float:
    """Tokens a second."""
    agreement = tuple(rank == 0 for rank in setup.trace.ranks)
    base = replace(setup.base, policy=get_policy("self_clocked"), agreement=agreement)
    caption = SimulatedCaption(base) if setup.shape is None else SimulatedTrees(replace(setup, base=base), setup.shape)
    caption.run()
    return caption.tokens_per_s


# -- the table --------------------------------------------------------------------------------------------------------


def _flat(pass_s: float, until: int) -> Callable[[int], float]:
    """T_p: flat up to so many rows, then one percent a row, as the study took it."""
    return lambda rows: pass_s * (1 + 0.01 * max(rows - until, 0))


_CPU = pass_cost_table(
    {0: 13.3e-3, 1: 16.3e-3, 3: 19.6e-3, 5: 23.5e-3, 8: 29e-3, 12: 33e-3, 16: 37.2e-3, 20: 43e-3, 24: 47.1e-3}
)


@dataclass(frozen=True)
class StudyPoint:
    """A working point, and what the study of dynamic trees simulated there by another program, as speedups over
    `self_clocked`: siblings, branches in a chain's windows, whole trees; at tau 0.7, 0.8 and 0.9."""

    base: SimulationInput
    found: tuple[tuple[float, float, float], ...]
    row_share: float = 0.05


def _point(pass_s: Callable[[int], float], draft_s: float, message_s: float, max_window: int = 32) -> SimulationInput:
    shape = SimulationInput(pass_s, draft_s, None, message_s=message_s, max_window=max_window)
    return replace(shape, num_tokens=1600, interruptible=False)


TAUS = (0.7, 0.8, 0.9)
POINTS = {
    "7B/72B": StudyPoint(
        _point(_flat(0.42, 16), 0.0466, 5e-4), ((1.17, 1.25, 1.43), (1.10, 1.21, 1.34), (1.03, 1.15, 1.23))
    ),
    "7B/32B": StudyPoint(
        _point(_flat(0.203, 16), 0.0398, 5e-4), ((1.11, 1.20, 1.34), (1.06, 1.18, 1.25), (1.05, 1.10, 1.14))
    ),
    "0.5B/7B": StudyPoint(
        _point(_flat(0.0783, 16), 0.0258, 5e-4), ((1.05, 1.16, 1.22), (1.05, 1.13, 1.17), (1.04, 1.10, 1.12))
    ),
    "H100 72B+7B": StudyPoint(
        _point(_flat(0.035, 32), 0.006, 2e-4), ((1.15, 1.18, 1.32), (1.11, 1.18, 1.29), (1.06, 1.11, 1.17))
    ),
    "H100 72B+0.5B": StudyPoint(
        _point(_flat(0.035, 32), 0.0012, 2e-4), ((1.23, 1.18, 1.46), (1.14, 1.15, 1.38), (1.10, 1.18, 1.34))
    ),
    "H200 32B+3B": StudyPoint(
        _point(_flat(0.016, 32), 0.0025, 2e-4), ((1.15, 1.18, 1.35), (1.09, 1.17, 1.29), (1.06, 1.14, 1.18))
    ),
    "CPU pocket": StudyPoint(
        _point(_CPU, 1.6e-3, 1e-3, 24), ((1.15, 1.14, 1.14), (1.12, 1.10, 1.10), (1.01, 1.01, 1.01)), row_share=1.0
    ),
}
SHAPES = (Shape.SIBLINGS, Shape.BRANCHES, Shape.DYNAMIC_TREE)


def tree_rows(seeds: Sequence[int] = (1, 2, 3)) -> list[dict[str, object]]:
    """By working point and tau: each shape's speedup over `self_clocked`, the mean over seeds, beside the study's."""
    rows = []
    for (name, point), (column, tau) in itertools.product(POINTS.items(), enumerate(TAUS)):
        ratios: dict[Shape, list[float]] = {shape: [] for shape in SHAPES}
        for seed in seeds:
            setup = TreeInput(point.base, draw_trace(tau, seed=seed), row_share=point.row_share)
            chain = speed(setup)
            for shape, found in ratios.items():
                found.append(speed(replace(setup, shape=shape)) / chain)
        row: dict[str, object] = {"point": name, "tau": tau}
        for shape, of_study in zip(SHAPES, point.found[column], strict=True):
            row |= {shape.value: round(mean(ratios[shape]), 3), f"{shape.value}, study": of_study}
        rows.append(row)
    return rows


def tree_error(rows: Sequence[dict[str, object]]) -> dict[str, float]:
    """By shape, the median and the largest distance from the study's figures, as a share of them."""
    errors: dict[str, float] = {}
    for shape in SHAPES:
        far = [abs(float(str(row[shape.value])) / float(str(row[f"{shape.value}, study"])) - 1) for row in rows]
        errors |= {shape.value: round(median(far), 3), f"{shape.value}, most": round(max(far), 3)}
    return errors


def main(argv: Sequence[str]) -> None:
    given = make_parser("simulate-trees", "Dynamic trees over self_clocked in simulated time.", seeds=1).parse_args(
        argv
    )
    rows = tree_rows(range(1, given.seeds + 1))
    print_rows("speedup over self_clocked", rows)
    error = tree_error(rows)
    print("distance from the study:", ", ".join(f"{name} {value:.1%}" for name, value in error.items()))
    finish("simulate-trees", {"rows": rows, "error": error})
