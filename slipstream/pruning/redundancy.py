"""Pruners that drop what repeats over time: in the spirit of DyCoke and FastVID (paper 001, section 4.4).

Both look at the draft's own video embeddings and need no guidance. The originals merge tokens inside the model; here,
as in that comparison, they only say which tokens to keep.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from slipstream.errors import InvalidRequest
from slipstream.pruning.base import Guidance, Score, VideoTokens
from slipstream.pruning.baselines import evenly, whole_steps

WINDOW_STEPS = 4
"""DyCoke compares frames within windows of four: the second with the first, the fourth with the third, the third with
the first."""
_PARTNERS = (0, 0, 0, 2)


class DyCokePruner:
    """Token by token: keeps those that differ most from the same place in an earlier frame of their window. The first
    frame of every window is kept before all others, thinned out evenly where there is no room."""

    name: ClassVar[str] = "dycoke"
    score: ClassVar[Score | None] = None

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
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


class FastVidPruner:
    """Frame by frame: keeps whole frames at the transitions where consecutive frames are least alike."""

    name: ClassVar[str] = "fastvid"
    score: ClassVar[Score | None] = None

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
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
