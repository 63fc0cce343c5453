"""Pruners that ask nobody: the papers' baselines, and what a draft does when no guidance comes."""

from typing import ClassVar

import torch
from torch import Tensor

from slipstream.pruning.base import Guidance


class RandomPruner:
    """Keeps a random subset, a function of the seed."""

    name: ClassVar[str] = "random"
    needs_guidance: ClassVar[bool] = False

    def keep(self, num_video_tokens: int, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(num_video_tokens, generator=generator)[:num_keep].sort().values


class UniformPruner:
    """Keeps evenly spaced tokens: the middle of each of `num_keep` equal stretches."""

    name: ClassVar[str] = "uniform"
    needs_guidance: ClassVar[bool] = False

    def keep(self, num_video_tokens: int, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        odd_numbers = 2 * torch.arange(num_keep) + 1
        return odd_numbers * num_video_tokens // (2 * max(num_keep, 1))


class KeepAll:
    """Keeps every token, whatever share was to be pruned."""

    name: ClassVar[str] = "none"
    needs_guidance: ClassVar[bool] = False

    def keep(self, num_video_tokens: int, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        return torch.arange(num_video_tokens)
