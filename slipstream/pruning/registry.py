"""Pruners by name, and the one function that applies one."""

from pkgutil import resolve_name

from torch import Tensor

from slipstream.errors import InvalidRequest
from slipstream.pruning.base import Guidance, Pruner, VideoTokens, num_kept
from slipstream.pruning.guided import scores_of
from slipstream.speculation.methods import PRUNER_SPECS


def get_pruner(name: str) -> Pruner:
    """The pruner called `name`.

    Raises:
        InvalidRequest: there is none; the message lists those that there are.
    """
    spec = PRUNER_SPECS.get(name)
    if spec is None:
        raise InvalidRequest(f"unknown pruner {name!r}; known: {', '.join(PRUNER_SPECS)}")
    return Pruner(spec.name, spec.score, resolve_name(spec.keep))


def prune(pruner: Pruner, video: VideoTokens, alpha: float, *, guidance: Guidance | None, seed: int = 0) -> Tensor:
    """Indices of the video tokens to keep when the share `alpha` is pruned: int64, ascending, on the CPU.

    Raises:
        InvalidRequest: alpha out of range, or guidance that is missing or of another number of tokens.
    """
    num_keep = num_kept(video.num_tokens, alpha)
    if pruner.score is None:
        return pruner.keep(video, num_keep, None, seed)
    num_guided = guidance.num_video_tokens if guidance is not None else 0
    if num_guided != video.num_tokens:
        raise InvalidRequest(
            f"pruner {pruner.name!r} needs guidance on {video.num_tokens} video tokens, got {num_guided}"
        )
    return pruner.keep(video, num_keep, scores_of(guidance, pruner.score), seed)
