"""Pruners that look at positions alone: the papers' baselines, and what a draft does when no guidance comes."""

from typing import ClassVar

import torch
from torch import Tensor

from slipstream.pruning.base import Guidance, Score, VideoTokens


class RandomPruner:
    """Keeps a random subset, a function of the seed."""

    name: ClassVar[str] = "random"
    score: ClassVar[Score | None] = None

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(video.num_tokens, generator=generator)[:num_keep].sort().values


class UniformPruner:
    """Keeps evenly spaced tokens: the middle of each of `num_keep` equal stretches (paper 001, SD-Uniform)."""

    name: ClassVar[str] = "uniform"
    score: ClassVar[Score | None] = None

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        return evenly(video.num_tokens, num_keep)


class FramePruner:
    """Keeps whole frames at even distances and drops the others (paper 001, SD-Frame)."""

    name: ClassVar[str] = "frame"
    score: ClassVar[Score | None] = None

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        num_frames = -(-num_keep // video.tokens_per_step)
        return whole_steps(video, evenly(-(-video.num_tokens // video.tokens_per_step), num_frames), num_keep)


class WindowPruner:
    """Keeps the first frame and the latest tokens, as caches of attention sinks and a sliding window do (paper 001,
    figure 7a)."""

    name: ClassVar[str] = "window"
    score: ClassVar[Score | None] = None

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        num_first = min(video.tokens_per_step, num_keep // 2)
        last = torch.arange(video.num_tokens - (num_keep - num_first), video.num_tokens)
        return torch.cat([torch.arange(num_first), last])


class KeepAll:
    """Keeps every token, whatever share was to be pruned."""

    name: ClassVar[str] = "none"
    score: ClassVar[Score | None] = None

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        return torch.arange(video.num_tokens)


class KeepNone:
    """Keeps no video token: the draft knows the text alone (paper 000, OnSD)."""

    name: ClassVar[str] = "all"
    score: ClassVar[Score | None] = None

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        return torch.arange(0)


def evenly(num_tokens: int, num_keep: int) -> Tensor:
    """The middles of `num_keep` equal stretches of `num_tokens` places, ascending."""
    odd_numbers = 2 * torch.arange(num_keep) + 1
    return odd_numbers * num_tokens // (2 * max(num_keep, 1))


def whole_steps(video: VideoTokens, steps: Tensor, num_keep: int) -> Tensor:
    """`num_keep` tokens of these steps (best first): whole steps as far as they fit, and an even part of the last."""
    per_step = video.tokens_per_step
    chosen: list[Tensor] = []
    num_left = num_keep
    for step in steps.tolist():
        first = step * per_step
        length = min(per_step, video.num_tokens - first)
        chosen.append(first + evenly(length, min(length, num_left)))
        num_left -= len(chosen[-1])
    return torch.cat([torch.arange(0), *chosen]).sort().values
