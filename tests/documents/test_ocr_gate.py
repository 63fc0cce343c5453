"""The gate before the OCR: what an OCR that does not pay may cost, and that one that pays is kept."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.captioning.ocr_gate import (
    CREDIT,
    FIRST_BUDGET,
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


def read_document(gate: OcrGate, num_pages: int, ocr_s: float, hinted: float = 5.0) -> tuple[float, int]:
    """Seconds that pages take by the gate, one at a time, and how many the OCR was asked for. A page is decoded plainly
    until its draft is there and `hinted` times as fast from then on; the next page begins when both are done."""
    seconds, num_asked = 0.0, 0
    for _ in range(num_pages):
        is_asked = not gate.closed
        left_s = min(max(DECODE_S - (ocr_s - PREFILL_S), 0.0), DECODE_S) if is_asked else 0.0
        generate_s = DECODE_S - left_s + left_s / hinted
        gate.on_page(PREFILL_S + generate_s, TOKENS, generate_s, TOKEN_S)
        seconds += PREFILL_S + generate_s
        if is_asked:
            num_asked += 1
            owed_s, patience_s = max(ocr_s - PREFILL_S - generate_s, 0.0), gate.patience_s
            gate.on_starved(min(owed_s, patience_s))
            if owed_s > patience_s:
                gate.close()
            seconds += min(owed_s, patience_s)
    return seconds, num_asked


@pytest.mark.parametrize("ocr_s", [1.01, 1.2, 1.5, 3.0, 10.0])
def test_an_ocr_slower_than_the_target_costs_its_bound_and_no_more(ocr_s: float) -> None:
    for num_pages in (1, 2, 5, 20, 200, 2000):
        seconds, _ = read_document(OcrGate(), num_pages, ocr_s * PLAIN_S)
        bound = FIRST_BUDGET + TRIAL_BUDGET * math.log2(1 + num_pages / FIRST_REST)
        assert seconds <= (num_pages + bound) * PLAIN_S + 1e-9
        if num_pages >= 20:
            assert seconds <= num_pages * PLAIN_S / 0.96


@pytest.mark.parametrize("ocr_s", [0.1, 0.5, 0.9])
def test_an_ocr_that_is_faster_than_the_target_is_kept(ocr_s: float) -> None:
    seconds, num_asked = read_document(OcrGate(), 100, ocr_s * PLAIN_S)
    assert num_asked == 100 and seconds < 100 * PLAIN_S


def test_an_ocr_that_becomes_fast_is_found_again_and_trusted() -> None:
    gate = OcrGate()
    read_document(gate, 100, 3 * PLAIN_S)
    assert gate.closed
    _, num_asked = read_document(gate, 200, 0.3 * PLAIN_S)
    assert num_asked > 80 and not gate.closed and gate.loss == -CREDIT
    read_document(gate, 3, 3 * PLAIN_S)
    assert 0 < gate.num_left <= FIRST_REST


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
    watch.on_owed(True)
    watch.on_begun()
    asyncio.get_running_loop().call_soon(watch.on_ended, caption(0.01))
    with pytest.raises(OcrGivenUp):
        async with watch.patience():
            await asyncio.Event().wait()
    assert gate.closed and not watch.wants_ocr
    assert OcrWatch(OcrGate()).wants_ocr and OcrWatch().wants_ocr


async def test_who_has_a_page_to_read_is_not_starved() -> None:
    watch, draft, loop = OcrWatch(OcrGate()), asyncio.Event(), asyncio.get_running_loop()
    watch.on_owed(True)
    for _ in range(2):
        watch.on_begun()
        loop.call_soon(watch.on_ended, caption(0.001))
    loop.call_soon(watch.on_begun)  # before any timer
    loop.call_later(0.05, draft.set)
    async with watch.patience():
        await draft.wait()
    assert watch.wants_ocr


async def test_a_timeout_of_others_is_theirs() -> None:
    with pytest.raises(TimeoutError):
        async with OcrWatch(OcrGate()).patience():
            raise TimeoutError
