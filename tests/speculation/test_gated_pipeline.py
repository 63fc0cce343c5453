"""The protocol with a gate: the text is the same, the draft rests while the gate is closed, and it opens again."""

import random
from collections import Counter

import pytest

from slipstream.speculation.gate import FIRST_REST, FRUITLESS, RECONSIDER, Gate
from slipstream.speculation.lines import DraftPhase
from slipstream.speculation.pacing import CostModel, Fixed, SelfClocked
from slipstream.speculation.pipeline import UNDRAFTED_PASSES, Pipeline
from slipstream.speculation.protocol import Commit, Finish, FinishReason, JudgeWindow, RestartLine, Verdict
from tests.speculation.toys import Always, Stage, measured_costs, new_stage

Seen = Counter[str]


def _play(seed: int) -> Seen:
    """One caption of up to 400 tokens in random order, by a draft that is bad, good or both in turn, and may die."""
    order, seen = random.Random(seed), Counter[str]()
    stage = new_stage(
        order.choice((Fixed(), SelfClocked(), Always(2, 8))),
        measured_costs(9.0, order.choice((0.1, 0.9)), slope=0.05),
        max_window=8,
        vocab_size=100_000,
        salt=seed,
        max_new_tokens=order.randint(50, 400),
        gated=True,
    )
    agreement, trouble = order.choice(((0.0, 0.0), (0.95, 0.95), (0.95, 0.0))), order.choice((0.0, 0.01))
    while stage.finish_reason is None:
        was_gated, phase = stage.pipeline.gated, stage.pipeline.draft_phase
        agree = agreement[len(stage.output) > 150]
        if stage.draft is None:
            if order.random() < 0.2:
                stage.join()
                seen["joined while closed"] += was_gated
        elif order.random() < trouble:
            stage.lose()
            seen["lost while closed"] += was_gated
        if stage.draft is not None and order.random() < 0.9:
            _draft_acts(stage, agree, order)
        elif stage.passes:
            stage.judge(1.0 + 0.05 * len(stage.passes[0]), 0.1 * order.random())
        seen["closed"] += stage.pipeline.gated and not was_gated
        seen["opened"] += was_gated and not stage.pipeline.gated and phase is DraftPhase.RESTING
    stage.check_lossless()
    gate = stage.pipeline.gate
    assert gate is not None and gate.num_closings == seen["closed"]
    seen["ended while closed"] += stage.pipeline.gated
    seen["gated tokens"] += gate.num_gated_tokens
    seen["tokens"] += len(stage.output)
    return seen


def _draft_acts(stage: Stage, agreement: float, order: random.Random) -> None:
    draft = stage.draft
    assert draft is not None
    if not draft.ready:
        stage.ready()
    elif draft.inbox:
        draft.obey()
    elif draft.outbox:
        stage.deliver()
    elif draft.can_write:
        stage.write(agree=order.random() < agreement)


def test_the_text_does_not_depend_on_the_gate_and_everything_happens() -> None:
    seen = sum((_play(seed) for seed in range(120)), Counter[str]())
    for event in ("closed", "opened", "joined while closed", "lost while closed", "ended while closed"):
        assert seen[event] >= 3, event
    assert seen["gated tokens"] < seen["tokens"]


def _closed(*, resting: bool = True) -> Pipeline:
    """A pipeline whose gate has just closed over a draft that only writes nonsense; 5 plain passes are in flight."""
    costs = CostModel()
    costs.plain_token_s.observe(1.0)
    pipeline = Pipeline(Always(0, 4), costs, max_window=4, vocab_size=100, gate=Gate(costs))
    pipeline.on_draft_joining()
    pipeline.on_draft_ready(0)
    pipeline.on_verdict(Verdict(0, 7), 1.0)
    while not pipeline.gated:
        actions = pipeline.on_verdict(Verdict(0, 7), 2.5)
    rest, judge = actions[1:]
    num_committed = len(pipeline.committed)
    assert isinstance(rest, RestartLine)
    assert (rest.keep + len(rest.suffix), rest.write_until) == (num_committed, num_committed)
    assert judge == JudgeWindow((), RECONSIDER)
    assert pipeline.draft_phase is DraftPhase.RESTING
    if not resting:
        pipeline.on_draft_lost()
    return pipeline


def test_a_draft_that_is_late_is_not_taken_for_a_bad_one() -> None:
    """It may have had to wait while prompts of others were run."""
    costs = CostModel()
    costs.plain_token_s.observe(1.0)
    pipeline = Pipeline(Always(0, 4), costs, max_window=4, vocab_size=100, gate=Gate(costs))
    pipeline.on_draft_joining()
    pipeline.on_draft_ready(0)
    for _ in range(2 * FRUITLESS):
        pipeline.on_verdict(Verdict(0, 7), 1.0)
    assert pipeline.draft_phase is DraftPhase.WRITING and not pipeline.gated
    for _ in range(FRUITLESS + 1):  # what it writes is wrong by the time it could be judged
        assert not pipeline.gated
        pipeline.on_draft_tokens(pipeline.epoch, len(pipeline.committed), (5,))
        pipeline.on_verdict(Verdict(0, 7), 1.0)
    assert pipeline.gated


