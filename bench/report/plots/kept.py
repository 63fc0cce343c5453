"""Kept video tokens, drawn over the frames, and where in the video they lie."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.clips import CLIP_FOLDER
from bench.report.plots.style import BLUE, GREY, RED, grid, new_figure, panels
from bench.report.positions import END_WIDTH, densities, kept_in_frame, num_positions
from bench.report.rows import Document
from slipstream.video.decode import sample_video
from slipstream.video.sampled import DecodeLimits

OVER_FRAMES = ("uv", "uv_spread", "attention", "specvlm")
NUM_FRAMES = 8
FRAME_SIDE = 56
"""Pixels of a drawn frame: small, so that the file is."""
ALONG_VIDEO = ("uv", "uv_spread", "attention", "attention_variation")
NUM_STRETCHES = 50


def over_frames(document: Document) -> Figure | None:
    """Frames from the whole clip, with what each pruner keeps of them in colour and the rest faint."""
    kept = document.get("kept") or {}
    clip = CLIP_FOLDER / Path(kept.get("clip", "")).name
    if not kept.get("pruners") or not clip.is_file():
        return None
    names = [name for name in OVER_FRAMES if name in kept["pruners"]]
    numbers = np.linspace(0, kept["frames"] - 1, NUM_FRAMES).round().astype(int).tolist()
    frames = _small_frames(clip, kept["frames"], numbers)
    figure = new_figure(9.2, 1.2 * len(names) + 0.4)
    every = panels(figure, len(names), NUM_FRAMES)
    for place, axes in enumerate(every):
        name, column = names[place // NUM_FRAMES], place % NUM_FRAMES
        mask = kept_in_frame(kept["pruners"][name], numbers[column], tuple(kept["grid"]))
        axes.imshow(veiled(frames[column], mask), interpolation="none")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        if column == 0:
            axes.set_ylabel(name)
        if place < NUM_FRAMES:
            axes.set_title(f"frame {numbers[column] + 1}", fontsize=8, fontweight="normal", loc="center")
    return figure


def along_video(document: Document) -> Figure | None:
    """How densely tokens are kept along the video: positional bias."""
    kept = document.get("kept") or {}
    names = [name for name in ALONG_VIDEO if name in kept.get("pruners", {})]
    if not names:
        return None
    num_tokens = num_positions(kept)
    figure = new_figure(7.6, 1.15 * len(names) + 0.7)
    centres = (np.arange(NUM_STRETCHES) + 0.5) / NUM_STRETCHES
    for axes, name in zip(panels(figure, len(names), sharex=True), names, strict=True):
        heights = densities(kept["pruners"][name], num_tokens, NUM_STRETCHES)
        ends = (centres < END_WIDTH) | (centres > 1 - END_WIDTH)
        axes.bar(centres, heights, 0.9 / NUM_STRETCHES, color=[RED if end else BLUE for end in ends])
        axes.axhline(1.0, color=GREY, linewidth=0.8)
        axes.set_title(name)
        axes.set_ylabel("density")
        grid(axes)
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"place in the video (density 1: kept as often as on average; red: the outer {END_WIDTH:.0%})")
    return figure


def veiled(frame: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """A frame [height, width, 3] whose tokens outside `mask` [rows, columns] fade to white."""
    rows = np.arange(frame.shape[0]) * mask.shape[0] // frame.shape[0]
    columns = np.arange(frame.shape[1]) * mask.shape[1] // frame.shape[1]
    shown = mask[rows][:, columns, None]
    return np.where(shown, frame, 255 - (255 - frame) // 5).astype(np.uint8)


def _small_frames(clip: Path, num_frames: int, numbers: list[int]) -> NDArray[np.uint8]:
    with clip.open("rb") as source:
        frames = sample_video(source, num_frames, DecodeLimits()).frames[numbers]
    step = max(frames.shape[1] // FRAME_SIDE, 1)
    return np.asarray(frames[:, ::step, ::step])
