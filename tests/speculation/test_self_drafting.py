"""The target drafts its own windows: many rounds a request, one verdict each, and no draft anywhere."""

import pytest

from slipstream.errors import ProtocolViolation
from slipstream.speculation.pacing import Sequential
from slipstream.speculation.pipeline import Pipeline
from slipstream.speculation.protocol import Commit, Finish, FinishReason, JudgeWindow, Verdict
from tests.speculation.toys import measured_costs


def drafting_itself() -> Pipeline:
    costs = measured_costs(9, 0.8)
    pipeline = Pipeline(Sequential(4), costs, max_window=16, vocab_size=100, undrafted_passes=3, self_draft=4)
    assert pipeline.on_verdict(Verdict(0, 5)) == [Commit((5,), 0), JudgeWindow((), 3, self_draft=4)]
    return pipeline


def test_rounds_follow_each_other_without_being_asked_for() -> None:
    pipeline = drafting_itself()
    assert pipeline.on_verdict(Verdict(2, 8, drafted=(6, 7))) == [Commit((6, 7, 8), 2)]
    assert pipeline.on_verdict(Verdict(0, 9)) == [Commit((9,), 0)]
    last = pipeline.on_verdict(Verdict(4, 3, drafted=(1, 2, 1, 2)))
    assert last == [Commit((1, 2, 1, 2, 3), 4), JudgeWindow((), 3, self_draft=4)]
    assert (pipeline.num_accepted, pipeline.num_judged) == (6, 3 + 1 + 4)
    assert pipeline.num_deaths == 2, "the last of three was right to its end"


def test_the_text_ends_inside_a_round() -> None:
    pipeline = drafting_itself()
    verdict = Verdict(2, None, FinishReason.STOP, drafted=(6, 0))
    assert pipeline.on_verdict(verdict) == [Commit((6, 0), 2), Finish(FinishReason.STOP)]
    assert pipeline.num_deaths == 0
    with pytest.raises(ProtocolViolation):
        pipeline.on_verdict(Verdict(0, 9))


def test_more_than_was_drafted_cannot_be_accepted() -> None:
    with pytest.raises(ProtocolViolation):
        drafting_itself().on_verdict(Verdict(5, 3, drafted=(1, 2, 3, 4, 5)))


def test_self_drafting_teaches_nothing_of_plain_passes() -> None:
    pipeline = drafting_itself()
    weight = pipeline.costs.plain_token_s.weight
    pipeline.on_verdict(Verdict(0, 9), 1.0)
    pipeline.on_verdict(Verdict(0, 9), 1.0)
    assert pipeline.costs.plain_token_s.weight == weight
