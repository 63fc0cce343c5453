"""Films of which much is torn: what is sound is found as ever, and the rest is marked."""

import io
import tempfile
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.media import Media
from slipstream.errors import LimitExceeded, SlipstreamError, UnreadableVideo
from slipstream.video import decode as video_decode
from slipstream.video import film_windows
from slipstream.video.damage import DamageCount, FilmDamage
from slipstream.video.decode import sample_video
from slipstream.video.files import FileThreads, VideoFile
from slipstream.video.film_cuts import SHOT_PIECE_S, Cut
from slipstream.video.film_windows import NO_FRAME, plan_segments, plan_shots, sample_windows
from slipstream.video.messages import DecodeLimits, Planned, SampledVideo
from tests.support.films import Film, frame_times, make_film, torn
from tests.support.variants import one_in

LIMITS = DecodeLimits()
SEGMENTS, LONG = 8, 16
"""Frames of a segment, of an eighth of a second each."""
WINDOWS = [(2.0 * number, 2.0 * number + 2.0) for number in range(SEGMENTS)]
SCENES = [LONG] * SEGMENTS
KEYS_EVERY = {"each a key": 1, "a key each segment": LONG, "keys across segments": 24}


def film_of(key_every: int) -> Film:
    return make_film(SCENES, frame_times(SCENES), key_every=key_every, codec_options={"bf": "0", "sc_threshold": "0"})


def packets_in(segments: Iterable[int]) -> list[int]:
    return [LONG * segment + packet for segment in segments for packet in range(LONG)]


def sampled(data: bytes, num_frames: int = 4, limits: DecodeLimits = LIMITS) -> list[SampledVideo | SlipstreamError]:
    return sample_windows(io.BytesIO(data), num_frames, WINDOWS, limits)


def check_sound(found: object, wanted: object) -> None:
    assert isinstance(found, SampledVideo) and isinstance(wanted, SampledVideo)
    assert np.array_equal(found.frames, wanted.frames) and found.timestamps_s == wanted.timestamps_s
    assert not found.warnings


# -- fixed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{2, 5}, {2, 3, 5}, {1, 2, 3, 7}, {1, 2, 3, 4, 5, 6, 7}])
def test_sound_segments_stay_whatever_else_is_torn(bad: Collection[int]) -> None:
    sound = film_of(key_every=LONG).data
    whole, found = sampled(sound), sampled(torn(sound, packets_in(bad)))
    for number in range(SEGMENTS):
        if number in bad:
            assert isinstance(found[number], UnreadableVideo) and str(found[number]) == NO_FRAME
        else:
            check_sound(found[number], whole[number])


def test_frames_of_each_second_are_counted_segment_by_segment() -> None:
    source, windows = io.BytesIO(film_of(key_every=LONG).data), [(0.0, 2.0), (2.0, 3.0), (3.0, 12.0)]
    found = sample_windows(source, 8, windows, LIMITS, fps=2.0)
    for window, count, video in zip(windows, (4, 2, 8), found, strict=True):
        [alone] = sample_windows(source, count, [window], LIMITS)
        assert isinstance(video, SampledVideo) and len(video.frames) == count
        check_sound(video, alone)


def test_a_film_with_a_torn_beginning_begins_later() -> None:
    sound = film_of(key_every=LONG).data
    damaged = io.BytesIO(torn(sound, packets_in([0, 1, 2])))
    planned = plan_segments(damaged, 2.0, LIMITS)
    assert planned.start_s == 6.0 and planned.bounds == (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)
    for video, wanted in zip(sample_windows(damaged, 4, WINDOWS[:5], LIMITS), sampled(sound)[3:], strict=True):
        check_sound(video, wanted)


@pytest.mark.parametrize("keys", KEYS_EVERY)
@pytest.mark.parametrize("group", [(0, 4), (4, 8), (5, 6)])
def test_what_is_torn_before_a_group_costs_it_nothing(keys: str, group: tuple[int, int]) -> None:
    """Also where its last segment is torn, which is looked at once more with what comes before."""
    sound = film_of(KEYS_EVERY[keys]).data
    of_group = slice(*group)
    damaged = torn(sound, packets_in([1, 2, 3, 7]))
    whole = sample_windows(io.BytesIO(sound), 4, WINDOWS[of_group], LIMITS)
    found = sample_windows(io.BytesIO(damaged), 4, WINDOWS[of_group], LIMITS)
    behind_torn = {4} if keys == "keys across segments" else set[int]()
    for number, video, wanted in zip(range(*group), found, whole, strict=True):
        if number in {1, 2, 3, 7}:
            assert isinstance(video, UnreadableVideo)
        elif number not in behind_torn:
            check_sound(video, wanted)


