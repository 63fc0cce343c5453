"""The lossy baselines of ParallelVLM, table 2: where they drop video tokens of the target itself, how many they keep,
and what ranks them.

Each in its training-free form, and without what is not pruning: SparseVLM does not recycle dropped tokens into new
ones, and DyCoke merges at the input only, without its second pruning of the cache while decoding.

Every method keeps the share r ** s of the video from its s-th stage on, and r is solved for the share that the caller
wants kept averaged over the layers. So methods of one `keep` do the same work in different places.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.errors import InvalidRequest
from slipstream.speculation.methods import LOSSY_SPECS, Lossy, LossyRank

_BISECTIONS = 60
_BLOCK_TOKENS = 1024
"""Video tokens that are compared with the text at a time."""


@dataclass(frozen=True)
class DropStage:
    """When `after_layer` layers have run, `num_keep` video tokens go on into the next."""

    after_layer: int
    num_keep: int


@dataclass(frozen=True)
class Schedule:
    """What a lossy method does to one prompt."""

    rank: LossyRank
    stages: tuple[DropStage, ...]
    """In the layers' order; empty where all is kept."""


def make_schedule(lossy: Lossy, *, num_video: int, num_layers: int) -> Schedule:
    """The method's stages for this prompt and model. Keeping all has none.

    A share that the method cannot reach from its own layers on, because those before already take more, moves all its
    stages to the front, as far as needed.

    Raises:
        InvalidRequest: less than the one layer that has to run before there is attention to rank by.
    """
    places = _places(lossy.method, num_layers)
    while places[0] > 1 and places[0] >= lossy.keep * num_layers:
        places = tuple(sorted({max(1, place - 1) for place in places}))
    if lossy.keep < places[0] / num_layers:
        raise InvalidRequest(
            f"{lossy.method} drops tokens after layer {places[0]} at the earliest, so that of {num_layers} layers it"
            f" keeps a share of {places[0] / num_layers:.3f} at least; lossy_keep {lossy.keep} is less"
        )
    stages: tuple[DropStage, ...] = ()
    if lossy.keep < 1.0:
        ratio = _solve(lossy.keep, places, num_layers)
        stages = tuple(
            DropStage(place, round(num_video * ratio**number)) for number, place in enumerate(places, start=1)
        )
    return Schedule(LOSSY_SPECS[lossy.method].rank, stages)


def text_raters(video: Tensor, text: Tensor) -> list[int]:
    """SparseVLM's text raters: the text tokens that the video tokens are more like than others are on average.

    Args:
        video: input embeddings, [m, hidden].
        text: input embeddings of the text behind the video, [n, hidden].

    Returns:
        Indices into `text`, ascending, at least one.
    """
    columns = text.float().T
    blocks = [(block.float() @ columns).softmax(dim=-1).sum(dim=0) for block in video.split(_BLOCK_TOKENS)]
    relevance = torch.stack(blocks).sum(dim=0) / len(video)
    chosen: list[int] = (relevance >= relevance.mean()).nonzero().flatten().tolist()
    return chosen or [int(relevance.argmax())]


def _places(method: str, num_layers: int) -> tuple[int, ...]:
    """After how many layers a method drops tokens, ascending: 0 where no attention is needed, at least one layer
    otherwise; the last layer is none of them."""
    spec = LOSSY_SPECS[method]
    places = spec.drops_after(num_layers)
    if spec.rank is LossyRank.REDUNDANCY:
        return places
    return tuple(sorted({min(max(place, 1), max(num_layers - 1, 1)) for place in places}))


def _solve(keep: float, places: tuple[int, ...], num_layers: int) -> float:
    """The ratio r of a stage to the one before it with which the layers keep the share `keep` on average."""
    spans = [last - first for first, last in pairwise((*places, num_layers))]
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        ratio = (low + high) / 2
        kept = places[0] + sum(span * ratio**number for number, span in enumerate(spans, start=1))
        low, high = (ratio, high) if kept < keep * num_layers else (low, ratio)
    return high
