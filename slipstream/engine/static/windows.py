"""Attention of a static step: windows of several sessions over a pool, with every place and length on the device.

Nothing here depends on what the host knows of a session, so that one graph serves all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.engine.attention import flash_of, join_window, wide_dtype
from slipstream.engine.static.pool import KVPool


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """What a graph is recorded for."""

    num_sessions: int
    num_rows: int
    """Of each session: a window and the token before it."""
    capacity: int
    """Most tokens that a session's extent may hold."""

    @property
    def num_all_rows(self) -> int:
        return self.num_sessions * self.num_rows


@dataclass(frozen=True, eq=False)
class StepPlaces:
    """Where the sessions of a step stand, int64 on the pool's device."""

    shape: StepShape
    starts: Tensor
    """First row of each session's extent, [sessions]."""
    lengths: Tensor
    """Rows of each extent, at most `capacity`, [sessions]."""
    past: Tensor
    """Tokens that each session's rows all see, at least one, [sessions]."""
    write_rows: Tensor
    """Pool rows that the step's keys and values go to, [sessions * rows]."""
    visible: Tensor
    """Which rows of its window a row sees, 0 or 1, [sessions, rows, rows]; itself at least."""

    def pool_rows(self) -> Tensor:
        """[sessions, capacity]: an extent's rows, the last one over and over behind its end."""
        columns = torch.arange(self.shape.capacity, device=self.starts.device)
        return self.starts[:, None] + columns.minimum(self.lengths[:, None] - 1)

    def past_mask(self) -> Tensor:
        """Bool [sessions, capacity]."""
        return torch.arange(self.shape.capacity, device=self.past.device) < self.past[:, None]

    def whole_mask(self) -> Tensor:
        """Past and window as they lie in the extent, bool [sessions, rows, capacity]."""
        columns = torch.arange(self.shape.capacity, device=self.past.device) - self.past[:, None]
        among = columns.clamp(0, self.shape.num_rows - 1)[:, None].expand(-1, self.shape.num_rows, -1)
        in_window = (columns >= 0) & (columns < self.shape.num_rows)
        return (self.visible.gather(2, among).bool() & in_window[:, None]) | self.past_mask()[:, None]


