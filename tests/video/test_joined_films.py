"""Recordings that were joined by writing one file behind the other: their clock begins anew in the middle."""

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
import pytest

from slipstream.video.container import RunningClock
from slipstream.video.decode import sample_video
from slipstream.video.film_windows import plan_segments
from slipstream.video.frame_times import DecodeRun, PacketTimes, plan_all
from slipstream.video.messages import DecodeLimits, SampledVideo
from tests.support.media import ClipSpec, even_times_ms, make_clip, read_index

LIMITS = DecodeLimits()
COUNT, FLV_HEADER_BYTES = 50, 13
REORDERED = {"g": "6", "bf": "2"}
KINDS = [("mpegts", "libx264"), ("mpegts", "mpeg2video"), ("vob", "mpeg2video"), ("flv", "libx264")]


def recording(container: str, codec: str) -> bytes:
    return make_clip(ClipSpec(even_times_ms(COUNT), container=container, codec=codec, codec_options=REORDERED))


def joined(container: str, one: bytes, count: int) -> bytes:
    """One recording so many times. Of FLV libav reads no second header."""
    return one + one[FLV_HEADER_BYTES if container == "flv" else 0 :] * (count - 1)


def sample(data: bytes, num_frames: int) -> SampledVideo:
    return sample_video(io.BytesIO(data), num_frames, LIMITS)


@pytest.mark.parametrize(("container", "codec"), KINDS)
def test_the_second_recording_is_shown_behind_the_first(
    container: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = recording(container, codec)
    video = sample(joined(container, one, 3), 12)
    assert [read_index(frame) for frame in video.frames] == [0, 12, 25, 37] * 3
    assert video.timestamps_s == pytest.approx([0.04 * (at + 50 * part) for part in range(3) for at in (0, 12, 25, 37)])
    assert video.duration_s == pytest.approx(6.0)
    assert video.warnings == (
        "timestamps go back 2 times, as in files that were joined; times were counted on from there",
    )
    assert not sample(one, 4).warnings

    def plan_everything(packets: PacketTimes, wanted_s: Sequence[float]) -> list[DecodeRun]:
        return plan_all(packets)

    monkeypatch.setattr("slipstream.video.decode.plan_runs", plan_everything)
    whole = sample(joined(container, one, 3), 12)
    assert whole.timestamps_s == video.timestamps_s and np.array_equal(whole.frames, video.frames)


@pytest.mark.parametrize(("container", "codec"), KINDS)
def test_of_a_film_in_segments_it_is_said_how_much_is_not_shown(container: str, codec: str) -> None:
    """Their times are the container's, by which clips are cut."""
    one = recording(container, codec)
    assert not plan_segments(io.BytesIO(one), 0.5, LIMITS).warnings
    planned = plan_segments(io.BytesIO(joined(container, one, 2)), 0.5, LIMITS)
    assert planned.bounds[-1] == pytest.approx(2.0)
    assert planned.warnings[0] == (
        "timestamps go back 1 times, as in files that were joined; "
        "50 frames are stamped as others before and are not shown"
    )


def followed(container: str, decoded_at: Sequence[int | None]) -> tuple[RunningClock, list[int]]:
    """The clock behind packets that are decoded then and shown two ticks later, each a tick long."""
    clock, shown = RunningClock(container, counts_on=True), list[int]()
    for ticks in decoded_at:
        packet = av.Packet(b"data")
        packet.time_base, packet.duration, packet.dts = Fraction(1, 10), 1, ticks
        packet.pts = 2 if ticks is None else ticks + 2
        clock.follow(packet)
        shown.append(packet.pts)
    return clock, shown


def test_only_what_goes_back_far_begins_anew() -> None:
    assert followed("mpegts", [20, 10, 9, 19])[1] == [22, 12, 11, 21]
    clock, shown = followed("mpegts", [100, 101, 0, None, 1, 0, 50, 39])
    assert shown == [102, 103, 104, 104, 105, 104, 154, 155] and (clock.num_restarts, clock.num_behind) == (2, 0)
    clock.begin()
    assert (clock.num_restarts, clock.num_behind) == (0, 0)


def test_other_containers_keep_their_times() -> None:
    clock, shown = followed("matroska,webm", [100, 101, 0])
    assert shown == [102, 103, 2] and not clock.num_restarts
