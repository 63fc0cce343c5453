"""Dynamic trees over whole captions in random order, and what only seldom shows there."""

import math
import random
from collections.abc import Sequence

import pytest

from slipstream.errors import DraftFault, FaultKind
from slipstream.speculation.lines import MAX_NODES
from slipstream.speculation.methods import Shape
from slipstream.speculation.pacing import Policy, SelfClocked
from slipstream.speculation.pipeline import Pipeline
from slipstream.speculation.protocol import Action, Commit, JudgeWindow, MoveLine, RestartLine, Verdict
from slipstream.speculation.trees.confidence import Confident
from slipstream.speculation.trees.growth import GROWTHS
from tests.speculation.dynamic_toys import DynamicStage, new_dynamic_stage, tree_costs
from tests.speculation.toys import Always, Stage, measured_costs, new_stage
from tests.support.variants import one_in

SHAPES = sorted(GROWTHS)
VOCAB = 50


def _random_stage(order: random.Random) -> DynamicStage:
    max_window, shape = order.randint(1, 16), order.choice(SHAPES)
    policies: tuple[Policy, ...] = (Confident(), SelfClocked(), Always(order.randint(0, max_window), max_window))
    stage = _stage(order, order.choice(policies), shape, max_window)
    stage.least_chance = order.choice((0.0, GROWTHS[shape].least_chance))
    return stage


