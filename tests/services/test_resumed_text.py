"""Delivered tokens, judged again by a target that begins anew: what is asked of it, and what it may answer."""

from collections.abc import Sequence

import pytest

from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.plan import make_plan
from slipstream.captioning.resumption import MAX_IN_VAIN, MAX_RESUMPTIONS, REPLAY_WINDOW, Replay, Resumptions
from slipstream.errors import InvalidRequest, ProtocolViolation, ResumeMismatch
from slipstream.options import CaptionOptions
from slipstream.session_messages import Judgement, PassFacts
from slipstream.speculation.protocol import FinishReason, StopRule, Verdict, judge_window

EOS = 0
TEXT = [*range(1, 201), EOS]


def judged(
    written: Sequence[int], window: Sequence[int], *, limit: int = 1000, longest_window: int | None = None
) -> Judgement:
    """What a target says that writes `TEXT` and has written so much."""
    window = tuple(window)[:longest_window]
    choices = (TEXT[len(written) :] + [EOS] * len(window))[: len(window) + 1]
    verdict = judge_window(window, choices, len(written), StopRule((EOS,), limit))
    return Judgement(verdict, tuple(f"<{token}>" for token in verdict.committed(window)), PassFacts(0.1))


def replayed(delivered: Sequence[int], **target: int) -> tuple[Judgement, int]:
    """What is new behind the delivered tokens, and the passes that it took to come there."""
    replay, written, passes = Replay(tuple(delivered)), list[int](), 0
    while True:
        window = replay.window.window
        judgement = judged(written, window, **target)
        written += judgement.verdict.committed(window)
        fresh = replay.take(judgement)
        if fresh is not None:
            assert [token.token_id for token in replay.tokens] == list(delivered)
            assert [token.piece for token in replay.tokens] == [f"<{token}>" for token in delivered]
            return fresh, passes
        passes += 1


@pytest.mark.parametrize("num_delivered", [1, 2, REPLAY_WINDOW, REPLAY_WINDOW + 1, REPLAY_WINDOW + 2, 199, 200])
@pytest.mark.parametrize("longest_window", [1, 7, REPLAY_WINDOW])
def test_what_follows_is_what_would_have_followed(num_delivered: int, longest_window: int) -> None:
    fresh, passes = replayed(TEXT[:num_delivered], longest_window=longest_window)
    assert fresh.verdict.committed(()) == (TEXT[num_delivered],)
    assert fresh.pieces == (f"<{TEXT[num_delivered]}>",)
    assert (fresh.verdict.finish_reason is FinishReason.STOP) == (num_delivered == 200)
    assert passes <= num_delivered // min(longest_window + 1, num_delivered) + 2


def test_a_text_that_was_delivered_whole_only_ends() -> None:
    for delivered, limit, reason in ((TEXT, 1000, FinishReason.STOP), (TEXT[:30], 30, FinishReason.LENGTH)):
        fresh, _ = replayed(delivered, limit=limit)
        assert fresh.verdict == Verdict(0, None, reason) and fresh.pieces == ()


@pytest.mark.parametrize(
    ("delivered", "position"),
    [([9], 1), ([1, 2, 9, 4], 3), ([*TEXT, 7], 202), ([*TEXT[:100], 9], 101)],
    ids=["first", "middle", "past the end", "behind a window"],
)
def test_another_text_is_noticed(delivered: list[int], position: int) -> None:
    with pytest.raises(ResumeMismatch, match=f"token {position} would be another one now"):
        replayed(delivered)


@pytest.mark.parametrize(
    "answer",
    [
        Judgement(Verdict(1, 5), ("a", "b"), PassFacts(0.0)),
        Judgement(Verdict(0, 1), (), PassFacts(0.0)),
        Judgement(Verdict(0, None), (), PassFacts(0.0)),
        Judgement(Verdict(1, 1, path=(3,)), ("a", "b"), PassFacts(0.0)),
    ],
)
def test_a_verdict_that_answers_nothing(answer: Judgement) -> None:
    with pytest.raises(ProtocolViolation):
        Replay((1, 2)).take(answer)


def test_resumptions_are_bounded() -> None:
    resumptions = Resumptions()
    assert [resumptions.begin(number) for number in range(MAX_RESUMPTIONS + 2)] == [True] * MAX_RESUMPTIONS + [
        False
    ] * 2
    for num_tokens in (0, 7):
        in_vain = Resumptions()
        assert [in_vain.begin(num_tokens) for _ in range(MAX_IN_VAIN + 1)] == [True] * MAX_IN_VAIN + [False]


# -- plans ------------------------------------------------------------------------------------------------------------

CONFIG = GatewayConfig(listen="", target="t:1", draft="d:1")


@pytest.mark.parametrize(
    ("options", "why_not"),
    [
        ({}, ""),
        ({"temperature": 1.0}, ""),
        ({"temperature": 1.0, "sampling_rule": "rejection"}, "rule 'rejection' depends on its draft"),
        ({"temperature": 1.0, "sampling_rule": "rejection", "method": "autoregressive"}, ""),
        ({"temperature": 1.0, "sampling_rule": "rejection", "method": "std"}, ""),
        ({"method": "autoregressive", "lossy": "fastv"}, ""),
        ({"method": "hsd", "tolerance": 1.0}, ""),
        ({"method": "hsd", "tolerance": 0.9}, "with a tolerance below 1 depends on its hints"),
    ],
)
def test_a_text_that_depends_on_what_is_drafted_is_not_resumed(options: dict[str, object], why_not: str) -> None:
    def plan() -> object:
        return make_plan(CaptionOptions.from_mapping(options), CONFIG, delivered=(1, 2))

    if not why_not:
        assert plan()
    else:
        with pytest.raises(InvalidRequest, match=f"{why_not} and cannot be resumed"):
            plan()


def test_more_was_delivered_than_was_asked_for() -> None:
    def make(count: int) -> object:
        return make_plan(CaptionOptions(max_new_tokens=3), CONFIG, delivered=[5] * count)

    assert make(3)
    with pytest.raises(InvalidRequest, match="resume_after has 4 tokens, and the caption at most 3"):
        make(4)
