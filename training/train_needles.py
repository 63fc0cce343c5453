"""Teaches a pocket pair the world of needles: `python -m training.train_needles target|draft`.

Starts from the shipped pair. First the vision tower learns to say in each token what flashes in that very token, since
the shipped one learned to tell it in all tokens of a frame, and then any of them would do. Then the text model learns
the captions, from few video tokens at first: those of needles and random others. The target ends with whole videos. The
draft sees some of the needles only, as it will after pruning, so that it learns to guess the others.
"""

import argparse
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerFast

from training.augment import roughen
from training.budget import Budget, Pace, apply_step, make_optimizer
from training.examples import CaptionExample, ClipRange
from training.language import CaptionBatch, EncodedClip, make_batch
from training.needles import (
    NUM_FRAMES,
    PROMPT,
    TOKENS_PER_FRAME,
    NeedleClip,
    sample_needle_clip,
    write_needle_caption,
)
from training.parallel import run_processes
from training.pocket import IMAGE_SIZE, ROLES, Family, Role, family_folder, text_config
from training.stages import Curriculum, Stage
from training.tokenizer import chat_ids
from training.train import SEEDS_PER_PROCESS, Trainer, check_stages, run_stages
from training.world import COLOURS, MAX_SCENES, VISITOR_SHAPES

FOLDER = family_folder("needles")
VISION_SEEDS, STAGE_SEEDS = 6_000_000, 7_000_000
BATCH_FRAMES = 32
SIDES = ("left", "right")
CLASSES = {"colour": len(COLOURS) + 1, "shape": len(VISITOR_SHAPES) + 1, "side": len(SIDES) + 1, "number": MAX_SCENES}
"""What each token is to say; the last of the first three is "no needle here"."""
NO_NEEDLE_WEIGHT = 0.1
TEXT_LEN = 100
"""The prompt's part behind the video and the caption, which is as long for every clip."""
_CLIPS = ClipRange((MAX_SCENES, MAX_SCENES), (NUM_FRAMES,), shown_steps=40)
_WHOLE = replace(_CLIPS, shown_steps=NUM_FRAMES)
_ALL_TOKENS = NUM_FRAMES * TOKENS_PER_FRAME

CURRICULA: dict[Role, Curriculum] = {
    "target": Curriculum(
        0.3,
        (
            Stage("sparse", 0.6, _CLIPS, (96,), TEXT_LEN, 8, 1, 240, Pace(6e-4, 2e-4, 20)),
            Stage("wide", 0.25, _WHOLE, (1200,), TEXT_LEN, 2, 1, 60, Pace(2e-4, 1e-4, 5)),
            Stage("whole", 0.15, _WHOLE, (_ALL_TOKENS,), TEXT_LEN, 1, 1, 1, Pace(1e-4, 1e-5, 3)),
        ),
    ),
    "draft": Curriculum(
        0.4, (Stage("sparse", 1.0, _CLIPS, (64, 320, 640), TEXT_LEN, 8, 1, 240, Pace(1.5e-3, 1e-4, 20)),)
    ),
}
KEPT_NEEDLES: dict[Role, float] = {"target": 1.0, "draft": 0.6}
"""How likely a needle's tokens are among those kept; left out, some of them may still be there by chance."""


@dataclass(frozen=True)
class NeedleExample(CaptionExample):
    clip: NeedleClip


class NeedleExamples(IterableDataset):
    """An endless stream from the seeds after `first_seed`: every frame that something flashes in, and random others."""

    def __init__(self, shown_frames: int, tokenizer: PreTrainedTokenizerFast, first_seed: int) -> None:
        self._shown_frames = shown_frames
        self._tokenizer = tokenizer
        self._first_seed = first_seed
        self._chat = chat_ids(tokenizer, PROMPT)

    def __iter__(self) -> Iterator[NeedleExample]:
        seed = self._first_seed
        while True:
            yield self.example(seed)
            seed += 1

    def example(self, seed: int) -> NeedleExample:
        clip = sample_needle_clip(seed)
        flashing = {frame for flash in (*clip.needles, *clip.decoys) for frame in flash.frames}
        others = [frame for frame in range(NUM_FRAMES) if frame not in flashing]
        random.Random(f"frames {seed}").shuffle(others)
        shown = sorted([*flashing, *others][: max(self._shown_frames, len(flashing))])
        caption_ids = self._tokenizer.encode(write_needle_caption(clip))
        return NeedleExample(
            frames=torch.from_numpy(clip.frames(shown, IMAGE_SIZE)),
            step_indices=torch.tensor(shown),
            num_frames=NUM_FRAMES,
            seconds_per_frame=clip.backdrop.duration_s / NUM_FRAMES,
            prefix_ids=self._chat[0],
            prompt_ids=self._chat[1],
            caption_ids=[*caption_ids, self._tokenizer.eos_token_id],
            clip=clip,
        )


def thin(clip: EncodedClip, num_kept: int, needle_share: float, rng: random.Random) -> EncodedClip:
    """Keeps `num_kept` of a clip's tokens: all of a needle with that probability, the others at random."""
    example: Any = clip.example
    wanted = [place for needle in example.clip.needles if rng.random() < needle_share for place in needle.places]
    priority = torch.rand(len(clip.places)) + torch.isin(clip.places, torch.tensor(wanted, dtype=torch.int64))
    kept = priority.topk(min(num_kept, len(priority))).indices.sort().values
    return replace(clip, tokens=clip.tokens[kept.to(clip.tokens.device)], places=clip.places[kept])


