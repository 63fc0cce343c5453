"""The choice of frames and of packets, against slow and obvious versions of the same rules."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import InvalidRequest
from slipstream.video.frame_times import (
    TIME_TOLERANCE_S,
    FramePicker,
    PacketTimes,
    num_sampled,
    plan_all,
    plan_runs,
    sample_times,
)

frame_times = st.lists(st.integers(0, 2000), min_size=1, max_size=60, unique=True).map(sorted)


def pick(frame_times_s: list[float], times_s: list[float]) -> list[float]:
    picker, kept, previous = FramePicker(times_s), [], 0.0
    for time_s in frame_times_s:
        if picker.offer(time_s):
            kept.append(previous)
        previous = time_s
    if picker.finish():
        kept.append(previous)
    return kept


def test_times_are_even_and_leave_the_end_out() -> None:
    assert sample_times(1.0, 3.0, 4) == [1.0, 1.5, 2.0, 2.5]


@pytest.mark.parametrize(("start_s", "end_s", "num_frames"), [(0.0, 1.0, 0), (0.0, 1.0, -3), (2.0, 1.0, 4)])
def test_impossible_requests_are_refused(start_s: float, end_s: float, num_frames: int) -> None:
    with pytest.raises(InvalidRequest):
        sample_times(start_s, end_s, num_frames)


@given(st.floats(0, 1e5), st.floats(0, 1e5), st.integers(1, 200))
def test_times_ascend_from_the_start_and_stay_before_the_end(start_s: float, length_s: float, num_frames: int) -> None:
    times_s = sample_times(start_s, start_s + length_s, num_frames)
    assert len(times_s) == num_frames
    assert times_s[0] == start_s
    assert times_s == sorted(times_s)
    assert times_s[-1] <= start_s + length_s


@given(st.floats(0, 1e5), st.integers(1, 200), st.floats(1e-3, 1000))
def test_frames_of_each_second_are_the_nearest_number_within_bounds(length_s: float, most: int, fps: float) -> None:
    count = num_sampled(length_s, most, fps)
    assert 1 <= count <= most
    assert abs(count - length_s * fps) <= 0.5 or count == (1 if length_s * fps < 1 else most)
    assert num_sampled(length_s, most, 0.0) == most


@given(frame_times, st.integers(1, 80))
def test_picker_takes_the_last_frame_at_or_before_each_time_once(frame_ms: list[int], num_frames: int) -> None:
    frames_s = [ms / 1000 for ms in frame_ms]
    times_s = sample_times(frames_s[0], frames_s[-1] + 0.04, num_frames)
    expected = sorted({max(f for f in frames_s if f <= t + TIME_TOLERANCE_S) for t in times_s})
    assert pick(frames_s, times_s) == expected


@given(frame_times, st.integers(1, 80))
def test_packet_times_foretell_what_the_picker_takes(frame_ms: list[int], num_frames: int) -> None:
    frames_s = np.array(frame_ms) / 1000
    flags = np.ones(len(frames_s), dtype=np.bool_)
    times_s = sample_times(frames_s[0], frames_s[-1] + 0.04, num_frames)
    assert PacketTimes(frames_s, flags, flags).wanted_s(times_s) == pick(list(frames_s), times_s)


def test_picker_gives_the_first_frame_to_earlier_times_and_nothing_without_frames() -> None:
    assert pick([5.0, 6.0], [0.0, 1.0]) == [5.0]
    assert pick([], [0.0]) == []


def test_picker_knows_frames_that_go_back_and_when_it_is_done() -> None:
    picker = FramePicker([0.0])
    assert not picker.is_late(0.0)
    assert not picker.offer(0.0)
    assert picker.is_late(0.0)
    assert picker.offer(1.0)
    assert picker.done


@st.composite
def packet_times(draw: st.DrawFn) -> PacketTimes:
    """Groups of pictures in decode order; leading pictures of a key packet are shown before it."""
    times: list[float] = []
    keys: list[bool] = []
    shown_from = 0
    for length in draw(st.lists(st.integers(1, 8), min_size=1, max_size=6)):
        leading = draw(st.integers(0, length - 1)) if times else 0
        order = [leading, *range(leading), *range(leading + 1, length)]
        times += [float(shown_from + offset) for offset in order]
        keys += [True] + [False] * (length - 1)
        shown_from += length
    return PacketTimes(np.array(times), np.array(keys), np.ones(len(times), dtype=np.bool_))


@given(packet_times(), st.integers(1, 12))
def test_runs_hold_every_wanted_packet_and_start_where_a_decoder_can(packets: PacketTimes, num_frames: int) -> None:
    wanted_s = packets.wanted_s(sample_times(0.0, packets.end_s(), num_frames))
    runs = plan_runs(packets, wanted_s)
    for before, after in pairwise(runs):
        assert before.stop <= after.start
    for run in runs:
        assert packets.is_key[run.start]
        assert run.stop - 1 in (run.wanted or ())
        for packet in run.wanted or ():
            assert packets.time_s[packet] >= packets.time_s[run.start]
    wanted_packets = [packet for run in runs for packet in run.wanted or ()]
    assert sorted(packets.time_s[wanted_packets]) == wanted_s


def test_a_run_starts_at_no_key_that_is_decoded_behind_the_wanted_frame() -> None:
    """A second edit that begins within a group of pictures hides those up to there, with times of the first edit."""
    times_s = np.array([0.0, 1.0, 2.0, 3.0, 2.0, 3.0, 4.0, 5.0])
    is_key = np.array([True, False, False, False, True, False, False, False])
    is_shown = np.array([True, True, True, True, False, False, True, True])
    runs = plan_runs(PacketTimes(times_s, is_key, is_shown), [3.0, 5.0])
    assert [(run.start, run.stop) for run in runs] == [(0, 4), (4, 8)]


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_runs_start_at_the_last_key_before_in_both_orders(listed: list[tuple[int, bool, bool]]) -> None:
    """Whatever times packets have."""
    times_s, is_key, is_shown = (np.array(column) for column in zip(*listed, strict=True))
    packets = PacketTimes(times_s.astype(np.float64), is_key, is_shown)
    for time_s in packets.shown_s():
        (run,) = plan_runs(packets, [time_s])
        (packet,) = run.wanted or ()
        assert packets.time_s[packet] == time_s and run.stop == packet + 1
        assert run.start == max((at for at in range(packet + 1) if is_key[at] and times_s[at] <= time_s), default=0)


def test_plan_of_everything_is_one_run() -> None:
    flags = np.ones(3, dtype=np.bool_)
    (run,) = plan_all(PacketTimes(np.arange(3.0), flags, flags))
    assert (run.start, run.stop, run.wanted) == (0, 3, None)


def test_a_clip_ends_one_median_gap_after_its_last_frame() -> None:
    flags = np.ones(4, dtype=np.bool_)
    assert PacketTimes(np.array([0.0, 0.1, 0.2, 9.0]), flags, flags).end_s() == pytest.approx(9.1)
    assert PacketTimes(np.zeros(1), flags[:1], flags[:1], lone_frame_s=0.5).end_s() == 0.5
