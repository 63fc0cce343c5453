"""Which runner takes a model's passes on a CPU: one through fused layers, where they can be fused."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from slipstream.engine.attention import attend_segments
from slipstream.engine.forward import Decoder, Note, Runner
from slipstream.engine.fused_layers import FusedLayers, can_fuse
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.row_writer import RowWriter, can_write_rows
from slipstream.engine.segments import Rows, pack
from slipstream.speculation.protocol import TokenTree


class FusedRunner(Runner):
    """Takes whole passes, which decoding does again and again, through fused layers: of a small model on a CPU the
    number of operations is most of a pass.

    Args:
        decoder: see `can_fuse`. Its weights move.
        num_axes: of positions.
    """

    def __init__(self, decoder: Decoder, *args: Any, num_axes: int, **options: Any) -> None:
        super().__init__(decoder, *args, **options)
        self._num_axes = num_axes
        self.fused = FusedLayers(decoder)
        self._writer: RowWriter | None = None

    def run(self, batch: Sequence[Rows]) -> list[Tensor]:
        assert not any(rows.additions or rows.observer for rows in batch), "prompts alone have these"
        with torch.inference_mode():
            packed = pack(batch)
            attend = partial(attend_segments, packed.segments, self.kernel)
            normed = self.fused(packed.hidden, packed.position_ids, attend)
            logits = cast(Tensor, self.lm_head(normed).float())
        for segment in packed.segments:
            segment.cache.advance(segment.length)
        return list(logits.split([segment.length for segment in packed.segments]))

    def write_ahead(
        self, cache: KVCache, token: int, first_position: int, num_tokens: int, note: Note | None
    ) -> list[int] | None:
        writer = self._row_writer()
        with torch.inference_mode():
            return None if writer is None else writer.write(cache, token, first_position, num_tokens, note)

    @property
    def most_nodes(self) -> int:
        if self.fixed_shapes or self.pool is not None:  # a strict width, or static steps
            return 0
        writer = self._row_writer()
        return 0 if writer is None else writer.most_nodes

    def read_nodes(self, cache: KVCache, tree: TokenTree, first_position: int) -> Tensor:
        writer = self._row_writer()
        assert writer is not None, "it says how many nodes it reads"
        with torch.inference_mode():
            return writer.read_nodes(cache, tree, first_position)

    def _row_writer(self) -> RowWriter | None:
        if self._writer is None and can_write_rows(self.fused, self.decoder, self.lm_head):
            weights = (self.decoder.embed_tokens.weight, cast(Tensor, self.lm_head.weight))
            with torch.inference_mode():
                self._writer = RowWriter(self.fused, *weights, self._num_axes, compiles=self.kernel.compiles)
        return self._writer


def fastest_runner(decoder: Decoder, lm_head: nn.Module, *args: Any, num_axes: int, **options: Any) -> Runner:
    """What runs a model's passes: fused on a CPU, where that can be. On CUDA static steps are."""
    on_cpu = decoder.embed_tokens.weight.device.type == "cpu"
    if on_cpu and can_fuse(decoder, num_axes):
        return FusedRunner(decoder, lm_head, *args, num_axes=num_axes, **options)
    return Runner(decoder, lm_head, *args, **options)
