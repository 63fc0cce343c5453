"""First stage: teaches the way from pixels to video tokens single frames, by naming what is in them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from training.augment import roughen
from training.budget import Budget, Pace, apply_step, make_optimizer
from training.pocket import IMAGE_SIZE, Family, text_config
from training.render import Renderer
from training.world import (
    APPEAR_PHASE,
    BACKGROUNDS,
    COLOURS,
    MAX_SCENES,
    MOTIONS,
    SHAPES,
    SIZES,
    VANISH_PHASE,
    VISITOR_SHAPES,
    Scene,
    sample_clip,
)

BATCH_FRAMES = 32
ONE_TOKEN_WEIGHT = 0.4
IGNORED = -100
CLASSES = {
    "colour": len(COLOURS),
    "shape": len(SHAPES),
    "size": len(SIZES),
    "motion": len(MOTIONS),
    "background": len(BACKGROUNDS),
    "number": MAX_SCENES,
    "visible": 2,
    "visitor_colour": len(COLOURS) + 1,
    "visitor_shape": len(VISITOR_SHAPES) + 1,
}
WEIGHTS = [2.0 if name in ("shape", "motion") else 1.0 for name in CLASSES]


class LabelledFrames(IterableDataset):
    """An endless stream of (frame, labels) of random scenes, at random moments, from the seeds after `first_seed`."""

    def __init__(self, first_seed: int) -> None:
        self._first_seed = first_seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        seed = self._first_seed
        while True:
            yield _labelled_frame(seed)
            seed += 1


class FrameHeads(nn.Module):
    """Linear classifiers on a frame's pooled tokens: one set on their attention-weighted mean, one on each."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self._sizes = list(CLASSES.values())
        self.weigh = nn.Linear(hidden_size, len(CLASSES))
        self.from_mean = nn.ModuleList(nn.Linear(hidden_size, size) for size in self._sizes)
        self.from_token = nn.Linear(hidden_size, sum(self._sizes))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss over `tokens` [frames, k, hidden], and whether each label [frames, classes] was named rightly."""
        means = torch.einsum("ftc,fth->cfh", self.weigh(tokens).softmax(1), tokens)
        guesses = [head(mean) for head, mean in zip(self.from_mean, means, strict=True)]
        token_guesses = self.from_token(tokens).flatten(0, 1).split(self._sizes, dim=1)
        losses = [
            weight * (_naming_loss(guess, label) + ONE_TOKEN_WEIGHT * _naming_loss(token_guess, label))
            for weight, guess, token_guess, label in zip(WEIGHTS, guesses, token_guesses, labels.T, strict=True)
        ]
        right = torch.stack([guess.argmax(1) == label for guess, label in zip(guesses, labels.T, strict=True)], dim=1)
        return torch.stack(losses).sum(), right


def _naming_loss(guesses: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of `guesses` [frames * k, classes], k of them for each of `labels` [frames]."""
    repeated = labels.repeat_interleave(len(guesses) // len(labels))
    return functional.cross_entropy(guesses, repeated, ignore_index=IGNORED)


def pretrain_vision(family: Family, model: Any, budget: Budget, first_seed: int, device: str = "cpu") -> None:
    """Trains the vision parameters of `model` in place; the classifiers are thrown away.

    Where a step takes several frames, it sees the same one several times, as upstream treats an image.
    """
    heads = FrameHeads(text_config(model).hidden_size).to(device)
    optimizer = make_optimizer([*family.vision_parameters(model), *heads.parameters()])
    pace = Pace(peak=1.5e-3, floor=5e-5)
    right_sum, label_sum = torch.zeros(len(CLASSES)), torch.zeros(len(CLASSES))
    for frames, labels in DataLoader(LabelledFrames(first_seed), BATCH_FRAMES, num_workers=1, prefetch_factor=16):
        with torch.autocast(device, dtype=torch.bfloat16):
            still = roughen(frames).to(device).repeat_interleave(family.frames_per_step, dim=0)
            tokens = family.video_features(model, still)
        loss, right = heads(tokens.float(), labels.to(device))
        apply_step(optimizer, loss, pace, budget)
        right_sum += right.cpu().sum(0)
        label_sum += (labels != IGNORED).sum(0)
        if budget.done_steps % 100 == 0:
            shares = " ".join(f"{name} {share:.2f}" for name, share in zip(CLASSES, right_sum / label_sum, strict=True))
            print(f"vision {budget.done_steps} {budget.progress:.0%} loss {loss.item():.3f} {shares}", flush=True)
            right_sum.zero_(), label_sum.zero_()
        if budget.progress >= 1:
            return


def _labelled_frame(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = random.Random(f"frame {seed}")
    clip = sample_clip(seed, (1, 1))
    scene = replace(clip.scenes[0], number=rng.randint(1, MAX_SCENES))
    phase = rng.random()
    frame = Renderer(replace(clip, scenes=(scene,)), IMAGE_SIZE).frame(phase * scene.duration_s)
    return torch.from_numpy(frame), torch.tensor(_labels(scene, phase))


def _labels(scene: Scene, phase: float) -> list[int]:
    visible = scene.event != "vanish" or phase < VANISH_PHASE
    subject = (
        COLOURS.index(scene.colour),
        SHAPES.index(scene.shape),
        SIZES.index(scene.size),
        MOTIONS.index(scene.motion),
    )
    visitor = scene.visitor if phase >= APPEAR_PHASE else None
    return [
        *(subject if visible else [IGNORED] * len(subject)),
        BACKGROUNDS.index(scene.background),
        scene.number - 1,
        int(visible),
        COLOURS.index(visitor.colour) if visitor else len(COLOURS),
        VISITOR_SHAPES.index(visitor.shape) if visitor else len(VISITOR_SHAPES),
    ]
