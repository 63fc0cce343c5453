"""The protocol over whole captions in random order, and the single rules that random order only seldom shows."""

import random
from collections.abc import Callable

import pytest

from slipstream.errors import DraftFault, ProtocolViolation
from slipstream.speculation.lines import DraftPhase
from slipstream.speculation.pacing import CostModel, Fixed, Policy, SelfClocked, Sequential
from slipstream.speculation.pipeline import UNDRAFTED_PASSES, Pipeline
from slipstream.speculation.protocol import AdvanceLine, Commit, Finish, FinishReason, JudgeWindow, RestartLine, Verdict
from tests.speculation.toys import Always, Stage, measured_costs, new_stage
from tests.support.variants import one_in


def _random_stage(order: random.Random) -> Stage:
    max_window = order.randint(1, 16)
    policies: tuple[Policy, ...] = (
        Fixed(),
        SelfClocked(),
        Sequential(order.randint(1, 8)),
        Always(order.randint(0, max_window), order.randint(0, 16)),
    )
    return new_stage(
        order.choice(policies),
        measured_costs(order.choice((0.5, 2.0, 9.0, 30.0)), order.choice((0.05, 0.6, 0.9, 0.99)), slope=0.05),
        max_window=max_window,
        vocab_size=order.choice((2, 60, 400, 100_000)),
        salt=order.randrange(1000),
        max_new_tokens=order.randint(1, 150),
    )


def _possible(stage: Stage, agreement: float, order: random.Random) -> list[Callable[[], None]]:
    """What an honest draft and the target can do next, more often what they do more often."""
    draft = stage.draft
    choices: list[Callable[[], None]] = [stage.judge] * 2 if stage.passes else []
    if draft is None:
        return choices
    choices += [] if draft.ready else [stage.ready]
    choices += [draft.obey] * 2 if draft.inbox else []
    choices += [stage.deliver] * 4 if draft.outbox else []
    choices += [lambda: stage.write(agree=order.random() < agreement)] * 6 if draft.can_write else []
    return choices


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(60))
@one_in(4, "agreement", "seed")
def test_an_honest_draft_completes_without_a_hold_ever_expiring(agreement: float, seed: int) -> None:
    order = random.Random(seed)
    stage = _random_stage(order)
    for _ in range(order.randrange(8)):
        if stage.passes:
            stage.judge()
    if stage.finish_reason is None:
        stage.join()
    while stage.finish_reason is None:
        order.choice(_possible(stage, agreement, order))()
    stage.check_lossless()
    if agreement == 1.0:
        assert stage.pipeline.num_deaths == 0
        assert stage.pipeline.num_accepted == stage.pipeline.num_judged, "a text that ends rejects nothing"


@pytest.mark.parametrize("seed", range(100))
def test_the_text_is_the_same_at_one_target_after_the_other(seed: int) -> None:
    order = random.Random(seed)
    stage = _random_stage(order)
    while stage.finish_reason is None:
        choices = _possible(stage, 0.85, order)
        if not choices or order.random() < 0.1:
            choices = [stage.lose_target, *([stage.join] if stage.draft is None else [stage.lose])]
        order.choice(choices)()
    stage.check_lossless()


@pytest.mark.parametrize("seed", range(300))
@one_in(4, "seed")
def test_the_text_is_the_targets_whatever_happens_to_drafts(seed: int) -> None:
    order = random.Random(seed)
    stage = _random_stage(order)
    trouble = order.choice((0.02, 0.1, 0.3))
    while stage.finish_reason is None:
        choices = _possible(stage, 0.85, order)
        if not choices or order.random() < trouble:
            choices = [stage.join] if stage.draft is None else [stage.lose, stage.expire_hold]
        order.choice(choices)()
    stage.check_lossless()
    assert stage.pipeline.on_hold_expired() == []
    assert stage.pipeline.on_draft_ready(0) == []
    assert stage.pipeline.on_draft_tokens(stage.pipeline.epoch, len(stage.output), (1,)) == []
    assert stage.pipeline.on_draft_lost() == []
    with pytest.raises(ProtocolViolation):
        stage.pipeline.on_verdict(Verdict(0, 1))


