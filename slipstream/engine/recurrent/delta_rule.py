"""The gated delta rule over rows of one session: a chain of tokens behind a state, or a tree of them.

A layer's state is a matrix M for each head, [head_k, head_v], and the last rows that went into a short convolution. Of
each token the convolution makes a query q, a key k and a value v; with a decay g <= 0 and a rate b (Gated Delta
Networks, eq. 10, transposed):

    M <- e^g M;    M <- M + k^T (b (v - k M));    what is read: q M

Sums are upstream's own: by chunks of 64 tokens, or token by token where there is one.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, softplus
from transformers.activations import ACT2FN

from slipstream.device_copy import to_device
from slipstream.speculation.protocol import ROOT

KINDS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
"""Upstream's classes whose parts are known here."""
PIECE_ROWS = 2048
"""Of a prompt that go through at once, which bounds its memory: whole chunks, so sums are those of all rows at once."""


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """What goes into the recurrence of one layer, a row a token."""

    mixed: Tensor
    """Queries, keys and values before their convolution, [n, width]."""
    gates: Tensor
    """Decays and rates of all heads, fp32 [n, 2 * heads]."""

    def __len__(self) -> int:
        return len(self.mixed)

    def __getitem__(self, rows: slice) -> "DeltaRows":
        return DeltaRows(self.mixed[rows], self.gates[rows])

    def behind(self, before: "DeltaRows") -> "DeltaRows":
        """These rows, and others before them."""
        return DeltaRows(torch.cat([before.mixed, self.mixed]), torch.cat([before.gates, self.gates]))


@dataclass(frozen=True, slots=True)
class DeltaState:
    """What one layer knows of all tokens so far."""

    num_tokens: int
    conv: Tensor
    """The last rows of `DeltaRows.mixed`, [kernel - 1, width]; zeros before the first token."""
    memory: Tensor
    """fp32 [heads, head_k, head_v]."""

    @property
    def num_bytes(self) -> int:
        return self.conv.nbytes + self.memory.nbytes


class Recur(Protocol):
    """What a pass does in the recurrence of one layer: hands every session's rows to its own state."""

    def recur(self, layer: int, rows: DeltaRows) -> Tensor:
        """What is read, [n, heads, head_v]."""
        ...


