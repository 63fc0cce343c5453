"""Decoder layers as few kernels: one product for queries, keys and values, and one for both halves of the MLP's inner
width. For steps; prompts run upstream's layers on the same weights.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from slipstream.engine.attention import Attend, attend_segments
from slipstream.engine.forward import Decoder, Note, Runner
from slipstream.engine.joined_weights import Product, bare, can_join, join, joined_parts
from slipstream.engine.kv_cache import KVCache, LayerBuffers
from slipstream.engine.segments import Rows, pack
from slipstream.sampling.sampler import NO_TOKEN

LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen2_5_VLDecoderLayer")
"""Upstream's, whose forward is the one that is written down here."""


# -- between the products ---------------------------------------------------------------------------------------------

# Norm, rotation, activation: each a function of tensors alone. Upstream's twenty small kernels a layer take longer than
# what they compute; on CUDA they are four, where there is a compiler (`static.glue`).


@dataclass(frozen=True)
class Glue:
    """What lies between a layer's products: functions of tensors alone, the same for all layers."""

    norm: Callable[[Tensor, Tensor], Tensor]
    """[rows, hidden], weight -> RMS norm."""
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Two [rows, hidden], weight -> their sum, and its norm."""
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Queries, keys and values [rows, heads * d], cos and sin [rows, d] -> queries and keys, rotated, [rows, n, d]."""
    gate: Callable[[Tensor], Tensor]
    """[rows, 2 * inner] -> silu of the first half times the second."""


@dataclass(frozen=True)
class GlueShape:
    """What the glue of one model is made for."""

    eps: float
    """Of its norms."""
    hidden_size: int
    inner_size: int
    num_heads: int
    """Of queries, keys and values together."""
    num_rotated: int
    """Heads of queries and keys."""
    head_dim: int


MakeGlue = Callable[[GlueShape], Glue]


def exact_glue(shape: GlueShape) -> Glue:
    """Upstream's operations in upstream's order."""

    def norm(hidden: Tensor, weight: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + shape.eps)
        return weight * wide.to(hidden.dtype)

    return glue_with(shape, norm)


