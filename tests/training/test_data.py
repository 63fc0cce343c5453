"""Rendered files are real H.264 video that shows the scenes its truth tells of."""

from pathlib import Path

import av
import numpy as np

from training.data import FILE_SIZE, render_clip
from training.evaluate import load_clip_frames
from training.render import render_frames
from training.world import frame_times, sample_clip

SEED = 9_000_123


def lit_boxes(frame: np.ndarray) -> int:
    """How many boxes of the chapter mark are lit, read from the pixels."""
    size = frame.shape[0]
    strip = frame[round(0.03 * size) : round(0.05 * size)].mean((0, 2))
    centres = [round((box + 0.5) / 6 * size) for box in range(6)]
    return int(sum(strip[centre] > 150 for centre in centres))


def test_file_is_h264_of_the_truth_s_length(tmp_path: Path) -> None:
    truth = render_clip(SEED, tmp_path / "clip.mp4")
    with av.open(str(tmp_path / "clip.mp4")) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert (stream.width, stream.height) == (FILE_SIZE, FILE_SIZE)
        frames = list(container.decode(video=0))
    assert abs(len(frames) / 8 - truth["duration_s"]) < 0.2


def test_file_shows_as_many_scenes_as_its_truth(tmp_path: Path) -> None:
    truth = render_clip(SEED, tmp_path / "clip.mp4")
    frames = load_clip_frames(tmp_path / "clip.mp4", 32)
    assert sorted({lit_boxes(frame) for frame in frames}) == list(range(1, len(truth["scenes"]) + 1))


def test_decoded_frames_look_like_rendered_ones(tmp_path: Path) -> None:
    truth = render_clip(SEED, tmp_path / "clip.mp4")
    decoded = load_clip_frames(tmp_path / "clip.mp4", 8).astype(np.float32)
    clip = sample_clip(SEED)
    rendered = render_frames(clip, frame_times(truth["duration_s"], 8), FILE_SIZE).astype(np.float32)
    assert np.abs(decoded - rendered).mean() < 8