class GatedDelta(nn.Module):
    """Stands in an upstream layer for its linear attention, whose weights it uses.

    Args:
        upstream: one of `KINDS`.
    """

    def __init__(self, upstream: Any) -> None:
        super().__init__()
        self._upstream = upstream
        maths = sys.modules[type(upstream).__module__]
        self._by_chunks, self._by_tokens = maths.torch_chunk_gated_delta_rule, maths.torch_recurrent_gated_delta_rule
        self._activation = ACT2FN[upstream.activation]
        self._num_heads = int(upstream.num_v_heads)

    def forward(self, hidden_states: Tensor, *, attend: Recur, **_: Any) -> Tensor:
        """[1, rows, hidden] -> the same; the rows may be of several sessions, which `attend` tells apart."""
        read = attend.recur(self._upstream.layer_idx, self._rows(hidden_states[0]))
        made = torch.empty_like(hidden_states)
        for first in range(0, len(read), PIECE_ROWS):
            rows = slice(first, first + PIECE_ROWS)
            made[0, rows] = self._gated(read[rows], hidden_states[0, rows])
        return made

    def _rows(self, hidden: Tensor) -> DeltaRows:
        parts = self._upstream
        decays = -parts.A_log.float().exp() * softplus(parts.in_proj_a(hidden).float() + parts.dt_bias)
        rates = parts.in_proj_b(hidden).sigmoid().float()
        return DeltaRows(parts.in_proj_qkv(hidden), torch.cat([decays, rates], dim=-1))

    def _gated(self, read: Tensor, hidden: Tensor) -> Tensor:
        """What the layer makes of what its rows have read, [n, hidden]."""
        parts = self._upstream
        gate = parts.in_proj_z(hidden).view(-1, parts.head_v_dim)
        normed = parts.norm(read.reshape(-1, parts.head_v_dim), gate)
        return cast(Tensor, parts.out_proj(normed.view(len(hidden), -1)))

    def state_bytes(self, num_rows: int) -> int:
        """Bytes of one state, and of so many rows."""
        parts = self._upstream
        row = parts.conv_dim * parts.in_proj_qkv.weight.element_size()
        memory = self._num_heads * parts.head_k_dim * parts.head_v_dim * torch.float32.itemsize
        return int(memory + (parts.conv_kernel_size - 1) * row + num_rows * (row + 2 * self._num_heads * 4))

    def prefill_bytes(self, num_tokens: int) -> int:
        """Bytes that a prompt of so many tokens needs here at its peak, beside matrices as wide as the model."""
        parts = self._upstream
        itemsize = parts.in_proj_qkv.weight.element_size()
        held = num_tokens * (parts.conv_dim + 2 * parts.value_dim) * itemsize
        heads = self._num_heads * (parts.head_k_dim + parts.head_v_dim)
        return int(held + min(num_tokens, PIECE_ROWS) * (parts.conv_dim + 8 * heads) * torch.float32.itemsize)

    def fresh(self, like: DeltaRows) -> DeltaState:
        """Before the first token, on the device of such rows."""
        parts = self._upstream
        conv = like.mixed.new_zeros(parts.conv_kernel_size - 1, parts.conv_dim)
        return DeltaState(0, conv, like.gates.new_zeros(self._num_heads, parts.head_k_dim, parts.head_v_dim))

    def run(self, rows: DeltaRows, state: DeltaState) -> tuple[Tensor, DeltaState]:
        """What the tokens of a chain read, [n, heads, head_v], and the state behind them."""
        found = []
        for first in range(0, len(rows), PIECE_ROWS):
            piece = rows[first : first + PIECE_ROWS]
            joined = torch.cat([state.conv, piece.mixed])
            heads = self._heads(self._convolved(joined), piece.gates)
            read, memory = self._rule(len(piece) == 1, heads, state.memory[None])
            state = DeltaState(state.num_tokens + len(piece), joined[len(piece) :].clone(), memory[0])
            found.append(read[0])
        return torch.cat(found) if len(found) > 1 else found[0], state

    def run_tree(self, rows: DeltaRows, parents: Sequence[int], state: DeltaState) -> Tensor:
        """What the nodes of a tree read, [n, heads, head_v], each behind the state and the nodes above it: those of one
        depth at once, token by token."""
        joined = torch.cat([state.conv, rows.mixed])
        taps = to_device(torch.tensor(_taps(parents, len(state.conv))), joined.device)
        windows = joined[taps].to(self._weight.dtype)  # [n, kernel, width]
        convolved = (windows * self._weight[:, 0].T).sum(dim=1)
        if self._upstream.conv1d.bias is not None:
            convolved = convolved + self._upstream.conv1d.bias
        heads = self._heads(self._activation(convolved).to(joined.dtype), rows.gates)
        memories, found = {ROOT: state.memory}, dict[int, Tensor]()
        for nodes in _levels(parents):
            chosen = to_device(torch.tensor(nodes), joined.device)
            of_nodes = [each[0, chosen][:, None] for each in heads]
            before = torch.stack([memories[parents[node]] for node in nodes])
            read, after = self._rule(True, of_nodes, before)
            memories.update(zip(nodes, after, strict=True))
            found.update(zip(nodes, read[:, 0], strict=True))
        return torch.stack([found[node] for node in range(len(parents))])

    @property
    def _weight(self) -> Tensor:
        """Of the convolution, [width, 1, kernel]."""
        return cast(Tensor, self._upstream.conv1d.weight)

    def _convolved(self, joined: Tensor) -> Tensor:
        """[kernel - 1 + n, width] -> [n, width], activated."""
        rows = joined.T[None].to(self._weight.dtype)
        made = conv1d(rows, self._weight, self._upstream.conv1d.bias, groups=joined.shape[1])
        return cast(Tensor, self._activation(made))[0].T.to(joined.dtype)

    def _heads(self, convolved: Tensor, gates: Tensor) -> list[Tensor]:
        """Queries and keys [1, n, heads, head_k], values [1, n, heads, head_v], decays and rates [1, n, heads]."""
        parts = self._upstream
        query, key, value = convolved[None].split([parts.key_dim, parts.key_dim, parts.value_dim], dim=-1)
        shared = self._num_heads // parts.num_k_heads
        keys = [each.unflatten(-1, (-1, parts.head_k_dim)).repeat_interleave(shared, dim=2) for each in (query, key)]
        return [*keys, value.unflatten(-1, (-1, parts.head_v_dim)), *gates[None].split(self._num_heads, dim=-1)]

    def _rule(self, by_tokens: bool, heads: Sequence[Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
        """Upstream's: heads as `_heads` gives them and memories, of a batch -> [batch, n, heads, head_v], memories."""
        query, key, value, decays, rates = heads
        rule = self._by_tokens if by_tokens else self._by_chunks
        how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        found = rule(query, key, value, g=decays, beta=rates, initial_state=memory, **how)
        return cast(tuple[Tensor, Tensor], found)


def _taps(parents: Sequence[int], num_before: int) -> list[list[int]]:
    """For each node of a tree which rows its convolution reads, itself last: nodes, and of the `num_before` rows before
    the first node those next to it."""
    before = list(range(num_before))
    paths = {ROOT: before}
    for node, parent in enumerate(parents):
        paths[node] = [*paths[parent], num_before + node][-num_before:] if num_before else []
    return [[*paths[parent], num_before + node] for node, parent in enumerate(parents)]


def _levels(parents: Sequence[int]) -> list[list[int]]:
    """The nodes of each depth."""
    depths = {ROOT: -1}
    levels: list[list[int]] = []
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1
        if depths[node] == len(levels):
            levels.append([])
        levels[depths[node]].append(node)
    return levels
