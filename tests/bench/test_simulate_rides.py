"""An archive in simulated time: what can be said of it without simulating it."""

import pytest

from bench.simulate_rides import Archive, Point, in_turns, riding
from slipstream.engine.ride_plan import RidePlanner

POINT = Point("made up", prefill_s=10.0, prompt_rows=1000, pass_s=0.2, decode_s=20.0, num_layers=8)


def test_one_clip_takes_its_prefill_and_its_decoding() -> None:
    assert in_turns(Archive(POINT, slots=1, clips=1)) == pytest.approx(30.0)
    assert riding(Archive(POINT, slots=1, clips=1), RidePlanner(1.0), overlap=1.0) == pytest.approx(30.0)


def test_with_one_slot_nothing_rides() -> None:
    assert riding(Archive(POINT, 1, 5), RidePlanner(1.0), 1.0) == pytest.approx(in_turns(Archive(POINT, 1, 5)))


def test_what_hides_is_saved_and_what_does_not_is_not() -> None:
    """Between the sum and the larger of the two, of a clip whose prefill takes half as long as its decoding."""
    before_s = in_turns(Archive(POINT, 2, 40))
    hidden_s, open_s = (riding(Archive(POINT, 2, 40), RidePlanner(0.3), overlap) for overlap in (1.0, 0.0))
    assert 10.0 <= hidden_s < 0.85 * before_s
    assert open_s > 0.99 * before_s
