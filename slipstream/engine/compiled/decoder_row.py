"""One row through all layers of a decoder as one function, for small models, whose rows are mostly what stands around
operations. Weights that bfloat16 holds exactly are read as such: half as many bytes, which may stay in the cache.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from llvmlite import ir
from torch import Tensor

from slipstream.engine.compiled.blocked_attention import ORDER, Attention, attention_for, can_read, scratch_numbers
from slipstream.engine.compiled.code import COUNT, HALF, VOID, Code, Compiled, Vectors, count, vectors_for
from slipstream.engine.fused_layers import FusedLayers
from slipstream.engine.kv_cache import LayerBuffers

MOST_WEIGHTS = 1 << 23
"""Of more, reading takes so long that nothing else counts, which several threads do faster."""
CACHED_BYTES = 1 << 21
"""So many stay in a core's cache from row to row."""

_PRODUCTS = ("qkv", "output", "gate_up", "down")
_HELD = ("keys", "keys_head", "keys_dim", "values", "values_head", "values_token")
_LAYER = (*_PRODUCTS, "qkv_start", "gate_up_start", "norm", "mlp_norm", *_HELD, "past", "attention")
"""What is told of a layer, 8 bytes each: places; distances in numbers; rows that are there; its attention's order."""
_FIRST_HELD = _LAYER.index("keys")
_BUFFERS = ("hidden", "normed", "packed", "attended", "inner", "logits", "zeros")
_ROW = ("token", "cos", "sin", "columns", "mask", "embeddings", "head", "last_norm", *_BUFFERS, "layers")
_TABLE = COUNT.as_pointer()


