"""What rank 0 computes with, see `mirror`, of a model some of whose layers recur; which runner a model gets."""

from collections.abc import Sequence
from typing import Any

from slipstream.engine.forward import Decoder
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.parallel.mirror import Director, MirroredCache, MirroredRunner
from slipstream.engine.recurrent.cache import RecurrentCache
from slipstream.engine.recurrent.runner import RecurrentRunner


class MirroredRecurrentCache(MirroredCache, RecurrentCache):
    """What cannot be taken back is refused before the other ranks are told."""

    def rollback(self, length: int) -> None:
        self.check_rollback(length)
        super().rollback(length)

    def keep(self, num_before: int, rows: Sequence[int]) -> None:
        self.check_reach(num_before)
        super().keep(num_before, rows)


class MirroredRecurrentRunner(MirroredRunner, RecurrentRunner):
    """A runner of rank 0's share."""

    def new_cache(self, capacity: int, num_text: int = 0) -> KVCache:
        layout = {"deltas": self.deltas, "num_text": num_text, **self.cache_layout}
        return MirroredRecurrentCache(self._director, self.num_layers, capacity=capacity, **layout)


def mirrored_runner(decoder: Decoder, *parts: Any, director: Director, **options: Any) -> MirroredRunner:
    """Rank 0's runner of a model; see `Runner` for its parts."""
    recurs = any(hasattr(layer, "linear_attn") for layer in decoder.layers)
    kind = MirroredRecurrentRunner if recurs else MirroredRunner
    return kind(decoder, *parts, director=director, **options)
