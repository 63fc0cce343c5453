"""Kept video tokens, drawn over the frames."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.common import CLIP_FOLDER
from bench.report.figures import new_figure, panels
from bench.tables import Row
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits

PRUNERS = ("uv", "uv_spread", "attention", "specvlm")
NUM_FRAMES = 8
FRAME_SIDE = 56
"""Pixels of a drawn frame: small, so that the file is."""


def draw_kept(document: Row) -> Figure | None:
    """Frames from the whole clip, with what each pruner keeps of them in colour and the rest faint."""
    kept = document.get("kept") or {}
    clip = CLIP_FOLDER / str(kept.get("clip", "")).rpartition("/")[2]
    if not kept.get("pruners") or not clip.is_file():
        return None
    names = [name for name in PRUNERS if name in kept["pruners"]]
    numbers = shown_frames(kept["frames"])
    with clip.open("rb") as source:
        sampled = sample_video(source, kept["frames"], DecodeLimits()).frames[numbers]
    step = max(sampled.shape[1] // FRAME_SIDE, 1)
    frames = np.asarray(sampled[:, ::step, ::step])
    figure = new_figure(8.4, 1.1 * len(names) + 0.3)
    for place, axes in enumerate(panels(figure, len(names), NUM_FRAMES)):
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


def shown_frames(num_frames: int) -> list[int]:
    """Indices of the frames that are drawn, evenly over the clip."""
    return [int(number) for number in np.linspace(0, num_frames - 1, NUM_FRAMES).round()]


def kept_in_frame(positions: Sequence[int], frame: int, grid: tuple[int, int]) -> NDArray[np.bool_]:
    """Which tokens of one frame are kept, [rows, columns]."""
    size = grid[0] * grid[1]
    mask = np.zeros(size, dtype=np.bool_)
    mask[[position - frame * size for position in positions if position // size == frame]] = True
    return mask.reshape(grid)


def veiled(frame: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """A frame [height, width, 3] whose tokens outside `mask` [rows, columns] fade to white."""
    rows = np.arange(frame.shape[0]) * mask.shape[0] // frame.shape[0]
    columns = np.arange(frame.shape[1]) * mask.shape[1] // frame.shape[1]
    shown = mask[rows][:, columns, None]
    return np.where(shown, frame, 255 - (255 - frame) // 5).astype(np.uint8)