@dataclass(frozen=True)
class RowShape:
    """What the code of one model is made for."""

    dtype: torch.dtype
    in_halves: bool
    """Weights of products lie as bfloat16."""
    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    """Of queries."""
    num_kv: int
    """Of keys, and of values."""
    head_dim: int
    vocab_size: int
    eps: float
    """Of norms."""

    @property
    def packed_size(self) -> int:
        """Numbers of queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv) * self.head_dim

    def fits(self, vectors: Vectors) -> bool:
        """Whether all rows, and halves of heads, are whole vectors."""
        sizes = (self.hidden_size, self.inner_size, self.head_dim // 2, self.num_heads * self.head_dim)
        return all(size % vectors.lanes == 0 for size in sizes)


# -- the code ---------------------------------------------------------------------------------------------------------


class _TableCode(Code):
    """A function that is told things in tables of 8 bytes each."""

    def told(self, table: Any, names: Sequence[str], name: str) -> Any:
        return self.build.load(self.at(table, count(names.index(name))))

    def place(self, table: Any, names: Sequence[str], name: str, kind: Any = None) -> Any:
        return self.build.inttoptr(self.told(table, names, name), kind or self.vectors.pointer)


def _write_dots(module: Any, vectors: Vectors, shape: RowShape) -> Any:
    """out [rows] = start [rows] + weight [rows, depth] @ row [depth]. As many rows at a time as a vector has lanes, so
    that their sums become one."""
    weights = HALF.as_pointer() if shape.in_halves else vectors.pointer
    places = {"weight": weights} | dict.fromkeys(("start", "row", "out"), vectors.pointer)
    code = Code(module, "dots", places | {"rows": COUNT, "depth": COUNT}, vectors)
    build, lanes, depth = code.build, vectors.lanes, code["depth"]
    read_weights = code.read_halves if shape.in_halves else code.read

    def sums(first: Any, num_rows: int) -> Sequence[Any]:
        rows = [code.at(code["weight"], build.add(first, count(number)), depth) for number in range(num_rows)]
        with code.loop(count(0), depth, count(lanes), [code.filled(0.0)] * num_rows) as turn:
            own = code.read(code.at(code["row"], turn.index))
            products = zip((read_weights(code.at(row, turn.index)) for row in rows), turn.carried, strict=True)
            turn.following = [code.multiply_add(of_row, own, so_far) for of_row, so_far in products]
        return turn.carried

    num_whole = build.and_(code["rows"], count(-lanes))
    with code.loop(count(0), num_whole, count(lanes)) as rows:
        start, out = (code.at(code[name], rows.index) for name in ("start", "out"))
        code.write(build.fadd(code.read(start), code.totals(sums(rows.index, lanes))), out)
    with code.loop(num_whole, code["rows"], count(1)) as rows:
        start, out = (code.at(code[name], rows.index) for name in ("start", "out"))
        build.store(build.fadd(build.load(start), code.total(sums(rows.index, 1)[0])), out)
    return code.finish()


def _write_norm(module: Any, vectors: Vectors, shape: RowShape) -> Any:
    """normed = RMS norm of hidden."""
    code = Code(module, "norm", dict.fromkeys(("hidden", "weight", "normed"), vectors.pointer), vectors)
    build, numbers = code.build, (count(0), count(shape.hidden_size), count(vectors.lanes))
    with code.loop(*numbers, [code.filled(0.0)]) as dim:
        own = code.read(code.at(code["hidden"], dim.index))
        dim.following = [code.multiply_add(own, own, dim.carried[0])]
    mean = build.fdiv(code.total(dim.carried[0]), code.number(shape.hidden_size))
    scale = build.fdiv(code.filled(1.0), code.root(code.spread(build.fadd(mean, code.number(shape.eps)))))
    with code.loop(*numbers) as dim:
        own, weight = (code.read(code.at(code[name], dim.index)) for name in ("hidden", "weight"))
        code.write(build.fmul(build.fmul(own, scale), weight), code.at(code["normed"], dim.index))
    return code.finish()


def _write_rotate(module: Any, vectors: Vectors, shape: RowShape) -> Any:
    """Turns queries and keys where they lie. `sin` has the signs of what is added to each half."""
    code = Code(module, "rotate", dict.fromkeys(("packed", "cos", "sin"), vectors.pointer), vectors)
    build, half = code.build, count(shape.head_dim // 2)
    with code.loop(count(0), count(shape.num_heads + shape.num_kv), count(1)) as head:
        first_half = code.at(code["packed"], head.index, count(shape.head_dim))
        with code.loop(count(0), half, count(vectors.lanes)) as dim:
            indices = (dim.index, build.add(dim.index, half))
            places = [code.at(first_half, index) for index in indices]
            own = [code.read(place) for place in places]
            for place, index, one, other in zip(places, indices, own, own[::-1], strict=True):
                cos, sin = (code.read(code.at(code[name], index)) for name in ("cos", "sin"))
                code.write(code.multiply_add(one, cos, build.fmul(other, sin)), place)
    return code.finish()


def _write_gate(module: Any, vectors: Vectors, shape: RowShape) -> Any:
    """silu of the first half times the second, where the first lies."""
    code = Code(module, "gate", {"inner": vectors.pointer}, vectors)
    build, size, one = code.build, count(shape.inner_size), code.filled(1.0)
    with code.loop(count(0), size, count(vectors.lanes)) as dim:
        place = code.at(code["inner"], dim.index)
        gate, up = code.read(place), code.read(code.at(place, size))
        small = code.power_of_two(build.fmul(code.magnitude(gate), code.filled(-math.log2(math.e))))
        is_negative = build.fcmp_ordered("<", gate, code.filled(0.0))
        sigmoid = build.fdiv(build.select(is_negative, small, one), build.fadd(one, small))
        code.write(build.fmul(build.fmul(gate, sigmoid), up), place)
    return code.finish()


def _write_keep(module: Any, vectors: Vectors, shape: RowShape) -> Any:
    """Puts the row's keys and values behind those of its layer, and tells the layer's attention where they lie, and
    of how many `columns` at their end the row's `mask` speaks."""
    parameters = {"layer": _TABLE, "order": _TABLE, "packed": vectors.pointer, "columns": COUNT, "mask": COUNT}
    code = _TableCode(module, "keep", parameters, vectors)
    build, layer, head_dim = code.build, code["layer"], count(shape.head_dim)
    fields = {name: code.told(layer, _LAYER, name) for name in (*_HELD, "past")}
    keys, values = (build.inttoptr(fields[name], vectors.pointer) for name in ("keys", "values"))
    with code.loop(count(0), count(shape.num_kv), count(1)) as head:
        new_keys = code.at(code["packed"], build.add(head.index, count(shape.num_heads)), head_dim)
        new_values = code.at(new_keys, count(shape.num_kv), head_dim)
        to_keys = code.at(code.at(keys, head.index, fields["keys_head"]), fields["past"])
        to_values = code.at(code.at(values, head.index, fields["values_head"]), fields["past"], fields["values_token"])
        with code.loop(count(0), head_dim, count(1)) as dim:
            build.store(build.load(code.at(new_keys, dim.index)), code.at(to_keys, dim.index, fields["keys_dim"]))
        with code.loop(count(0), head_dim, count(vectors.lanes)) as dim:
            code.write(code.read(code.at(new_values, dim.index)), code.at(to_values, dim.index))
    num_keys = build.add(fields["past"], count(1))
    build.store(num_keys, code.at(layer, count(_LAYER.index("past"))))
    fields |= {"num_keys": num_keys, "past": build.sub(num_keys, code["columns"]), "mask": code["mask"]}
    for name, value in (fields | {"begun": count(0), "done": count(0)}).items():
        build.store(value, code.at(code["order"], count(ORDER.index(name))))
    return code.finish()


