"""What marks a text gets: of itself, and beside its batch."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.quality import (
    LEAST_DISTANCE,
    LEAST_DOUBT,
    LEAST_RESULTS,
    LONGEST_PERIOD,
    LOOP_TIMES,
    LOOP_WORDS,
    UNKNOWN,
    BatchNorms,
    Mark,
    Norms,
    is_looped,
    marks_of,
    words_of,
)
from slipstream.messages import Caption, Speculation
from slipstream.speculation.protocol import FinishReason
from training.captions import write_caption
from training.world import sample_clip

WORDS = st.text(alphabet="abcdefghij", min_size=1, max_size=6)
DISTINCT = st.lists(WORDS, min_size=1, max_size=LONGEST_PERIOD, unique=True)
FEW_TO_MANY = st.integers(3, 400)


def caption(text: str, judged: int = 0, accepted: int = 0, cut: bool = False) -> Caption:
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    return Caption(text, len(text.split()), reason, speculation=Speculation(judged=judged, accepted=accepted))


@given(DISTINCT, st.integers(LOOP_TIMES, 8), DISTINCT)
def test_a_piece_that_is_repeated_is_found_wherever_it_stands(piece: list[str], times: int, before: list[str]) -> None:
    looped = before + piece * max(times, -(-LOOP_WORDS // len(piece)))
    assert is_looped(looped)
    assert Mark.LOOPED in marks_of(caption(" ".join(looped)))


@given(st.lists(WORDS, max_size=200, unique=True))
def test_words_that_differ_are_no_loop(words: list[str]) -> None:
    assert not is_looped(words)


@given(DISTINCT)
def test_what_is_said_twice_is_no_loop(piece: list[str]) -> None:
    assert not is_looped(piece * 2)


def test_the_captions_of_the_pocket_world_are_no_loops() -> None:
    for seed in range(200):
        text = write_caption(sample_clip(seed))
        assert marks_of(caption(text)) == (), text


def test_most_of_a_text_that_was_said_before_is_a_loop_also_with_small_changes() -> None:
    said = " ".join(f"the man walks to the red car and opens its door {'again' if n % 2 else 'now'}" for n in range(9))
    assert Mark.LOOPED in marks_of(caption(said))


@given(st.text())
def test_marks_of_any_text_are_the_same_each_time_and_never_short_and_empty(text: str) -> None:
    marks = marks_of(caption(text))
    assert marks == marks_of(caption(text))
    assert not {Mark.EMPTY, Mark.SHORT} <= set(marks)
    assert (Mark.EMPTY in marks) == (not words_of(text))


def test_what_has_no_word_is_empty_and_what_the_limit_ended_is_cut() -> None:
    assert marks_of(caption(" ... \n")) == (Mark.EMPTY,)
    assert marks_of(caption("a red car in the rain", cut=True)) == (Mark.CUT,)
    assert words_of("赤い車 and ONE") == ["赤", "い", "車", "and", "one"]


@given(FEW_TO_MANY)
def test_short_is_short_for_the_batch(num_words: int) -> None:
    norms = Norms.of([caption("w " * num_words)] * LEAST_RESULTS)
    assert Mark.SHORT not in marks_of(caption("w " * num_words), norms)
    assert (Mark.SHORT in marks_of(caption("one"), norms)) == (num_words > 4)
    assert Mark.SHORT in marks_of(caption("one")), "nothing is known of the batch"


@given(st.lists(st.integers(60, 90), min_size=LEAST_RESULTS, max_size=60))
def test_acceptance_is_marked_where_it_is_far_from_the_batch_alone(accepted: list[int]) -> None:
    usual = [caption("a b c d", 100, number) for number in accepted]
    norms = Norms.of(usual)
    assert norms.acceptance is not None
    median, far = norms.acceptance.median, max(4 * norms.acceptance.spread, LEAST_DISTANCE)
    for one in usual:
        is_far = abs(one.speculation.accepted / 100 - median) > far
        assert (Mark.ACCEPTANCE in marks_of(one, norms)) == is_far
    assert Mark.ACCEPTANCE in marks_of(caption("a b c d", 1000, 0), norms) or median <= far
    assert Mark.ACCEPTANCE not in marks_of(caption("a b c d", 10, 0), norms), "too few were judged"


@given(st.lists(st.floats(-1, -0.2), min_size=LEAST_RESULTS, max_size=60))
def test_unsure_is_what_the_target_found_far_less_likely_than_the_batch(logprobs: list[float]) -> None:
    usual = [replace(caption("a b c d"), avg_logprob=logprob) for logprob in logprobs]
    norms = Norms.of(usual)
    assert norms.avg_logprob is not None
    lowest = norms.avg_logprob.median - max(4 * norms.avg_logprob.spread, LEAST_DOUBT)
    for one in (*usual, replace(caption("a b c d"), avg_logprob=-6.0), replace(caption("a b c d"), avg_logprob=0.0)):
        assert one.avg_logprob is not None
        assert (Mark.UNSURE in marks_of(one, norms)) == (one.avg_logprob < lowest)
    assert Mark.UNSURE not in marks_of(caption("a b c d"), norms), "nothing is known of it"
    assert Mark.UNSURE not in marks_of(replace(caption("a b c d"), avg_logprob=-9.0)), "nothing is known of the batch"


def test_what_was_skipped_has_no_mark_and_says_nothing_of_what_is_usual() -> None:
    skipped = replace(caption(""), skipped="black")
    assert marks_of(skipped) == () and marks_of(caption("")) == (Mark.EMPTY,)
    said = [caption("a red car turns left at the light")] * LEAST_RESULTS
    assert Norms.of([*said, *[skipped] * (2 * LEAST_RESULTS)]) == Norms.of(said)


def test_few_results_say_nothing_of_a_batch() -> None:
    assert Norms.of([caption("a b c d e", 100, 70)] * (LEAST_RESULTS - 1)) == UNKNOWN
    norms = Norms.of([caption("a b c d e")] * LEAST_RESULTS)
    assert norms.acceptance is None and norms.avg_logprob is None


def test_what_is_usual_is_that_of_answers_to_the_same_prompt() -> None:
    """A batch of a long question and a short one marked each short answer."""
    long, short = caption("w " * 100), caption("two words here now")
    answers = [("What happens?", long), ("Who?", short)] * LEAST_RESULTS + [("Once?", short)] * (LEAST_RESULTS - 1)
    norms = BatchNorms.of(answers)
    assert Mark.SHORT in marks_of(short, norms.to("What happens?"))
    assert marks_of(short, norms.to("Who?")) == marks_of(short, norms.to("Once?")) == ()
    assert norms.to("Once?") == norms.to("never asked") == UNKNOWN
    whole = BatchNorms.of([(f"What does {number} do?", long) for number in range(LEAST_RESULTS)])
    assert Mark.SHORT in marks_of(short, whole.to("What does 0 do?")), "no prompt has enough answers"
