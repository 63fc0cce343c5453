"""Pruners that need no guidance: by position (the papers' baselines) or by what repeats in the draft's embeddings."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from slipstream.errors import InvalidRequest
from slipstream.pruning.base import VideoTokens

# -- baselines --------------------------------------------------------------------------------------------------------


def keep_random(video: VideoTokens, num_keep: int, scores: Tensor | None, seed: int) -> Tensor:
    """A random subset, a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(video.num_tokens, generator=generator)[:num_keep].sort().values


def keep_evenly(video: VideoTokens, num_keep: int, scores: Tensor | None, seed: int) -> Tensor:
    """Evenly spaced tokens: the middle of each of `num_keep` equal stretches (SpecVLM's SD-Uniform)."""
    return evenly(video.num_tokens, num_keep)


def keep_frames(video: VideoTokens, num_keep: int, scores: Tensor | None, seed: int) -> Tensor:
    """Whole frames at even distances; drops the others (SpecVLM's SD-Frame)."""
    num_frames = -(-num_keep // video.tokens_per_step)
    return whole_steps(video, evenly(-(-video.num_tokens // video.tokens_per_step), num_frames), num_keep)


def keep_first_and_latest(video: VideoTokens, num_keep: int, scores: Tensor | None, seed: int) -> Tensor:
    """The first frame and the latest tokens, as caches of attention sinks and a sliding window do (SpecVLM, figure
    7a)."""
    num_first = min(video.tokens_per_step, num_keep // 2)
    last = torch.arange(video.num_tokens - (num_keep - num_first), video.num_tokens)
    return torch.cat([torch.arange(num_first), last])


def keep_first(video: VideoTokens, num_keep: int, scores: Tensor | None, seed: int) -> Tensor:
    """The first ones, of pruners that keep every token, or no video token: then the draft knows the text alone
    (ParallelVLM's OnSD)."""
    return torch.arange(num_keep)


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


# -- redundancy -------------------------------------------------------------------------------------------------------

# Pruners that drop what repeats over time: in the spirit of DyCoke and FastVID (SpecVLM, section 4.4).
#
# Both look at the draft's own video embeddings and need no guidance. The originals merge tokens inside the model;
# here, as in that comparison, they only say which tokens to keep.

WINDOW_STEPS = 4
"""DyCoke compares frames within windows of four: the second with the first, the fourth with the third, the third with
the first."""
_PARTNERS = (0, 0, 0, 2)


def keep_changed_tokens(video: VideoTokens, num_keep: int, scores: Tensor | None, seed: int) -> Tensor:
    """DyCoke, token by token: those that differ most from the same place in an earlier frame of their window. The first
    frame of every window is kept before all others, thinned out evenly where there is no room."""
    steps = _steps(video)
    num_steps, per_step, _ = steps.shape
    places = torch.arange(num_steps)
    partners = places - places % WINDOW_STEPS + torch.tensor(_PARTNERS)[places % WINDOW_STEPS]
    is_first = (places % WINDOW_STEPS == 0).repeat_interleave(per_step)
    firsts = is_first.nonzero().flatten()
    if len(firsts) >= num_keep:
        return firsts[evenly(len(firsts), num_keep)]
    similarity = cosine_similarity(steps, steps[partners], dim=-1).flatten().masked_fill(is_first, -2.0)
    return similarity.nan_to_num(nan=1.0).argsort(stable=True)[:num_keep].sort().values


def keep_changed_frames(video: VideoTokens, num_keep: int, scores: Tensor | None, seed: int) -> Tensor:
    """FastVID, frame by frame: whole frames at the transitions where consecutive frames are least alike."""
    frames = _steps(video).mean(dim=1)
    similarity = cosine_similarity(frames[1:], frames[:-1], dim=-1).nan_to_num(nan=1.0)
    first_then_changes = torch.cat([torch.full((1,), -2.0), similarity]).argsort(stable=True)
    num_frames = -(-num_keep // video.tokens_per_step)
    return whole_steps(video, first_then_changes[:num_frames], num_keep)


def _steps(video: VideoTokens) -> Tensor:
    """The embeddings, fp32 [steps, tokens a step, hidden] on the CPU."""
    if video.embeddings is None or video.num_tokens % video.num_steps:
        raise InvalidRequest("pruners of temporal redundancy need the video's embeddings, and steps of equal length")
    return video.embeddings.detach().float().cpu().view(video.num_steps, -1, video.embeddings.shape[-1])
