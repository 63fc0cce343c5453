"""All keys and values of a model in one pool that never moves, and caches that are extents of it.

A graph that was recorded once reads and writes these addresses, whoever's rows lie there now.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from slipstream.engine.kv_cache import KVCache, LayerBuffers, Layout, round_up

NUM_SCRATCH_ROWS = 64
"""The pool's first rows belong to nobody: rows that only fill up a step are written there."""
_CARRIED_ROWS = 1024
"""Rows that are moved at once."""


@dataclass(eq=False, slots=True)
class Extent:
    """Rows of a pool, the same in all layers. They move when the pool makes room."""

    start: int
    length: int
    owner: "ref[object]"
    """Once this is gone, so is its claim."""

    @property
    def end(self) -> int:
        return self.start + self.length


class KVPool:
    """Belongs to the model's thread.

    Args:
        num_layers: decoder layers of the model.
        num_rows: tokens of all caches together.
        kv_heads, head_dim: of one layer's keys and values.
        like: has their dtype and device.

    Every layer's keys and values are [NUM_SCRATCH_ROWS + num_rows, kv_heads, head_dim].
    """

    def __init__(self, num_layers: int, num_rows: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        shape = (NUM_SCRATCH_ROWS + num_rows, kv_heads, head_dim)
        self.keys, self.values = ([like.new_zeros(shape) for _ in range(num_layers)] for _ in range(2))
        self._carried = like.new_empty(_CARRIED_ROWS, *shape[1:])
        self._extents: list[Extent] = []
        """In the order of their places."""
        self._end = shape[0]

    @property
    def num_free(self) -> int:
        """Rows that no extent has."""
        self._free_ownerless()
        return self._end - NUM_SCRATCH_ROWS - sum(extent.length for extent in self._extents)

    @property
    def row_bytes(self) -> int:
        """Of one token in all layers."""
        return sum(held[0].nbytes for held in self._buffers())

    def take(self, num_tokens: int, owner: object) -> Extent | None:
        """Rows for that many tokens, all zero; None when there are not so many left."""
        length = round_up(max(1, num_tokens))
        if length > self.num_free:
            return None
        start = self._gap(length)
        if start is None:
            self._move_together()
            start = self._gap(length)
        assert start is not None, "what is free lies together now"
        extent = Extent(start, length, ref(owner))
        insort(self._extents, extent, key=lambda other: other.start)
        with torch.inference_mode():
            for held in self._buffers():
                held[start : extent.end].zero_()  # whatever is masked must still be a number
        return extent

    def grow(self, extent: Extent, num_tokens: int) -> bool:
        """Has an extent hold that many tokens, with its rows; False, and nothing changes, when there is no room."""
        more = self.take(num_tokens, self)
        if more is None:
            return False
        self._copy(extent.start, more.start, extent.length)
        self._extents.remove(extent)
        self._extents[self._extents.index(more)] = extent
        extent.start, extent.length = more.start, more.length
        return True

    def give_back(self, extent: Extent) -> None:
        self._extents.remove(extent)

    def ownerless(self) -> list[int]:
        """Where extents start whose owner is gone."""
        return [extent.start for extent in self._extents if extent.owner() is None]

    def free(self, starts: Sequence[int]) -> None:
        """Gives back the extents that start there."""
        self._extents = [extent for extent in self._extents if extent.start not in starts]

    def view(self, layer: int, extent: Extent) -> LayerBuffers:
        """An extent's rows in one layer."""
        rows = slice(extent.start, extent.end)
        return LayerBuffers(self.keys[layer][rows].transpose(0, 1), self.values[layer][rows].transpose(0, 1))

    def _free_ownerless(self) -> None:
        self.free(self.ownerless())

    def _gap(self, length: int) -> int | None:
        """The first place where so many rows are free."""
        start = NUM_SCRATCH_ROWS
        for extent in self._extents:
            if extent.start - start >= length:
                return start
            start = extent.end
        return start if self._end - start >= length else None

    def _move_together(self) -> None:
        start = NUM_SCRATCH_ROWS
        for extent in self._extents:
            if extent.start > start:
                self._copy(extent.start, start, extent.length)
                extent.start = start
            start = extent.end

    def _copy(self, source: int, target: int, length: int) -> None:
        """To a lower place, or to one apart from the first. Takes no memory: it must not fail halfway."""
        with torch.inference_mode():
            for held in self._buffers():
                for first in range(0, length, _CARRIED_ROWS):
                    carried = self._carried[: min(_CARRIED_ROWS, length - first)]
                    carried.copy_(held[source + first : source + first + len(carried)])
                    held[target + first : target + first + len(carried)] = carried

    def _buffers(self) -> Iterator[Tensor]:
        yield from self.keys
        yield from self.values


class SharedPool(KVPool):
    """One of several pools, a rank's each, that give the same places. They do as long as they are asked the same in the
    same order; when a rank notices that an owner is gone depends on its garbage collector, so `free` is told."""

    def _free_ownerless(self) -> None:
        pass


class PooledCache(KVCache):
    """A cache whose rows lie in a pool; in memory of their own when the pool is full."""

    def __init__(self, num_layers: int, *, capacity: int, pool: KVPool, whole_granules: bool = False) -> None:
        layout = {"key_layout": Layout.TOKEN_HEAD_DIM, "value_layout": Layout.TOKEN_HEAD_DIM}
        super().__init__(num_layers, capacity=capacity, **layout, whole_granules=whole_granules)
        self._pool = pool
        self._is_written = [False] * num_layers
        self.extent: Extent | None = None
        """Where the rows lie; None before the first, and when they lie elsewhere."""

    def empty_like(self, capacity: int) -> KVCache:
        return PooledCache(self.num_layers, capacity=capacity, pool=self._pool, whole_granules=self._whole_granules)

    @property
    def num_bytes(self) -> int:
        """See `KVCache`: those of the extent."""
        return super().num_bytes if self.extent is None else self.extent.length * self._pool.row_bytes

    @property
    def is_whole(self) -> bool:
        """Whether every layer holds a row for every token."""
        return not any(self.num_missing(layer) for layer in range(self.num_layers))

    def has_room(self, num_tokens: int) -> bool:
        return super().has_room(num_tokens) and (self.extent is not None or any(self._layers))

    def clear(self) -> None:
        super().clear()
        self._is_written = [False] * self.num_layers
        if self.extent is not None:
            self._pool.give_back(self.extent)
            self.extent = None

    def reserve(self, num_tokens: int) -> None:
        """See `KVCache`. The only place where rows of the pool are taken, and others moved."""
        before = self._capacity
        super().reserve(num_tokens)
        num_rows, extent = self._capacity - min(self._missing), self.extent
        try:
            if extent is None and not any(self._layers):
                self.extent = self._pool.take(num_rows, self)
            elif extent is not None and extent.length < num_rows and not self._pool.grow(extent, num_rows):
                self._leave_pool()
        except BaseException:
            self._capacity = before
            raise

    def trimmed(self, num_tokens: int) -> KVCache:
        """See `KVCache`: in place."""
        if self.extent is None:
            return super().trimmed(num_tokens)
        self.rollback(num_tokens)
        self._capacity = round_up(max(1, num_tokens))
        self.extent.length = min(self.extent.length, round_up(max(1, self._capacity - min(self._missing))))
        return self

    def _held(self, layer: int) -> LayerBuffers | None:
        if self.extent is None:
            return super()._held(layer)
        return self._pool.view(layer, self.extent) if self._is_written[layer] else None

    def _buffers(self, layer: int, keys: Tensor, values: Tensor) -> LayerBuffers:
        if self.extent is None:
            return super()._buffers(layer, keys, values)
        self._is_written[layer] = True
        return self._pool.view(layer, self.extent)

    def _leave_pool(self) -> None:
        """Goes on in memory of its own."""
        assert self.extent is not None
        own: list[LayerBuffers | None] = []
        with torch.inference_mode():
            for layer in range(self.num_layers):
                held = self._held(layer)
                own.append(None if held is None else self._grown(layer, held, held.keys, held.values))
        self._layers = own
        self._pool.give_back(self.extent)
        self.extent = None
