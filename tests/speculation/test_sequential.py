"""Draft-then-verify in turns: the draft never writes while the target judges, and windows have the length asked for."""

import random

import pytest

from slipstream.speculation.lines import DraftPhase
from slipstream.speculation.pacing import Sequential
from slipstream.speculation.protocol import JudgeWindow, RestartLine, judge_window
from tests.speculation.toys import Stage, measured_costs, new_stage


def stage_of(gamma: int, max_new_tokens: int = 120) -> Stage:
    return new_stage(
        Sequential(gamma),
        measured_costs(9, 0.8),
        max_window=16,
        vocab_size=5000,
        salt=3,
        max_new_tokens=max_new_tokens,
    )


def act(stage: Stage, agrees: bool) -> None:
    """The one thing that may happen next."""
    draft = stage.draft
    assert draft is not None
    if draft.inbox:
        draft.obey()
    elif draft.outbox:
        stage.deliver()
    elif draft.can_write:
        assert not stage.passes, "the draft writes while the target judges"
        stage.write(agree=agrees)
    else:
        stage.judge()


@pytest.mark.parametrize("gamma", [1, 5, 9])
@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
def test_draft_and_target_take_turns(gamma: int, agreement: float) -> None:
    order = random.Random(gamma)
    stage = stage_of(gamma)
    stage.judge()
    stage.judge()
    for _ in range(len(stage.passes)):
        stage.judge()
    stage.join()
    stage.ready()
    while stage.passes and stage.finish_reason is None:  # plain passes that were asked for before it was ready
        stage.judge()
    windows = []
    while stage.finish_reason is None:
        if stage.passes and stage.pipeline.draft_phase is DraftPhase.WRITING:
            windows.append(len(stage.passes[0]))
        act(stage, order.random() < agreement)
    stage.check_lossless()
    assert set(windows) == {gamma}


def test_the_targets_own_token_is_given_to_the_draft_not_written_by_it() -> None:
    stage = stage_of(2)
    stage.join()
    stage.ready()
    verdict = judge_window((), [stage.next_token([])], 0, stage.rule)
    actions = stage.pipeline.on_verdict(verdict)
    restarts = [action for action in actions if isinstance(action, RestartLine)]
    assert [restart.suffix for restart in restarts] == [(stage.pipeline.committed[0],)]
    assert restarts[0].write_until == 1 + 2
    assert not any(isinstance(action, JudgeWindow) for action in actions), "it holds for the window"
