"""Trees through the whole protocol: the text is plain decoding's whatever the trees hold and whatever befalls them."""

import random
from collections import deque
from collections.abc import Sequence

import pytest

from slipstream.errors import DraftFault
from slipstream.speculation.lines import DraftPhase
from slipstream.speculation.methods import Shape
from slipstream.speculation.pacing import Sequential
from slipstream.speculation.pipeline import Pipeline
from slipstream.speculation.protocol import (
    Action,
    Commit,
    Finish,
    JudgeWindow,
    RestartLine,
    StopRule,
    TokenTree,
    Verdict,
    accept_tree,
)
from tests.speculation.toys import EOS, Played, measured_costs, toy_target
from tests.support.variants import one_in

VOCAB = 300
RULE = StopRule((EOS,), 80)


def pipeline_of(gamma: int = 4) -> Pipeline:
    costs = measured_costs(9, 0.8)
    return Pipeline(Sequential(gamma), costs, max_window=16, vocab_size=VOCAB, shape=Shape.TREE)


class TreeStage(Played):
    """Plays target and draft. The draft's output is what it was told; its trees hold the right path with luck."""

    def __init__(self, order: random.Random, agreement: float) -> None:
        self.order = order
        self.agreement = agreement
        next_token = toy_target(VOCAB, order.randrange(1000))
        super().__init__(pipeline_of(order.randint(1, 6)), next_token, RULE)
        self.passes: deque[tuple[tuple[int, ...], tuple[int, ...]]] = deque([((), ())])
        self.mail: deque[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = deque()
        self.told: list[int] = []
        self.epoch = self.write_until = 0
        self.ready = False

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case JudgeWindow(window, num_passes, parents):
                    assert not self.passes
                    self.passes.extend([(window, parents), *[((), ())] * (num_passes - 1)])
                case RestartLine():
                    self.told = [*self.told[: action.keep], *action.suffix]
                    assert self.told == self.pipeline.committed
                    self.epoch, self.write_until = action.epoch, action.write_until
                    self.mail.append(self.grow())
                case Commit(tokens, _):
                    self.output.extend(tokens)
                case Finish(reason):
                    self.finish_reason = reason
                case _:
                    raise AssertionError(f"{action} in a tree's turn")

    def grow(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """A random tree behind what the draft was told, no deeper than it may be."""
        tokens: list[int] = []
        parents: list[int] = []
        texts: dict[int, list[int]] = {-1: list(self.told)}
        for _ in range(self.order.randint(1, 12)):
            parent = self.order.choice(list(texts))
            if len(texts[parent]) >= self.write_until:
                continue
            right = self.next_token(texts[parent])
            tokens.append(right if self.order.random() < self.agreement else self.order.randrange(1, VOCAB))
            parents.append(parent)
            texts[len(tokens) - 1] = [*texts[parent], tokens[-1]]
        return self.epoch, len(self.told), tuple(tokens), tuple(parents)

    def join(self) -> None:
        point = self.pipeline.on_draft_joining()
        self.told, self.epoch, self.write_until = list(point.committed), point.epoch, point.write_until
        self.ready = False
        self.mail.clear()

    def become_ready(self) -> None:
        self.ready = True
        self.mail.append(self.grow())
        self.carry_out(self.pipeline.on_draft_ready(len(self.told)))

    def deliver(self) -> None:
        self.carry_out(self.pipeline.on_draft_tokens(*self.mail.popleft()))

    def judge(self) -> None:
        window, parents = self.passes.popleft()
        verdict = self.tree_verdict(window, parents) if window else self.chain_verdict(window)
        if verdict.finish_reason is not None:
            self.passes.clear()
        self.carry_out(self.pipeline.on_verdict(verdict))

    def lose(self) -> None:
        self.mail.clear()
        self.carry_out(self.pipeline.on_draft_lost())


@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(40))
@one_in(3, "agreement", "seed")
def test_the_text_is_the_targets(agreement: float, seed: int) -> None:
    order = random.Random(seed)
    stage = TreeStage(order, agreement)
    pipeline = stage.pipeline
    while stage.finish_reason is None:
        if pipeline.draft_phase is DraftPhase.ABSENT and order.random() < 0.3:
            stage.join()
        elif pipeline.draft_phase is DraftPhase.JOINING and order.random() < 0.5:
            stage.become_ready()
        elif stage.mail and order.random() < 0.7:
            stage.deliver()
        elif stage.passes:
            stage.judge()
        elif order.random() < 0.05:
            stage.lose()
        elif not stage.mail:
            stage.carry_out(pipeline.on_hold_expired())
    stage.check_lossless()


def test_a_tree_is_judged_whole_and_its_path_becomes_text() -> None:
    pipeline = pipeline_of(gamma=3)
    pipeline.on_verdict(Verdict(0, 5))
    pipeline.on_draft_lost()
    for token in range(6, 9):
        pipeline.on_verdict(Verdict(0, token))
    pipeline.on_draft_joining()
    epoch = pipeline.epoch
    committed = len(pipeline.committed)
    pipeline.on_draft_ready(committed)
    pipeline.on_draft_tokens(epoch, committed, (10, 20, 30, 40), (-1, -1, 1, 2))
    actions = pipeline.on_verdict(Verdict(0, 9))
    restart = next(action for action in actions if isinstance(action, RestartLine))
    assert (restart.keep, restart.suffix) == (committed, (9,)), "a tree that a plain pass overtook is over"
    actions = pipeline.on_draft_tokens(restart.epoch, committed + 1, (10, 20, 30, 40), (-1, -1, 1, 2))
    assert actions == [JudgeWindow((10, 20, 30, 40), 1, (-1, -1, 1, 2))]
    actions = pipeline.on_verdict(Verdict(2, 50, path=(1, 2)))
    assert actions[0] == Commit((20, 30, 50), 2)
    assert isinstance(actions[1], RestartLine) and actions[1].suffix == (20, 30, 50)
    assert (pipeline.num_accepted, pipeline.num_judged) == (2, 3)


@pytest.mark.parametrize(
    ("position", "tokens", "parents", "complaint"),
    [
        (0, (1,), (-1,), "1 was next"),
        (1, (), (), "0 nodes"),
        (1, (1, 2), (-1,), "no tree"),
        (1, (1, 2), (-1, 1), "no tree"),
        (1, (1, 2, 3), (-1, 0, 1), "past output position 3"),
        (1, (VOCAB,), (-1,), "vocabulary"),
        (1, tuple(range(1, 258)), (-1,) * 257, "257 nodes"),
    ],
)
def test_no_tree(position: int, tokens: tuple[int, ...], parents: tuple[int, ...], complaint: str) -> None:
    pipeline = pipeline_of(gamma=2)
    pipeline.on_draft_joining()
    pipeline.on_draft_ready(0)
    restart = next(a for a in pipeline.on_verdict(Verdict(0, 5)) if isinstance(a, RestartLine))
    with pytest.raises(DraftFault, match=complaint):
        pipeline.on_draft_tokens(restart.epoch, position, tokens, parents)


def test_a_second_tree_is_refused() -> None:
    pipeline = pipeline_of(gamma=2)
    pipeline.on_draft_joining()
    pipeline.on_draft_ready(0)
    restart = next(a for a in pipeline.on_verdict(Verdict(0, 5)) if isinstance(a, RestartLine))
    pipeline.on_draft_tokens(restart.epoch, 1, (1,), (-1,))
    with pytest.raises(DraftFault, match="second tree"):
        pipeline.on_draft_tokens(restart.epoch, 1, (1,), (-1,))


def test_the_walk_down_a_tree_asks_once_a_step() -> None:
    tree = TokenTree((4, 5, 6, 7), (-1, -1, 1, 2))
    asked: list[tuple[int, tuple[int, ...]]] = []
    choices = {0: 5, 2: 6, 3: 9}

    def choose(row: int, path: tuple[int, ...]) -> int:
        asked.append((row, path))
        return choices[row]

    assert accept_tree(tree, choose) == ((1, 2), 9)
    assert asked == [(0, ()), (2, (1,)), (3, (1, 2))]