class Windows(ABC):
    """The attention of one kind of step, see `Attend`."""

    def __init__(self, pool: KVPool, places: StepPlaces) -> None:
        self.pool = pool
        self.places = places
        self._grouped: Tensor | None = None

    def begin(self) -> None:
        """What all layers share is made of the places as they are now."""
        self._grouped = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.pool.keys[layer].index_copy_(0, self.places.write_rows, key.transpose(0, 1))
        self.pool.values[layer].index_copy_(0, self.places.write_rows, value.transpose(0, 1))
        heads, _, head_dim = query.shape
        shape, kv_heads = self.places.shape, len(key)
        folded = (fold(query, kv_heads, shape), fold(key, kv_heads, shape), fold(value, kv_heads, shape))
        output = self._attend(layer, *folded, scale)
        by_row = output.view(shape.num_sessions, kv_heads, -1, shape.num_rows, head_dim).permute(0, 3, 1, 2, 4)
        return by_row.reshape(-1, heads, head_dim)

    @abstractmethod
    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[sessions, kv_heads, group * rows, d] over the past and the window's own [sessions, kv_heads, rows, d]."""

    def _per_group(self, mask: Tensor, num_folded: int) -> Tensor:
        """[sessions, rows, n] -> [sessions, 1, group * rows, n], once for all layers."""
        if self._grouped is None:
            self._grouped = mask.repeat(1, num_folded // self.places.shape.num_rows, 1)[:, None]
        return self._grouped


def fold(tensor: Tensor, kv_heads: int, shape: StepShape) -> Tensor:
    """[any heads, all rows, d] -> [sessions, kv_heads, group * rows, d]."""
    by_session = tensor.view(kv_heads, -1, shape.num_sessions, shape.num_rows, tensor.shape[-1])
    return by_session.permute(2, 0, 1, 3, 4).flatten(2, 3)


class WholeWindows(Windows):
    """One masked attention over as many rows as any extent may hold: works everywhere, and copies keys and values.

    A key's place decides what is added up with what, and no row's place does: a token has the same bits in a window and
    alone, as long as its extent has the same capacity.
    """

    def begin(self) -> None:
        super().begin()
        self._pool_rows = self.places.pool_rows()
        self._mask = self.places.whole_mask()

    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        rows = self._pool_rows
        held_keys, held_values = (held[layer][rows].transpose(1, 2) for held in (self.pool.keys, self.pool.values))
        mask = self._per_group(self._mask, query.shape[2])
        return scaled_dot_product_attention(query, held_keys, held_values, attn_mask=mask, scale=scale)


AttendPast = Callable[[Tensor, int, float], tuple[Tensor, Tensor]]
"""Queries [sessions, kv_heads, m, d], layer and scale -> attention, shaped as they are, and log-sum-exp
[sessions, kv_heads, m] of the scaled scores."""
PastOfPool = Callable[[KVPool, StepPlaces, Tensor], AttendPast]
"""How a step attends over the first rows of each session's extent, so many as the int64 [sessions] says. Called once a
step, for what its layers share."""
Join = Callable[[tuple[Tensor, Tensor], Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""See `join_window`."""


class JoinedWindows(Windows):
    """Attention over the past by a kernel that reads the pool where it lies, joined to the window: `JoinedKernel`. A
    row that is alone sees all there is, itself too, which lies in the pool by then: one call, and nothing to join."""

    def __init__(self, pool: KVPool, places: StepPlaces, past_of_pool: PastOfPool, join: Join = join_window) -> None:
        super().__init__(pool, places)
        self._past_of_pool = past_of_pool
        self._join = join

    def begin(self) -> None:
        super().begin()
        is_alone = self.places.shape.num_rows == 1
        self._attend_past = self._past_of_pool(self.pool, self.places, self.places.past + is_alone)
        self._mask = None if is_alone else torch.where(self.places.visible.bool(), 0.0, -torch.inf)

    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        of_past = self._attend_past(query, layer, scale)
        if self._mask is None:
            return of_past[0].to(query.dtype)
        return self._join(of_past, query, keys, values, self._per_group(self._mask, query.shape[2]), scale)


def past_by_copy(pool: KVPool, places: StepPlaces, used: Tensor) -> AttendPast:
    """Two matrix products over a copy of the past: what other ways are compared with."""
    rows = places.pool_rows()
    unused = (torch.arange(places.shape.capacity, device=used.device) >= used[:, None])[:, None, None]

    def attend(query: Tensor, layer: int, scale: float) -> tuple[Tensor, Tensor]:
        wide = wide_dtype(query)
        keys, values = (held[layer][rows].transpose(1, 2).to(wide) for held in (pool.keys, pool.values))
        scores = query.to(wide) @ keys.transpose(-1, -2) * scale
        scores = scores.masked_fill(unused, -torch.inf)
        lse = scores.logsumexp(dim=-1)
        return (scores - lse[..., None]).exp() @ values, lse

    return attend


VarlenKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor, float], tuple[Tensor, Tensor]]
"""Queries [sessions, heads, d], a layer's keys and values [pool rows, kv_heads, d], where each session begins in both
(int32 [sessions + 1]), the most keys that one may have, how many it has (int32 [sessions]) and the scale -> output,
shaped as the queries, and log-sum-exp [heads, sessions]."""


def past_by_varlen(kernel: VarlenKernel, pool: KVPool, places: StepPlaces, used: Tensor) -> AttendPast:
    """Flash attention for sequences of different lengths (CUDA, 16 bits). A session is one query row, of which all rows
    of its window are heads, so that its keys and values are read once; starts and lengths stay on the device.
    """
    sessions, capacity = places.shape.num_sessions, places.shape.capacity
    bounds = torch.arange(sessions + 1, dtype=torch.int32, device=used.device)
    starts = torch.cat([places.starts, places.starts[-1:] + places.lengths[-1:]]).to(torch.int32)
    used = used.to(torch.int32)

    def attend(query: Tensor, layer: int, scale: float) -> tuple[Tensor, Tensor]:
        one_row = query.reshape(sessions, -1, query.shape[-1])
        output, lse = kernel(one_row, pool.keys[layer], pool.values[layer], bounds, starts, capacity, used, scale)
        return output.reshape(query.shape), lse.T.reshape(query.shape[:-1])

    return attend


def torchs_varlen(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, starts: Tensor, most: int, used: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Torch's `VarlenKernel`: what `varlen_attn` calls, which itself cannot be told how many keys count before 2.13."""
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, keys, values, rows, starts, 1, most, 0.0, False, False, scale=scale, seqused_k=used
    )
    return output, lse


def packages_varlen(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, starts: Tensor, most: int, used: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The `VarlenKernel` of flash-attn (2.7 or later)."""
    from flash_attn.flash_attn_interface import (  # type: ignore[import-not-found,unused-ignore]
        _flash_attn_varlen_forward,
    )

    output, lse, *_ = _flash_attn_varlen_forward(
        query, keys, values, rows, starts, 1, most, 0.0, scale, False, seqused_k=used
    )
    return output, lse


def varlen_of(name: str) -> VarlenKernel:
    """Torch's by another implementation: "FA3" or "FA4", whose packages it looks for."""

    def attend(*args: Any) -> tuple[Tensor, Tensor]:
        with flash_of(name):
            return torchs_varlen(*args)

    return attend


MakeWindows = Callable[[KVPool, StepPlaces], Windows]


def known_windows(pool: KVPool, join: Join = join_window) -> Sequence[tuple[str, MakeWindows]]:
    """Ways to attend that may work on the pool's device, by name, the one that always works first."""

    def joined(past_of_pool: PastOfPool) -> MakeWindows:
        return lambda pool, places: JoinedWindows(pool, places, past_of_pool, join)

    ways: list[tuple[str, MakeWindows]] = [("whole", WholeWindows), ("copy", joined(past_by_copy))]
    if not pool.keys[0].is_cuda or pool.keys[0].dtype not in (torch.float16, torch.bfloat16):
        return ways
    kernels = {
        "varlen": torchs_varlen,
        "flash-attn": packages_varlen,
        **{f"varlen {name}": varlen_of(name) for name in ("FA3", "FA4")},
    }
    return [*ways, *((name, joined(partial(past_by_varlen, kernel))) for name, kernel in kernels.items())]
