"""The cache of one session of a model some of whose layers recur: beside keys and values, their states.

A state cannot be cut back, so a layer that recurs holds an earlier one, its *base*, and the rows of the tokens behind
it, from which any later state is made again; its *tip* is the latest that is known. Where nothing was taken back, a
pass goes on from the tip. The rows lie where other layers have keys and values, with those before the base missing.
A *mark* is the state behind a prompt's video, before the text: where prompts about the same video part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.kv_cache import KVCache, LayerBuffers
from slipstream.engine.recurrent.delta_rule import DeltaRows, DeltaState, GatedDelta
from slipstream.errors import LimitExceeded
from slipstream.speculation.protocol import TokenTree

REACH = 256
"""So many of the latest tokens can be taken back at least: more than the windows of a caption that are under way."""
_FOLDED = 64
"""The base moves when so many more rows are there."""
MOST_ROWS = REACH + 2 * _FOLDED
"""That a layer holds, unless a pass brings more than 64."""


class RecurrentCache(KVCache):
    """See `KVCache`. Copied, and cut back for good, at its mark alone.

    Args:
        deltas: the layers that recur, by number.
        num_text: tokens of the prompt behind its mark; 0: it gets none.
        layout: of keys and values, see `KVCache`.
    """

    def __init__(
        self, num_layers: int, *, capacity: int, deltas: Mapping[int, GatedDelta], num_text: int = 0, **layout: Any
    ) -> None:
        super().__init__(num_layers, capacity=capacity, **layout)
        self._deltas, self._num_text, self._layout = deltas, num_text, layout
        self._bases: dict[int, DeltaState] = {}
        self._tips: dict[int, DeltaState] = {}
        self._marks: dict[int, DeltaState] = {}

    @property
    def num_bytes(self) -> int:
        states = {id(state): state.num_bytes for of in (self._bases, self._tips, self._marks) for state in of.values()}
        return super().num_bytes + sum(states.values())

    def recur(self, layer: int, rows: DeltaRows, tree: TokenTree | None = None) -> Tensor:
        """Take in one layer's new rows behind the current length, which `advance` moves when all layers are done.

        Args:
            tree: whose new nodes the rows are, see `TokenTree.num_cached`; None: they are a chain.

        Returns:
            What they read, [n, heads, head_v].
        """
        if self.length == 0:
            return self._read_prompt(layer, rows)
        delta, past = self._deltas[layer], self.length - (tree.num_cached if tree is not None else 0)
        self._fold(layer, past)
        if tree is None:
            found, self._tips[layer] = delta.run(rows, self._state_at(layer, past))
        else:
            state = self._tips[layer] = self._state_at(layer, past)
            nodes = rows.behind(self._rows(layer, past, self.length)) if tree.num_cached else rows
            found = delta.run_tree(nodes, tree.parents, state)[tree.num_cached :]
        self.write(layer, rows.mixed[None], rows.gates[None])
        return found

    def advance(self, num_tokens: int) -> None:
        is_prompt = self.length == 0
        super().advance(num_tokens)
        if is_prompt:  # of which video tokens may have been left out on the way
            marked = self.length - self._num_text
            self._marks = {layer: replace(mark, num_tokens=marked) for layer, mark in self._marks.items()}
            self._begin_at({layer: replace(tip, num_tokens=self.length) for layer, tip in self._tips.items()})

    def rollback(self, length: int) -> None:
        """Raises `LimitExceeded` for tokens before the base, but for a cut at the mark."""
        self.check_rollback(length)
        if self._is_before_base(length):
            self._begin_at(self._marks)
        super().rollback(length)

    def check_rollback(self, length: int) -> None:
        """Raises `LimitExceeded` where `rollback` would."""
        if {mark.num_tokens for mark in self._marks.values()} != {length}:
            self.check_reach(length)

    def keep(self, num_before: int, rows: Sequence[int]) -> None:
        self.check_reach(num_before)
        super().keep(num_before, rows)

    def empty_like(self, capacity: int) -> KVCache:
        return RecurrentCache(self.num_layers, capacity=capacity, deltas=self._deltas, **self._layout)

    def copy_from(self, other: KVCache, num_tokens: int) -> None:
        """Up to the mark of `other`, into an empty cache."""
        assert isinstance(other, RecurrentCache) and self.length == 0, "a prompt of the same model is copied"
        assert all(mark.num_tokens == num_tokens for mark in other._marks.values()), "it is copied up to its mark"
        self.reserve(num_tokens)
        with torch.inference_mode():  # as when the buffers were made
            for layer in range(self.num_layers):
                if layer not in self._deltas:
                    keys, values = other.read(layer)
                    self.write(layer, keys[:, :num_tokens], values[:, :num_tokens])
        super().advance(num_tokens)
        self._marks = dict(other._marks)
        self._begin_at(self._marks)

    def clear(self) -> None:
        super().clear()
        for states in (self._bases, self._tips, self._marks):
            states.clear()

    def _read_prompt(self, layer: int, rows: DeltaRows) -> Tensor:
        """`recur` of the first rows, of which none is kept."""
        delta, num_marked = self._deltas[layer], len(rows) - self._num_text
        if not self._num_text or num_marked <= 0:
            found, self._tips[layer] = delta.run(rows, delta.fresh(rows))
            return found
        before, self._marks[layer] = delta.run(rows[:num_marked], delta.fresh(rows))
        behind, self._tips[layer] = delta.run(rows[num_marked:], self._marks[layer])
        return torch.cat([before, behind])

    def _begin_at(self, states: Mapping[int, DeltaState]) -> None:
        """What is behind these is not known any more, or not yet."""
        self._bases, self._tips = dict(states), dict(states)
        for layer, state in states.items():
            self._missing[layer] = state.num_tokens

    def _is_before_base(self, length: int) -> bool:
        return any(base.num_tokens > length for base in self._bases.values())

    def check_reach(self, length: int) -> None:
        """Raises `LimitExceeded` when too many tokens behind the first `length` would change."""
        if self._is_before_base(length):
            raise LimitExceeded(
                f"{self.length - length} tokens would be taken back, and a model with linear attention takes back"
                f" {REACH}: start the gateway with a smaller --max-window"
            )

    def _state_at(self, layer: int, num_tokens: int) -> DeltaState:
        """Behind so many tokens, which are not before the base. The tip of tokens that were taken back is behind them,
        and a pass makes another one before there are as many again."""
        tip, base = self._tips.get(layer), self._bases[layer]
        state = tip if tip is not None and base.num_tokens <= tip.num_tokens <= num_tokens else base
        if state.num_tokens < num_tokens:
            _, state = self._deltas[layer].run(self._rows(layer, state.num_tokens, num_tokens), state)
        return state

    def _fold(self, layer: int, past: int) -> None:
        """Moves the base, so that rows stay few. Behind the first `past` tokens are nodes of a tree, if any."""
        num_rows, num_folded = self._num_rows(layer), past - REACH - self._missing[layer]
        if num_folded <= _FOLDED:
            return
        self._bases[layer] = self._state_at(layer, self._missing[layer] + num_folded)
        held = self._layers[layer]
        assert held is not None, "rows have been written"
        kept = (each[:, num_folded:num_rows].clone() for each in (held.keys, held.values))
        self._layers[layer] = LayerBuffers(*kept)  # which gives back what a pass of many rows took
        self._missing[layer] += num_folded

    def _rows(self, layer: int, first: int, end: int) -> DeltaRows:
        """Of tokens behind the base, from the one numbered `first` on."""
        held = self._layers[layer]
        assert held is not None, "rows have been written"
        rows = slice(first - self._missing[layer], end - self._missing[layer])
        return DeltaRows(held.keys[0, rows], held.values[0, rows])

    def _buffers(self, layer: int, keys: Tensor, values: Tensor) -> LayerBuffers:
        """Of a layer that recurs for its few rows, whatever is reserved for tokens."""
        if layer not in self._deltas:
            return super()._buffers(layer, keys, values)
        held, num_held = self._layers[layer], self._num_rows(layer)
        needed = num_held + keys.shape[1]
        if held is None or held.keys.shape[1] < needed:
            size = needed if needed > MOST_ROWS else min(MOST_ROWS, max(_FOLDED, 2 * needed))
            grown = LayerBuffers(*(each.new_empty(1, size, each.shape[2]) for each in (keys, values)))
            if held is not None:
                grown.keys[:, :num_held] = held.keys[:, :num_held]
                grown.values[:, :num_held] = held.values[:, :num_held]
            held = self._layers[layer] = grown
        return held
