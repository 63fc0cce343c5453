"""Where films are cut, and the frames of their segments: against clips that hold the same frames and nothing else."""

import io
import json
import tempfile
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.media import Media
from slipstream.errors import InvalidRequest, LimitExceeded, SlipstreamError, UnreadableVideo
from slipstream.video.decode import sample_video
from slipstream.video.files import FileThreads, VideoFile
from slipstream.video.film_cuts import (
    MAX_SEGMENTS,
    SHOT_PIECE_S,
    Cut,
    FoundShots,
    bounds_of,
    check_times,
    fixed_starts,
    groups,
    parse_segments,
)
from slipstream.video.film_windows import plan_segments, plan_shots, sample_windows
from slipstream.video.frame_times import PacketTimes
from slipstream.video.messages import (
    BadAnswer,
    DecodeLimits,
    DecodeRequest,
    Planned,
    Refused,
    Sampled,
    SampledVideo,
    SampledWindows,
    encode_answer,
    parse_answer,
)
from slipstream.video.shots import shot_starts
from tests.support.films import frame_times, make_film, scene, write_film

LIMITS = DecodeLimits()
gaps_ms = st.lists(st.integers(1, 4000), min_size=0, max_size=60)

# -- planning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cut"),
    [("none", None), ("shots", Cut(0.0)), ("fixed:10s", Cut(10.0)), ("fixed:2.5", Cut(2.5)), ("fixed:.5s", Cut(0.5))],
)
def test_what_the_option_says(text: str, cut: Cut | None) -> None:
    assert parse_segments(text) == cut


@pytest.mark.parametrize("text", ["", "fixed", "fixed:", "fixed:0s", "fixed:-1s", "fixed:1e9s", "fixed:nan", "shot"])
def test_what_the_option_cannot_say(text: str) -> None:
    with pytest.raises(InvalidRequest, match="segments"):
        parse_segments(text)
    with pytest.raises(InvalidRequest, match="segments"):
        parse_segments("fixed:" + "9" * 400)


