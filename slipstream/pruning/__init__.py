"""Which video tokens the draft keeps: guidance in, a sorted keep-index out."""

from slipstream.pruning.base import Guidance, Pruner, Score, VideoTokens, num_kept
from slipstream.pruning.registry import PRUNER_NAMES, get_pruner, prune

__all__ = ["PRUNER_NAMES", "Guidance", "Pruner", "Score", "VideoTokens", "get_pruner", "num_kept", "prune"]
