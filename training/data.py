"""Renders clips to real H.264 files with their caption and truth beside them."""

import argparse
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from training.captions import scene_truth, write_caption
from training.render import Renderer
from training.world import FULL_SCENES, HELD_OUT_SEEDS, sample_clip

FILE_SIZE = 224
FRAMES_PER_SECOND = 8


def render_clip(
    seed: int,
    path: Path,
    num_scenes: tuple[int, int] = FULL_SCENES,
    size: int = FILE_SIZE,
    frames_per_second: int = FRAMES_PER_SECOND,
) -> dict[str, Any]:
    """Writes the clip of `seed` as an mp4 and returns its truth: seed, duration, caption, attributes of each scene."""
    clip = sample_clip(seed, num_scenes)
    renderer = Renderer(clip, size)
    num_frames = round(clip.duration_s * frames_per_second)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(frames_per_second))
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "20", "preset": "veryfast"}
        for index in range(num_frames):
            picture = renderer.frame(index / frames_per_second)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return {
        "seed": seed,
        "duration_s": clip.duration_s,
        "caption": write_caption(clip),
        "scenes": scene_truth(clip),
    }


def render_folder(folder: Path, seeds: range, num_scenes: tuple[int, int] = FULL_SCENES) -> list[Path]:
    """One mp4 and one json per seed; clips that are already there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for seed in seeds:
        path = folder / f"clip-{seed}.mp4"
        truth_path = path.with_suffix(".json")
        if not truth_path.exists():
            truth = render_clip(seed, path, num_scenes)
            truth_path.write_text(json.dumps(truth, indent=2) + "\n")
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clips", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=HELD_OUT_SEEDS.start)
    options = parser.parse_args()
    paths = render_folder(options.folder, range(options.first_seed, options.first_seed + options.clips))
    print(f"{len(paths)} clips in {options.folder}")


if __name__ == "__main__":
    main()
