"""Greedy acceptance, and that nothing is ever committed past the end of the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.speculation.protocol import FinishReason, StopRule, Verdict, accept_greedy, end_verdict, judge_window

EOS = 0
FAR = StopRule((EOS,), 1000)
TOKENS = st.lists(st.integers(0, 3), max_size=8)


@pytest.mark.parametrize(
    ("window", "choices", "expected"),
    [
        ([], [5], (0, 5)),
        ([5, 6], [5, 6, 7], (2, 7)),
        ([5, 6], [5, 9, 7], (1, 9)),
        ([5, 6], [9, 6, 7], (0, 9)),
        ([5, 6, 7], [5, 9, 7, 8], (1, 9)),
    ],
)
def test_the_accepted_prefix_ends_at_the_first_difference(
    window: list[int], choices: list[int], expected: tuple[int, int]
) -> None:
    assert accept_greedy(window, choices) == expected


@pytest.mark.parametrize("choices", [[1], [1, 2], [1, 2, 3, 4]])
def test_a_window_needs_one_choice_more_than_it_has_tokens(choices: list[int]) -> None:
    with pytest.raises(ValueError, match="needs 3 choices"):
        accept_greedy([1, 2], choices)


def test_an_end_token_inside_the_window_ends_the_text_there() -> None:
    verdict = judge_window([5, EOS, 6], [5, EOS, 6, 7], 0, FAR)
    assert verdict == Verdict(2, None, FinishReason.STOP)
    assert verdict.committed([5, EOS, 6]) == (5, EOS)


def test_an_end_token_as_the_targets_own_ends_the_text() -> None:
    verdict = judge_window([5, 6], [5, EOS, 7], 0, FAR)
    assert verdict == Verdict(1, EOS, FinishReason.STOP)
    assert verdict.committed([5, 6]) == (5, EOS)


def test_an_end_token_that_the_target_rejects_ends_nothing() -> None:
    assert judge_window([EOS, 6], [5, 6, 7], 0, FAR) == Verdict(0, 5)


def test_every_end_token_counts() -> None:
    assert judge_window([], [9], 0, StopRule({0, 9}, 1000)).finish_reason is FinishReason.STOP


@pytest.mark.parametrize("room", range(1, 6))
def test_the_limit_cuts_a_window_at_any_position(room: int) -> None:
    window = [1, 2, 3, 4]
    verdict = judge_window(window, [1, 2, 3, 4, 5], 10, StopRule((EOS,), 10 + room))
    assert verdict.committed(window) == (1, 2, 3, 4, 5)[:room]
    assert verdict.finish_reason is FinishReason.LENGTH
    assert (verdict.own_token is None) == (room <= 4)


def test_an_end_token_at_the_limit_is_a_stop() -> None:
    assert judge_window([], [EOS], 9, StopRule((EOS,), 10)).finish_reason is FinishReason.STOP


@settings(max_examples=300, deadline=None, derandomize=True)
@given(window=TOKENS, choices=st.lists(st.integers(0, 3), min_size=9, max_size=9), limit=st.integers(1, 12))
def test_a_verdict_commits_what_one_token_at_a_time_would(window: list[int], choices: list[int], limit: int) -> None:
    choices = choices[: len(window) + 1]
    verdict = judge_window(window, choices, 0, StopRule((EOS,), limit))
    expected: list[int] = []
    reason = None
    for index, choice in enumerate(choices):
        expected.append(choice)
        reason = FinishReason.STOP if choice == EOS else FinishReason.LENGTH if len(expected) == limit else None
        if reason is not None or index == len(window) or window[index] != choice:
            break
    assert verdict.committed(window) == tuple(expected)
    assert verdict.finish_reason is reason


def test_a_verdict_that_a_sampler_took_ends_where_the_text_does() -> None:
    window = [5, EOS, 6]
    assert end_verdict(window, 3, 7, 0, FAR) == Verdict(2, None, FinishReason.STOP)
    assert end_verdict(window, 1, EOS, 0, FAR) == Verdict(1, EOS, FinishReason.STOP)
    assert end_verdict(window, 1, 7, 0, FAR) == Verdict(1, 7)
    assert end_verdict(window, 1, 7, 8, StopRule((EOS,), 10)) == Verdict(1, 7, FinishReason.LENGTH)
    assert end_verdict(window, 1, 7, 9, StopRule((EOS,), 10)) == Verdict(1, None, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("index", "committed"), [(0, (1,)), (1, (1, 2)), (2, (1, 2, 3)), (3, (1, 2, 3, 9))], ids=["0", "1", "2", "own"]
)
def test_a_stop_string_cuts_a_verdict_behind_any_token(index: int, committed: tuple[int, ...]) -> None:
    window = [1, 2, 3, 4]
    verdict = Verdict(3, 9, FinishReason.LENGTH).ended_at(index, FinishReason.STOP, "end")
    assert verdict.committed(window) == committed
    assert (verdict.finish_reason, verdict.stop_string) == (FinishReason.STOP, "end")
    assert (verdict.own_token is None) == (index < 3)
