"""Fingerprints: what leaves two videos alike, what does not, and that the nearest of many is found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.captioning.duplicates import HINT, SHARE, WITHIN
from slipstream.video.fingerprint import (
    NUM_PICTURES,
    PICTURE_CELLS,
    Fingerprint,
    Fingerprints,
    distance,
    fingerprint_of,
    without_border,
)
from slipstream.video.messages import SampledVideo
from tests.support.films import scene

seeds = st.integers(0, 10_000)
shares = st.floats(0.0, 0.04)


def video(frames: NDArray[np.uint8], duration_s: float = 10.0) -> SampledVideo:
    times_s = tuple(duration_s * number / len(frames) for number in range(len(frames)))
    height, width = frames.shape[1:3]
    return SampledVideo(frames, times_s, duration_s, width, height, "h264", 0, ())


def made(seed: int, num_frames: int = 6, size: tuple[int, int] = (96, 64)) -> NDArray[np.uint8]:
    return np.stack(scene(seed, num_frames, size))


def between(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    return distance(fingerprint_of(video(one)), fingerprint_of(video(other)))


@settings(max_examples=30)
@given(seeds, st.integers(1, 9))
def test_a_video_is_at_no_distance_from_itself(seed: int, num_frames: int) -> None:
    frames = made(seed, num_frames)
    fingerprint = fingerprint_of(video(frames))
    assert fingerprint.pictures.shape == (min(num_frames, NUM_PICTURES), PICTURE_CELLS)
    assert distance(fingerprint, fingerprint_of(video(frames.copy()))) == 0


@settings(max_examples=30)
@given(seeds, st.integers(0, 40), st.integers(0, 40), st.integers(0, 9))
def test_bars_change_nothing(seed: int, above: int, beside: int, dark: int) -> None:
    frames = made(seed)
    bars = ((0, 0), (above, above), (beside, beside), (0, 0))
    barred = np.pad(frames, bars, constant_values=dark)
    assert np.array_equal(without_border(barred), without_border(frames))


@settings(max_examples=30)
@given(seeds, st.integers(2, 4), st.floats(0, 4), st.floats(0.9, 1.1))
def test_noise_scaling_and_another_range_of_brightness_stay_near(
    seed: int, larger: int, noise: float, gain: float
) -> None:
    frames = made(seed)
    scaled = frames.repeat(larger, axis=1).repeat(larger, axis=2).astype(np.float32)
    changed = gain * scaled + np.random.default_rng(seed).normal(0, noise, scaled.shape)
    assert between(frames, changed.clip(0, 255).astype(np.uint8)) <= WITHIN[SHARE]


@settings(max_examples=30)
@given(seeds, shares, shares, shares, shares)
def test_a_small_crop_stays_near(seed: int, top: float, bottom: float, left: float, right: float) -> None:
    frames = made(seed, size=(240, 160))
    cropped = frames[:, round(160 * top) : round(160 * (1 - bottom)), round(240 * left) : round(240 * (1 - right))]
    assert between(frames, cropped) <= WITHIN[HINT]
    assert between(cropped, frames) <= WITHIN[HINT]


@settings(max_examples=30)
@given(seeds)
def test_another_scene_other_colours_and_one_object_are_far(seed: int) -> None:
    frames = made(seed)
    assert between(frames, made(seed + 1)) > WITHIN[HINT]
    marked = frames.copy()
    marked[-1, 24:40, 40:56] = 255 - (marked[-1, 24:40, 40:56].mean(axis=(0, 1)) > 127) * 255
    assert between(frames, marked) > WITHIN[SHARE]
    plain = np.full_like(frames, 100)
    red = plain.copy()
    red[..., 0], red[..., 1] = 180, 68
    assert between(plain, red) > WITHIN[HINT]


def test_lengths_and_numbers_of_frames_must_agree() -> None:
    one = fingerprint_of(video(made(1), 10.0))
    assert distance(one, fingerprint_of(video(made(1), 10.4))) == 0
    assert distance(one, fingerprint_of(video(made(1), 11.0))) == np.inf
    assert distance(one, fingerprint_of(video(made(1)[:3], 10.0))) == np.inf


@pytest.mark.parametrize("level", [0, 15, 255])
def test_a_video_of_one_colour_has_a_fingerprint(level: int) -> None:
    frames = np.full((1, 1, 1, 3), level, dtype=np.uint8)
    assert without_border(frames).shape == frames.shape
    assert (fingerprint_of(video(frames)).pictures[0, :256] == level).all()


# -- search -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 7), st.lists(seeds, min_size=1, max_size=20, unique=True), st.data())
def test_the_nearest_of_those_that_are_kept_is_found(most: int, added: list[int], data: st.DataObject) -> None:
    kept = Fingerprints(most)
    assert kept.nearest(_random(0), 255.0) is None
    for seed in added:
        kept.add(_random(seed))
    assert len(kept) == min(most, len(added))
    wanted = data.draw(st.sampled_from(added))
    found = kept.nearest(_random(wanted), WITHIN[SHARE])
    number = added.index(wanted) - (len(added) - len(kept))
    assert (found.number, found.distance) == (number, 0) if number >= 0 and found else number < 0 and found is None


def _random(seed: int) -> Fingerprint:
    pictures = np.random.default_rng(seed).integers(0, 256, (NUM_PICTURES, 4, 4), dtype=np.uint8)
    light = pictures.repeat(4, axis=1).repeat(4, axis=2).reshape(NUM_PICTURES, -1)
    colour = np.full((NUM_PICTURES, PICTURE_CELLS - light.shape[1]), 128, dtype=np.uint8)
    return Fingerprint(1.0, np.concatenate([light, colour], axis=1))