def _writing(policy: Policy, *, max_window: int = 4) -> Pipeline:
    """A pipeline whose draft writes while the prefill still runs."""
    pipeline = Pipeline(policy, CostModel(), max_window=max_window, vocab_size=100)
    pipeline.on_draft_joining()
    assert pipeline.on_draft_ready(0) == []
    return pipeline


def test_without_a_draft_plain_passes_are_asked_for_in_one_message() -> None:
    pipeline = Pipeline(SelfClocked(), CostModel(), max_window=4, vocab_size=100)
    assert pipeline.on_verdict(Verdict(0, 7)) == [Commit((7,), 0), JudgeWindow((), UNDRAFTED_PASSES)]
    for token in range(UNDRAFTED_PASSES - 1):
        assert pipeline.on_verdict(Verdict(0, token)) == [Commit((token,), 0)]
    assert pipeline.on_verdict(Verdict(0, 9)) == [Commit((9,), 0), JudgeWindow((), UNDRAFTED_PASSES)]


def test_disagreement_on_the_very_first_token_restarts_the_line() -> None:
    pipeline = _writing(Always(0, 4))
    assert pipeline.on_draft_tokens(1, 0, (5, 6)) == []
    actions = pipeline.on_verdict(Verdict(0, 7))
    assert actions == [Commit((7,), 0), RestartLine(2, 0, (7,), 6, 4), JudgeWindow((), 1)]
    assert pipeline.on_draft_tokens(1, 2, (8,)) == [], "a stale line is ignored"


def test_the_line_lives_when_the_bonus_token_is_its_own_next_one() -> None:
    pipeline = _writing(Always(0, 2))
    pipeline.on_draft_tokens(1, 0, (5, 6, 7, 8))
    assert pipeline.on_verdict(Verdict(0, 5)) == [Commit((5,), 0), JudgeWindow((6, 7), 1), AdvanceLine(1, 8)]
    assert pipeline.on_verdict(Verdict(2, 8)) == [Commit((6, 7, 8), 2), JudgeWindow((), 1), AdvanceLine(1, 9)]


def test_a_line_that_falls_two_tokens_behind_restarts_after_them() -> None:
    pipeline = _writing(Always(0, 4))
    assert pipeline.on_verdict(Verdict(0, 5)) == [Commit((5,), 0), JudgeWindow((), 1), AdvanceLine(1, 6)]
    assert RestartLine(2, 0, (5, 6), 7, 4) in pipeline.on_verdict(Verdict(0, 6))
    assert pipeline.num_deaths == 0


def test_a_draft_that_joins_while_its_predecessors_window_runs_is_compared_with_all_of_it() -> None:
    pipeline = _writing(Always(0, 4))
    pipeline.on_draft_tokens(1, 0, (5, 6, 7))
    assert JudgeWindow((6, 7), 1) in pipeline.on_verdict(Verdict(0, 5))
    assert pipeline.on_draft_lost() == []
    point = pipeline.on_draft_joining()
    assert (point.committed, point.write_until) == ((5,), 1 + 2 + 1 + 4)
    pipeline.on_draft_ready(1)
    pipeline.on_draft_tokens(point.epoch, 1, (6, 7, 9, 10))
    actions = pipeline.on_verdict(Verdict(2, 8))
    assert actions[0] == Commit((6, 7, 8), 2)
    assert RestartLine(point.epoch + 1, 3, (8,), 9, 4) in actions


def test_a_hold_for_a_whole_window_is_reached_by_a_draft_that_joined_late() -> None:
    pipeline = Pipeline(Always(4, 4), CostModel(), max_window=4, vocab_size=100)
    point = pipeline.on_draft_joining()
    pipeline.on_verdict(Verdict(0, 0))
    pipeline.on_draft_ready(0)
    pipeline.on_draft_tokens(point.epoch, 0, tuple(range(5)))
    pipeline.on_verdict(Verdict(0, 1))
    actions = pipeline.on_verdict(Verdict(0, 2))
    assert pipeline.holding
    assert pipeline.num_pending == 2
    assert AdvanceLine(point.epoch, 7) in actions, "without it the draft could not write the fourth token"


