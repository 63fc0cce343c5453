"""The curricula of both models: what clips each stage shows, how many tokens it keeps, and for how long."""

from dataclasses import dataclass

from training.budget import Pace
from training.examples import ClipRange
from training.pocket import FULL_FRAMES, START_DEPTH, TOKENS_PER_FRAME, Role

SHORT_TEXT = 128
LONG_TEXT = 272


@dataclass(frozen=True)
class Stage:
    """`depth` decoder layers take part (all if None); `kept_tokens` lists how many video tokens a batch may
    keep; `fresh_clips` newly rendered clips replace the oldest of the pool at each step."""

    name: str
    share: float
    clips: ClipRange
    kept_tokens: tuple[int, ...]
    text_len: int
    batch_clips: int
    fresh_clips: int
    pool_clips: int
    pace: Pace
    depth: int | None = None


VISION_SHARE: dict[Role, float] = {"target": 0.3, "draft": 0.5}

_SHORT = ClipRange(num_scenes=(1, 2), frame_counts=(4, 6, 8, 16), shown_frames=4)
_SPARSE = ClipRange(num_scenes=(2, 6), frame_counts=(20, 24, 32, 32, 64, 96, 128, 128), shown_frames=20)
_DENSE = ClipRange(num_scenes=(3, 6), frame_counts=(32, 32, 64, 128), shown_frames=32)
_FULL = ClipRange(num_scenes=(4, 6), frame_counts=(FULL_FRAMES,), shown_frames=FULL_FRAMES)

STAGES: dict[Role, tuple[Stage, ...]] = {
    "target": (
        Stage("short", 0.20, _SHORT, (98,), SHORT_TEXT, 16, 6, 240, Pace(1.5e-3, 1e-3), START_DEPTH),
        Stage("sparse", 0.40, _SPARSE, (160,), LONG_TEXT, 12, 3, 800, Pace(1e-3, 5e-4), START_DEPTH),
        Stage("deep", 0.20, _SPARSE, (256,), LONG_TEXT, 8, 2, 400, Pace(5e-4, 2e-4)),
        Stage("dense", 0.08, _DENSE, (32 * TOKENS_PER_FRAME,), LONG_TEXT, 2, 1, 100, Pace(2e-4, 8e-5, 10)),
        Stage("full", 0.12, _FULL, (FULL_FRAMES * TOKENS_PER_FRAME,), LONG_TEXT, 1, 1, 1, Pace(8e-5, 1e-5, 10)),
    ),
    "draft": (
        # Ends early on purpose: a draft that knows all the target knows would leave nothing to verify.
        Stage("short", 0.3, _SHORT, (98,), SHORT_TEXT, 16, 6, 240, Pace(2e-3, 2e-3)),
        Stage("sparse", 0.7, _SPARSE, (80, 320), LONG_TEXT, 12, 3, 800, Pace(2e-3, 5e-4)),
    ),
}
