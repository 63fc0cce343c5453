"""What a fault run asks for: small clips, a pair of tiny models, and jobs whose captions all differ."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase

from slipstream.archive.messages import BatchItem
from tests.support.clips import make_colour_clip
from tests.support.tiny_pair import TinyPair, write_tiny_pair

NUM_CLIPS = 20
NUM_FRAMES = 12
NUM_TOKENS = 40
NUM_WORDS = 6
PAIR_SEED = 1
NO_TOKEN = 100_000


@dataclass(frozen=True)
class Workload:
    """Models, clips and jobs, all below `folder`."""

    folder: Path
    pair: TinyPair
    items: tuple[BatchItem, ...]
    clips: tuple[Path, ...] = field(default=())

    @property
    def video_root(self) -> Path:
        return self.folder / "videos"


def make_workload(folder: Path, num_jobs: int, num_clips: int = NUM_CLIPS, num_tokens: int = NUM_TOKENS) -> Workload:
    """Every job has another pair of clip and prompt; every other one is sampled, with a seed of its own."""
    videos = folder / "videos"
    videos.mkdir(parents=True)
    clips = []
    for index in range(min(num_clips, num_jobs)):
        clips.append(videos / f"clip-{index:02d}.mp4")
        clips[-1].write_bytes(make_colour_clip(seed=index))
    items = tuple(_make_item(number, clips, num_tokens) for number in range(num_jobs))
    pair = write_tiny_pair(folder / "pair", seed=PAIR_SEED)
    _never_end(pair.target)
    return Workload(folder, pair, items, tuple(clips))


def _never_end(checkpoint: Path) -> None:
    """Texts are as long as they are asked to be: short ones might be equal by chance."""
    path = checkpoint / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": NO_TOKEN}))


def _words(number: int) -> str:
    """So different from number to number that these models say something else."""
    rng = random.Random(number)
    return " ".join("".join(rng.choices(ascii_lowercase, k=4)) for _ in range(NUM_WORDS))


def _make_item(number: int, clips: list[Path], num_tokens: int) -> BatchItem:
    clip, prompt = clips[number % len(clips)], number // len(clips)
    sampled = number % 2 == 1
    caption = {
        "prompt": f"Describe the video. {_words(number)}",
        "num_frames": NUM_FRAMES,
        "max_new_tokens": num_tokens,
        "temperature": 0.8 if sampled else 0.0,
        "seed": number,
        "gate": False,
    }
    return BatchItem(f"{clip.stem}/prompt-{prompt}", str(clip), caption)
