"""The synthetic world is the same for the same seed, and its pictures and words agree with it."""

import itertools

import numpy as np
import pytest

from training.captions import ALL_ATTRIBUTES, parse_attributes, scene_truth, score_caption, write_caption
from training.render import render_frames, subject_position
from training.world import HELD_OUT_SEEDS, MAX_SCENES, frame_times, sample_clip

SEEDS = range(40)


def test_same_seed_same_clip_and_caption() -> None:
    assert sample_clip(7) == sample_clip(7)
    assert write_caption(sample_clip(7)) == write_caption(sample_clip(7))
    assert sample_clip(7) != sample_clip(8)


def test_same_seed_same_pixels() -> None:
    clip = sample_clip(3)
    times_s = frame_times(clip.duration_s, 4)
    assert np.array_equal(render_frames(clip, times_s, 112), render_frames(clip, times_s, 112))


@pytest.mark.parametrize("num_scenes", [(1, 1), (2, 3), (4, MAX_SCENES)])
def test_clips_have_the_number_of_scenes_asked_for(num_scenes: tuple[int, int]) -> None:
    counts = {len(sample_clip(seed, num_scenes).scenes) for seed in SEEDS}
    assert counts == set(range(num_scenes[0], num_scenes[1] + 1))


def test_scenes_follow_one_another_without_gaps() -> None:
    scenes = sample_clip(5).scenes
    assert scenes[0].start_s == 0
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(scenes))
    assert [scene.number for scene in scenes] == list(range(1, len(scenes) + 1))


def test_subjects_move_where_their_motion_says() -> None:
    for seed in SEEDS:
        for scene in sample_clip(seed).scenes:
            (x_before, y_before), (x_after, y_after) = subject_position(scene, 0.2), subject_position(scene, 0.8)
            moved = {
                "left": x_after < x_before,
                "right": x_after > x_before,
                "up": y_after < y_before,
                "down": y_after > y_before,
                "still": (x_after, y_after) == (x_before, y_before),
                "circling": True,
            }
            assert moved[scene.motion]


def test_parser_reads_back_every_caption() -> None:
    for seed in SEEDS:
        clip = sample_clip(HELD_OUT_SEEDS[seed])
        assert parse_attributes(write_caption(clip)) == scene_truth(clip)


def test_score_counts_right_and_missing_attributes() -> None:
    clip = sample_clip(11)
    truth = scene_truth(clip)
    caption = write_caption(clip)
    total = len(truth) * len(ALL_ATTRIBUTES)
    assert score_caption(caption, truth, ALL_ATTRIBUTES) == (total, total)
    assert score_caption("", truth, ALL_ATTRIBUTES) == (0, total)
    painted = caption.replace(f" {truth[0]['colour']} ", " mauve ")
    assert score_caption(painted, truth, ALL_ATTRIBUTES)[0] < total


def test_parser_survives_any_text() -> None:
    assert parse_attributes("a large red") == []
    assert parse_attributes("A small red ring hums.") == [{"size": "small", "colour": "red", "shape": "ring"}]
