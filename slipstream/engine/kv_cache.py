"""The KV cache of one session: preallocated buffers with a length.

Appending writes into a slice; rolling back changes a number. Nothing is concatenated, so a step costs no copy of the
past. Buffers appear layer by layer on the device of the first key written there, which also serves models that are
spread over several devices.

A layer may hold fewer rows than there are tokens, always the same number fewer: where video tokens were dropped in the
middle of a prefill, or where a sparse copy has only some of them. Lengths count tokens all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from slipstream.device_copy import to_device

_GRANULE_TOKENS = 64
_GROWTH_FACTOR = 1.5


class Layout(Enum):
    """Physical order of one buffer; the logical shape is [kv_heads, tokens, head_dim] for all of them.

    The value lists the logical axes from the slowest to the fastest in memory.
    """

    HEAD_TOKEN_DIM = (0, 1, 2)
    HEAD_DIM_TOKEN = (0, 2, 1)
    TOKEN_HEAD_DIM = (1, 0, 2)

    def allocate(self, shape: tuple[int, int, int], like: Tensor, *, zeroed: bool = False) -> Tensor:
        """A buffer of logical `shape` in this order, with the dtype and device of `like`; uninitialised or zeros."""
        physical = [shape[axis] for axis in self.value]
        inverse = [self.value.index(axis) for axis in range(3)]
        make = torch.zeros if zeroed else torch.empty
        return make(physical, dtype=like.dtype, device=like.device).permute(inverse)


@dataclass(slots=True)
class LayerBuffers:
    """One layer's rows, and room for more: [kv_heads, capacity, head_dim] each."""

    keys: Tensor
    values: Tensor


