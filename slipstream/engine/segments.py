"""One session's rows in a packed pass and what each of them may see."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.device_copy import to_device
from slipstream.engine.kv_cache import KVCache
from slipstream.errors import InvalidRequest
from slipstream.speculation.protocol import TokenTree

StateT = TypeVar("StateT")
Window = Sequence[int] | TokenTree
"""New tokens of one session: a chain, or a tree."""


def chains_of(batch: Sequence[tuple[StateT, Window]]) -> list[tuple[StateT, Sequence[int]]]:
    """What every state of a model with a strict width is fed. Raises `InvalidRequest` for a tree."""
    chains = [(state, window) for state, window in batch if not isinstance(window, TokenTree)]
    if len(chains) < len(batch):
        raise InvalidRequest("a model with a strict width judges no trees; send chains, or start it without")
    return chains


def num_new(window: Window) -> int:
    """Rows that a pass takes in for it."""
    return len(window.new_token_ids) if isinstance(window, TokenTree) else len(window)


def end_of(position: int, window: Window) -> int:
    """The position behind the last one that a window takes, of which the next token has `position`."""
    if isinstance(window, TokenTree):
        return position - window.num_cached + max(window.depths) + 1
    return position + len(window)


class Recording(Protocol):
    """What an observer keeps of the attention heads that this process has, for a model spread over several."""

    video: Tensor
    """Which keys are the video's now: int64, ascending."""
    join_heads: Callable[[Tensor], Tensor]
    """Makes of this process's [kv_heads, n] those of the whole model."""

    @property
    def order(self) -> Mapping[str, Any]:
        """What to record, as JSON: for twins of it in the other processes."""
        ...


class Observer(Protocol):
    """Sees what goes into the attention of one session; the pass itself is the same with and without it."""

    @property
    def recording(self) -> Recording | None:
        """What it keeps of the layers that follow; None: nothing."""
        ...

    def place_video(self, rows: Tensor) -> None:
        """Which keys of the layers that follow are the video's: int64, ascending. Told first, and when some go."""
        ...

    def observe(self, layer: int, query: Tensor, keys: Tensor, scale: float) -> None:
        """One layer's queries and keys, rotated; the query rows are the last of the keys' tokens, in their order.

        Args:
            query: [heads, n, head_dim].
            keys: all keys including the rows' own, [kv_heads, num_tokens, head_dim].
        """
        ...


@dataclass(eq=False)
class Segment:
    """One session's rows in a packed pass."""

    start: int
    """First row of the segment in the packed sequence."""
    length: int
    """Rows of the segment: new tokens."""
    cache: KVCache
    past: int
    """Keys that every row sees: those in the cache before this pass, without a tree's nodes among them."""
    device: torch.device
    dtype: torch.dtype
    tree: TokenTree | None = None
    """Whose last nodes the rows are; None: they are a chain."""
    observer: Observer | None = None
    ahead: int = 0
    """Rows of `past` that are behind the cache's length, see `KVCache.write`."""
    _folded_mask: Tensor | None = field(default=None, init=False)
    _in_layers: dict[int, "Segment"] = field(default_factory=dict, init=False)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.length)

    @property
    def num_keys(self) -> int:
        """Keys up to the last new row's own."""
        return self.past + (self.length if self.tree is None else len(self.tree))

    @cached_property
    def num_columns(self) -> int:
        """Keys behind the past: of a tree's nodes or the new tokens, and what the cache shows behind them."""
        return self.cache.view_length(self.num_keys) - self.past

    @property
    def is_masked(self) -> bool:
        """Whether there is a key that some row must not see."""
        return self.num_columns > 1

    @cached_property
    def window_mask(self) -> Tensor:
        """What new rows add to their scores of the keys behind the past: 0 or -inf, [length, num_columns].

        Built once for all layers.
        """
        size = self.length, self.num_columns
        if self.tree is None:
            return torch.full(size, float("-inf"), dtype=self.dtype, device=self.device).triu_(1)
        mask = torch.full(size, float("-inf"), dtype=self.dtype)
        rows, columns = self.tree.visible()
        mask[rows, columns] = 0
        return to_device(mask, self.device)

    def folded_mask(self, group_size: int) -> Tensor:
        """The window mask behind a past that every row sees, once for each query head of a group.

        [group_size * length, past + num_columns], built once for all layers.
        """
        if self._folded_mask is None:
            self._folded_mask = self.mask_of(slice(None), group_size)
        return self._folded_mask

    def mask_of(self, rows: slice, group_size: int) -> Tensor:
        """The same of some of the new rows, made anew."""
        return pad(self.window_mask[rows], (self.past, 0)).repeat(group_size, 1)

    def in_layer(self, layer: int) -> "Segment":
        """The segment as `layer` has it: with a shorter past where the layer holds fewer rows than there are tokens."""
        num_missing = self.cache.num_missing(layer)
        if not num_missing or not self.past:
            return self
        if num_missing not in self._in_layers:
            self._in_layers[num_missing] = replace(self, past=self.past - num_missing)
        return self._in_layers[num_missing]


