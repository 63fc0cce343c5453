"""Held-out clips of the synthetic world, rendered once and kept in a cache folder. Knows no model."""

from pathlib import Path

from training.data import render_clip
from training.world import FULL_SCENES, HELD_OUT_SEEDS

CLIP_FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "bench"
SHORT_SCENES = (1, 2)

__all__ = ["CLIP_FOLDER", "FULL_SCENES", "SHORT_SCENES", "held_out_clips"]


def held_out_clips(count: int, num_scenes: tuple[int, int] = FULL_SCENES, skip: int = 0) -> list[Path]:
    """`count` clips that the models were never trained on, those of the first `skip` held-out seeds left out."""
    CLIP_FOLDER.mkdir(parents=True, exist_ok=True)
    first = HELD_OUT_SEEDS.start + skip
    return [_rendered(seed, num_scenes) for seed in range(first, first + count)]


def _rendered(seed: int, num_scenes: tuple[int, int]) -> Path:
    least, most = num_scenes
    path = CLIP_FOLDER / f"clip-{seed}-{least}to{most}.mp4"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        render_clip(seed, unfinished, num_scenes)
        unfinished.replace(path)
    return path
