"""Synthetic pages: the same for the same seed, and with nothing on them but what their text says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.pages import FACES, HELD_OUT_SEEDS, KINDS, PAGE_HEIGHT, PAGE_WIDTH, PITCH, sample_page
from training.train_reader import SEEDS_PER_PROCESS, TRAINING_SEEDS

seeds = st.integers(0, 10_000)


@given(seeds, st.sampled_from(KINDS), st.sampled_from(list(FACES)))
def test_a_seed_says_everything_about_its_page(seed: int, kind: str, face: str) -> None:
    one, other = (sample_page(seed, kind, face) for _ in range(2))
    assert (one.text, one.boxes) == (other.text, other.boxes)
    assert np.array_equal(one.pixels, other.pixels)
    assert one.pixels.shape == (PAGE_HEIGHT, PAGE_WIDTH, 3)
    assert sample_page(seed, kind, face, draw=False).text == one.text


def test_no_two_pages_are_alike() -> None:
    assert len({sample_page(seed, draw=False).text for seed in range(300)}) == 300


@given(seeds, st.sampled_from(KINDS), st.sampled_from(list(FACES)))
def test_every_character_stands_where_its_box_says(seed: int, kind: str, face: str) -> None:
    page = sample_page(seed, kind, face)
    assert len(page.boxes) == len(page.text)
    grey = page.pixels[..., 0].astype(int)
    paper = int(np.median(grey))
    for character, (left, right, middle, _) in zip(page.text, page.boxes, strict=True):
        if left < 0 or character == " ":
            continue
        assert 0 <= left < right <= PAGE_WIDTH + 1 and 0 <= middle <= PAGE_HEIGHT
        strip = grey[max(0, int(middle) - PITCH // 2) : int(middle) + PITCH // 2, int(left) : int(right) + 2]
        assert strip.min() < paper - 50, f"nothing is drawn where {character!r} should be"


@given(seeds, st.sampled_from(("lines", "prose", "columns")), st.sampled_from(list(FACES)))
def test_nothing_else_is_drawn(seed: int, kind: str, face: str) -> None:
    page = sample_page(seed, kind, face)
    grey = page.pixels[..., 0].astype(int)
    paper = int(np.median(grey))
    for left, right, middle, _ in page.boxes:
        if left >= 0:
            grey[
                max(0, int(middle) - PITCH // 2) : int(middle) + PITCH // 2, max(0, int(left) - 2) : int(right) + 3
            ] = paper
    assert grey.min() > paper - 50


@given(seeds)
def test_lines_of_the_text_are_lines_of_the_page(seed: int) -> None:
    page = sample_page(seed)
    place = 0
    for line in page.text.split("\n"):
        heights = {box[2] for box in page.boxes[place : place + len(line)] if box[0] >= 0}
        assert len(heights) == bool(line)
        place += len(line) + 1


@pytest.mark.parametrize("kind", ["table", "figure", "list"])
def test_kinds_have_what_they_are_called_after(kind: str) -> None:
    mark = {"table": "\n| ", "figure": "![Fig", "list": ("- ", "1. ")}[kind]
    marks = (mark,) if isinstance(mark, str) else mark
    texts = [sample_page(seed, kind, draw=False).text for seed in range(100)]
    assert sum(any(one in text for one in marks) for text in texts) > 90


def test_training_sees_no_held_out_page() -> None:
    assert HELD_OUT_SEEDS.stop <= TRAINING_SEEDS < TRAINING_SEEDS + SEEDS_PER_PROCESS
