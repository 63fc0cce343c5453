"""Real files of many kinds: the right frames, the right way up, and the same ones however they are reached."""

import io
import tempfile
from collections.abc import Sequence
from typing import BinaryIO, cast

import numpy as np
import pytest

from slipstream.errors import InvalidRequest, LimitExceeded
from slipstream.video.container import DecodeCancelled
from slipstream.video.decode import sample_video
from slipstream.video.frame_times import DecodeRun, PacketTimes, plan_all, plan_runs
from slipstream.video.messages import DecodeLimits, SampledVideo
from tests.support.clip_kinds import CLIPS, SHORT_GROUPS, TIMES_MS
from tests.support.media import (
    ClipSpec,
    even_times_ms,
    expected_indices,
    index_picture,
    make_clip,
    read_index,
    rotated_mp4,
)

LIMITS = DecodeLimits()


def sample(data: bytes, num_frames: int, limits: DecodeLimits = LIMITS) -> SampledVideo:
    return sample_video(io.BytesIO(data), num_frames, limits)


def indices(video: SampledVideo) -> list[int]:
    return [read_index(frame) for frame in video.frames]


@pytest.mark.parametrize("name", CLIPS)
def test_exactly_the_expected_frames(name: str) -> None:
    spec = CLIPS[name]
    data = make_clip(spec)
    for num_frames in (1, 3, 7, len(spec.times_ms), 64):
        video = sample(data, num_frames)
        expected = expected_indices(spec.times_ms, num_frames)
        assert indices(video) == expected
        shown_s = [(spec.times_ms[index] - spec.times_ms[0]) / 1000 for index in expected]
        assert video.timestamps_s == pytest.approx(shown_s, abs=2e-3)
        assert video.frames.shape[1:] == (spec.height, spec.width, 3)
        assert (len(expected) < num_frames) == any("asked for" in warning for warning in video.warnings)


@pytest.mark.parametrize("name", CLIPS)
def test_skipping_packets_changes_no_pixel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_clip(CLIPS[name])
    sparse = {num_frames: sample(data, num_frames) for num_frames in (3, 7, 64)}

    def plan_everything(packets: PacketTimes, wanted_s: Sequence[float]) -> list[DecodeRun]:
        return plan_all(packets)

    monkeypatch.setattr("slipstream.video.decode.plan_runs", plan_everything)
    for num_frames, video in sparse.items():
        whole = sample(data, num_frames)
        np.testing.assert_array_equal(whole.frames, video.frames)
        assert whole.timestamps_s == video.timestamps_s


def test_sparse_samples_decode_few_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_clip(ClipSpec(even_times_ms(200), codec_options=SHORT_GROUPS))
    plans: list[list[DecodeRun]] = []

    def recorded(packets: PacketTimes, wanted_s: Sequence[float]) -> list[DecodeRun]:
        plans.append(plan_runs(packets, wanted_s))
        return plans[-1]

    monkeypatch.setattr("slipstream.video.decode.plan_runs", recorded)
    assert indices(sample(data, 4)) == [0, 50, 100, 150]
    assert sum(run.stop - run.start for run in plans[0]) < 4 * 12