def _pass_plainly(pipeline: Pipeline, count: int) -> list[object]:
    """Plain verdicts; all actions but the commits."""
    actions = [action for _ in range(count) for action in pipeline.on_verdict(Verdict(0, 9), 1.0)]
    return [action for action in actions if not isinstance(action, Commit)]


def test_the_draft_hears_nothing_until_the_rest_is_over_and_then_gets_all_it_lacks() -> None:
    pipeline = _closed()
    epoch, num_known = pipeline.epoch, len(pipeline.committed)
    assert _pass_plainly(pipeline, RECONSIDER) == [JudgeWindow((), FIRST_REST - RECONSIDER)]
    restart, judge, *_ = _pass_plainly(pipeline, FIRST_REST - RECONSIDER)
    assert isinstance(restart, RestartLine) and isinstance(judge, JudgeWindow)
    assert (restart.epoch, restart.keep, restart.suffix) == (epoch + 1, num_known, (9,) * FIRST_REST)
    assert restart.may_write and judge.num_passes == 1
    assert pipeline.draft_phase is DraftPhase.WRITING
    assert not pipeline.gated


def test_a_resting_draft_is_not_called_silent_and_its_late_tokens_are_ignored() -> None:
    pipeline = _closed()
    assert not pipeline.draft_owes
    assert not pipeline.holding
    assert pipeline.on_draft_tokens(pipeline.epoch - 1, 2, (5,)) == []
    assert pipeline.num_pending == 0


@pytest.mark.parametrize("num_passed", [0, 3, RECONSIDER])
def test_a_draft_that_joins_while_the_gate_is_closed_writes_nothing(num_passed: int) -> None:
    pipeline = _closed(resting=False)
    _pass_plainly(pipeline, num_passed)
    point = pipeline.on_draft_joining()
    assert point.write_until == len(point.committed)
    _pass_plainly(pipeline, 2)
    assert pipeline.on_draft_ready(len(point.committed)) == []
    assert not pipeline.draft_owes
    while pipeline.gated:
        num_known, actions = len(pipeline.committed), _pass_plainly(pipeline, 1)
    (restart,) = (action for action in actions if isinstance(action, RestartLine))
    assert (restart.keep, len(restart.suffix)) == (len(point.committed), num_known + 1 - len(point.committed))


def test_a_draft_that_joined_before_the_gate_closed_is_told_to_rest_when_it_is_ready() -> None:
    costs = CostModel()
    costs.plain_token_s.observe(1.0)
    pipeline = Pipeline(Always(0, 4), costs, max_window=4, vocab_size=100, gate=Gate(costs))
    pipeline.on_draft_joining()
    pipeline.on_draft_ready(0)
    pipeline.on_verdict(Verdict(0, 7), 1.0)
    for _ in range(3):
        pipeline.on_verdict(Verdict(0, 7), 2.3)
    pipeline.on_draft_lost()
    point = pipeline.on_draft_joining()
    pipeline.on_verdict(Verdict(0, 7), 2.3)
    assert pipeline.gated and pipeline.draft_phase is DraftPhase.JOINING
    (rest,) = pipeline.on_draft_ready(len(point.committed))
    assert isinstance(rest, RestartLine) and not rest.may_write
    assert rest.epoch == point.epoch + 1


def test_a_gate_that_opens_without_a_draft_leaves_plain_decoding_as_it_is() -> None:
    pipeline = _closed(resting=False)
    assert _pass_plainly(pipeline, FIRST_REST)[-1] == JudgeWindow((), UNDRAFTED_PASSES)
    assert not pipeline.gated


def test_the_text_may_end_while_the_gate_is_closed() -> None:
    pipeline = _closed()
    actions = pipeline.on_verdict(Verdict(0, 0, FinishReason.STOP), 1.0)
    assert actions == [Commit((0,), 0), Finish(FinishReason.STOP)]
    assert pipeline.on_draft_lost() == []


def test_the_first_caption_measures_plain_decoding_while_its_draft_rests_and_not_while_it_prefills() -> None:
    costs = CostModel()
    gate = Gate(costs)
    pipeline = Pipeline(SelfClocked(), costs, max_window=4, vocab_size=100, gate=gate)
    pipeline.on_draft_joining()
    for _ in range(7):
        pipeline.on_verdict(Verdict(0, 7), 0.9)
    assert not costs.plain_token_s.weight
    pipeline.on_draft_ready(0)
    assert pipeline.draft_phase is DraftPhase.RESTING
    for _ in range(20):
        if pipeline.gated:
            pipeline.on_verdict(Verdict(0, 7), 0.3)
    assert pipeline.draft_phase is DraftPhase.WRITING
    assert gate.plain_s == costs.plain_token_s.value == pytest.approx(0.3)
    assert (gate.loss, gate.num_closings) == (0.0, 0)


def test_a_caption_without_a_draft_measures_plain_decoding_for_later_ones() -> None:
    costs = CostModel()
    pipeline = Pipeline(SelfClocked(), costs, max_window=4, vocab_size=100, undrafted_passes=50)
    for _ in range(10):
        pipeline.on_verdict(Verdict(0, 7), 0.3)
    assert costs.plain_token_s.value == pytest.approx(0.3)
    assert not Gate(costs).closed