def _write_row(module: Any, vectors: Vectors, shape: RowShape, attend_address: int) -> None:
    """From a token to the logits behind it."""
    dots, norm, rotate, gate, keep = (
        write(module, vectors, shape) for write in (_write_dots, _write_norm, _write_rotate, _write_gate, _write_keep)
    )
    code = _TableCode(module, "run_row", {"row": _TABLE}, vectors, is_entry=True)
    build, row = code.build, code["row"]
    attend = build.inttoptr(count(attend_address), ir.FunctionType(VOID, [_TABLE]).as_pointer())
    at = {name: code.place(row, _ROW, name) for name in (*_BUFFERS, "embeddings", "cos", "sin", "last_norm")}
    weights = dots.args[0].type
    hidden_size, inner_size = count(shape.hidden_size), count(shape.inner_size)
    embedding = code.at(at["embeddings"], code.told(row, _ROW, "token"), hidden_size)
    with code.loop(count(0), hidden_size, count(vectors.lanes)) as dim:
        code.write(code.read(code.at(embedding, dim.index)), code.at(at["hidden"], dim.index))
    layers = code.place(row, _ROW, "layers", _TABLE)
    with code.loop(count(0), count(shape.num_layers), count(1)) as number:
        layer = code.at(layers, number.index, count(len(_LAYER)))
        qkv, output, gate_up, down = (code.place(layer, _LAYER, name, weights) for name in _PRODUCTS)
        qkv_start, gate_up_start, norm_weight, mlp_norm = (
            code.place(layer, _LAYER, name) for name in ("qkv_start", "gate_up_start", "norm", "mlp_norm")
        )
        order = code.place(layer, _LAYER, "attention", _TABLE)
        code.call(norm, at["hidden"], norm_weight, at["normed"])
        code.call(dots, qkv, qkv_start, at["normed"], at["packed"], count(shape.packed_size), hidden_size)
        code.call(rotate, at["packed"], at["cos"], at["sin"])
        code.call(keep, layer, order, at["packed"], *(code.told(row, _ROW, name) for name in ("columns", "mask")))
        code.call(attend, order)
        num_attended = count(shape.num_heads * shape.head_dim)
        code.call(dots, output, at["hidden"], at["attended"], at["hidden"], hidden_size, num_attended)
        code.call(norm, at["hidden"], mlp_norm, at["normed"])
        code.call(dots, gate_up, gate_up_start, at["normed"], at["inner"], count(2 * shape.inner_size), hidden_size)
        code.call(gate, at["inner"])
        code.call(dots, down, at["hidden"], at["inner"], at["hidden"], hidden_size, inner_size)
    code.call(norm, at["hidden"], at["last_norm"], at["normed"])
    head = code.place(row, _ROW, "head", weights)
    code.call(dots, head, at["zeros"], at["normed"], at["logits"], count(shape.vocab_size), hidden_size)
    code.finish()


