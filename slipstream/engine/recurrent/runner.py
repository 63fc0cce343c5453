"""Passes through a model some of whose layers recur."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from slipstream.engine.attention import Kernel, attend_segments
from slipstream.engine.forward import Decoder, Runner
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.recurrent.cache import MOST_ROWS, RecurrentCache
from slipstream.engine.recurrent.delta_rule import KINDS, DeltaRows, GatedDelta
from slipstream.engine.row_chunks import BESIDE_CHUNKS
from slipstream.engine.segments import Segment
from slipstream.errors import ModelNotUsable


def check_recurrence(ref: str, decoder: Decoder, strict_width: int) -> None:
    """Raises `ModelNotUsable` for a text model whose linear attention is not known here, or cannot do what is asked."""
    kinds = {type(layer.linear_attn).__name__ for layer in cast(Any, decoder.layers) if hasattr(layer, "linear_attn")}
    if not kinds or not kinds <= set(KINDS):
        raise ModelNotUsable(f"{ref}: linear attention is known of Qwen 3.5 only, not {', '.join(sorted(kinds))}")
    if strict_width:
        raise ModelNotUsable(
            f"{ref}: has linear attention, whose sums depend on where a window begins: no width makes them those of"
            " plain decoding to the bit; start it without --strict-width"
        )


class RecurrentRunner(Runner):
    """See `Runner`."""

    recurs = True

    def __init__(self, decoder: Decoder, lm_head: nn.Module, kernel: Kernel, *, fixed_shapes: bool = False) -> None:
        self.deltas: dict[int, GatedDelta] = {}
        """The layers that recur, by number."""
        for number, layer in enumerate(cast(Any, decoder.layers)):
            if hasattr(layer, "linear_attn"):
                layer.linear_attn = self.deltas[number] = GatedDelta(layer.linear_attn)
        super().__init__(decoder, lm_head, kernel, fixed_shapes=fixed_shapes)

    def attention(self, segments: Sequence[Segment]) -> "RecurrentAttention":
        return RecurrentAttention(segments, self.kernel)

    def cache_bytes(self, num_tokens: int) -> int:
        states = sum(2 * delta.state_bytes(0) + delta.state_bytes(MOST_ROWS) for delta in self.deltas.values())
        return super().cache_bytes(num_tokens) + states

    def prefill_bytes(self, num_tokens: int) -> int:
        weight = self.decoder.embed_tokens.weight
        beside = int(BESIDE_CHUNKS * num_tokens * weight.shape[1] * weight.element_size())
        recurring = max(delta.prefill_bytes(num_tokens) for delta in self.deltas.values())
        return max(super().prefill_bytes(num_tokens), beside + recurring)

    def new_cache(self, capacity: int, num_text: int = 0) -> KVCache:
        return RecurrentCache(
            self.num_layers, capacity=capacity, deltas=self.deltas, num_text=num_text, **self.cache_layout
        )


class RecurrentAttention:
    """`Attend` of the layers that attend, and `Recur` of the others, over every segment's own cache."""

    def __init__(self, segments: Sequence[Segment], kernel: Kernel) -> None:
        self._segments, self._kernel = segments, kernel

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return attend_segments(self._segments, self._kernel, layer, query, key, value, scale)

    def recur(self, layer: int, rows: DeltaRows) -> Tensor:
        found = [_cache(each).recur(layer, rows[each.rows], each.tree) for each in self._segments]
        return torch.cat(found) if len(found) > 1 else found[0]


def _cache(segment: Segment) -> RecurrentCache:
    assert isinstance(segment.cache, RecurrentCache), "caches of this model are its runner's"
    assert not segment.ahead, "prompts of this model do not ride along"
    return segment.cache