@dataclass(frozen=True, slots=True)
class Rows:
    """What one session adds to a pass."""

    cache: KVCache
    hidden: Tensor
    """Input embeddings, [n, hidden]."""
    positions: Tensor
    """Position ids, [n], or [axes, n] for rotary embeddings of several axes."""
    tree: TokenTree | None = None
    """Whose new nodes these are; None: each row follows the one before it."""
    observer: Observer | None = None
    """Sees the rows' attention in every layer."""
    additions: "Additions | None" = None
    ahead: int = 0
    """Rows of the same prompt that the layers of this pass have taken in before, and the cache does not count yet."""


@dataclass(frozen=True, slots=True)
class Additions:
    """What the first layers add to some of a session's rows, behind the layer: DeepStack's features of a video."""

    rows: Tensor
    """int64 [m], ascending."""
    features: tuple[Tensor, ...]
    """One for each of these layers, from the first: [m, hidden]."""

    def behind(self, num_rows: int) -> "Additions":
        """The same for rows that follow so many others."""
        return replace(self, rows=self.rows + num_rows)

    def among(self, keep: Tensor) -> "Additions":
        """For those rows that are kept, by their new numbers. `keep`: int64, ascending."""
        stays = torch.isin(self.rows, keep)
        rows = torch.searchsorted(keep, self.rows[stays])
        return Additions(rows, tuple(take(each, stays.nonzero().squeeze(1)) for each in self.features))


def additions_of(batch: Sequence[Rows]) -> list[Additions]:
    """With the rows that they have in the packed pass."""
    starts = accumulate((rows.hidden.shape[0] for rows in batch), initial=0)
    return [rows.additions.behind(start) for start, rows in zip(starts, batch, strict=False) if rows.additions]


@dataclass(frozen=True, slots=True)
class Packed:
    """The rows of all sessions in one pass."""

    hidden: Tensor
    """[1, rows, hidden]."""
    position_ids: Tensor
    """[1, rows], or [axes, 1, rows]."""
    segments: list[Segment]


def pack(batch: Sequence[Rows]) -> Packed:
    """Puts the sessions' rows behind one another, and makes room for them in every cache."""
    segments, start = list[Segment](), 0
    for rows in batch:
        assert rows.hidden.shape[0] > 0, "every session in a pass needs rows"
        hidden, length = rows.hidden, rows.hidden.shape[0]
        rows.cache.reserve(rows.cache.length + rows.ahead + length)
        past = rows.cache.length + rows.ahead - (rows.tree.num_cached if rows.tree is not None else 0)
        here = hidden.device, hidden.dtype
        segments.append(Segment(start, length, rows.cache, past, *here, rows.tree, rows.observer, rows.ahead))
        start += length
    positions = torch.cat([rows.positions for rows in batch], dim=-1)
    return Packed(torch.cat([rows.hidden for rows in batch])[None], positions[..., None, :], segments)


@dataclass(frozen=True, slots=True)
class PassRows:
    """What a pass says of one session's new tokens, on the device."""

    logits: Tensor
    """fp32 [n, vocab]."""
    largest: Tensor | None = None
    """What `largest_of` makes of them, where that is known."""


@dataclass(frozen=True, slots=True)
class GreedyRows:
    """The same, and which token is the likeliest of each row, on the host."""

    logits: Tensor
    """fp32 [n, vocab], on the device."""
    largest: Sequence[int] = ()
    """Below 0 where the largest logit is no finite number. Empty: nobody asked."""

    def likely(
        self, rows: Sequence[int], tokens: Sequence[int], num_best: int
    ) -> tuple[list[float], list[tuple[int, float]]]:
        """How likely `tokens` are, one behind each of `rows`, and the `num_best` likeliest tokens behind each, row by
        row; natural logarithms. Waits once for the device."""
        behind, columns = to_device(torch.tensor([[*rows], [*tokens]]), self.logits.device)
        chances = self.logits[behind].log_softmax(dim=-1)
        best = chances.topk(min(num_best, chances.shape[-1]), dim=-1)
        asked = chances.gather(1, columns[:, None])
        pairs = torch.stack([best.indices.double(), best.values.double()], dim=-1)
        table = torch.cat([asked, pairs.flatten(1)], dim=-1).tolist()
        likeliest = [(int(token), chance) for row in table for token, chance in zip(row[1::2], row[2::2], strict=True)]
        return [row[0] for row in table], likeliest


def kept_rows(keep: Tensor | None, video: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The rows of a prompt that survive pruning, and which of those are the video's; both int64, ascending.

    Args:
        keep: which of `video` survive, ascending from 0; all other rows of the prompt do. None: all.
        video: the video's rows, ascending.
    """
    if keep is None:
        return torch.arange(num_rows), video
    keep = keep.to("cpu", torch.int64)
    if len(keep) > 0:
        assert int(keep[0]) >= 0, "keep has negative indices"
        assert int(keep[-1]) < len(video), "keep points behind the video"
        assert bool((keep.diff() > 0).all()), "keep must be ascending"
    is_kept = torch.ones(num_rows, dtype=torch.bool)
    is_kept[video] = False
    is_kept[video[keep]] = True
    rows = is_kept.nonzero().squeeze(1)
    return rows, torch.searchsorted(rows, video[keep])


def take(hidden: Tensor, rows: Tensor) -> Tensor:
    """Some rows, ascending; without a copy where they lie together."""
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1:
        return hidden[int(rows[0]) : int(rows[-1]) + 1]
    return hidden.index_select(0, to_device(rows, hidden.device))
