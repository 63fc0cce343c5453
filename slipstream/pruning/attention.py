"""Pruners that follow the target's text-to-video attention: SpecVLM (paper 001, section 3.2)."""

from typing import ClassVar

import torch
from torch import Tensor

from slipstream.pruning.base import Guidance, Score, VideoTokens
from slipstream.pruning.baselines import evenly
from slipstream.pruning.uv import scores_of, top_k

TOP_P_SHARE = 0.5
"""Of the places, at most this share goes to stage I. The paper calibrates its threshold lambda_r a model and ratio; in
its figure 5 the best tenth of the tokens has half of the attention, so stage I would otherwise take every place."""
TOP_P = 0.4
"""lambda: stage I ends when its tokens have this share of all attention."""


class AttentionPruner:
    """Keeps the tokens that the text attends to most: SpecVLM without its second stage."""

    name: ClassVar[str] = "attention"
    score: ClassVar[Score | None] = Score.ATTENTION

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        return top_k(scores_of(guidance, Score.ATTENTION), num_keep)


class AttentionVariationPruner:
    """Keeps the tokens that the text's attention grows for most (paper 000, figure 9)."""

    name: ClassVar[str] = "attention_variation"
    score: ClassVar[Score | None] = Score.ATTENTION_VARIATION

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        return top_k(scores_of(guidance, Score.ATTENTION_VARIATION), num_keep)


class SpecVlmPruner:
    """Stage I keeps the most attended tokens up to a share of all attention (Top-P, eq. 6); stage II keeps the others
    at a fixed spatial interval (eq. 7)."""

    name: ClassVar[str] = "specvlm"
    score: ClassVar[Score | None] = Score.ATTENTION

    def keep(self, video: VideoTokens, num_keep: int, guidance: Guidance | None, seed: int) -> Tensor:
        scores = scores_of(guidance, Score.ATTENTION).float().cpu().nan_to_num(nan=0.0)
        informative = _top_p(scores, TOP_P, int(num_keep * TOP_P_SHARE))
        others = torch.ones(video.num_tokens, dtype=torch.bool)
        others[informative] = False
        rest = others.nonzero().flatten()
        spread = rest[evenly(len(rest), num_keep - len(informative))]
        return torch.cat([informative, spread]).sort().values


def _top_p(scores: Tensor, share: float, most: int) -> Tensor:
    """The fewest best tokens that have `share` of the sum of [m] scores, `most` at most."""
    ranked = scores.argsort(descending=True, stable=True)
    reached = scores[ranked].double().cumsum(0)
    num_needed = int((reached < share * reached[-1]).sum()) + 1
    return ranked[: min(num_needed, most)]
