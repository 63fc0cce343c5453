"""The text ends before the first stop string, whatever the pieces, and nothing is ever taken back."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.families.adapter import StopMatcher, StoppingText, TextDecoder, TextStream
from tests.engine.test_text import ids_of_bytes
from tests.support.tiny_checkpoint import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
DECODER = TextDecoder(TOKENIZER.backend_tokenizer)
SPECIAL_ID = TOKENIZER.get_vocab()["<|im_end|>"]
LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str]:
    """The definition: the first end of any stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, ""


def could_go_on(text: str, stops: list[str]) -> int:
    """Characters at the end of the text that a stop string may begin with."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_pieces_add_up_to_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, given_text, emitted, stop = StopMatcher(stops), "", "", ""
    for first, last in pairwise([0, *sorted(min(place, len(text)) for place in cuts), len(text)]):
        certain, stop = matcher.push(text[first:last])
        given_text, emitted = given_text + text[first:last], emitted + certain
        if stop:
            break
        assert emitted == given_text[: len(given_text) - could_go_on(given_text, stops)]
    assert (emitted + matcher.flush(), stop) == cut(text, stops)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="aé🎬b", max_size=12),
    stops=st.lists(st.text(alphabet="aé🎬b\ufffd", min_size=1, max_size=3), max_size=3),
    broken=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_tokens_may_be_parts_of_characters(text: str, stops: list[str], broken: bool, cuts: list[int]) -> None:
    data = text.encode() + b"\xf0\x9f" * broken
    token_ids, stopping = ids_of_bytes(data), StoppingText(TextStream(DECODER), stops)
    bounds = [0, *sorted(min(place, len(token_ids)) for place in cuts), len(token_ids)]
    emitted, stop, num_pieces = "", "", 0
    for first, last in pairwise(bounds):
        stopped = stopping.push(token_ids[first:last], last=last == len(token_ids))
        emitted, stop, num_pieces = emitted + "".join(stopped.pieces), stopped.stop, num_pieces + len(stopped.pieces)
        if stop or last == len(token_ids):
            break
    if token_ids:
        assert (emitted, stop) == cut(data.decode(errors="replace"), stops)
    assert stop or num_pieces == len(token_ids)


def test_a_stop_inside_a_run_of_tokens_says_which_token_completed_it() -> None:
    stopping = StoppingText(TextStream(DECODER), ["cd"])
    stopped = stopping.push(ids_of_bytes(b"abcdef"))
    assert (stopped.pieces, stopped.stop) == (["a", "b", "", ""], "cd")


def test_a_stop_that_began_in_an_earlier_verdict() -> None:
    stopping = StoppingText(TextStream(DECODER), ["bcd"])
    assert stopping.push(ids_of_bytes(b"abc")).pieces == ["a", "", ""]
    assert stopping.push(ids_of_bytes(b"bcde")).pieces == ["bc", "", ""]


def test_special_tokens_pass_through_a_stop_string() -> None:
    first, second = ids_of_bytes(b"ab")
    stopped = StoppingText(TextStream(DECODER), ["ab"]).push([first, SPECIAL_ID, second])
    assert (stopped.pieces, stopped.stop) == (["", "", ""], "ab")


def test_what_was_held_back_leaves_with_the_last_token() -> None:
    stopping = StoppingText(TextStream(DECODER), ["abc"])
    assert stopping.push(ids_of_bytes(b"xab")).pieces == ["x", "", ""]
    assert stopping.push([SPECIAL_ID], last=True).pieces == ["ab"]


@pytest.mark.parametrize(
    ("stops", "expected"),
    [(["ab", "xaby"], ("x", "ab")), (["b", "ab", "xab"], ("", "xab")), (["y", "ab"], ("x", "ab"))],
)
def test_the_first_that_is_complete_wins_and_then_the_longest(stops: list[str], expected: tuple[str, str]) -> None:
    assert StopMatcher(stops).push("xaby") == expected


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StoppingText(TextStream(DECODER)).push(ids_of_bytes(b"ab")).pieces == ["a", "b"]
