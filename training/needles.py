"""A world in which what is kept of a video matters: tiny shapes that flash for a frame or two, and words about them.

Every clip has six scenes of the pocket world without their events. In each a needle flashes in one corner, and decoys
do, which look the same but are grey. The caption names every needle and nothing else, so all its other words can be
foreseen without the video. A needle of one frame lies in 4 of a long clip's 6,272 tokens.
"""

import itertools
import random
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from training.render import VISITOR_RADIUS, Renderer, draw_visitor
from training.world import COLOURS, MAX_SCENES, VISITOR_SHAPES, Clip, Visitor, frame_times, sample_clip

NUM_FRAMES = 128
GRID = 7
"""Tokens along a frame's side."""
TOKENS_PER_FRAME = GRID * GRID
DECOYS_PER_SCENE = 2
DECOY_COLOUR = "grey"
FLASH_FRAMES = (1, 2)
PROMPT = "What tiny shapes come into view?"

_OPENINGS = (
    "The video opens and",
    *(f"In the {place} scene" for place in ("second", "third", "fourth", "fifth", "sixth")),
)
_CORNERS = ((0.11, 0.2), (0.89, 0.2), (0.11, 0.88), (0.89, 0.88))


@dataclass(frozen=True)
class Flash:
    """A tiny shape that shows in a few of a clip's frames."""

    frames: range
    look: Visitor

    @property
    def side(self) -> str:
        return "left" if self.look.corner[0] < 0.5 else "right"

    @property
    def cells(self) -> tuple[int, ...]:
        """Tokens of a frame, row by row, that the shape lies in."""
        columns, rows = (
            range(int((centre - VISITOR_RADIUS) * GRID), int((centre + VISITOR_RADIUS) * GRID) + 1)
            for centre in self.look.corner
        )
        return tuple(row * GRID + column for row in rows for column in columns)

    @property
    def places(self) -> tuple[int, ...]:
        """The video tokens that it lies in, ascending."""
        return tuple(frame * TOKENS_PER_FRAME + cell for frame in self.frames for cell in self.cells)


@dataclass(frozen=True)
class NeedleClip:
    """A clip as `num_frames` evenly spaced frames; needle k flashes in scene k."""

    num_frames: int
    backdrop: Clip
    needles: tuple[Flash, ...]
    decoys: tuple[Flash, ...]

    def frames(self, indices: list[int], size: int) -> npt.NDArray[np.uint8]:
        """Those of its frames, uint8 [n, size, size, 3]."""
        renderer, times_s = Renderer(self.backdrop, size), frame_times(self.backdrop.duration_s, self.num_frames)
        pictures = [renderer.frame(times_s[index]).astype(np.float32) for index in indices]
        for picture, index in zip(pictures, indices, strict=True):
            for flash in (*self.needles, *self.decoys):
                if index in flash.frames:
                    draw_visitor(picture, flash.look)
        return np.rint(np.stack(pictures)).clip(0, 255).astype(np.uint8)


def sample_needle_clip(seed: int, num_frames: int = NUM_FRAMES) -> NeedleClip:
    """The clip of `seed`; its shortest scene has room for all that flashes if it has 56 frames or more."""
    clip = sample_clip(seed, (MAX_SCENES, MAX_SCENES))
    backdrop = replace(clip, scenes=tuple(replace(scene, event="none", visitor=None) for scene in clip.scenes))
    rng = random.Random(f"needles {seed}")
    numbers = [backdrop.scene_at(time_s).number for time_s in frame_times(backdrop.duration_s, num_frames)]
    needles: list[Flash] = []
    decoys: list[Flash] = []
    for _, group in itertools.groupby(range(num_frames), key=lambda frame: numbers[frame]):
        needle_start, *decoy_starts = rng.sample(list(group)[:-1:2], 1 + DECOYS_PER_SCENE)
        needles.append(_flash(rng, needle_start, rng.choice(COLOURS)))
        decoys += [_flash(rng, start, DECOY_COLOUR) for start in decoy_starts]
    return NeedleClip(num_frames, backdrop, tuple(needles), tuple(decoys))


def write_needle_caption(clip: NeedleClip) -> str:
    """One sentence a scene."""
    return " ".join(
        f"{opening} a tiny {needle.look.colour} {needle.look.shape} shows up on the {needle.side}."
        for opening, needle in zip(_OPENINGS, clip.needles, strict=True)
    )


def _flash(rng: random.Random, start: int, colour: str) -> Flash:
    look = Visitor(colour, rng.choice(VISITOR_SHAPES), rng.choice(_CORNERS))
    return Flash(range(start, start + rng.choice(FLASH_FRAMES)), look)