def test_an_expired_hold_goes_on_and_does_not_hold_again_until_the_draft_writes() -> None:
    pipeline = _writing(Always(2, 4))
    pipeline.on_verdict(Verdict(0, 5))
    assert pipeline.holding
    assert pipeline.on_hold_expired()[0] == JudgeWindow((), 1)
    pipeline.on_verdict(Verdict(0, 6))
    assert not pipeline.holding
    pipeline.on_draft_tokens(pipeline.epoch, 2, (7,))
    pipeline.on_verdict(Verdict(0, 7))
    assert pipeline.holding


def test_a_death_while_holding_starts_what_the_new_line_needs() -> None:
    pipeline = _writing(Fixed())
    pipeline.on_verdict(Verdict(0, 5))
    assert pipeline.holding, "post-verify waits"
    actions = pipeline.on_draft_tokens(1, 0, (6,))
    assert actions[0] == RestartLine(2, 0, (5,), 6, 1)
    assert actions[1] == JudgeWindow((), 1), "pre-verify does not"


@pytest.mark.parametrize(
    ("epoch", "position", "tokens", "complaint"),
    [
        (2, 0, (5,), "never started"),
        (1, 1, (5,), "0 was next"),
        (1, 0, (5,) * 6, "past output position 5"),
        (1, 0, (100,), "vocabulary"),
        (1, 0, (-1,), "vocabulary"),
        (1, 0, (), "without tokens"),
    ],
)
def test_a_draft_that_breaks_the_protocol_is_a_fault(
    epoch: int, position: int, tokens: tuple[int, ...], complaint: str
) -> None:
    pipeline = _writing(Always(0, 4))
    with pytest.raises(DraftFault, match=complaint):
        pipeline.on_draft_tokens(epoch, position, tokens)
    assert pipeline.num_pending == 0


@pytest.mark.parametrize("verdict", [Verdict(1, 5), Verdict(0, None)])
def test_an_impossible_verdict_is_a_violation(verdict: Verdict) -> None:
    pipeline = _writing(Always(0, 4))
    with pytest.raises(ProtocolViolation):
        pipeline.on_verdict(verdict)
    assert pipeline.committed == []


def test_nothing_follows_the_end() -> None:
    pipeline = Pipeline(SelfClocked(), CostModel(), max_window=4, vocab_size=100)
    pipeline.on_verdict(Verdict(0, 7))
    end = pipeline.on_verdict(Verdict(0, 0, FinishReason.STOP))
    assert end == [Commit((0,), 0), Finish(FinishReason.STOP)]
    with pytest.raises(ProtocolViolation):
        pipeline.on_verdict(Verdict(0, 8))
    pipeline.on_draft_joining()
    assert pipeline.on_draft_ready(0) == []
    assert pipeline.committed == [7, 0]


@pytest.mark.parametrize(
    ("policy", "speed_ratio", "first_chunk"),
    [(Always(5, 16), 9, 5), (Always(0, 16), 9, 4), (Always(0, 3), 9, 3), (Always(0, 16), 1, 1), (Fixed(), 9, 1)],
)
def test_a_line_first_sends_what_is_held_for_or_what_half_a_plain_pass_leaves_time_for(
    policy: Policy, speed_ratio: float, first_chunk: int
) -> None:
    pipeline = Pipeline(policy, measured_costs(speed_ratio, 0.9), max_window=16, vocab_size=100)
    point = pipeline.on_draft_joining()
    pipeline.on_draft_ready(0)
    pipeline.on_verdict(Verdict(0, 7))
    restart, *_ = pipeline.on_draft_tokens(point.epoch, 0, (8,))
    assert isinstance(restart, RestartLine)
    assert restart.first_chunk == first_chunk


def test_only_one_draft_takes_part() -> None:
    pipeline = _writing(SelfClocked())
    assert pipeline.draft_phase is DraftPhase.WRITING
    with pytest.raises(AssertionError):
        pipeline.on_draft_joining()