def _stage(order: random.Random, policy: Policy, shape: Shape, max_window: int) -> DynamicStage:
    slope = order.choice((0.0, 0.1))
    return new_dynamic_stage(
        policy,
        tree_costs(order.choice((0.5, 2.0, 9.0, 30.0)), order.choice((0.05, 0.6, 0.99)), slope=slope),
        shape=shape,
        max_window=max_window,
        vocab_size=order.choice((2, 60, 400, 100_000)),
        salt=order.randrange(1000),
        max_new_tokens=order.randint(1, 120),
        gated=order.random() < 0.3,
    )


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(40))
@one_in(4, "agreement", "seed")
def test_an_honest_draft_completes(agreement: float, seed: int) -> None:
    order = random.Random(seed)
    stage = _random_stage(order)
    stage.join()
    while stage.finish_reason is None:
        stage.act(order, agreement, order.choice((1, 2, 3)), 3)
    stage.check_lossless()
    if agreement == 1.0:
        assert stage.pipeline.num_deaths == 0
        assert stage.pipeline.num_accepted == stage.pipeline.num_judged


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if GROWTHS[shape].least_chance])
def test_no_target_waits_for_a_draft_that_rests(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one lost for its silence."""
    num_rests = 0
    for seed in range(40):
        order = random.Random(seed)
        stage = _stage(order, Confident(), shape, 16)
        stage.least_chance = GROWTHS[shape].least_chance
        monkeypatch.setattr(stage, "expire_hold", lambda: pytest.fail("the target waits, and nothing will come"))
        stage.join()
        while stage.finish_reason is None:
            stage.act(order, 0.8, 3, 3)
            if (draft := stage.draft) is not None and draft.ready and not (draft.inbox or draft.outbox):
                is_due = bool(draft.may_read(9, stage.least_chance))
                num_rests += not is_due and bool(draft.may_read(9))
                assert is_due or stage.finish_reason is not None or not stage.pipeline.draft_owes
        stage.check_lossless()
    assert num_rests > 5


def test_no_target_waits_behind_an_unlikely_node_for_what_is_written_beside() -> None:
    """Its main path ends where the draft rests; beside it the draft goes on and on."""
    pipeline = _writing(shape=Shape.BRANCHES, max_window=16)
    _says(pipeline, 0, (5, 6, 7, 8), (-1, -1, 0, 0), 0.6, 0.35, 0.3, 0.3)
    assert pipeline.draft_owes, "behind the second one"
    assert not pipeline._line.moment(16).is_due  # type: ignore[attr-defined]
    _says(pipeline, 4, (9, 9), (1, 1), 0.1, 0.1)
    assert not pipeline.draft_owes


@pytest.mark.parametrize("seed", range(200))
@one_in(4, "seed")
def test_the_text_is_the_targets_whatever_happens(seed: int) -> None:
    order = random.Random(seed)
    stage = _random_stage(order)
    trouble = order.choice((0.02, 0.1, 0.3))
    while stage.finish_reason is None:
        if order.random() < trouble:
            if stage.draft is None:
                stage.join()
            else:
                order.choice([stage.lose, stage.expire_hold, stage.lose_target])()
        elif stage.draft is None and not stage.passes:
            stage.join()
        else:
            stage.act(order, 0.7, 3, 3)
    stage.check_lossless()


# -- width 1 ----------------------------------------------------------------------------------------------------------


def _heard_alike(chain: Stage, tree: DynamicStage) -> None:
    """What the draft of chains says next, said as the tree whose every node has one candidate."""
    assert chain.draft is not None and tree.draft is not None
    epoch, position, tokens = chain.draft.outbox[0]
    base, draft = tree.bases[epoch], tree.draft
    first = position - base
    parents = tuple(number - 1 for number in range(first, first + len(tokens)))
    draft.outbox.append((epoch, first, tokens, parents, 0.0, ()))


class _Twin(DynamicStage):
    """Of a stage with chains; its draft is told what that of the chains is told."""

    def __init__(self, stage: Stage, *, seed_policy: Policy) -> None:
        pipeline = Pipeline(
            seed_policy,
            tree_costs(9.0, 0.8),
            max_window=stage.pipeline.max_window,
            vocab_size=stage.pipeline.vocab_size,
            shape=Shape.SIBLINGS,
        )
        super().__init__(pipeline, stage.next_token, stage.rule)
        self.bases: dict[int, int] = {}

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, RestartLine):
                self.bases[action.epoch] = action.keep + len(action.suffix)
        super().carry_out(actions)


@pytest.mark.parametrize("policy", [SelfClocked(), Always(0, 3), Always(2, 5)])
@pytest.mark.parametrize("seed", range(40))
@one_in(3, "policy", "seed")
def test_of_width_one_it_acts_token_for_token_as_a_chain(policy: Policy, seed: int) -> None:
    order = random.Random(seed)
    chain = new_stage(
        policy, measured_costs(9.0, 0.8), max_window=6, vocab_size=60, salt=seed, max_new_tokens=order.randint(1, 90)
    )
    chain.pipeline.costs.target_pass_s.observe(0, 1.0)
    twin = _Twin(chain, seed_policy=Confident() if isinstance(policy, SelfClocked) else policy)
    twin.pipeline.costs.target_pass_s.observe(0, 1.0)
    windows: tuple[list[object], list[object]] = ([], [])
    chain.join()
    twin.join()
    twin.bases[twin.pipeline.epoch] = 0
    chain.ready()
    twin.ready()
    while chain.finish_reason is None:
        draft = chain.draft
        assert draft is not None
        choices = ["judge"] * 2 if chain.passes else []
        choices += ["obey"] * 2 if draft.inbox else []
        choices += ["deliver"] * 4 if draft.outbox else []
        choices += ["write"] * 6 if draft.can_write else []
        match order.choice(choices):
            case "judge":
                assert twin.passes[0][0] == chain.passes[0]
                windows[0].append(chain.passes[0])
                chain.judge()
                twin.judge()
            case "obey":
                draft.obey()
            case "write":
                chain.write(agree=order.random() < 0.8)
            case "deliver":
                _heard_alike(chain, twin)
                chain.deliver()
                twin.deliver()
        assert twin.output == chain.output
        assert [len(window) for window in chain.passes] == [len(window) for window, _ in twin.passes]
        assert twin.pipeline.epoch == chain.pipeline.epoch
        assert twin.pipeline._line.write_until == chain.pipeline._line.write_until
    assert twin.finish_reason == chain.finish_reason
    assert (twin.pipeline.num_deaths, len(windows[0]) > 0) == (chain.pipeline.num_deaths, True)


# -- single rules -----------------------------------------------------------------------------------------------------


def _writing(*, shape: Shape = Shape.SIBLINGS, hold: int = 0, max_window: int = 6) -> Pipeline:
    """A pipeline whose draft writes while the prefill still runs."""
    pipeline = Pipeline(
        Always(hold, max_window), tree_costs(9.0, 0.8), max_window=max_window, vocab_size=VOCAB, shape=shape
    )
    pipeline.on_draft_joining()
    assert pipeline.on_draft_ready(0) == []
    return pipeline


def _says(
    pipeline: Pipeline, first: int, tokens: tuple[int, ...], parents: tuple[int, ...], *chances: float
) -> list[Action]:
    return pipeline.on_draft_tokens(pipeline.epoch, first, tokens, parents, chances=chances or (0.9,) * len(tokens))


def test_a_sibling_that_is_right_commits_a_token_more_and_ends_the_line() -> None:
    pipeline = _writing()
    _says(pipeline, 0, (5, 6, 7, 8), (-1, -1, 0, 0), 0.6, 0.3, 0.6, 0.3)
    actions = pipeline.on_verdict(Verdict(0, 5))
    assert actions[1:] == [JudgeWindow((7, 8), 1, (-1, -1)), MoveLine(1, 0, 9)]
    commit, restart, *_ = pipeline.on_verdict(Verdict(1, 9, path=(1,)))
    assert commit == Commit((8, 9), 1)
    assert isinstance(restart, RestartLine) and (restart.keep, restart.suffix) == (1, (8, 9))
    assert pipeline.num_deaths == 1


def test_a_correction_that_was_second_best_restarts_behind_it() -> None:
    pipeline = _writing()
    _says(pipeline, 0, (5, 6, 7, 8), (-1, -1, 0, 0))
    _, restart, *_ = pipeline.on_verdict(Verdict(0, 6))
    assert isinstance(restart, RestartLine) and (restart.keep, restart.suffix) == (0, (6,))
    assert (pipeline.num_accepted, pipeline.num_judged) == (1, 1)


def test_a_draft_that_goes_on_behind_siblings_is_waited_for() -> None:
    pipeline = _writing(shape=Shape.BRANCHES)
    _says(pipeline, 0, (5, 6, 7, 8), (-1, -1, 0, 0), 0.6, 0.3, 0.6, 0.3)
    assert pipeline.on_verdict(Verdict(0, 5))[1] == JudgeWindow((7, 8), 1, (-1, -1))
    actions = pipeline.on_verdict(Verdict(1, 9, path=(1,)))
    assert actions[0] == Commit((8, 9), 1)
    assert actions[1] == JudgeWindow((), 1), "nobody has been behind the sibling yet"
    assert actions[2] == MoveLine(1, 3, 10)
    restart = _says(pipeline, 4, (1, 2), (3, 3))[0]
    assert isinstance(restart, RestartLine) and (restart.keep, restart.suffix) == (2, (9,))


def test_a_branch_behind_the_targets_own_token_lives_on() -> None:
    pipeline = _writing(shape=Shape.BRANCHES)
    _says(pipeline, 0, (5, 6, 7, 8, 9, 10), (-1, -1, 0, 0, 1, 1))
    actions = pipeline.on_verdict(Verdict(0, 6))
    assert actions[1] == JudgeWindow((9, 10), 1, (-1, -1))
    assert actions[2] == MoveLine(1, 1, 9)
    assert pipeline.num_deaths == 0


def test_what_follows_a_dropped_node_crossed_a_verdict_and_is_let_pass() -> None:
    pipeline = _writing(shape=Shape.BRANCHES)
    _says(pipeline, 0, (5, 6), (-1, -1))
    pipeline.on_verdict(Verdict(0, 6))
    assert _says(pipeline, 2, (7, 8), (0, 0)) == []
    assert _says(pipeline, 4, (1,), (2,)) == [], "nor does it know its children"
    assert pipeline.num_pending == 0
    assert _says(pipeline, 5, (9,), (1,)) == []
    assert pipeline.num_pending == 1


def test_a_whole_tree_is_judged_where_rows_are_cheap_the_likeliest_first() -> None:
    pipeline = _writing(shape=Shape.DYNAMIC_TREE, max_window=5)
    pipeline.on_draft_tokens(1, 0, (4,), (-1,), chances=(0.9,))
    _says(pipeline, 1, (5, 6, 7), (0, 0, 0), 0.55, 0.35, 0.05)
    _says(pipeline, 4, (8, 9), (1, 1), 0.25, 0.15)
    _says(pipeline, 6, (10, 11), (2, 2), 0.95, 0.01)
    actions = pipeline.on_verdict(Verdict(0, 4))
    assert actions[1] == JudgeWindow((5, 6, 10, 8, 9), 1, (-1, -1, 1, 0, 0))
    actions = pipeline.on_verdict(Verdict(2, 3, path=(1, 2)))
    assert actions[0] == Commit((6, 10, 3), 2)
    assert MoveLine(1, 6, pipeline._line.write_until) in actions, "what follows node 6 was not written yet"
    assert pipeline.num_deaths == 0


@pytest.mark.parametrize(
    ("first", "tokens", "parents", "chances", "complaint"),
    [
        (1, (5,), (-1,), (0.5,), "node 1; 0 was next"),
        (0, (5, 6), (-1, 1), (0.5, 0.5), "no tree"),
        (0, (5, 6), (0, -1), (0.5, 0.5), "no tree"),
        (0, (5,), (-2,), (0.5,), "no tree"),
        (0, (5, 6), (-1,), (0.5, 0.5), "no tree"),
        (0, (), (), (), "no tree"),
        (0, (5,), (-1,), (math.nan,), "chances"),
        (0, (5,), (-1,), (math.inf,), "chances"),
        (0, (5,), (-1,), (-0.1,), "chances"),
        (0, (5,), (-1,), (1.1,), "chances"),
        (0, (5, 6), (-1, -1), (0.5,), "chances"),
        (0, (VOCAB,), (-1,), (0.5,), "vocabulary"),
        (0, (-1,), (-1,), (0.5,), "vocabulary"),
        (0, (5,) * 8, tuple(range(-1, 7)), (0.5,) * 8, "past output position 7"),
        (0, (5,) * (MAX_NODES + 1), (-1,) * (MAX_NODES + 1), (0.5,) * (MAX_NODES + 1), "past node 256"),
    ],
)
def test_a_draft_that_breaks_the_protocol_is_a_fault(
    first: int, tokens: tuple[int, ...], parents: tuple[int, ...], chances: tuple[float, ...], complaint: str
) -> None:
    pipeline = _writing()
    with pytest.raises(DraftFault, match=complaint):
        pipeline.on_draft_tokens(pipeline.epoch, first, tokens, parents, chances=chances)
    assert pipeline.on_draft_lost() == []
    assert pipeline.num_pending == 0


def test_a_node_has_its_candidates_once() -> None:
    pipeline = _writing()
    _says(pipeline, 0, (5, 6), (-1, -1))
    with pytest.raises(DraftFault, match="a second time what follows its node -1") as caught:
        _says(pipeline, 2, (7,), (-1,))
    assert caught.value.kind is FaultKind.ORDER


def test_more_nodes_may_come_than_live_at_once() -> None:
    pipeline = _writing(shape=Shape.BRANCHES)
    wide = 40
    first = 0
    root = -1
    for _ in range(2 * MAX_NODES // wide):
        _says(pipeline, first, tuple(range(wide)), (root,) * wide)
        root, first = first + 7, first + wide
        assert any(isinstance(action, MoveLine) for action in pipeline.on_verdict(Verdict(0, 7)))
    _says(pipeline, first, tuple(range(wide)), (root,) * wide)
    for node in range(1, MAX_NODES // wide):
        _says(pipeline, first + node * wide, tuple(range(wide)), (first + node,) * wide)
    with pytest.raises(DraftFault, match="256 may live"):
        _says(pipeline, first + MAX_NODES // wide * wide, tuple(range(wide)), (first + wide - 1,) * wide)


def test_a_message_of_a_line_that_ended_is_let_pass() -> None:
    pipeline = _writing()
    _says(pipeline, 0, (5, 6), (-1, -1))
    assert any(isinstance(action, RestartLine) for action in pipeline.on_verdict(Verdict(0, 7)))
    assert pipeline.on_draft_tokens(1, 2, (8, 9), (0, 0), chances=(0.5, 0.5)) == []
    with pytest.raises(DraftFault, match="node 9; 4 was next"):
        pipeline.on_draft_tokens(1, 9, (8,), (0,), chances=(0.5,))