@dataclass(frozen=True)
class RowCode:
    """Compiled for one shape."""

    attention: Attention
    """Which it calls."""
    code: Compiled
    run: Callable[[Any], None]
    """Its entry, which is told a row."""


@cache
def _compile(shape: RowShape, attention: Attention) -> RowCode:
    vectors, module = vectors_for(shape.dtype), ir.Module()
    assert vectors is not None, "there are some for its attention"
    _write_row(module, vectors, shape, attention.address)
    code = Compiled(module)
    return RowCode(attention, code, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("run_row")))


# -- a row ------------------------------------------------------------------------------------------------------------


def compiled_row(layers: FusedLayers, embeddings: Tensor, head: Tensor) -> "CompiledRow | None":
    """None: the model is too large, or not of whole vectors as this processor has them."""
    vectors, attention = vectors_for(head.dtype), attention_for(head.dtype, layers.shape.head_dim)
    if vectors is None or attention is None or sum(map(Tensor.numel, _products(layers, head))) > MOST_WEIGHTS:
        return None
    shape = _shape_of(layers, head)
    if not shape.fits(vectors) or len(embeddings) < len(head) or not _are_alike(layers, embeddings, head):
        return None
    return CompiledRow(shape, _compile(shape, attention), layers, embeddings, head)


def _products(layers: FusedLayers, head: Tensor) -> Iterator[Tensor]:
    for layer in layers.layers:
        yield from (cast(Tensor, getattr(layer, name).weight) for name in _PRODUCTS)
    yield head


def _are_alike(layers: FusedLayers, embeddings: Tensor, head: Tensor) -> bool:
    """Whether all that the code reads is of one type."""
    biases = [part.bias for layer in layers.layers for part in (layer.qkv, layer.gate_up) if part.bias is not None]
    return {each.dtype for each in (*_products(layers, head), embeddings, *layers.norms, *biases)} == {head.dtype}


def _shape_of(layers: FusedLayers, head: Tensor) -> RowShape:
    of, num_heads = layers.shape, layers.layers[0].num_heads
    is_single = head.dtype == torch.float32
    return RowShape(
        dtype=head.dtype,
        in_halves=is_single and all(bool((each.bfloat16() == each).all()) for each in _products(layers, head)),
        num_layers=len(layers.layers),
        hidden_size=of.hidden_size,
        inner_size=of.inner_size,
        num_heads=num_heads,
        num_kv=of.num_rotated - num_heads,
        head_dim=of.head_dim,
        vocab_size=len(head),
        eps=of.eps,
    )