@given(gaps_ms, st.integers(1, 10_000))
def test_fixed_segments_lie_side_by_side_and_each_has_frames_of_its_own(gaps: list[int], stride_ms: int) -> None:
    shown_s = np.cumsum([0, *gaps]) / 1000
    stride_s, end_s = stride_ms / 1000, float(shown_s[-1]) + 0.04
    bounds = bounds_of(fixed_starts(shown_s, stride_s), end_s)
    assert bounds[0] == 0 and bounds[-1] == pytest.approx(end_s)
    numbers = np.searchsorted(bounds, shown_s + 1e-6) - 1
    assert set(numbers) == set(range(len(bounds) - 1)), "each segment has a frame, and each frame a segment"
    assert all(np.abs(shown_s - start_s).min() < 1e-6 for start_s in bounds[:-1]), "it begins with one"
    for number in range(len(bounds) - 1):
        own_ms = np.round(shown_s[numbers == number] * 1000).astype(int)
        assert len(set(own_ms // stride_ms)) == 1, "a segment holds the frames between two multiples of the stride"
    firsts = np.round(np.asarray(bounds[:-1]) * 1000).astype(int) // stride_ms
    assert all(early < late for early, late in pairwise(firsts)), "and all of them"


@given(st.lists(st.integers(0, 200), unique=True).map(sorted), st.integers(1, 20))
def test_groups_follow_on_one_another(numbers: list[int], size: int) -> None:
    gathered = groups(numbers, size)
    assert [number for group in gathered for number in group] == numbers
    for group in gathered:
        assert len(group) <= size and group == list(range(group[0], group[0] + len(group)))


def test_a_film_has_no_more_segments_than_a_job_has_parts() -> None:
    starts_s = np.arange(MAX_SEGMENTS + 1) / 10
    assert len(bounds_of(starts_s[:-1], 1000.0)) == MAX_SEGMENTS + 1
    with pytest.raises(LimitExceeded, match="would have 10001 segments"):
        bounds_of(starts_s, 1000.1)


@pytest.mark.parametrize("error", [LimitExceeded("too slow"), UnreadableVideo("it crashed")])
def test_pieces_without_shots_may_not_take_for_ever(error: SlipstreamError) -> None:
    shots = FoundShots([30.0 * number for number in range(721)])
    shots.add([0.0, 30.0])
    for piece in shots.pieces[1:3]:
        shots.skip(piece, error, 121.0)
    with pytest.raises(type(error)):
        shots.skip(shots.pieces[3], error, 121.0)


def test_the_bounds_of_the_longest_film_fit_a_message() -> None:
    bounds = bounds_of(np.linspace(0, LIMITS.max_duration_s, MAX_SEGMENTS, endpoint=False), LIMITS.max_duration_s)
    request = DecodeRequest(1, LIMITS, cut=1.0)
    planned = Planned(95443.717689, bounds, ())
    assert parse_answer(encode_answer(planned), request) == planned


def test_frames_without_times_have_no_segments() -> None:
    key = np.asarray([True, False, False])
    with pytest.raises(InvalidRequest, match="have no times of their own"):
        check_times(PacketTimes(np.zeros(3), key, np.ones(3, dtype=bool)))
    check_times(PacketTimes(np.zeros(1), key[:1], np.ones(1, dtype=bool)))
    check_times(PacketTimes(np.arange(3.0), key, np.ones(3, dtype=bool)))


# -- shots ------------------------------------------------------------------------------------------------------------


def picture(grey: int) -> NDArray[np.uint8]:
    return np.full((4, 4, 3), grey, dtype=np.uint8)


def test_a_shot_begins_where_the_picture_changes_and_not_too_soon_after_another() -> None:
    greys = [10] * 10 + [200] * 2 + [10] * 8 + [250] * 10
    timed = [(number / 10, picture(grey)) for number, grey in enumerate(greys)]
    assert shot_starts(timed) == [1.0, 2.0]
    assert shot_starts(timed, least_s=0.1) == [1.0, 1.2, 2.0]
    assert shot_starts(timed[:10]) == shot_starts([]) == []
    assert shot_starts([timed[0], timed[15], timed[3], timed[25]]) == [2.5], "what goes back in time is left out"


# -- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "codec", "start_s"),
    [
        ("matroska", "ffv1", 0.0),
        ("matroska", "libx264", 5.0),
        ("mp4", "libx264", 3.0),
        ("mpegts", "libx264", 7.0),
        ("matroska", "libvpx-vp9", 100.0),
    ],
)
def test_scenes_are_found_at_the_times_of_the_container(container: str, codec: str, start_s: float) -> None:
    lengths = [20, 33, 27]
    film = make_film(lengths, frame_times(lengths, start_s=start_s), codec=codec, container=container)
    data = io.BytesIO(film.data)
    for pieces in ([0.0, 10.0], [0.0, 2.5, 4.0, 10.0], [0.0, 1.0, 2.375, 2.5, 6.625, 6.75, 10.0]):
        starts_s = [0.0]
        for piece in pairwise(pieces):
            shots = plan_shots(data, piece, starts_s[-1], LIMITS)
            request = DecodeRequest(1, LIMITS, windows=(piece,), cut=starts_s[-1])
            assert parse_answer(encode_answer(shots), request) == shots
            starts_s += shots.bounds[1:-1]
        assert [start_s + shot_s for shot_s in starts_s] == pytest.approx(film.scenes_s)
    fixed = plan_segments(data, 3.0, LIMITS)
    assert fixed.start_s == start_s and fixed.bounds == (0.0, 3.0, 6.0, 9.0, 10.0) and not fixed.warnings


@settings(max_examples=25)
@given(gaps=st.lists(st.integers(20, 900), min_size=3, max_size=23), stride_ms=st.integers(100, 4000))
def test_a_segment_has_the_frames_of_a_clip_of_its_own(gaps: list[int], stride_ms: int) -> None:
    """Also where frames come unevenly."""
    times_s = [float(time_s) for time_s in np.cumsum([300, *gaps]) / 1000]
    pictures = scene(0, len(times_s), size=(16, 16))
    data = io.BytesIO(write_film(pictures, times_s, codec="ffv1", key_every=5))
    planned = plan_segments(data, stride_ms / 1000, LIMITS)
    windows = list(pairwise(planned.bounds))
    for part, (start_s, end_s) in zip(sample_windows(data, 3, windows, LIMITS), windows, strict=True):
        own = [n for n, time_s in enumerate(times_s) if start_s - 1e-6 <= time_s - times_s[0] < end_s - 1e-6]
        clip = write_film([pictures[n] for n in own], [times_s[n] - times_s[own[0]] for n in own], codec="ffv1")
        alone = sample_video(io.BytesIO(clip), 3, LIMITS)
        assert isinstance(part, SampledVideo) and part.timestamps_s[0] == 0
        assert part.duration_s == pytest.approx(end_s - start_s)
        picked = [times_s[own[0]] + time_s for time_s in part.timestamps_s]
        for time_s, frame in zip(picked, part.frames, strict=True):
            assert np.array_equal(frame, pictures[int(np.abs(np.asarray(times_s) - time_s).argmin())])
        if alone.duration_s == pytest.approx(part.duration_s):  # a clip's last frame lasts as long as most others
            assert np.array_equal(part.frames, alone.frames)
            assert part.timestamps_s == pytest.approx(alone.timestamps_s)


def test_segments_are_sampled_in_any_part_of_a_film() -> None:
    film = make_film([24, 24, 24], frame_times([24] * 3), key_every=30)
    data, windows = io.BytesIO(film.data), [(0.0, 3.0), (3.0, 6.0), (6.0, 9.0)]
    together = sample_windows(data, 4, windows, LIMITS)
    for window, whole in zip(windows, together, strict=True):
        (alone,) = sample_windows(data, 4, [window], LIMITS)
        assert isinstance(alone, SampledVideo) and isinstance(whole, SampledVideo)
        assert np.array_equal(alone.frames, whole.frames) and alone.timestamps_s == whole.timestamps_s


# -- messages ---------------------------------------------------------------------------------------------------------

SAMPLED = Sampled((1, 2, 2), (0.0,), 1.0, 2, 2, "h264", 0, ())
WINDOWS = DecodeRequest(2, LIMITS, windows=((0.0, 1.0), (1.0, 2.0)))
CUT = DecodeRequest(1, LIMITS, cut=1.0)


def test_windows_survive_the_way_to_the_parent() -> None:
    answer = SampledWindows((SAMPLED, Refused("UnreadableVideo", "torn")))
    assert parse_answer(encode_answer(answer), WINDOWS) == answer
    assert DecodeRequest.decode(WINDOWS.encode()) == WINDOWS and DecodeRequest.decode(CUT.encode()) == CUT
    assert WINDOWS.frames_bytes == 2 * WINDOWS.window_bytes and WINDOWS.most_frames == 4


@pytest.mark.parametrize(
    "windows",
    [
        [{"Sampled": asdict(SAMPLED)}],
        [{"Sampled": asdict(SAMPLED)}] * 3,
        [{"Sampled": asdict(SAMPLED)}, {"Started": {}}],
        [{"Sampled": asdict(SAMPLED) | {"shape": [3, 2, 2]}}] * 2,
        [{"SampledWindows": {"windows": []}}] * 2,
    ],
)
def test_windows_that_were_not_asked_for_are_not_believed(windows: list[object]) -> None:
    with pytest.raises(BadAnswer):
        parse_answer(json.dumps({"SampledWindows": {"windows": windows}}).encode(), WINDOWS)


@pytest.mark.parametrize("bounds", [[], [0], [0, 2, 1, 3], [0, 1, 1, 2], [-1, 1], [0, 2, 1], [0, float("nan")]])
def test_segments_that_cannot_be_are_not_believed(bounds: list[float]) -> None:
    message = json.dumps({"Planned": {"start_s": 0, "bounds": bounds, "warnings": []}}).encode()
    with pytest.raises(BadAnswer):
        parse_answer(message, CUT)


@pytest.mark.parametrize(("start_s", "end_s"), [(1e300, 1.0), (-1e300, 1.0), (0.0, 1e300)])
def test_times_that_no_file_can_have_are_not_believed(start_s: float, end_s: float) -> None:
    with pytest.raises(BadAnswer):
        parse_answer(encode_answer(Planned(start_s, (0.0, end_s), ())), CUT)


def test_shots_outside_of_their_piece_are_not_believed() -> None:
    asked = DecodeRequest(1, LIMITS, windows=((30.0, 60.0),), cut=25.0)
    parse_answer(encode_answer(Planned(0.0, (25.0, 31.0, 60.0), ())), asked)
    for bounds in ((25.0, 29.0, 60.0), (25.0, 61.0, 62.0), (25.0, 31.0, 61.0)):
        with pytest.raises(BadAnswer):
            parse_answer(encode_answer(Planned(0.0, bounds, ())), asked)


def test_segments_that_nobody_asked_for_are_not_believed() -> None:
    message = encode_answer(Planned(0.0, (0.0, 1.0), ()))
    with pytest.raises(BadAnswer):
        parse_answer(message, WINDOWS)


# -- through confined decoders ----------------------------------------------------------------------------------------


async def test_the_shots_of_a_film_are_found_piece_by_piece() -> None:
    """Also one that begins with a piece, and one just before it."""
    lengths = [100, 139, 1, 240, 17]
    film = make_film(lengths, frame_times(lengths, start_s=2.0), size=(16, 16))
    media = Media(GatewayConfig(listen="", target="t:1", decode_workers=1))
    try:
        with tempfile.TemporaryFile() as file:
            file.write(film.data)
            file.flush()
            source = VideoFile(file, len(film.data), FileThreads())
            planned = await media.plan_segments(source, Cut(0.0))
            short = await media.plan_segments(source, Cut(1000.0))
    finally:
        media.close()
    starts_s = [2.0 + bound for bound in planned.bounds[:-1]]
    assert starts_s == pytest.approx([start_s for n, start_s in enumerate(film.scenes_s) if n != 3])  # too soon
    assert film.scenes_s[3] == 2.0 + SHOT_PIECE_S and not planned.warnings
    assert short.bounds == (0.0, planned.bounds[-1]) and "less than a segment of 1000 s" in short.warnings[0]
