"""Pruners by name, and the one function that applies one."""

from torch import Tensor

from slipstream.errors import InvalidRequest
from slipstream.pruning.base import Guidance, Pruner, num_kept
from slipstream.pruning.baselines import KeepAll, RandomPruner, UniformPruner
from slipstream.pruning.uv import UvPruner, UvSpreadPruner

_PRUNERS: dict[str, type[Pruner]] = {
    pruner.name: pruner for pruner in (UvPruner, UvSpreadPruner, RandomPruner, UniformPruner, KeepAll)
}
PRUNER_NAMES = tuple(_PRUNERS)


def get_pruner(name: str) -> Pruner:
    """The pruner called `name`.

    Raises:
        InvalidRequest: there is none; the message lists those that there are.
    """
    if name not in _PRUNERS:
        raise InvalidRequest(f"unknown pruner {name!r}; known: {', '.join(PRUNER_NAMES)}")
    return _PRUNERS[name]()


def prune(pruner: Pruner, num_video_tokens: int, alpha: float, *, guidance: Guidance | None, seed: int = 0) -> Tensor:
    """Indices of the video tokens to keep when the share `alpha` is pruned: int64, ascending, on the CPU.

    Raises:
        InvalidRequest: alpha out of range, or guidance that is missing or of another number of tokens.
    """
    num_keep = num_kept(num_video_tokens, alpha)
    if pruner.needs_guidance:
        num_guided = guidance.num_video_tokens if guidance is not None else 0
        if num_guided != num_video_tokens:
            raise InvalidRequest(
                f"pruner {pruner.name!r} needs guidance on {num_video_tokens} video tokens, got {num_guided}"
            )
    return pruner.keep(num_video_tokens, num_keep, guidance, seed)
