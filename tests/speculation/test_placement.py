"""One draft for several targets: the arithmetic, beside the closed form and what replays of real services measured."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.speculation.caption_book import CaptionBook, Kind
from slipstream.speculation.pacing import CostModel, DecayedMean
from slipstream.speculation.placement import (
    Advice,
    DraftedTime,
    MeasuredCaptions,
    PlainTime,
    captions_of_each,
    compare,
    draft_pass_bounds,
    placements,
    plain_targets,
)

MAX_WINDOW = 24
T_P, T_Q, TAU = 0.42, 0.0466, 0.92
"""ParallelVLM's 7B/72B on 8 L40S, at an acceptance that the pocket pair has."""


def costs_of(tau: float, plain_s: float = T_P) -> CostModel:
    costs = CostModel(plain_token_s=DecayedMean(plain_s), _accepted=tau, _judged=1.0)
    for window_len in range(MAX_WINDOW + 1):
        costs.target_pass_s.observe(window_len, plain_s)
    return costs


def measured(draft_pass_s: dict[int, float], first_token_s: float = 0.0, tau: float = TAU) -> MeasuredCaptions:
    return MeasuredCaptions(costs_of(tau), draft_pass_s, first_token_s, 100)


def closed_form(tau: float, speed_ratio: float) -> float:
    """Design section 3: min over h of 1 + h/c + tau^(h+1) / (1 - tau^c), in units of T_p, for 1 / (1 - tau) tokens."""
    cycle = min(1 + h / speed_ratio + tau ** (h + 1) / (1 - tau**speed_ratio) for h in range(round(speed_ratio)))
    return 1 / (1 - tau) / cycle


def test_decoding_is_the_closed_form_where_windows_cost_nothing() -> None:
    [alone] = placements(measured({1: T_Q}), MAX_WINDOW, [1])
    assert alone.decoding_at_least == alone.decoding_at_most
    assert alone.decoding_at_least == pytest.approx(closed_form(TAU, T_P / T_Q), rel=0.04)
    assert alone.devices_at_least == pytest.approx(alone.decoding_at_least / 2)


def test_what_was_never_seen_at_once_is_told_as_bounds() -> None:
    assert draft_pass_bounds({1: 0.01, 2: 0.015}, 4) == (0.015, 0.03)
    assert draft_pass_bounds({1: 0.01, 2: 0.015}, 2) == (0.015, 0.015)
    assert draft_pass_bounds({4: 0.02}, 1) == (0.005, 0.02)
    one, two, four = placements(measured({1: T_Q, 2: 1.05 * T_Q}), MAX_WINDOW)
    assert (one.targets, two.targets, four.targets) == (1, 2, 4)
    assert two.devices_at_least == two.devices_at_most > one.devices_at_most
    assert four.decoding_at_least < four.decoding_at_most < two.decoding_at_most * 1.0001


def test_a_long_prefill_leaves_a_draft_little_to_gain() -> None:
    short, long = (placements(measured({1: T_Q}, seconds), MAX_WINDOW, [1])[0] for seconds in (0.0, 100 * T_P * 9))
    assert short.decoding_at_least == long.decoding_at_least > 4
    assert short.devices_at_least > 2
    assert long.devices_at_least < 0.6, "nine tenths of such a caption are no decoding: two plain targets do more"


@given(
    tau=st.floats(0.05, 0.99),
    speed_ratio=st.floats(1.5, 50),
    first_token_s=st.floats(0, 100),
    row_share=st.floats(0, 1),
    targets=st.integers(1, 16),
)
def test_bounds_hold_what_lies_between(
    tau: float, speed_ratio: float, first_token_s: float, row_share: float, targets: int
) -> None:
    alone_s = T_P / speed_ratio
    unknown = measured({1: alone_s}, first_token_s, tau)
    known = measured({1: alone_s, targets: alone_s * (1 + row_share * (targets - 1))}, first_token_s, tau)
    [bounds] = placements(unknown, MAX_WINDOW, [targets])
    [truth] = placements(known, MAX_WINDOW, [targets])
    slack = 1e-9
    assert bounds.decoding_at_least - slack <= truth.decoding_at_least <= bounds.decoding_at_most + slack
    assert bounds.devices_at_least - slack <= truth.devices_at_least <= bounds.devices_at_most + slack
    assert all(map(math.isfinite, (bounds.devices_at_least, bounds.devices_at_most)))
    assert truth.devices_at_least <= truth.decoding_at_least * targets / (targets + 1) + slack or (
        truth.decoding_at_least < 1
    )