def test_a_frame_that_is_torn_has_another_of_its_segment_in_its_place() -> None:
    sound = film_of(key_every=1).data
    third_frames = [LONG * segment + 8 for segment in range(SEGMENTS)]
    found = sampled(torn(sound, third_frames))
    for video in found:
        assert isinstance(video, SampledVideo) and video.timestamps_s == (0.0, 0.5, 0.875, 1.5)
        assert video.warnings[0].startswith("1 damaged packets were skipped")


def test_a_segment_with_too_much_damage_is_refused_alone() -> None:
    sound = film_of(key_every=1).data
    limits = DecodeLimits(max_corrupt_packets=3)
    found = sampled(torn(sound, packets_in([3])[:14]), num_frames=8, limits=limits)
    assert "the segment is damaged: more than 3 packets could not be decoded" in str(found[3])
    assert sum(isinstance(video, SampledVideo) for video in found) == SEGMENTS - 1


@pytest.mark.parametrize("error", [LimitExceeded("out of time"), UnreadableVideo("torn")])
def test_a_closer_look_that_fails_costs_nothing_that_was_there(
    error: SlipstreamError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has written over the frames of the first pass."""
    sound = film_of(key_every=1).data
    damaged, wanted = torn(sound, [LONG * 3 + 8]), sampled(sound, num_frames=16)[3]
    memory = {number: np.zeros((4, 48, 64, 3), dtype=np.uint8) for number in range(SEGMENTS)}
    passes: list[list[float]] = []

    def decode(video: Any, packets: Any, runs: Any, limits: Any, damage: Any) -> Iterator[tuple[float, Any]]:
        passes.append([])
        for time_s, frame in decode_runs(video, packets, runs, limits, damage):
            if len(passes) > 1 and time_s >= 7.6:
                raise error
            passes[-1].append(time_s)
            yield time_s, frame

    decode_runs = film_windows.decode_runs
    monkeypatch.setattr(film_windows, "decode_runs", decode)
    found = sample_windows(
        io.BytesIO(damaged), 4, WINDOWS, LIMITS, allocate=lambda window, shape: memory[window][: shape[0]]
    )
    assert len(passes) == 2 and passes[1][-1] > 7.0, "the second pass gave some frames of the segment"
    assert isinstance(found[3], SampledVideo) and isinstance(wanted, SampledVideo)
    assert found[3].timestamps_s == (0.0, 0.5, 0.875, 1.5)
    assert np.array_equal(found[3].frames, wanted.frames[[0, 4, 7, 12]])


@pytest.mark.parametrize("error", [LimitExceeded("out of time"), UnreadableVideo("torn"), None])
def test_what_a_sparse_look_gave_of_a_clip_stays_if_a_whole_one_fails_or_gives_less(
    error: SlipstreamError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that has written over the frames."""
    sound = film_of(key_every=1).data
    whole = sample_video(io.BytesIO(sound), SEGMENTS * LONG, LIMITS).frames
    memory = np.zeros((4, 48, 64, 3), dtype=np.uint8)
    passes: list[list[float]] = []

    def decode(video: Any, packets: Any, runs: Any, limits: Any, damage: Any) -> Iterator[tuple[float, Any]]:
        passes.append([])
        for time_s, frame in decode_runs(video, packets, runs, limits, damage):
            if len(passes) > 1 and time_s > 4.5:
                if error is not None:
                    raise error
                return
            passes[-1].append(time_s)
            yield time_s + (0.125 if len(passes) > 1 else 0.0), frame

    decode_runs = video_decode.decode_runs
    monkeypatch.setattr(video_decode, "decode_runs", decode)
    video = sample_video(io.BytesIO(torn(sound, [64])), 4, LIMITS, allocate=lambda shape: memory[: shape[0]])
    assert len(passes) == 2 and passes[1][-1] == 4.5, "the second pass gave some frames"
    assert video.timestamps_s == (0.0, 4.0, 7.875, 12.0) and np.array_equal(video.frames, whole[[0, 32, 63, 96]])


def test_lack_of_memory_is_not_called_damage() -> None:
    damage = FilmDamage(3, lambda packet: packet)
    damage.add(MemoryError())
    assert isinstance(damage.of(0).error(NO_FRAME), LimitExceeded)


def test_damage_is_bounded_in_one_place_and_counted_by_part() -> None:
    damage = FilmDamage(3, lambda packet: packet // 10)
    for packet in range(40):
        damage.at(packet)
        damage.add(f"torn {packet}")
    assert [damage.of(part).count for part in range(5)] == [10, 10, 10, 10, 0] and damage.count == 40
    assert damage.of(0).is_too_much and not damage.of(4).is_too_much
    for _ in range(2):
        damage.add("again")
    with pytest.raises(UnreadableVideo, match="cannot be read on from its packet 39"):
        damage.add("again")
    strict = DamageCount(1)
    strict.add("torn")
    with pytest.raises(UnreadableVideo, match="more than 1 packets"):
        strict.add("torn")


# -- shots ------------------------------------------------------------------------------------------------------------


def test_shots_are_found_on_both_sides_of_what_is_torn() -> None:
    film = film_of(key_every=1)
    data = io.BytesIO(torn(film.data, packets_in([2, 3, 4])))
    shots = plan_shots(data, (0.0, 16.0), 0.0, LIMITS)
    assert set(shots.bounds) >= {0.0, 2.0, 12.0, 14.0, 16.0}
    assert plan_segments(data, 2.0, LIMITS).bounds == (*(start_s for start_s, _ in WINDOWS), 16.0)


async def cut_at_shots(data: bytes, media: Media) -> Planned:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            return await media.plan_segments(VideoFile(file, len(data), FileThreads()), Cut(0.0))
    finally:
        media.close()


def new_media() -> Media:
    return Media(GatewayConfig(listen="", target="t:1", decode_workers=1))


async def test_a_film_with_torn_pieces_is_cut_at_the_shots_of_the_others() -> None:
    lengths = [120] * 6
    film = make_film(lengths, frame_times(lengths), size=(16, 16), key_every=1)
    bad = range(240, 480)
    planned = await cut_at_shots(torn(film.data, bad), new_media())
    assert {0.0, 15.0, 75.0} <= set(planned.bounds) and planned.bounds[-1] == 90.0
    windows = list(pairwise(planned.bounds))
    found = sample_windows(io.BytesIO(torn(film.data, bad)), 4, windows, LIMITS)
    assert sum(isinstance(video, SampledVideo) for video in found) >= len(windows) - 1


@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {0, 2}])
@one_in(3, "bad")
async def test_a_piece_that_cannot_be_looked_at_is_a_segment_of_its_own(
    bad: Collection[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one over which decoders crash."""
    lengths = [120] * 6
    film = make_film(lengths, frame_times(lengths), size=(16, 16))
    media = new_media()
    plan = media._pool.plan_segments

    async def crash(*given: object, **how: object) -> Planned:
        piece = how.get("piece")
        if isinstance(piece, tuple) and piece[0] / SHOT_PIECE_S in bad:
            raise UnreadableVideo("the decoder crashed on this file")
        return await plan(*given, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(media._pool, "plan_segments", crash)
    planned = await cut_at_shots(film.data, media)
    lost = {30.0 * piece + 15.0 for piece in bad}
    assert planned.bounds == tuple(bound for bound in (*film.scenes_s, 90.0) if bound not in lost)
    assert planned.warnings == (
        f"no shots could be looked for in {30 * len(bad):.1f} s of the film, the first from {30 * min(bad):.1f} s on",
    )


async def test_a_film_none_of_whose_shots_can_be_looked_for_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    film = make_film([120, 120, 120], frame_times([120] * 3), size=(16, 16))
    media = new_media()
    plan = media._pool.plan_segments

    async def crash(*given: object, **how: object) -> Planned:
        if how.get("piece"):
            raise LimitExceeded("decoding took longer than 1 s")
        return await plan(*given, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(media._pool, "plan_segments", crash)
    with pytest.raises(LimitExceeded, match="longer than 1 s"):
        await cut_at_shots(film.data, media)
