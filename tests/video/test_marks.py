"""Marks: black, frozen and static videos, and which of them get no text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.video.marks import BLACK, FROZEN, MARKS, STATIC, is_skipped, marks_of
from slipstream.video.messages import SampledVideo
from tests.support.films import scene

sizes = st.tuples(st.integers(1, 90), st.integers(1, 90))


def marks(frames: NDArray[np.uint8]) -> tuple[str, ...]:
    return marks_of(SampledVideo(frames, tuple(map(float, range(len(frames)))), 1.0, 1, 1, "h264", 0, ()))


@given(st.integers(1, 5), sizes, st.integers(0, 20), st.integers(0, 100))
def test_dark_frames_are_black_whatever_flickers_in_them(n: int, size: tuple[int, int], most: int, seed: int) -> None:
    frames = np.random.default_rng(seed).integers(0, most + 1, (n, *size, 3), dtype=np.uint8)
    assert marks(frames) == (BLACK,)


@given(st.integers(2, 5), sizes, st.integers(0, 100))
def test_one_frame_repeated_is_frozen(n: int, size: tuple[int, int], seed: int) -> None:
    frame = np.random.default_rng(seed).integers(60, 256, (1, *size, 3), dtype=np.uint8)
    assert marks(frame.repeat(n, axis=0)) == (FROZEN,)


@settings(max_examples=30)
@given(st.integers(0, 1000))
def test_a_still_camera_is_static_and_one_moving_thing_ends_that(seed: int) -> None:
    still = np.stack([scene(seed, 1, (320, 240))[0]] * 4).astype(np.float32)
    noisy = (still + np.random.default_rng(seed).normal(0, 3, still.shape)).clip(0, 255).astype(np.uint8)
    assert marks(noisy) == (STATIC,)
    moved = noisy.copy()
    patch = moved[2, 100:140, 150:190]
    moved[2, 100:140, 150:190] = np.where(patch > 127, patch - 90, patch + 90)
    assert marks(moved) == ()


def test_one_frame_stands_not_still() -> None:
    assert marks(np.full((1, 8, 8, 3), 90, dtype=np.uint8)) == ()


def test_one_lit_frame_is_not_black() -> None:
    frames = np.zeros((4, 64, 64, 3), dtype=np.uint8)
    frames[3, :16] = 200
    assert marks(frames) == ()


@pytest.mark.parametrize("weakest", ["none", *MARKS])
def test_each_choice_leaves_out_those_before_it(weakest: str) -> None:
    skipped = {mark for mark in MARKS if is_skipped((mark,), weakest) == mark}
    assert skipped == set(MARKS[: MARKS.index(weakest) + 1] if weakest in MARKS else ())
    assert is_skipped((), weakest) == ""