class CompiledRow:
    """See `Row`; `compiled_row` makes it.

    Args:
        embeddings, head: weights, [vocab, hidden].
    """

    def __init__(self, shape: RowShape, code: RowCode, layers: FusedLayers, embeddings: Tensor, head: Tensor) -> None:
        self._shape, self._code = shape, code
        self._read: list[Tensor] = []
        """What the code reads, which must stay where it is."""
        self._buffers = {name: embeddings.new_zeros(size) for name, size in _sizes(shape).items()}
        places = {name: buffer.data_ptr() for name, buffer in self._buffers.items()}
        self._orders = [_order(shape, places, code.attention.told(layer.scale)) for layer in layers.layers]
        told = [self._told(layers, number) for number in range(shape.num_layers)]
        self._layers = _table([each.get(name, 0) for each in told for name in _LAYER])
        row = {name: places[name] for name in _BUFFERS}
        row |= {"embeddings": self._place(embeddings), "head": self._place(head, in_halves=shape.in_halves)}
        row |= {"last_norm": self._place(layers.norms[-1]), "layers": ctypes.addressof(self._layers)}
        self._row = _table([row.get(name, 0) for name in _ROW])
        self._is_cached = sum(tensor.nbytes for tensor in self._read) <= CACHED_BYTES

    @property
    def most_nodes(self) -> int:
        """Of larger models each row reads all weights again, and several threads share a pass."""
        if self._is_cached:
            return 8
        return 4 if torch.get_num_threads() == 1 else 1

    def end(self) -> None:
        """Places are numbers, which hold nothing."""

    def begin(self, held: Sequence[LayerBuffers], past: Sequence[int]) -> bool:
        if not all(can_read(each.keys, each.values, self._code.attention.num_columns) for each in held):
            return False
        for number, (each, num_past) in enumerate(zip(held, past, strict=True)):
            keys, values = each.keys, each.values
            of_keys = (keys.data_ptr(), keys.stride(0), keys.stride(2))
            of_values = (values.data_ptr(), values.stride(0), values.stride(1))
            first = number * len(_LAYER) + _FIRST_HELD
            self._layers[first : first + len(_HELD) + 1] = (*of_keys, *of_values, num_past)
        return True

    def run(self, token: int, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        columns, place = (0, 0) if mask is None else (len(mask), mask.data_ptr())
        self._row[:5] = (token, cos.data_ptr(), sin.data_ptr(), columns, place)
        self._code.run(self._row)
        return self._buffers["logits"]

    def _told(self, layers: FusedLayers, number: int) -> dict[str, int]:
        """Of a layer, but for keys and values."""
        layer, zeros, halves = layers.layers[number], self._buffers["zeros"], self._shape.in_halves
        fields = {name: self._place(getattr(layer, name).weight, in_halves=halves) for name in _PRODUCTS}
        others = {"qkv_start": layer.qkv.bias, "gate_up_start": layer.gate_up.bias}
        others |= {"norm": layers.norms[2 * number], "mlp_norm": layers.norms[2 * number + 1]}
        fields |= {name: self._place(zeros if tensor is None else tensor) for name, tensor in others.items()}
        return fields | {"attention": ctypes.addressof(self._orders[number])}

    def _place(self, tensor: Tensor, *, in_halves: bool = False) -> int:
        self._read.append((tensor.bfloat16() if in_halves else tensor).contiguous())
        return self._read[-1].data_ptr()


def _table(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _order(shape: RowShape, places: dict[str, int], scale: int) -> Any:
    """Of a layer's attention, but for keys and values."""
    fields = {"query": places["packed"], "output": places["attended"]}
    fields |= {"scratch": places["scratch"], "query_head": shape.head_dim, "output_head": shape.head_dim}
    fields |= {"num_rows": 1, "group_size": shape.num_heads // shape.num_kv, "num_shares": 1}
    fields |= {"num_parts": shape.num_kv, "scale": scale}
    return _table([fields.get(name, 0) for name in ORDER])


def _sizes(shape: RowShape) -> dict[str, int]:
    """Of all buffers, in numbers."""
    return {
        "hidden": shape.hidden_size,
        "normed": shape.hidden_size,
        "packed": shape.packed_size,
        "attended": shape.num_heads * shape.head_dim,
        "inner": 2 * shape.inner_size,
        "logits": shape.vocab_size,
        "zeros": max(shape.packed_size, 2 * shape.inner_size, shape.vocab_size),
        "scratch": shape.num_heads * scratch_numbers(shape.head_dim),
    }