class KVCache:
    """Keys and values of one session for every layer of one model.

    Args:
        num_layers: decoder layers of the model.
        capacity: tokens to make room for before the first growth.
        key_layout, value_layout: what the attention kernel reads fastest.
        whole_granules: `write` returns views whose length is a multiple of 64, zeros or stale rows at their end, so
            that attention has the same shape wherever in such a granule a pass begins. The caller masks that end.
    """

    def __init__(
        self, num_layers: int, *, capacity: int, key_layout: Layout, value_layout: Layout, whole_granules: bool = False
    ) -> None:
        self._layers: list[LayerBuffers | None] = [None] * num_layers
        self._missing = [0] * num_layers
        self._capacity = round_up(capacity)
        self._key_layout = key_layout
        self._value_layout = value_layout
        self._whole_granules = whole_granules
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._length

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def capacity(self) -> int:
        """Tokens that fit before buffers are reallocated."""
        return self._capacity

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers that exist now."""
        held = map(self._held, range(self.num_layers))
        return sum(buffers.keys.nbytes + buffers.values.nbytes for buffers in held if buffers is not None)

    def num_missing(self, layer: int) -> int:
        """How many rows fewer than tokens a layer holds."""
        return self._missing[layer]

    def leave_out(self, num_tokens: int, *, from_layer: int = 0) -> None:
        """Have `from_layer` and those after it hold that many rows fewer than tokens, as their next `write` does.

        Only while the cache is empty: the rows belong to a prompt whose first pass is yet to come, or under way.
        """
        assert self._length == 0, "rows are left out of a prompt only"
        for layer in range(from_layer, self.num_layers):
            assert self._held(layer) is None, "the layers that have run keep their rows"
            self._missing[layer] += num_tokens

    def view_length(self, num_tokens: int) -> int:
        """Length of the views that `write` returns when there are `num_tokens` tokens with the new ones."""
        return round_up(num_tokens) if self._whole_granules else num_tokens

    def has_room(self, num_tokens: int) -> bool:
        """Whether `reserve` would change nothing."""
        return num_tokens <= self._capacity

    def reserve(self, num_tokens: int) -> None:
        """Make sure that `num_tokens` tokens in total will fit. Buffers grow by at least half, each when written to."""
        if num_tokens > self._capacity:
            self._capacity = round_up(max(num_tokens, int(self._capacity * _GROWTH_FACTOR)))

    def write(self, layer: int, keys: Tensor, values: Tensor, ahead: int = 0) -> tuple[Tensor, Tensor]:
        """Store one layer's new rows behind the current length, which `advance` moves when all layers are done.

        Args:
            keys, values: [kv_heads, n, head_dim].
            ahead: rows behind that length which this layer has stored before, and which the new ones follow: for a
                prompt that comes in chunks. Room for all of it is reserved first.

        Returns:
            Views of all keys and values up to and including the new rows, [kv_heads, length - num_missing(layer) +
            ahead + n, head_dim], or as long as `view_length` says.
        """
        buffers = self._buffers(layer, keys, values)
        first, num_new = self._num_rows(layer) + ahead, keys.shape[1]
        buffers.keys.narrow(1, first, num_new).copy_(keys)
        buffers.values.narrow(1, first, num_new).copy_(values)
        shown = self.view_length(first + num_new)
        return buffers.keys.narrow(1, 0, shown), buffers.values.narrow(1, 0, shown)

    def opened(self, layer: int) -> LayerBuffers:
        """The buffers of a layer that has been written to, with room for all that is reserved: for who writes there
        himself and then calls `advance`."""
        held = self._held(layer)
        assert held is not None, "nothing was written to this layer"
        return self._buffers(layer, held.keys, held.values)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of all keys and values of a layer that has been written to, [kv_heads, rows, head_dim]."""
        buffers = self._held(layer)
        assert buffers is not None, "nothing was written to this layer"
        num_rows = self._num_rows(layer)
        return buffers.keys[:, :num_rows], buffers.values[:, :num_rows]

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` rows, which every layer has written, as part of the past."""
        assert 0 <= num_tokens <= self._capacity - self._length, "advance beyond what was reserved"
        self._length += num_tokens

    def rollback(self, length: int) -> None:
        """Forget everything behind the first `length` tokens. O(1)."""
        assert 0 <= length <= self._length, "rollback goes backwards only"
        self._length = length

    def keep(self, num_before: int, rows: Sequence[int]) -> None:
        """Of the tokens behind the first `num_before`, keep those at `rows` (ascending, from 0), moved together."""
        end = num_before + len(rows)
        assert end <= self._length, "only what is there can be kept"
        if list(rows) != list(range(len(rows))):
            moved: Tensor | None = None
            with torch.inference_mode():  # as when the buffers were made
                for layer in range(self.num_layers):
                    for held in self.read(layer):
                        new = held[:, num_before - self._missing[layer] :]
                        if moved is None or moved.device != new.device:  # once, unless layers lie on several
                            moved = to_device(torch.tensor(rows), new.device)
                        new[:, : len(rows)] = new[:, moved]
        self._length = end

    def empty_like(self, capacity: int) -> "KVCache":
        """An empty cache for the same model and kernel, with room for `capacity` tokens."""
        return KVCache(
            self.num_layers,
            capacity=capacity,
            key_layout=self._key_layout,
            value_layout=self._value_layout,
            whole_granules=self._whole_granules,
        )

    def fork(self, num_tokens: int, capacity: int = 0) -> "KVCache":
        """A cache of its own with a copy of the first `num_tokens` rows, and room for `capacity` tokens or just them.

        Only layers that hold rows have buffers, as in any cache.
        """
        assert 0 <= num_tokens <= self._length, "a fork holds a part of the past"
        forked = self.empty_like(max(num_tokens, capacity))
        forked.copy_from(self, num_tokens)
        return forked

    def trimmed(self, num_tokens: int) -> "KVCache":
        """The first `num_tokens` rows with no more room than they take; this cache is of no use afterwards."""
        forked = self.fork(num_tokens)
        self.clear()
        return forked

    def copy_from(self, other: "KVCache", num_tokens: int) -> None:
        """Append what `other`, a cache of the same text, holds of the tokens behind this one's, up to `num_tokens`."""
        assert self._length <= num_tokens <= other._length, "only what the other one holds can be copied"
        if self._length == 0:
            self._missing = list(other._missing)
        self.reserve(num_tokens)
        num_new = num_tokens - self._length
        with torch.inference_mode():  # as when the buffers were made
            for layer in range(other.num_layers):
                if (buffers := other._held(layer)) is not None:
                    end = num_tokens - other._missing[layer]
                    rows = slice(max(0, end - num_new), end)
                    self.write(layer, buffers.keys[:, rows], buffers.values[:, rows])
        self.advance(num_new)

    def copy_chosen(self, other: "KVCache", among: Tensor, chosen: Sequence[Tensor]) -> None:
        """Fill an empty cache with the rows of `other`, but of the rows `among` only those that a KV head has chosen.

        Args:
            among: int64 [m], ascending; every layer has chosen as many of them.
            chosen: for each layer which of those, int64 [kv_heads, n], ascending.
        """
        self.leave_out(len(among) - chosen[0].shape[1])
        self.reserve(other.length)
        with torch.inference_mode():
            for layer, of_layer in enumerate(chosen):
                keys, values = (_chosen(rows, among.to(rows.device), of_layer) for rows in other.read(layer))
                self.write(layer, keys, values)
        self.advance(other.length)

    def clear(self) -> None:
        """Free the buffers."""
        self._layers = [None] * self.num_layers
        self._missing = [0] * self.num_layers
        self._length = 0

    def _num_rows(self, layer: int) -> int:
        """Rows of a layer before the pass that may be running: none in a prompt's first one, whatever it leaves out."""
        num_missing = self._missing[layer]
        return max(0, self._length - num_missing) if num_missing else self._length

    def _held(self, layer: int) -> LayerBuffers | None:
        """None of a layer that was not written to."""
        return self._layers[layer]

    def _buffers(self, layer: int, keys: Tensor, values: Tensor) -> LayerBuffers:
        """With room for as many tokens as `reserve` was told, of rows like these."""
        current = self._held(layer)
        if current is None or current.keys.shape[1] < self._capacity - self._missing[layer]:
            current = self._layers[layer] = self._grown(layer, current, keys, values)
        return current

    def _grown(self, layer: int, current: LayerBuffers | None, keys: Tensor, values: Tensor) -> LayerBuffers:
        """New buffers of a layer with the rows of its current ones."""
        kv_heads, _, head_dim = keys.shape
        shape = (kv_heads, round_up(self._capacity - self._missing[layer]), head_dim)
        zeroed = self._whole_granules  # what is masked must still be a number
        grown = LayerBuffers(
            self._key_layout.allocate(shape, keys, zeroed=zeroed),
            self._value_layout.allocate(shape, values, zeroed=zeroed),
        )
        if current is not None:
            num_held = self._num_rows(layer)
            grown.keys[:, :num_held] = current.keys[:, :num_held]
            grown.values[:, :num_held] = current.values[:, :num_held]
        return grown


def _chosen(rows: Tensor, among: Tensor, chosen: Tensor) -> Tensor:
    """Of one layer's keys or values, [kv_heads, tokens, head_dim]; see `KVCache.copy_chosen`."""
    num_heads, num_tokens, _ = rows.shape
    stays = torch.ones(num_heads, num_tokens, dtype=torch.bool, device=rows.device)
    stays[:, among] = False
    stays.scatter_(1, among[chosen.to(rows.device)], True)
    kept = stays.nonzero()[:, 1].view(num_heads, -1)
    return rows.gather(1, kept[:, :, None].expand(-1, -1, rows.shape[2]))


def round_up(num_tokens: int) -> int:
    """The capacity of a cache that was made for `num_tokens` tokens."""
    return -(-num_tokens // _GRANULE_TOKENS) * _GRANULE_TOKENS
