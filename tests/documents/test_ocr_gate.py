"""The gate before the OCR: what an OCR that does not pay may cost, and that one that pays is kept."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.captioning import ocr_gate
from slipstream.captioning.ocr_gate import (
    CREDIT,
    EXPECTED_OCR_S,
    FIRST_REST,
    LONGEST_REST,
    TRIAL_BUDGET,
    OcrGate,
    OcrGivenUp,
    OcrWatch,
)
from slipstream.messages import Caption, Speculation, Timings

TOKENS, TOKEN_S, PREFILL_S = 101, 0.01, 0.2
DECODE_S = (TOKENS - 1) * TOKEN_S
PLAIN_S = PREFILL_S + DECODE_S
SLOW = 10.0
"""Times as slow as that: a target that takes longer for a page than an OCR that nobody has seen yet is thought to."""


def read_document(
    gate: OcrGate, num_pages: int, ocr_s: float, slow: float = SLOW, hinted: float = 5.0
) -> tuple[float, int]:
    """Seconds that pages take by the gate, one at a time, and how many the OCR began with. A page is decoded plainly
    until its draft is there and `hinted` times as fast from then on; the next page begins when both are done, or, where
    the OCR was not asked for, with the target."""
    seconds, num_begun, is_asked = 0.0, 0, False
    prefill_s, decode_s, token_s = slow * PREFILL_S, slow * DECODE_S, slow * TOKEN_S
    for _ in range(num_pages):
        is_asked = gate.expects_gain or (is_asked and not gate.closed)
        begins_s = 0.0 if is_asked else math.inf if gate.closed else gate.head_start_s
        num_begun += begins_s < prefill_s + decode_s
        left_s = min(max(decode_s - (begins_s + ocr_s - prefill_s), 0.0), decode_s)
        generate_s = decode_s - left_s + left_s / hinted
        page_s = prefill_s + generate_s
        gate.on_page(page_s, TOKENS, generate_s, token_s, by_ocr=is_asked)
        seconds += page_s
        if not is_asked and begins_s < page_s:
            gate.on_ocr(min(ocr_s, page_s - begins_s), is_done=begins_s + ocr_s <= page_s)
        elif is_asked:
            owed_s, patience_s = max(begins_s + ocr_s - page_s, 0.0), gate.patience_s
            gate.on_starved(min(owed_s, patience_s))
            gate.on_ocr(min(ocr_s, page_s + patience_s - begins_s), is_done=owed_s <= patience_s)
            if owed_s > patience_s:
                gate.close()
            seconds += min(owed_s, patience_s)
    return seconds, num_begun


@pytest.mark.parametrize("ocr_s", [1.01, 1.2, 1.5, 3.0, 10.0])
def test_an_ocr_slower_than_the_target_costs_its_bound_and_no_more(ocr_s: float) -> None:
    plain_s = SLOW * PLAIN_S
    for num_pages in (1, 2, 5, 20, 200, 2000):
        seconds, _ = read_document(OcrGate(), num_pages, ocr_s * plain_s)
        bound = TRIAL_BUDGET * (1 + math.log2(1 + num_pages / FIRST_REST))
        assert seconds <= (num_pages + bound) * plain_s + 1e-9
        if num_pages >= 20:
            assert seconds <= num_pages * plain_s / 0.96


@pytest.mark.parametrize("ocr_s", [1.0, 2.0, 20.0])
def test_a_target_that_is_known_to_be_faster_or_proves_it_never_waits(ocr_s: float) -> None:
    """As any short document behind a start, where neither is known."""
    fast = 0.9 * EXPECTED_OCR_S / PLAIN_S
    assert read_document(OcrGate(), 500, ocr_s, fast) == (pytest.approx(500 * fast * PLAIN_S), 0)
    plain_s = SLOW * PLAIN_S
    for num_pages in (1, 4, 16):
        seconds, num_begun = read_document(OcrGate(), num_pages, 1.1 * ocr_s * plain_s)
        assert seconds == pytest.approx(num_pages * plain_s) and num_begun == 1


@pytest.mark.parametrize("ocr_s", [0.1, 0.5, 0.8])
def test_an_ocr_that_is_faster_than_the_target_is_begun_with_the_first_page_and_kept(ocr_s: float) -> None:
    gate, plain_s = OcrGate(), SLOW * PLAIN_S
    seconds, num_begun = read_document(gate, 100, ocr_s * plain_s)
    assert num_begun == 100 and seconds < 100 * plain_s
    assert gate.expects_gain, "the next document asks for it at once"


def test_an_ocr_that_becomes_fast_is_found_again_and_trusted() -> None:
    gate = OcrGate()
    read_document(gate, 100, 3 * SLOW * PLAIN_S)
    assert not gate.expects_gain
    _, num_begun = read_document(gate, 400, 0.3 * SLOW * PLAIN_S)
    assert num_begun > 200 and not gate.closed and gate.loss == -CREDIT
    read_document(gate, 3, 3 * SLOW * PLAIN_S)
    assert 0 < gate.num_left <= FIRST_REST


def test_pages_at_once_take_and_save_their_share() -> None:
    gate = OcrGate()
    gate.on_page(2 * EXPECTED_OCR_S, TOKENS, 2 * EXPECTED_OCR_S, 0.0, at_once=3)
    assert not gate.expects_gain
    gate.on_page(2 * EXPECTED_OCR_S, TOKENS, 2 * EXPECTED_OCR_S, 0.0)
    assert gate.expects_gain


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3), st.integers(0, 300)), max_size=200))
def test_it_is_open_or_rests_for_a_bounded_time(pages: list[tuple[float, float, int]]) -> None:
    gate = OcrGate()
    for starved_s, generate_s, num_tokens in pages:
        gate.on_page(0.2 + generate_s, num_tokens, generate_s, TOKEN_S)
        gate.on_starved(starved_s)
        assert 0 <= gate.num_left <= LONGEST_REST and gate.loss >= -CREDIT
        assert gate.patience_s >= 0 and (not gate.closed or gate.patience_s == 0)


def test_what_giving_up_cost_makes_the_rest_longer() -> None:
    gate = OcrGate()
    gate.on_page(PLAIN_S, TOKENS, DECODE_S, TOKEN_S)
    gate.close()
    gate.on_starved(3 * PLAIN_S)
    assert gate.num_left == FIRST_REST + 100
    gate.on_starved(1e9)
    assert gate.num_left == LONGEST_REST


def test_nothing_is_given_up_before_a_page_says_what_pages_take() -> None:
    gate = OcrGate()
    gate.on_starved(100.0)
    assert gate.patience_s == math.inf and not gate.closed


def caption(seconds: float) -> Caption:
    timings = Timings(total_s=seconds, generate_s=seconds)
    return Caption("", TOKENS, None, timings=timings, speculation=Speculation(plain_pass_s=seconds / (TOKENS - 1)))


async def test_a_starved_target_gives_the_ocr_up() -> None:
    gate = OcrGate()
    watch = OcrWatch(gate)
    watch.on_asked(ocr=True)
    watch.on_shown(is_owed=True)
    watch.on_begun()
    asyncio.get_running_loop().call_soon(watch.on_ended, caption(0.01))
    with pytest.raises(OcrGivenUp):
        async with watch.patience():
            await asyncio.Event().wait()
    assert gate.closed and not watch.wants_ocr and OcrWatch().wants_ocr


async def test_who_has_a_page_to_read_is_not_starved() -> None:
    """A starved one would wait for a quarter of its pages' two seconds, and they follow each other at once."""
    watch, draft, loop = OcrWatch(OcrGate()), asyncio.Event(), asyncio.get_running_loop()
    watch.on_asked(ocr=True)
    watch.on_shown(is_owed=True)
    for _ in range(2):
        watch.on_begun()
        loop.call_soon(watch.on_ended, caption(2.0))
    loop.call_soon(watch.on_begun)  # before any timer
    loop.call_later(1.0, draft.set)
    async with watch.patience():
        await draft.wait()
    assert watch.wants_ocr


async def test_a_page_is_outlasted_while_the_target_has_no_place_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr_gate, "EXPECTED_OCR_S", 0.01)
    gate = OcrGate()
    watch = OcrWatch(gate, 2)
    watch.on_shown()
    assert not await watch.is_outlasted()
    watch.on_shown()
    assert await watch.is_outlasted()
    gate.on_ocr(3600.0)
    watch.on_begun()
    asyncio.get_running_loop().call_soon(watch.on_ended, None)
    assert not await watch.is_outlasted()
    gate.close()
    watch.on_shown()
    assert not await watch.is_outlasted() and not await OcrWatch().is_outlasted()


async def test_a_timeout_of_others_is_theirs() -> None:
    with pytest.raises(TimeoutError):
        async with OcrWatch(OcrGate()).patience():
            raise TimeoutError
