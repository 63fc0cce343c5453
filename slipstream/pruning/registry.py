"""Pruners by name, and the one function that applies one."""

from torch import Tensor

from slipstream.errors import InvalidRequest
from slipstream.pruning.base import Guidance, Pruner, VideoTokens, num_kept
from slipstream.pruning.guided import (
    AttentionPruner,
    AttentionVariationPruner,
    SpecVlmPruner,
    UvCosinePruner,
    UvPruner,
    UvSpreadPruner,
)
from slipstream.pruning.unguided import (
    DyCokePruner,
    FastVidPruner,
    FramePruner,
    KeepAll,
    KeepNone,
    RandomPruner,
    UniformPruner,
    WindowPruner,
)

_PRUNER_TYPES: tuple[type[Pruner], ...] = (
    UvPruner,
    UvSpreadPruner,
    UvCosinePruner,
    AttentionPruner,
    AttentionVariationPruner,
    SpecVlmPruner,
    RandomPruner,
    UniformPruner,
    FramePruner,
    WindowPruner,
    DyCokePruner,
    FastVidPruner,
    KeepAll,
    KeepNone,
)
_PRUNERS = {pruner.name: pruner for pruner in _PRUNER_TYPES}
PRUNER_NAMES = tuple(_PRUNERS)


def get_pruner(name: str) -> Pruner:
    """The pruner called `name`.

    Raises:
        InvalidRequest: there is none; the message lists those that there are.
    """
    if name not in _PRUNERS:
        raise InvalidRequest(f"unknown pruner {name!r}; known: {', '.join(PRUNER_NAMES)}")
    return _PRUNERS[name]()


def prune(pruner: Pruner, video: VideoTokens, alpha: float, *, guidance: Guidance | None, seed: int = 0) -> Tensor:
    """Indices of the video tokens to keep when the share `alpha` is pruned: int64, ascending, on the CPU.

    Raises:
        InvalidRequest: alpha out of range, or guidance that is missing or of another number of tokens.
    """
    num_keep = num_kept(video.num_tokens, alpha)
    if pruner.score is not None:
        num_guided = guidance.num_video_tokens if guidance is not None else 0
        if num_guided != video.num_tokens:
            raise InvalidRequest(
                f"pruner {pruner.name!r} needs guidance on {video.num_tokens} video tokens, got {num_guided}"
            )
    return pruner.keep(video, num_keep, guidance, seed)
