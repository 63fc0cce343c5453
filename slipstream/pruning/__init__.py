"""Which video tokens the draft keeps: guidance in, a sorted keep-index out."""

from slipstream.pruning.base import Guidance, Keep, Pruner, VideoTokens, num_kept
from slipstream.pruning.guided import get_pruner, prune
from slipstream.speculation.methods import PRUNERS, Score

__all__ = ["PRUNERS", "Guidance", "Keep", "Pruner", "Score", "VideoTokens", "get_pruner", "num_kept", "prune"]
