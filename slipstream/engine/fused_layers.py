"""Decoder layers as few kernels: one product for queries, keys and values, and one for both halves of the MLP's inner
width. For steps; prompts run upstream's layers on the same weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from slipstream.engine.attention import Attend, attend_segments
from slipstream.engine.forward import Decoder, Runner
from slipstream.engine.segments import Rows, pack
from slipstream.engine.thread import is_device_lost
from slipstream.logs import get_logger

LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen2_5_VLDecoderLayer")
"""Upstream's, whose forward is the one that is written down here."""


# -- the products -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """Several linear layers of one input as one, whose outputs lie behind one another."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)


def join(parts: Sequence[nn.Linear]) -> Product:
    """One product of the layers, which from now on are views of its weights: no weight is there twice."""
    with torch.inference_mode(False), torch.no_grad():
        weight = _joined(parts, "weight")
        bias = None if parts[0].bias is None else _joined(parts, "bias")
    return Product(weight, bias)


def _joined(parts: Sequence[nn.Linear], name: str) -> Tensor:
    whole = torch.cat([getattr(part, name) for part in parts])
    for part, own in zip(parts, whole.split([part.weight.shape[0] for part in parts]), strict=True):
        setattr(part, name, nn.Parameter(own, requires_grad=False))
    return whole


def _bare(part: Any) -> nn.Module | Product:
    """A plain linear layer without a module's call around it, which takes longer than a small product."""
    return Product(part.weight, part.bias) if can_join((part,)) else part


def can_join(parts: Sequence[Any]) -> bool:
    """Whether these are plain linear layers of one kind. A quantised one, or one with a forward of its own, is none."""
    return (
        all(type(part) is nn.Linear and "forward" not in vars(part) for part in parts)
        and all(type(part.weight) is nn.Parameter for part in parts)
        and len({(part.weight.dtype, part.weight.device, part.bias is None) for part in parts}) == 1
    )


# -- between the products ---------------------------------------------------------------------------------------------

# Norm, rotation, activation: each a function of tensors alone. Upstream's twenty small kernels a layer take longer than
# what they compute; on CUDA they are four here, where there is a compiler.

MAX_ERROR = 2e-2
"""Beside the largest number: what 16 bits explain."""
MANY_ROWS = 5
"""Of a sample that stands for any number of rows."""


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


def exact_glue(shape: GlueShape) -> Glue:
    """Upstream's operations in upstream's order."""

    def norm(hidden: Tensor, weight: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + shape.eps)
        return weight * wide.to(hidden.dtype)

    return _glue(shape, norm)


def torch_glue(shape: GlueShape) -> Glue:
    """With torch's own norm, which is one kernel on CUDA."""
    return _glue(shape, lambda hidden, weight: rms_norm(hidden, weight.shape, weight, shape.eps))


def compiled_glue(shape: GlueShape) -> Glue:
    """Each function is one kernel that inductor writes, which takes a C compiler, and Triton on CUDA. The norm that
    stands alone, before the first layer, is not worth it."""
    plain = exact_glue(shape)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, options={"compile_threads": 1})  # no processes beside this one

    return Glue(plain.norm, compiled(plain.add_norm), compiled(plain.rotate), compiled(plain.gate))


def _glue(shape: GlueShape, norm: Callable[[Tensor, Tensor], Tensor]) -> Glue:
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


MakeGlue = Callable[[GlueShape], Glue]


def known_glue(device: torch.device) -> Mapping[str, MakeGlue]:
    """By name, the best first; the last one always works."""
    on_cuda = {"compiled": compiled_glue, "torch": torch_glue} if device.type == "cuda" else {}
    return {**on_cuda, "exact": exact_glue}


def choose_glue(shape: GlueShape, like: Tensor) -> tuple[str, Glue]:
    """The best that works here and is right."""
    for name, make in known_glue(like.device).items():
        try:
            glue = make(shape)
            if (error := _largest_error(glue, shape, like)) <= MAX_ERROR:
                return name, glue
            get_logger().warning("static_glue.differs", name=name, error=error)
        except Exception as failure:  # a compiler raises dozens of types
            if is_device_lost(failure):
                raise
            get_logger().info("static_glue.unusable", name=name, error=str(failure).partition("\n")[0])
    raise AssertionError("upstream's operations work everywhere")


