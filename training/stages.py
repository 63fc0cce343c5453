"""The curricula of all models: what clips each stage shows, how many tokens it keeps, and for how long."""

from dataclasses import dataclass

from training import llava
from training.budget import Pace
from training.examples import ClipRange
from training.pocket import Role

SHORT_TEXT = 128
MIDDLE_TEXT = 144
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


@dataclass(frozen=True)
class Curriculum:
    """The share of the time that the vision tower gets, and the stages that divide the rest."""

    vision_share: float
    stages: tuple[Stage, ...]


_SHORT = ClipRange(num_scenes=(1, 2), frame_counts=(4, 6, 8, 16), shown_steps=4)
_SPARSE = ClipRange(num_scenes=(2, 6), frame_counts=(20, 24, 32, 32, 64, 96, 128, 128), shown_steps=20)
_DENSE = ClipRange(num_scenes=(3, 6), frame_counts=(32, 32, 64, 128), shown_steps=32)
_FULL = ClipRange(num_scenes=(4, 6), frame_counts=(llava.FULL_FRAMES,), shown_steps=llava.FULL_FRAMES)
_DENSE_TOKENS = 32 * llava.TOKENS_PER_FRAME
_FULL_TOKENS = llava.FULL_FRAMES * llava.TOKENS_PER_FRAME

_PAIRS_SHORT = ClipRange(num_scenes=(1, 2), frame_counts=(8, 12, 16), shown_steps=4)
_PAIRS_FULL = ClipRange(num_scenes=(1, 3), frame_counts=(32,), shown_steps=16)

CURRICULA: dict[str, dict[Role, Curriculum]] = {
    "llava_onevision": {
        "target": Curriculum(
            0.3,
            (
                Stage("short", 0.20, _SHORT, (98,), SHORT_TEXT, 16, 6, 240, Pace(1.5e-3, 1e-3), llava.START_DEPTH),
                Stage("sparse", 0.40, _SPARSE, (160,), LONG_TEXT, 12, 3, 800, Pace(1e-3, 5e-4), llava.START_DEPTH),
                Stage("deep", 0.20, _SPARSE, (256,), LONG_TEXT, 8, 2, 400, Pace(5e-4, 2e-4)),
                Stage("dense", 0.08, _DENSE, (_DENSE_TOKENS,), LONG_TEXT, 2, 1, 100, Pace(2e-4, 8e-5, 10)),
                Stage("full", 0.12, _FULL, (_FULL_TOKENS,), LONG_TEXT, 1, 1, 1, Pace(8e-5, 1e-5, 10)),
            ),
        ),
        # Ends early on purpose: a draft that knows all the target knows would leave nothing to verify.
        "draft": Curriculum(
            0.5,
            (
                Stage("short", 0.3, _SHORT, (98,), SHORT_TEXT, 16, 6, 240, Pace(2e-3, 2e-3)),
                Stage("sparse", 0.7, _SPARSE, (80, 320), LONG_TEXT, 12, 3, 800, Pace(2e-3, 5e-4)),
            ),
        ),
    },
    "qwen2_5_vl": {
        "target": Curriculum(
            0.35,
            (
                Stage("short", 0.25, _PAIRS_SHORT, (48,), SHORT_TEXT, 8, 2, 240, Pace(1.5e-3, 1.2e-3, 20)),
                Stage("full", 0.75, _PAIRS_FULL, (96,), MIDDLE_TEXT, 8, 2, 400, Pace(1.2e-3, 1e-4, 20)),
            ),
        ),
        "draft": Curriculum(
            0.4,
            (
                Stage("short", 0.30, _PAIRS_SHORT, (32, 64), SHORT_TEXT, 16, 4, 240, Pace(2e-3, 2e-3)),
                Stage("full", 0.70, _PAIRS_FULL, (26, 96), MIDDLE_TEXT, 12, 2, 400, Pace(2e-3, 2e-4)),
            ),
        ),
    },
}
