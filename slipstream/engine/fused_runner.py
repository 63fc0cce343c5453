"""Which runner takes a model's passes on a CPU: one through fused layers, where they can be fused."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from slipstream.engine.attention import attend_segments
from slipstream.engine.forward import Decoder, Note, Runner
from slipstream.engine.fused_layers import FusedLayers, Product, can_fuse, can_join, on_axes
from slipstream.engine.kv_cache import KVCache, LayerBuffers
from slipstream.engine.segments import Rows, pack
from slipstream.sampling.sampler import NO_TOKEN
from slipstream.speculation.protocol import TokenTree

# -- rows of a small draft --------------------------------------------------------------------------------------------

# Few tokens of a draft on a CPU go through the model row by row, as the overhead of a pass is far more than their
# arithmetic. Rows round otherwise than passes do, so what is made of them may only be proposals.

AHEAD_S = 0.001
"""So long, and one token at least, a line is written without a look at what it is told meanwhile."""
MOST_AHEAD = 16
"""Tokens of one call."""
NUM_ANGLES, MOST_ANGLES = 64, 64
"""Positions whose rotations are made at a time, which takes as long for one as for all of them; and how often such
are kept."""


class Row(Protocol):
    """One row through all layers, again and again."""

    @property
    def most_nodes(self) -> int:
        """See `Runner.most_nodes`."""

    def begin(self, held: Sequence[LayerBuffers], past: Sequence[int]) -> bool:
        """Rows of a session follow: where its layers' keys and values lie, and how many there are. False: they cannot
        be read there."""

    def end(self) -> None:
        """They do not: nothing of the session is held any more."""

    def run(self, token: int, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """The logits [vocab] behind one more token, until the next call. Its keys and values follow those that are
        there.

        Args:
            cos, sin: of its position, [2, d / 2], with the signs of what is added to each half.
            mask: what is added to its scores of the last keys, its own among them: 0 or -inf. None: it sees all.
        """


class RowWriter:
    """Writes for one session at a time.

    Args:
        layers: see `can_write_rows`.
        embeddings, head: weights, [vocab, hidden].
        num_axes: of positions.
        compiles: the model's attention is compiled, for whose layout of keys and values a row is as well.
    """

    def __init__(self, layers: FusedLayers, embeddings: Tensor, head: Tensor, num_axes: int, *, compiles: bool) -> None:
        self._layers, self._num_axes, self._embeddings, self._head = layers, num_axes, embeddings, head
        compiled = _compiled_row(layers, embeddings, head) if compiles else None
        self._rows: list[Row] = [compiled] if compiled is not None else []
        """The first that can read a session's keys and values writes."""
        self._rows.append(TorchRow(layers, embeddings, head))
        self._angles: dict[int, Sequence[tuple[Tensor, Tensor]]] = {}

    @property
    def most_nodes(self) -> int:
        """See `Runner.most_nodes`."""
        return self._rows[0].most_nodes

    def write(self, cache: KVCache, token: int, first_position: int, num_tokens: int, note: Note | None) -> list[int]:
        """See `Runner.write_ahead`."""
        written: list[int] = []
        started = time.perf_counter()
        with self._row(cache, [token], num_tokens := min(num_tokens, MOST_AHEAD)) as row:
            for position in range(first_position, first_position + num_tokens):
                logits = row.run(token, *self._angles_of(position))
                chosen = note(logits[None]) if note is not None else None
                token = _largest(logits) if chosen is None else chosen
                written.append(token)
                if token == NO_TOKEN or time.perf_counter() - started > AHEAD_S:
                    break
        cache.advance(len(written))
        return written

    def read_nodes(self, cache: KVCache, tree: TokenTree, first_position: int) -> Tensor:
        """See `Runner.read_nodes`."""
        token_ids, depths = tree.new_token_ids, tree.depths[tree.num_cached :]
        logits, masks = self._embeddings.new_empty(len(token_ids), len(self._head)), self._masks(tree)
        with self._row(cache, token_ids, len(token_ids)) as row:
            for number, (token, depth) in enumerate(zip(token_ids, depths, strict=True)):
                mask = masks[number, : tree.num_cached + number + 1]
                logits[number] = row.run(token, *self._angles_of(first_position + depth), mask)
        cache.advance(len(token_ids))
        return logits

    @contextmanager
    def _row(self, cache: KVCache, token_ids: Sequence[int], num_rows: int) -> Iterator[Row]:
        """What takes in these tokens, and others up to so many rows, for which there is room then."""
        if not all(0 <= token < len(self._embeddings) for token in token_ids):  # a row looks nothing up with care
            raise IndexError(f"the model has {len(self._embeddings)} tokens, and not all of {list(token_ids)}")
        cache.reserve(cache.length + num_rows)
        held = [cache.opened(layer) for layer in range(cache.num_layers)]
        past = [cache.length - cache.num_missing(layer) for layer in range(cache.num_layers)]
        row = next(row for row in self._rows if row.begin(held, past))
        try:
            yield row
        finally:
            row.end()

    def _masks(self, tree: TokenTree) -> Tensor:
        """What nodes that are new add to their scores of all nodes."""
        masks = self._embeddings.new_full((len(tree) - tree.num_cached, len(tree)), -math.inf)
        rows, columns = tree.visible()
        masks[rows, columns] = 0
        return masks

    def _angles_of(self, position: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, as a row takes them."""
        number, place = divmod(position, NUM_ANGLES)
        if number not in self._angles:
            if len(self._angles) == MOST_ANGLES:
                del self._angles[next(iter(self._angles))]
            self._angles[number] = self._make_angles(number * NUM_ANGLES)
        return self._angles[number][place]

    def _make_angles(self, first_position: int) -> Sequence[tuple[Tensor, Tensor]]:
        positions = torch.arange(first_position, first_position + NUM_ANGLES)[None]
        like = self._embeddings[:1].expand(1, NUM_ANGLES, -1)
        angles = self._layers.rotary(like, on_axes(positions, self._num_axes))
        cos, sin = (each[0].unflatten(-1, (2, -1)) for each in angles)
        return [*zip(cos.contiguous(), torch.stack((-sin[:, 0], sin[:, 1]), 1), strict=True)]


def _compiled_row(layers: FusedLayers, embeddings: Tensor, head: Tensor) -> Row | None:
    """None: the model is too large for it to matter, or its sizes are not for this processor."""
    from slipstream.engine.compiled.decoder_row import compiled_row

    return compiled_row(layers, embeddings, head)


class TorchRow:
    """In as few of torch's operations as there can be, each of which leaves its result where the next one looks for
    it."""

    most_nodes = 1

    def __init__(self, layers: FusedLayers, embeddings: Tensor, head: Tensor) -> None:
        shape, self._layers = layers.shape, layers
        self._embeddings, self._head = embeddings, Product(head, None)
        num_queries, half = layers.layers[0].num_heads, shape.head_dim // 2
        num_kv = shape.num_rotated - num_queries
        self._held: Sequence[LayerBuffers] = ()
        self._past: list[int] = []

        def buffer(*size: int) -> Tensor:
            return embeddings.new_empty(size)

        self._hidden_and_eps = buffer(shape.hidden_size + 1)
        """The norm's epsilon is one more number to square."""
        self._hidden_and_eps[-1] = (shape.hidden_size * shape.eps) ** 0.5
        self._hidden, self._normed, self._length = self._hidden_and_eps[:-1], buffer(shape.hidden_size), buffer()
        self._packed = buffer(shape.num_heads * shape.head_dim)
        heads = self._packed.view(-1, 2, half)
        self._halves, values = heads[: shape.num_rotated], heads[shape.num_rotated :]
        self._rotated = torch.empty_like(self._halves)
        self._queries = self._rotated[:num_queries].view(num_kv, -1, shape.head_dim)
        self._key = self._rotated[num_queries:].view(num_kv, shape.head_dim, 1)
        self._value = values.view(num_kv, 1, shape.head_dim)
        self._attended = torch.empty_like(self._queries)
        self._gate_up = buffer(2 * shape.inner_size)
        self._gate, self._up = self._gate_up.chunk(2)
        self._logits = buffer(len(head))
        self._norms = [weight * shape.hidden_size**0.5 for weight in layers.norms]

    def begin(self, held: Sequence[LayerBuffers], past: Sequence[int]) -> bool:
        self._held, self._past = held, list(past)
        return True

    def end(self) -> None:
        self._held = ()

    def run(self, token: int, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        self._hidden.copy_(self._embeddings[token])
        for number in range(len(self._held)):
            self._run_layer(number, cos, sin, mask)
            self._past[number] += 1
        _multiply(self._head, self._norm(-1), self._logits)
        return self._logits

    def _run_layer(self, number: int, cos: Tensor, sin: Tensor, mask: Tensor | None) -> None:
        layer, hidden, held, past = self._layers.layers[number], self._hidden, self._held[number], self._past[number]
        _multiply(layer.qkv, self._norm(2 * number), self._packed)
        torch.mul(self._halves, cos, out=self._rotated).addcmul_(self._halves.flip(1), sin)
        keys = held.keys.transpose(1, 2)
        keys.narrow(2, past, 1).copy_(self._key)
        held.values.narrow(1, past, 1).copy_(self._value)
        scores = torch.bmm(self._queries, keys.narrow(2, 0, past + 1)).mul_(layer.scale)
        if mask is not None:
            scores[..., -len(mask) :] += mask
        torch.bmm(scores.softmax(-1), held.values.narrow(1, 0, past + 1), out=self._attended)
        torch.addmv(hidden, cast(Tensor, layer.output.weight), self._attended.view(-1), out=hidden)
        _multiply(layer.gate_up, self._norm(2 * number + 1), self._gate_up)
        silu(self._gate, inplace=True).mul_(self._up)
        torch.addmv(hidden, cast(Tensor, layer.down.weight), self._gate, out=hidden)

    def _norm(self, number: int) -> Tensor:
        torch.linalg.vector_norm(self._hidden_and_eps, out=self._length)
        return torch.mul(self._hidden, self._norms[number], out=self._normed).div_(self._length)


def can_write_rows(layers: FusedLayers, decoder: Decoder, lm_head: nn.Module) -> bool:
    """Whether what stands around the fused layers is plain as well, and in a type in which squares can be added up."""
    ends = [part for layer in layers.layers for part in (layer.output, layer.down)]
    return (
        all(isinstance(part, Product) and part.bias is None for part in ends)
        and can_join((lm_head,))
        and lm_head.bias is None
        and type(decoder.embed_tokens) is nn.Embedding
        and lm_head.weight.dtype in (torch.float32, torch.float64)
    )


def _largest(logits: Tensor) -> int:
    largest, index = logits.max(0)
    return int(index) if math.isfinite(largest) else NO_TOKEN


def _multiply(product: Product, row: Tensor, out: Tensor) -> None:
    if product.bias is None:
        torch.mv(product.weight, row, out=out)
    else:
        torch.addmv(product.bias, product.weight, row, out=out)


# -- runner -----------------------------------------------------------------------------------------------------------


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