def _largest_error(glue: Glue, shape: GlueShape, like: Tensor) -> float:
    """Beside upstream's operations in fp32 at least, of random rows. A compiler has written all afterwards that steps
    will need: what serves one row, and what serves any number of them."""
    exact, wide = exact_glue(shape), torch.promote_types(like.dtype, torch.float32)
    generator, errors = torch.Generator(like.device).manual_seed(0), []

    def random(*size: int) -> Tensor:
        made = torch.randn(size, dtype=like.dtype, device=like.device, generator=generator)
        if size[0] == MANY_ROWS:
            torch._dynamo.maybe_mark_dynamic(made, 0)
        return made

    with torch.inference_mode():
        for rows in (MANY_ROWS, 1):
            hidden, update, weight = (random(*size, shape.hidden_size) for size in ((rows,), (rows,), ()))
            packed, inner = random(rows, shape.num_heads * shape.head_dim), random(rows, 2 * shape.inner_size)
            angles = random(rows, shape.head_dim), random(rows, shape.head_dim)
            for ours, right, inputs in (
                (glue.norm, exact.norm, (hidden, weight)),
                (glue.add_norm, exact.add_norm, (hidden, update, weight)),
                (glue.rotate, exact.rotate, (packed, *angles)),
                (glue.gate, exact.gate, (inner,)),
            ):
                found, expected = _flat(ours(*inputs)).to(wide), _flat(right(*(each.to(wide) for each in inputs)))
                errors.append(float((found - expected).abs().max() / expected.abs().max()))
    return max(errors)


def _flat(found: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return found.flatten() if isinstance(found, Tensor) else torch.cat([part.flatten() for part in found])


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
    """

    def __init__(self, decoder: Decoder) -> None:
        self._rotary = decoder.rotary_emb
        self._layers = [_fuse(cast(Any, layer)) for layer in decoder.layers]
        self._last_norm = cast(Tensor, decoder.norm.weight)
        self._shape = _glue_shape(decoder)
        self.glue, self._glue = choose_glue(self._shape, self._last_norm)
        """Name of what lies between the products, see `known_glue`."""

    def __call__(self, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """[1, rows, hidden] -> what the language model's head takes, [rows, hidden]."""
        cos, sin = (angles[0] for angles in self._rotary(hidden, position_ids))
        hidden, glue, shape = hidden[0], self._glue, self._shape
        normed = glue.norm(hidden, self._layers[0].norms[0])
        following = [layer.norms[0] for layer in self._layers[1:]]
        for layer, next_norm in zip(self._layers, [*following, self._last_norm], strict=True):
            packed = layer.qkv(normed)
            rotated = glue.rotate(packed, cos, sin).transpose(0, 1)
            values = packed.view(len(packed), -1, shape.head_dim)[:, shape.num_rotated :].transpose(0, 1)
            query, keys = rotated[: layer.num_heads], rotated[layer.num_heads :]
            attended = attend(layer.number, query, keys, values, layer.scale)
            hidden, normed = glue.add_norm(hidden, layer.output(attended.flatten(1)), layer.norms[1])
            hidden, normed = glue.add_norm(hidden, layer.down(glue.gate(layer.gate_up(normed))), next_norm)
        return normed


def _glue_shape(decoder: Decoder) -> GlueShape:
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
    return _Layer(
        attention.layer_idx,
        float(attention.scaling),
        attention.q_proj.weight.shape[0] // attention.head_dim,
        join((attention.q_proj, attention.k_proj, attention.v_proj)),
        join((mlp.gate_proj, mlp.up_proj)),
        _bare(attention.o_proj),
        _bare(mlp.down_proj),
        (layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
    )


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


def fastest_runner(decoder: Decoder, lm_head: nn.Module, *args: Any, num_axes: int, **options: Any) -> Runner:
    """What runs a model's passes: fused on a CPU, where that can be. On CUDA static steps are."""
    on_cpu = decoder.embed_tokens.weight.device.type == "cpu"
    runner = FusedRunner if on_cpu and can_fuse(decoder, num_axes) else Runner
    return runner(decoder, lm_head, *args, **options)
