"""How much a prompt's text attends to its video, recorded while the prompt runs.

This is what SpecVLM rates video tokens by (its eq. 4-5), what STD selects them by for each layer and KV head
(Sparse-to-Dense, section 3.2), and with the last text row alone what FastV and PyramidDrop rank by. Only the text rows'
scores are computed, beside the pass and without changing it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from slipstream.device_copy import to_device
from slipstream.families.adapter import PromptPlan

_MAX_SCORES = 1 << 22
"""Scores in fp32 that exist at a time."""


@dataclass(frozen=True)
class _Behind:
    """All that counts of a plan: the text behind a video."""

    num_text_tokens: int
    video_rows: Tensor


class TextAttention:
    """An observer of one prefill, whole, pruned or resumed.

    Args:
        plan: of the prompt.
        text_rows: whose attention counts, as indices among the text tokens behind the video, which may be negative
            like Python's: [-1] is the last alone. None: all of them.
        layers: which to record; None: all.
    """

    def __init__(
        self,
        plan: "PromptPlan | _Behind",
        *,
        text_rows: Sequence[int] | None = None,
        layers: Collection[int] | None = None,
    ) -> None:
        num_text = plan.num_text_tokens
        self._rows = sorted({range(num_text)[row] for row in (range(num_text) if text_rows is None else text_rows)})
        if not self._rows:
            raise ValueError("attention needs at least one text row")
        self._num_text = num_text
        self.video = plan.video_rows
        """Which of a layer's keys are the video's, see `Observer`."""
        self.join_heads: Callable[[Tensor], Tensor] = lambda heads: heads
        """See `Recording`."""
        self._layers = layers
        self._by_layer: dict[int, Tensor] = {}

    @property
    def recording(self) -> "TextAttention":
        """See `Observer`."""
        return self

    @property
    def order(self) -> Mapping[str, Any]:
        """What `twin` makes another one of, in another process."""
        return {
            "num_text": self._num_text,
            "rows": self._rows,
            "layers": None if self._layers is None else sorted(self._layers),
        }

    @classmethod
    def twin(cls, order: Mapping[str, Any], video: Tensor, join_heads: Callable[[Tensor], Tensor]) -> "TextAttention":
        """One that records what the one with this `order` does, of other heads."""
        twin = cls(_Behind(order["num_text"], video), text_rows=order["rows"], layers=order["layers"])
        twin.join_heads = join_heads
        return twin

    @property
    def by_layer(self) -> Mapping[int, Tensor]:
        """What has been recorded so far, layer -> fp32 [kv_heads, num_video_tokens], on the layer's device.

        The share of its attention that a text row pays to each video token, of all that it pays to all tokens: averaged
        over the text rows, and over the query heads of a KV head. Video tokens are those that the layer has.
        """
        return MappingProxyType(self._by_layer)

    def mean(self, layers: Collection[int] | None = None) -> Tensor:
        """Averaged over layers (those recorded so far, or some of them) and query heads, fp32 [num_video_tokens].

        SpecVLM's a_j. The layers must have the same video tokens.
        """
        chosen = sorted(self._by_layer) if layers is None else sorted(layers)
        if not chosen:
            raise ValueError("no layer has been recorded yet")
        device = self._by_layer[chosen[0]].device
        return torch.stack([self._by_layer[layer].mean(dim=0).to(device) for layer in chosen]).mean(dim=0)

    def variation(self, last: int) -> Tensor:
        """`mean` of layer `last` less that of the first. Of a model some of whose layers do not attend: of the last
        one recorded up to there less the first, or of the first two where that is one."""
        recorded = sorted(self._by_layer)
        early = [layer for layer in recorded if layer <= last]
        if len(early) < 2 and 0 not in recorded:
            early = recorded[:2]
        return self.mean(early[-1:]) - self.mean(early[:1])

    def place_video(self, rows: Tensor) -> None:
        """See `Observer`."""
        self.video = rows

    def observe(self, layer: int, query: Tensor, keys: Tensor, scale: float) -> None:
        """Records a layer, see `Observer`."""
        if self._layers is not None and layer not in self._layers:
            return
        sums = torch.zeros(len(keys), len(self.video), device=keys.device)
        if len(self.video):  # a text alone may fill the context, and its mask the memory
            self._add_shares(sums, query, keys, scale)
        group_size = len(query) // len(keys)
        self._by_layer[layer] = self.join_heads(sums / (len(self._rows) * group_size))

    def _add_shares(self, sums: Tensor, query: Tensor, keys: Tensor, scale: float) -> None:
        """To [kv_heads, num_video_tokens] the shares of all text rows."""
        kv_heads, num_keys, head_dim = keys.shape
        text_rows = to_device(torch.tensor(self._rows), keys.device)
        text = query[:, query.shape[1] - self._num_text :].index_select(1, text_rows)
        folded = text.reshape(kv_heads, -1, len(self._rows), head_dim)
        first_key = num_keys - self._num_text  # the first text row's own
        mask = torch.full((self._num_text, self._num_text), float("-inf"), device=keys.device).triu_(1)[text_rows]
        video = to_device(self.video, keys.device)
        block_len = max(1, _MAX_SCORES // (folded.shape[1] * num_keys))
        for head in range(kv_heads):
            head_keys = keys[head].T.float()
            for first in range(0, len(self._rows), block_len):
                rows = slice(first, first + block_len)
                scores = folded[head, :, rows].float() * scale @ head_keys
                scores[..., first_key:] += mask[rows]
                sums[head] += scores.softmax(dim=-1)[..., video].sum(dim=(0, 1))
