"""Who is next, without threads or clocks."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.thread import CREDIT_S, PATIENCE_S, FairQueue, Lane


def serve(queue: FairQueue[str], cost_s: dict[Lane, float], until_s: float, refill: dict[Lane, str]) -> list[str]:
    """Jobs in the order they were served; a lane in `refill` gets its next job while the last one runs."""
    now, served = 0.0, []
    while now < until_s:
        taken = queue.pop(now)
        if not isinstance(taken, tuple):
            now += taken
            continue
        lane, job = taken
        served.append(job)
        if lane in refill:
            queue.push(lane, refill[lane])
        now += cost_s[lane]
        queue.charge(lane, cost_s[lane], now)
    return served


def test_two_busy_lanes_share_the_time_evenly() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push(Lane.DECODE, "pass")
    queue.push(Lane.PREFILL, "layer")
    refill = {Lane.DECODE: "pass", Lane.PREFILL: "layer"}
    served = serve(queue, {Lane.DECODE: 0.01, Lane.PREFILL: 0.2}, 40.0, refill)
    assert 90 <= served.count("layer") <= 110
    assert 1800 <= served.count("pass") <= 2200


@given(st.floats(0.005, 1.0), st.floats(0.005, 1.0))
@settings(max_examples=60, deadline=None)
def test_no_lane_starves_whatever_its_jobs_cost(decode_s: float, prefill_s: float) -> None:
    queue: FairQueue[str] = FairQueue()
    cost_s = {Lane.DECODE: decode_s, Lane.PREFILL: prefill_s}
    for lane in cost_s:
        queue.push(lane, lane.value)
    until_s = 20 * (decode_s + prefill_s)
    served = serve(queue, cost_s, until_s, {lane: lane.value for lane in cost_s})
    shares = {lane: served.count(lane.value) * cost_s[lane] for lane in cost_s}
    assert abs(shares[Lane.DECODE] - shares[Lane.PREFILL]) <= 2 * max(cost_s.values()) + CREDIT_S


def test_of_two_prefills_the_first_finishes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push(Lane.PREFILL, "second's layer", order=2)
    queue.push(Lane.PREFILL, "first's layer", order=1)
    served = []
    for layer in range(6):
        taken = queue.pop(float(layer))
        assert isinstance(taken, tuple)
        served.append(taken[1])
        if layer < 2:
            queue.push(Lane.PREFILL, "first's layer", order=1)
        else:
            queue.push(Lane.PREFILL, "second's layer", order=2)
    assert served == ["first's layer"] * 3 + ["second's layer"] * 3


def test_who_was_away_has_no_endless_credit() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(2000):
        queue.charge(Lane.PREFILL, 0.5, now_s=1000.0)
    queue.push(Lane.PREFILL, "layer")
    queue.push(Lane.DECODE, "pass")
    now, num_passes = 1000.0, 0
    while (taken := queue.pop(now)) == (Lane.DECODE, "pass"):
        num_passes += 1
        now += 0.1
        queue.charge(Lane.DECODE, 0.1, now)
        queue.push(Lane.DECODE, "pass")
    assert taken == (Lane.PREFILL, "layer")
    assert 0 < num_passes <= CREDIT_S / 0.1 + 1


def test_decoding_that_is_owed_time_is_waited_for_a_little_and_at_its_own_cost() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.charge(Lane.PREFILL, 0.4, now_s=0.4)
    queue.charge(Lane.DECODE, 0.01, now_s=0.41)
    queue.push(Lane.PREFILL, "layer")
    wait_s = queue.pop(0.411)
    assert isinstance(wait_s, float) and math.isclose(wait_s, PATIENCE_S - 0.001)
    queue.push(Lane.DECODE, "pass")
    assert queue.pop(0.412) == (Lane.DECODE, "pass")
    queue.charge(Lane.DECODE, 0.01, now_s=0.422)
    assert isinstance(queue.pop(0.423), float)
    assert queue.pop(0.422 + 2 * PATIENCE_S) == (Lane.PREFILL, "layer"), "it did not come back in time"


def test_prefill_alone_waits_for_nobody() -> None:
    queue: FairQueue[str] = FairQueue()
    assert queue.pop(0.0) == math.inf
    queue.push(Lane.PREFILL, "layer")
    assert len(queue) == 1
    assert queue.pop(0.0) == (Lane.PREFILL, "layer")


def test_idle_work_waits_until_decoding_stays_away_for_as_long_as_a_pass_takes() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push(Lane.IDLE, "chunk")
    queue.push(Lane.PREFILL, "layer")
    queue.push(Lane.DECODE, "pass")
    assert {queue.pop(0.0), queue.pop(0.0)} == {(Lane.DECODE, "pass"), (Lane.PREFILL, "layer")}
    queue.charge(Lane.DECODE, 0.1, now_s=1.0)
    assert queue.pop(1.04) == pytest.approx(0.06)
    queue.push(Lane.DECODE, "pass")
    assert queue.pop(1.05) == (Lane.DECODE, "pass")
    queue.charge(Lane.DECODE, 20.0, now_s=21.0)
    assert queue.pop(21.0) == CREDIT_S, "a long pass is not waited for as long again"
    assert queue.pop(21.0 + CREDIT_S) == (Lane.IDLE, "chunk")
    assert queue.pop(30.0) == math.inf


def test_idle_work_has_no_part_in_what_the_others_owe_each_other() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.charge(Lane.IDLE, 50.0, now_s=50.0)
    queue.push(Lane.PREFILL, "layer")
    queue.push(Lane.DECODE, "pass")
    refill = {Lane.DECODE: "pass", Lane.PREFILL: "layer"}
    served = serve(queue, {Lane.DECODE: 0.1, Lane.PREFILL: 0.1}, 4.0, refill)
    assert abs(served.count("pass") - served.count("layer")) <= 1