def end_caption(book: CaptionBook, kind: Kind, draft_pass_s: float | None, plain_s: float = T_P) -> None:
    opening = book.begin(kind, CostModel(), gated=False, max_window=MAX_WINDOW)
    opening.costs.plain_token_s.observe(plain_s)
    if draft_pass_s is not None:
        opening.costs.draft_pass_s.observe(draft_pass_s)
    book.end(opening, num_tokens=50, first_token_s=3.0)


def test_the_book_tells_what_its_newest_captions_with_a_draft_have_shown() -> None:
    book = CaptionBook()
    assert book.newest is None
    end_caption(book, Kind("size", "plain", 1, ""), None)
    assert book.newest is None, "nothing is known of a draft"
    end_caption(book, Kind("size", "other", 1, ""), 9.0)
    end_caption(book, Kind("size", "drafted", 2, ""), 0.02)
    end_caption(book, Kind("size", "drafted", 1, ""), 0.01)
    end_caption(book, Kind("size", "plain", 1, ""), None)
    found = book.newest
    assert found is not None and set(found.draft_pass_s) == {1, 2}
    assert found.draft_pass_s[2] == pytest.approx(0.02) and found.draft_pass_s[1] < 0.02
    assert (found.first_token_s, found.num_tokens) == (3.0, 50)


# -- a draft, or a target in its place --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill_s", "plain_s", "drafted_s", "at_once", "advice"),
    [
        (1.0, 9.0, 2.0, 2, Advice.DRAFT),  # decoding is most of a caption, and the draft makes it 4.5 times as fast
        (9.0, 3.0, 1.0, 2, Advice.PLAIN),  # prefills are most of it, which two targets share
        (1.0, 3.0, 2.5, 4, Advice.PLAIN),  # the draft gains little
        (0.8, 2.1, 0.65, 2, Advice.EITHER),
        (9.0, 3.0, 1.0, 1, Advice.DRAFT),  # a second target would have nothing to do
    ],
)
def test_either_placement_may_be_the_better_one(
    prefill_s: float, plain_s: float, drafted_s: float, at_once: float, advice: Advice
) -> None:
    drafted = DraftedTime(20 * (prefill_s + drafted_s), at_once, 20 * prefill_s, 20 * 100)
    found = compare(drafted, PlainTime(3 * plain_s, 3 * 100), targets=1, plain_targets=2)
    assert found.advice is advice
    assert found.faster == pytest.approx(plain_s / drafted_s)
    assert found.prefill_share == pytest.approx(prefill_s / (prefill_s + plain_s))
    assert found.times == pytest.approx((prefill_s + plain_s) / min(at_once, 2) / (prefill_s + drafted_s))


def test_devices_are_shared_out_among_plain_targets() -> None:
    assert [plain_targets(1, 1, 2), plain_targets(4, 1, 5), plain_targets(1, 1, 5)] == [2, 5, 1.25]
    assert plain_targets(1, 1, 1) == 1, "the draft is on its target's device"
    assert [captions_of_each(at_once, 2) for at_once in (1.0, 1.9, 4.1, 8.0)] == [1, 1, 2, 4]


@given(
    wall_s=st.floats(0.1, 1e6),
    at_once=st.floats(0.0, 64),
    prefill_s=st.floats(0, 1e7),
    plain_s=st.floats(0, 1e6),
    targets=st.integers(1, 8),
)
def test_more_devices_never_make_plain_targets_slower(
    wall_s: float, at_once: float, prefill_s: float, plain_s: float, targets: int
) -> None:
    drafted, plain = DraftedTime(wall_s, at_once, prefill_s, 100), PlainTime(plain_s, 100)
    times = [compare(drafted, plain, targets, number).times for number in (targets, targets + 1, 64)]
    assert times == sorted(times, reverse=True) and all(map(math.isfinite, times))