def glue_with(shape: GlueShape, norm: Callable[[Tensor, Tensor], Tensor]) -> Glue:
    """Upstream's operations around a norm."""

    def add_norm(hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = hidden + update
        return total, norm(total, weight)

    def rotate(packed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = packed.view(len(packed), -1, shape.head_dim)[:, : shape.num_rotated]
        first, second = rotated.chunk(2, dim=-1)
        return rotated * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    def gate(packed: Tensor) -> Tensor:
        first, second = packed.chunk(2, dim=-1)
        return silu(first) * second

    return Glue(norm, add_norm, rotate, gate)


# -- layers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    number: int
    scale: float
    num_heads: int
    """Of queries."""
    qkv: Product
    gate_up: Product
    output: nn.Module | Product
    down: nn.Module | Product
    norms: tuple[Tensor, Tensor]
    """Weights of the norms before attention and before the MLP."""


class FusedLayers:
    """All layers of a decoder and the norm behind them.

    Args:
        decoder: see `can_fuse`. Its weights move; what they are does not change.
        make_glue: makes what lies between the products.
    """

    def __init__(self, decoder: Decoder, make_glue: MakeGlue = exact_glue) -> None:
        self.rotary = decoder.rotary_emb
        self.layers = [_fuse(cast(Any, layer)) for layer in decoder.layers]
        norms = [norm for layer in self.layers for norm in layer.norms]
        self.norms = [*norms, cast(Tensor, decoder.norm.weight).detach()]
        """Weights of all norms, in their order; no parameters, as compiled code is of one type of tensor."""
        self.shape = glue_shape(decoder)
        self._glue = make_glue(self.shape)

    def __call__(self, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """[1, rows, hidden] -> what the language model's head takes, [rows, hidden]."""
        cos, sin = (angles[0] for angles in self.rotary(hidden, position_ids))
        hidden, glue, shape = hidden[0], self._glue, self.shape
        normed = glue.norm(hidden, self.norms[0])
        for layer, next_norm in zip(self.layers, self.norms[2::2], strict=True):
            packed = layer.qkv(normed)
            rotated = glue.rotate(packed, cos, sin).transpose(0, 1)
            values = packed.view(len(packed), -1, shape.head_dim)[:, shape.num_rotated :].transpose(0, 1)
            query, keys = rotated[: layer.num_heads], rotated[layer.num_heads :]
            attended = attend(layer.number, query, keys, values, layer.scale)
            hidden, normed = glue.add_norm(hidden, layer.output(attended.flatten(1)), layer.norms[1])
            hidden, normed = glue.add_norm(hidden, layer.down(glue.gate(layer.gate_up(normed))), next_norm)
        return normed


def glue_shape(decoder: Decoder) -> GlueShape:
    """Of a decoder that can be fused."""
    attention, mlp = cast(Any, decoder.layers[0]).self_attn, cast(Any, decoder.layers[0]).mlp
    heads = [part.weight.shape[0] // attention.head_dim for part in (attention.q_proj, attention.k_proj)]
    return GlueShape(
        eps=float(cast(Any, decoder.norm).variance_epsilon),
        hidden_size=len(decoder.norm.weight),  # type: ignore[arg-type]
        inner_size=mlp.up_proj.weight.shape[0],
        num_heads=sum(heads) + heads[1],
        num_rotated=sum(heads),
        head_dim=attention.head_dim,
    )


def can_fuse(decoder: Decoder, num_axes: int) -> bool:
    """Whether every layer is one of `LAYERS` with plain weights, and positions, of so many axes, rotate whole heads."""
    return all(map(_is_plain, decoder.layers)) and _rotates_heads(decoder, num_axes)


def _is_plain(layer: Any) -> bool:
    if type(layer).__name__ not in LAYERS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    return (
        {name for name, _ in attention.named_children()} == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and can_join((attention.q_proj, attention.k_proj, attention.v_proj))
        and can_join((mlp.gate_proj, mlp.up_proj))
        and attention.config.hidden_act in ("silu", "swish")
    )


def _rotates_heads(decoder: Decoder, num_axes: int) -> bool:
    attention = cast(Any, decoder.layers[0]).self_attn
    hidden = decoder.embed_tokens.weight[None, :2]
    position_ids = torch.zeros(1, 2, dtype=torch.int64, device=hidden.device)
    cos, _ = decoder.rotary_emb(hidden, on_axes(position_ids, num_axes))
    return bool(cos.shape == (1, 2, attention.head_dim))


def on_axes(position_ids: Tensor, num_axes: int) -> Tensor:
    """[1, rows] -> as a rotary embedding of so many axes takes them, all equal."""
    return position_ids if num_axes == 1 else position_ids.expand(num_axes, 1, -1)


def _fuse(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = map(join, joined_parts(layer))
    return _Layer(
        attention.layer_idx,
        float(attention.scaling),
        attention.q_proj.weight.shape[0] // attention.head_dim,
        qkv,
        gate_up,
        bare(attention.o_proj),
        bare(mlp.down_proj),
        (layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()),
    )


# -- one row after another --------------------------------------------------------------------------------------------


AHEAD_S = 0.001
"""So long, and one token at least, a line is written without a look at what it is told meanwhile."""


class RowWriter:
    """Writes greedy tokens of one session in as few operations as there can be, each of which leaves its result where
    the next one looks for it: of a small draft a token's overhead is far more than its arithmetic. Rounds otherwise
    than a pass does, so its tokens may only be proposals.

    Args:
        layers: see `can_write_rows`.
        embeddings, head: weights, [vocab, hidden].
    """

    def __init__(self, layers: FusedLayers, embeddings: Tensor, head: Tensor) -> None:
        shape, self._layers = layers.shape, layers
        self._embeddings, self._head = embeddings, Product(head, None)
        num_queries, half = layers.layers[0].num_heads, shape.head_dim // 2
        num_kv = shape.num_rotated - num_queries

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

    def write(self, cache: KVCache, token: int, position_ids: Tensor, note: Note | None) -> list[int]:
        """See `Runner.write_ahead`."""
        num_tokens = position_ids.shape[-1]
        cache.reserve(cache.length + num_tokens)
        cos, sin = self._angles(position_ids)
        token_ids, largest = torch.full((num_tokens + 1,), token), self._logits.new_empty(num_tokens + 1)
        read, found = token_ids.split(1), largest.split(1)
        held = [cache.opened(layer) for layer in range(cache.num_layers)]
        past = [cache.length - cache.num_missing(layer) for layer in range(cache.num_layers)]
        started, num_written = time.perf_counter(), 0
        while num_written < num_tokens and (not num_written or time.perf_counter() - started < AHEAD_S):
            torch.index_select(self._embeddings, 0, read[num_written], out=self._hidden[None])
            for number, (rows, before) in enumerate(zip(held, past, strict=True)):
                self._run_layer(number, rows, before + num_written, cos[num_written], sin[num_written])
            num_written += 1
            _multiply(self._head, self._norm(-1), self._logits)
            torch.max(self._logits, 0, keepdim=True, out=(found[num_written], read[num_written]))
            if note is not None:
                note(self._logits[None])
        cache.advance(num_written)
        written = torch.where(largest.isfinite(), token_ids, NO_TOKEN)
        chosen: list[int] = written[1 : num_written + 1].tolist()
        return chosen

    def _angles(self, position_ids: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Cosines and sines by token, [2, d / 2]: those of the first half turn the other way."""
        rows = self._normed.expand(1, position_ids.shape[-1], -1)
        cos, sin = (angles[0].unflatten(-1, (2, -1)) for angles in self._layers.rotary(rows, position_ids))
        return cos.unbind(), torch.stack((-sin[:, 0], sin[:, 1]), 1).unbind()

    def _run_layer(self, number: int, held: LayerBuffers, past: int, cos: Tensor, sin: Tensor) -> None:
        layer, hidden = self._layers.layers[number], self._hidden
        _multiply(layer.qkv, self._norm(2 * number), self._packed)
        torch.mul(self._halves, cos, out=self._rotated).addcmul_(self._halves.flip(1), sin)
        keys = held.keys.transpose(1, 2)
        keys.narrow(2, past, 1).copy_(self._key)
        held.values.narrow(1, past, 1).copy_(self._value)
        scores = torch.bmm(self._queries, keys.narrow(2, 0, past + 1)).mul_(layer.scale)
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
    """

    def __init__(self, decoder: Decoder, *args: Any, **options: Any) -> None:
        super().__init__(decoder, *args, **options)
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

    def write_ahead(self, cache: KVCache, token: int, position_ids: Tensor, note: Note | None) -> list[int] | None:
        if self._writer is None and can_write_rows(self.fused, self.decoder, self.lm_head):
            self._writer = RowWriter(self.fused, self.decoder.embed_tokens.weight, cast(Tensor, self.lm_head.weight))
        with torch.inference_mode():
            return None if self._writer is None else self._writer.write(cache, token, position_ids, note)


def fastest_runner(decoder: Decoder, lm_head: nn.Module, *args: Any, num_axes: int, **options: Any) -> Runner:
    """What runs a model's passes: fused on a CPU, where that can be. On CUDA static steps are."""
    on_cpu = decoder.embed_tokens.weight.device.type == "cpu"
    runner = FusedRunner if on_cpu and can_fuse(decoder, num_axes) else Runner
    return runner(decoder, lm_head, *args, **options)