class NeedleTrainer(Trainer):
    """Goes on from the checkpoint in the folder, in another world."""

    def train_vision(self, budget: Budget) -> None:
        first_seed = VISION_SEEDS + self.rank * SEEDS_PER_PROCESS
        train_local_vision(self.family, self.model, budget, first_seed, self.device)
        self.save()

    def examples_of(self, stage: Stage, first_seed: int) -> IterableDataset:
        return NeedleExamples(stage.clips.shown_steps, self.tokenizer, first_seed)

    def batch_of(self, clips: list[EncodedClip], stage: Stage) -> CaptionBatch:
        num_kept = self.rng.choice(stage.kept_tokens)
        thinned = [thin(clip, num_kept, KEPT_NEEDLES[self.role], self.rng) for clip in clips]
        return make_batch(self.family, thinned, num_kept, stage.text_len, self.tokenizer.pad_token_id, self.device)


class _TokenHeads(nn.Module):
    """Linear classifiers on single tokens."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.guess = nn.Linear(hidden_size, sum(CLASSES.values()))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        """Loss of tokens [n, hidden] with labels [n, classes], and the share right by class where a needle is."""
        guesses = self.guess(tokens).split(list(CLASSES.values()), dim=1)
        losses, right = [], []
        on_needle = labels[:, 0] < len(COLOURS)
        for (name, size), guess, label in zip(CLASSES.items(), guesses, labels.T, strict=True):
            weight = torch.ones(size, device=tokens.device)
            weight[-1] = 1.0 if name == "number" else NO_NEEDLE_WEIGHT
            losses.append(functional.cross_entropy(guess, label, weight=weight))
            right.append((guess.argmax(1) == label)[on_needle].float().mean().item())
        return torch.stack(losses).sum(), right


def train_local_vision(family: Family, model: Any, budget: Budget, first_seed: int, device: str) -> None:
    """Trains the vision parameters of `model` in place; the classifiers are thrown away."""
    heads = _TokenHeads(text_config(model).hidden_size).to(device)
    optimizer = make_optimizer([*family.vision_parameters(model), *heads.parameters()])
    pace = Pace(peak=8e-4, floor=5e-5)
    loader = DataLoader(_LabelledFrames(first_seed), BATCH_FRAMES, num_workers=1, prefetch_factor=16)
    for frames, labels in loader:
        with torch.autocast(device, dtype=torch.bfloat16):
            tokens = family.video_features(model, roughen(frames).to(device))
        loss, right = heads(tokens.float().flatten(0, 1), labels.to(device).flatten(0, 1))
        apply_step(optimizer, loss, pace, budget)
        if budget.done_steps % 25 == 0:
            shares = " ".join(f"{name} {share:.2f}" for name, share in zip(CLASSES, right, strict=True))
            print(f"vision {budget.done_steps} {budget.progress:.0%} loss {loss.item():.3f} {shares}", flush=True)
        if budget.progress >= 1:
            return


class _LabelledFrames(IterableDataset):
    """Frames of random clips, two of three with something that flashes, and labels [tokens, classes] of each."""

    def __init__(self, first_seed: int) -> None:
        self._first_seed = first_seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        seed = self._first_seed
        while True:
            rng, clip = random.Random(f"frame {seed}"), sample_needle_clip(seed)
            flashes = rng.choice((clip.needles, clip.needles, clip.decoys, ()))
            frame = rng.choice(rng.choice(flashes).frames) if flashes else rng.randrange(NUM_FRAMES)
            yield torch.from_numpy(clip.frames([frame], IMAGE_SIZE)[0]), token_labels(clip, frame)
            seed += 1


def token_labels(clip: NeedleClip, frame: int) -> torch.Tensor:
    """What each token of a frame is to say, [tokens, classes] by index as in `CLASSES`."""
    time_s = frame * clip.backdrop.duration_s / NUM_FRAMES
    nothing = [size - 1 for name, size in CLASSES.items() if name != "number"]
    labels = torch.tensor([[*nothing, clip.backdrop.scene_at(time_s).number - 1]]).repeat(TOKENS_PER_FRAME, 1)
    for needle in clip.needles:
        if frame in needle.frames:
            seen = (
                COLOURS.index(needle.look.colour),
                VISITOR_SHAPES.index(needle.look.shape),
                SIDES.index(needle.side),
            )
            labels[list(needle.cells), :3] = torch.tensor(seen)
    return labels


def train(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    run_stages(NeedleTrainer(options, rank, CURRICULA[options.role]), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--minutes", type=float, default=30.0, help="time for all stages together")
    parser.add_argument("--steps", type=int, help="steps for all stages together, instead of minutes")
    parser.add_argument("--only", nargs="*", help="just these stages, on the checkpoint in --out")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=1, help="with one thread each, on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--begin", type=Path, help="where --out is copied from if it is not there; the shipped pair's")
    options = parser.parse_args()
    check_stages(parser, options, CURRICULA[options.role])
    options.family, options.out = "llava_onevision", options.out or FOLDER / options.role
    if not options.out.exists():
        shutil.copytree(options.begin or family_folder("pocket") / options.role, options.out)
    options.only = options.only or ["vision", *(stage.name for stage in CURRICULA[options.role].stages)]
    run_processes(train, options.processes, options)


if __name__ == "__main__":
    main()
