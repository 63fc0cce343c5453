"""What the gate remembers from caption to caption, in made-up seconds: what a bad draft may cost in all, how soon a
draft that has changed is noticed, and that one kind of captions does not decide for another."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.speculation.caption_book import (
    CAPTION_SHARE,
    MOST_ENTRIES,
    MOST_MARGIN,
    NEW_MARGIN,
    TRIAL_MARGIN,
    TRIAL_SHARE,
    CaptionBook,
    Kind,
    Opening,
    Start,
)
from slipstream.speculation.gate import FIRST_BUDGET, FIRST_REST, LONGEST_REST
from slipstream.speculation.pacing import CostModel

PLAIN_S = 0.02
KIND = Kind(size="target", settings="draft", load=1, prompt="")
MAX_WINDOW = 16
Round = tuple[int, float]
"""Tokens that a round of speculation commits, and the plain passes that it takes."""
GOOD, BAD = (3, 1.5), (1, 1.7)


@dataclass
class Process:
    """Captions of one process, and the plain passes that each took beyond its tokens."""

    book: CaptionBook = field(default_factory=CaptionBook)
    starts: list[Start] = field(default_factory=list)
    excess: float = 0.0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.decode_plainly(KIND)

    def decode_plainly(self, kind: Kind) -> None:
        """A caption of another method says what a plain pass costs at this load."""
        plain = self.book.begin(replace(kind, settings="plain"), CostModel(), gated=False, max_window=MAX_WINDOW)
        plain.costs.plain_token_s.observe(PLAIN_S)
        self.book.end(plain, 1)

    def begin(self, kind: Kind = KIND) -> Opening:
        return self.book.begin(kind, CostModel(), gated=True, max_window=MAX_WINDOW)

    def caption(self, rounds: Iterable[Round], num_tokens: int, kind: Kind = KIND) -> Start:
        """One caption whose open rounds are `rounds`, from its beginning to its end."""
        opening, rounds = self.begin(kind), iter(rounds)
        self.play(opening, rounds, num_tokens)
        self.book.end(opening, num_tokens)
        self.starts.append(opening.start)
        return opening.start

    def play(self, opening: Opening, rounds: Iterator[Round], num_tokens: int) -> None:
        gate, done = opening.gate, 0
        while gate is not None and done < num_tokens:
            if gate.closed:
                batch = min(gate.num_passes, num_tokens - done)
                for index in range(batch):
                    gate.on_plain_pass(PLAIN_S, in_batch=index > 0, undisturbed=True)
                done += batch
                continue
            tokens, passes = next(rounds)
            gate.on_round(tokens, passes * PLAIN_S, 0.0)
            self.excess += passes - tokens
            done += tokens
        self.num_tokens += max(num_tokens, done)


LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)
ROUNDS = st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 2.9)), min_size=1, max_size=40)


@given(rounds=ROUNDS, lengths=LENGTHS)
def test_whatever_drafts_do_the_excess_over_plain_decoding_is_bounded(rounds: list[Round], lengths: list[int]) -> None:
    """Over all captions together, as if they were one text: a first margin, and a trial after each rest."""
    process, drafted = Process(), cycle(rounds)
    worst = max(0.0, *(passes - tokens for tokens, passes in rounds))
    for num_tokens in lengths:
        process.caption(drafted, num_tokens)
    bound = NEW_MARGIN + worst + (TRIAL_MARGIN + worst) * process.num_tokens / FIRST_REST
    assert process.excess <= bound + 1e-6


@pytest.mark.parametrize("num_tokens", [10, 70, 400])
def test_a_draft_that_never_helps_costs_a_hundredth_of_ever_more_captions(num_tokens: int) -> None:
    process = Process()
    for _ in range(20_000 // num_tokens):
        process.caption(repeat(BAD), num_tokens)
    first = NEW_MARGIN + BAD[1] - 1
    assert process.excess <= first + 6 * (TRIAL_MARGIN + BAD[1] - 1) + TRIAL_SHARE * process.num_tokens
    # A margin is used up by the first captions that are long enough for that; then all rest but for trials.
    assert process.starts.count(Start.OPEN) <= 1 + NEW_MARGIN / ((BAD[1] - 1) * num_tokens)


@given(before=st.lists(st.sampled_from([GOOD, BAD, (1, 2.5), (2, 1.9)]), min_size=1, max_size=80), lengths=LENGTHS)
def test_a_draft_that_becomes_good_is_noticed_after_the_longest_rest(before: list[Round], lengths: list[int]) -> None:
    process, num_tokens = Process(), 70
    for length in lengths:
        process.caption(chain(cycle(before)), length)
    process.starts.clear()
    # A trial that failed may have lost most of a caption of 300 tokens, but no more than its trials could.
    num_rests = LONGEST_REST / num_tokens + 2
    while process.caption(repeat(GOOD), num_tokens) is Start.REST:
        assert len(process.starts) <= num_rests
    for _ in range(5):
        assert process.caption(repeat(GOOD), num_tokens) is Start.OPEN


@given(num_good=st.integers(1, 50), num_tokens=st.integers(40, 300))
def test_a_draft_that_becomes_bad_is_noticed_within_some_captions(num_good: int, num_tokens: int) -> None:
    process = Process()
    for _ in range(num_good):
        assert process.caption(repeat(GOOD), num_tokens) is Start.OPEN
    gained = process.excess
    process.starts.clear()
    while process.caption(repeat(BAD), num_tokens) is not Start.REST:
        assert len(process.starts) <= 2 + MOST_MARGIN / FIRST_BUDGET
    assert process.excess - gained <= MOST_MARGIN + 2 * (BAD[1] + TRIAL_MARGIN) * (1 + num_tokens / FIRST_REST)


def test_a_kind_that_is_worth_its_draft_survives_captions_that_are_not() -> None:
    """Every third caption is useless: it costs no more than its own budget, and the others keep their draft."""
    process = Process()
    for number in range(60):
        before = process.excess
        assert process.caption(repeat(BAD if number % 3 == 2 else GOOD), 70) is Start.OPEN
        assert process.excess - before <= CAPTION_SHARE * MOST_MARGIN + BAD[1]


KINDS = [replace(KIND, settings=name) for name in ("one draft", "another")]


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([GOOD, BAD]), st.integers(1, 200)), max_size=60))
def test_kinds_do_not_decide_for_each_other(captions: list[tuple[int, Round, int]]) -> None:
    """What a kind decides is what it would decide if there were no other."""
    both, alone = Process(), [Process(), Process()]
    for which, kind_of_round, num_tokens in captions:
        start = both.caption(repeat(kind_of_round), num_tokens, KINDS[which])
        assert start is alone[which].caption(repeat(kind_of_round), num_tokens, KINDS[which])


@pytest.mark.parametrize("change", [{"load": 3}, {"prompt": "another"}])
def test_a_new_relative_of_a_kind_that_rests_may_lose_a_trial_only_and_decides_for_itself(
    change: dict[str, int],
) -> None:
    process, relative = Process(), replace(KIND, **change)
    while process.caption(repeat(BAD), 70) is not Start.REST:
        pass
    process.decode_plainly(relative)
    opening = process.begin(relative)
    assert opening.start is Start.OPEN and opening.record is not None and opening.record.margin == TRIAL_MARGIN
    process.play(opening, repeat(GOOD), 70)
    process.book.end(opening, 70)
    assert process.caption(repeat(GOOD), 70, relative) is Start.OPEN
    # Its own success says nothing of the kind that rests, nor does it end the rest.
    assert process.begin(KIND).start is not Start.OPEN


def test_one_caption_at_a_time_is_a_trial_and_one_that_was_given_up_makes_room() -> None:
    process = Process()
    while process.caption(repeat(BAD), 70) is not Start.REST:
        pass
    while (trial := process.begin()).start is not Start.TRIAL:
        process.book.end(trial, 70)
    assert process.begin().start is Start.REST
    process.book.give_up(trial)
    again = process.begin()
    assert again.start is Start.TRIAL
    process.play(again, repeat(GOOD), 70)
    process.book.end(again, 70)
    assert process.begin().start is Start.OPEN
    assert (process.book.num_kinds, process.book.num_resting) == (1, 0)


def test_a_trial_without_a_draft_has_shown_nothing() -> None:
    process = Process()
    while process.caption(repeat(BAD), 70) is not Start.REST:
        pass
    while (trial := process.begin()).start is not Start.TRIAL:
        process.book.end(trial, 70)
    process.book.end(trial, 70)
    assert process.begin().start is Start.TRIAL


def test_a_draft_that_is_always_late_is_tried_ever_more_rarely() -> None:
    """Passes beside a draft that prefills take half as long again, and it is never ready in time."""
    process, num_drafted = Process(), 0
    for _ in range(300):
        opening = process.begin()
        if opening.gate is not None:
            num_drafted += 1
            for _ in range(70):
                opening.gate.on_plain_pass(1.5 * PLAIN_S, in_batch=False, undisturbed=False)
        process.book.end(opening, 70)
    assert num_drafted <= 300 * 70 * TRIAL_SHARE / 35 + 3


def test_the_loss_of_captions_that_never_closed_adds_up() -> None:
    """2% a round: no caption of 60 tokens would use its budget up."""
    process = Process()
    for _ in range(300):
        process.caption(repeat((1, 1.02)), 60)
    assert Start.REST in process.starts
    assert process.excess <= NEW_MARGIN + 4 * TRIAL_MARGIN + 1.1 * TRIAL_SHARE * process.num_tokens


def test_prompts_that_are_asked_once_share_a_kind() -> None:
    book = CaptionBook()
    assert [book.prompt_class(prompt) for prompt in ("a", "b", "c")] == ["", "", ""]
    again = book.prompt_class("a")
    assert again != "" and again == book.prompt_class("a") != book.prompt_class("b") != ""


def test_it_forgets_what_is_long_ago() -> None:
    process = Process()
    for number in range(2 * MOST_ENTRIES):
        process.caption(repeat(GOOD), 5, replace(KIND, prompt=str(number)))
        process.book.prompt_class(str(number))
    assert process.book.num_kinds == MOST_ENTRIES
    assert process.book.prompt_class("0") == ""


def test_what_passes_cost_is_known_to_the_next_caption_and_to_relatives() -> None:
    process = Process()
    first = process.begin()
    first.costs.draft_pass_s.observe(0.001)
    process.play(first, repeat(GOOD), 70)
    process.book.end(first, 70)
    assert process.begin().costs.draft_pass_s.value == 0.001
    relative = process.book.begin(replace(KIND, load=4), CostModel(), gated=True, max_window=MAX_WINDOW)
    assert relative.costs.draft_pass_s.value == 0.001
    assert not relative.costs.plain_token_s.weight, "what a plain pass costs at this load is to be measured"
    stranger = process.book.begin(replace(KIND, settings="x"), CostModel(), gated=True, max_window=MAX_WINDOW)
    assert not stranger.costs.draft_pass_s.weight and stranger.costs.plain_token_s.value == PLAIN_S


def test_the_newest_kind_may_have_been_forgotten_by_half() -> None:
    """Captions that rest, and those without a draft, say how long texts are, and nothing of what passes cost."""
    process, newest, resting = Process(), replace(KIND, settings="newest"), replace(KIND, settings="resting")

    def measure(kind: Kind) -> None:
        opening = process.begin(kind)
        opening.costs.draft_pass_s.observe(0.001)
        process.book.end(opening, 50)

    for kind in (resting, newest):
        measure(kind)
    assert process.book.newest is not None
    process.book.end(replace(process.begin(resting), start=Start.REST), 1)
    for number in range(MOST_ENTRIES - 1):
        plain = replace(KIND, settings=f"plain {number}")
        process.book.end(process.book.begin(plain, CostModel(), gated=False, max_window=MAX_WINDOW), 1)
    assert process.book.newest is None
    measure(newest)
    assert process.book.newest is not None