@pytest.mark.parametrize("clockwise", [0, 90, 180, 270])
def test_frames_stand_upright(clockwise: int) -> None:
    upright = make_clip(ClipSpec(TIMES_MS, width=64, height=48))
    video = sample(rotated_mp4(upright, clockwise), 5)
    assert video.rotation == clockwise
    assert (video.source_width, video.source_height) == (64, 48)
    assert video.frames.flags["C_CONTIGUOUS"]
    assert [read_index(np.rot90(frame, k=clockwise // 90)) for frame in video.frames] == [0, 10, 20, 30, 40]


def test_lossless_frames_are_pixel_exact_and_described() -> None:
    video = sample(make_clip(ClipSpec(TIMES_MS, container="matroska", codec="ffv1", pix_fmt="bgr0")), 5)
    for frame, index in zip(video.frames, (0, 10, 20, 30, 40), strict=True):
        np.testing.assert_array_equal(frame, index_picture(index, 64, 48))
    assert video.frames.dtype == np.uint8
    assert video.duration_s == pytest.approx(2.0)
    assert (video.codec, video.rotation, video.warnings) == ("ffv1", 0, ())


def test_large_frames_are_scaled_down_in_shape() -> None:
    video = sample(make_clip(ClipSpec(even_times_ms(4), width=640, height=480)), 4, DecodeLimits(max_frame_pixels=7500))
    assert video.frames.shape == (4, 75, 100, 3)
    assert (video.source_width, video.source_height) == (640, 480)
    assert indices(video) == [0, 1, 2, 3]


@pytest.mark.parametrize("memory_bytes", [1, 10**9])
def test_an_upload_may_lie_in_memory_or_on_disk(memory_bytes: int) -> None:
    with tempfile.SpooledTemporaryFile(memory_bytes) as upload:
        upload.write(make_clip(CLIPS["h264"]))
        assert indices(sample_video(cast(BinaryIO, upload), 5, LIMITS)) == [0, 10, 20, 30, 40]
        assert not upload.closed


@pytest.mark.parametrize(("fps", "most", "expected"), [(2.5, 64, 5), (2.5, 4, 4), (0.1, 64, 1), (1e3, 8, 8), (0, 7, 7)])
def test_frames_of_each_second_are_as_many_evenly_spaced_ones(fps: float, most: int, expected: int) -> None:
    data = make_clip(CLIPS["h264"])
    video, even = sample_video(io.BytesIO(data), most, LIMITS, fps=fps), sample(data, expected)
    np.testing.assert_array_equal(video.frames, even.frames)
    assert (video.timestamps_s, video.warnings) == (even.timestamps_s, ())


def test_more_threads_give_the_same_frames() -> None:
    data = make_clip(CLIPS["h264"])
    np.testing.assert_array_equal(sample(data, 7, DecodeLimits(decoder_threads=2)).frames, sample(data, 7).frames)


def test_progress_counts_up_to_the_frames_expected() -> None:
    seen: list[tuple[int, int]] = []
    sample_video(
        io.BytesIO(make_clip(CLIPS["two frames"])),
        8,
        LIMITS,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 2), (2, 2)]


def test_a_stop_request_ends_the_work_at_the_next_packet() -> None:
    seen: list[int] = []
    with pytest.raises(DecodeCancelled):
        sample_video(
            io.BytesIO(make_clip(CLIPS["h264"])),
            50,
            LIMITS,
            should_stop=lambda: bool(seen),
            on_progress=lambda done, total: seen.append(done),
        )
    assert len(seen) <= 20  # what the decoder had already reordered


def test_a_stop_request_before_the_start_reads_nothing() -> None:
    with pytest.raises(DecodeCancelled):
        sample_video(io.BytesIO(make_clip(CLIPS["h264"])), 5, LIMITS, should_stop=lambda: True)


@pytest.mark.parametrize("num_frames", [0, -1, LIMITS.max_frames_sampled + 1])
def test_unreasonable_numbers_of_frames_are_refused(num_frames: int) -> None:
    with pytest.raises(InvalidRequest, match="num_frames"):
        sample(make_clip(CLIPS["one frame"]), num_frames)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (DecodeLimits(max_bytes=100), "100"),
        (DecodeLimits(max_duration_s=1.0), "lasts 2 s"),
        (DecodeLimits(max_packets=49), "49 packets"),
        (DecodeLimits(max_frames_decoded=5), "pictures would have to be decoded"),
        (DecodeLimits(max_pixels_source=64 * 48 - 1), "64x48"),
        (DecodeLimits(timeout_s=0.0), "longer than 0 s"),
    ],
)
def test_every_limit_says_its_name(limits: DecodeLimits, message: str) -> None:
    with pytest.raises(LimitExceeded, match=message):
        sample(make_clip(CLIPS["h264"]), 50, limits)
