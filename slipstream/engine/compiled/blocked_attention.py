"""Attention of a few rows over a long past: scores, softmax and values of a block of keys while they are in the cache.

Torch's way is two products around a softmax. Its products are a library's for large matrices, which get a quarter of a
core's arithmetic at so few rows, and the scores leave the cache between them. Here each block of keys and values is
read once, and the largest score, the sum and the output so far are scaled when a larger score comes (online softmax:
Milakov and Gimelshein 2018; Dao et al. 2022).

A row's result depends neither on how many rows there are nor on how many masked keys follow: blocks begin at multiples
of `BLOCK`, and threads take fixed ones of them.
"""

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from slipstream.engine.attention import MatmulKernel
from slipstream.engine.compiled.code import COUNT, INT, LOWEST, Code, Compiled, Vectors, count, vectors_for
from slipstream.engine.compiled.products import write_product
from slipstream.engine.segments import Segment

BLOCK = 256
"""Keys whose scores are weighed at a time."""
MAX_ROWS = 64
"""Query rows of one call: bounds its scratch."""
MIN_SHARED_KEYS = 1024
"""With fewer keys, threads would wait for one another longer than they work."""

_PLACES = ("query", "keys", "values", "output", "mask", "scratch")
_COUNTS = (
    *("query_head", "query_row", "keys_head", "keys_dim", "values_head", "values_token", "output_head", "output_row"),
    *("num_rows", "group_size", "num_keys", "past", "num_shares", "num_parts"),
)
ORDER = (*_PLACES, *_COUNTS, "scale", "begun", "done")
"""What a call is told, 8 bytes each: places; distances in numbers, and counts; the scale of scores, to the base of 2;
and how many parts threads have begun and done. A part is a KV head's share of the blocks."""


# -- the code ---------------------------------------------------------------------------------------------------------


class _PartCode(Code):
    """A function that is told the order, and a part's number where it is about one."""

    def __init__(self, module: Any, name: str, vectors: Vectors, head_dim: int, **parameters: Any) -> None:
        is_entry = not parameters
        super().__init__(module, name, {"order": COUNT.as_pointer()} | parameters, vectors, is_entry=is_entry)
        self.head_dim = count(head_dim)
        self.folded = self.build.mul(self["num_rows"], self["group_size"])
        """Rows of a KV head: those of all its query heads."""

    def __getitem__(self, name: str) -> Any:
        if name not in ORDER:
            return super().__getitem__(name)
        value = self.build.load(self.told(name))
        if name in _PLACES:
            return self.build.inttoptr(value, self.vectors.pointer)
        return value

    def told(self, name: str) -> Any:
        """Where it stands in the order."""
        return self.at(super().__getitem__("order"), count(ORDER.index(name)))

    def scratch_of(self, part: Any) -> dict[str, Any]:
        """A part's queries and output [rows, head_dim], scores [rows, BLOCK], largest scores and sums [rows]."""
        widths = {
            "query": self.head_dim,
            "output": self.head_dim,
            "scores": count(BLOCK),
            "largest": count(1),
            "sums": count(1),
        }
        place = self.at(self["scratch"], part, self.folded, count(scratch_numbers(self.head_dim.constant)))
        places = {}
        for name, width in widths.items():
            places[name] = place
            place = self.at(place, self.folded, width)
        return places


def scratch_numbers(head_dim: int) -> int:
    """Of a row, in each part."""
    return 2 * head_dim + BLOCK + 2


def _write_start(module: Any, vectors: Vectors, head_dim: int) -> Any:
    """Scaled queries of a part, and a softmax of nothing."""
    code = _PartCode(module, "start", vectors, head_dim, part=COUNT)
    build, places = code.build, code.scratch_of(code["part"])
    first_head = build.mul(build.udiv(code["part"], code["num_shares"]), code["group_size"])
    scale = code.spread(build.load(build.bitcast(code.told("scale"), vectors.pointer)))
    with code.loop(count(0), code.folded, count(1)) as row:
        head = build.add(first_head, build.udiv(row.index, code["num_rows"]))
        query = code.at(code["query"], head, code["query_head"])
        query = code.at(query, build.urem(row.index, code["num_rows"]), code["query_row"])
        build.store(code.number(LOWEST), code.at(places["largest"], row.index))
        build.store(code.number(0.0), code.at(places["sums"], row.index))
        with code.loop(count(0), code.head_dim, count(vectors.lanes)) as dim:
            to_query, to_output = (
                code.at(code.at(places[name], row.index, code.head_dim), dim.index) for name in ("query", "output")
            )
            code.write(build.fmul(code.read(code.at(query, dim.index)), scale), to_query)
            code.write(code.filled(0.0), to_output)
    return code.finish()


def _write_mask(module: Any, vectors: Vectors, head_dim: int) -> Any:
    """What a part's rows must not see of a block: the window's, and what is no key."""
    code = _PartCode(module, "mask", vectors, head_dim, scores=vectors.pointer, first=COUNT, num_keys_here=COUNT)
    build, first, num_keys = code.build, code["first"], code["num_keys_here"]
    behind_past = build.sub(code["past"], first)
    behind_past = build.select(build.icmp_signed("<", behind_past, count(0)), count(0), behind_past)
    num_columns = build.sub(code["num_keys"], code["past"])
    with code.loop(count(0), code.folded, count(1)) as row:
        scores = code.at(code["scores"], row.index, count(BLOCK))
        mask = code.at(code["mask"], build.urem(row.index, code["num_rows"]), num_columns)
        with code.loop(behind_past, num_keys, count(1)) as key:
            place = code.at(scores, key.index)
            column = build.sub(build.add(first, key.index), code["past"])
            build.store(build.fadd(build.load(place), build.load(code.at(mask, column))), place)
        with code.loop(num_keys, code.rounded_up(num_keys, vectors.lanes), count(1)) as key:
            build.store(code.number(-math.inf), code.at(scores, key.index))
    return code.finish()


def _write_weigh(module: Any, vectors: Vectors) -> Any:
    """Makes weights of a row's scores in a block, and scales its sum and output to the largest score so far."""
    places = dict.fromkeys(("scores", "output", "largest", "sum"), vectors.pointer)
    code = Code(module, "weigh", places | {"num_keys": COUNT, "head_dim": COUNT}, vectors)
    build, lanes = code.build, count(vectors.lanes)
    with code.loop(count(0), code["num_keys"], lanes, [code.spread(build.load(code["largest"]))]) as key:
        key.following = [code.greater(key.carried[0], code.read(code.at(code["scores"], key.index)))]
    largest = code.largest(key.carried[0])
    before, now = code.spread(build.load(code["largest"])), code.spread(largest)
    build.store(largest, code["largest"])
    with code.loop(count(0), code["num_keys"], lanes, [code.filled(0.0)]) as key:
        place = code.at(code["scores"], key.index)
        weights = code.power_of_two(build.fsub(code.read(place), now))
        code.write(weights, place)
        key.following = [build.fadd(key.carried[0], weights)]
    faded = code.power_of_two(build.fsub(before, now))
    so_far = build.fmul(build.load(code["sum"]), build.extract_element(faded, INT(0)))
    build.store(build.fadd(so_far, code.total(key.carried[0])), code["sum"])
    with code.loop(count(0), code["head_dim"], lanes) as dim:
        place = code.at(code["output"], dim.index)
        code.write(build.fmul(code.read(place), faded), place)
    return code.finish()


def _write_part(module: Any, vectors: Vectors, head_dim: int) -> Any:
    """A KV head's share of the blocks."""
    start, mask = (write(module, vectors, head_dim) for write in (_write_start, _write_mask))
    weigh, score = _write_weigh(module, vectors), write_product(module, "score", vectors.across, vectors, adds=False)
    sums = _value_products(module, vectors, head_dim)
    code = _PartCode(module, "run_part", vectors, head_dim, part=COUNT)
    build, num_shares, places = code.build, code["num_shares"], code.scratch_of(code["part"])
    head, share = (divide(code["part"], num_shares) for divide in (build.udiv, build.urem))
    keys, values = (code.at(code[name], head, code[f"{name}_head"]) for name in ("keys", "values"))
    code.call(start, code["order"], code["part"])
    first_key, step = build.mul(share, count(BLOCK)), build.mul(num_shares, count(BLOCK))
    with code.loop(first_key, code["num_keys"], step) as block:
        num_keys = code.least(count(BLOCK), build.sub(code["num_keys"], block.index))
        with code.loop(count(0), num_keys, count(vectors.width)) as key:
            operands = [places["query"], code.head_dim, code.at(keys, build.add(block.index, key.index))]
            result = [code.at(places["scores"], key.index), count(BLOCK)]
            code.call(score, *operands, code["keys_dim"], *result, code.head_dim, code.folded)
        code.call(mask, code["order"], places["scores"], block.index, num_keys)
        with code.loop(count(0), code.folded, count(1)) as row:
            widths = (("scores", count(BLOCK)), ("output", code.head_dim), ("largest", count(1)), ("sums", count(1)))
            of_row = [code.at(places[name], row.index, width) for name, width in widths]
            code.call(weigh, *of_row, code.rounded_up(num_keys, vectors.lanes), code.head_dim)
        for first, add in sums:
            of_block = code.at(code.at(values, block.index, code["values_token"]), count(first))
            output = [code.at(places["output"], count(first)), code.head_dim, num_keys, code.folded]
            code.call(add, places["scores"], count(BLOCK), of_block, code["values_token"], *output)
    return code.finish()


def _value_products(module: Any, vectors: Vectors, head_dim: int) -> list[tuple[int, Any]]:
    """Products of weights and values that together have a head's columns, each with its first column."""
    num_whole, rest = divmod(head_dim // vectors.lanes, vectors.across)
    products = []
    if num_whole:
        whole = write_product(module, "add_values", vectors.across, vectors, adds=True)
        products = [(number * vectors.width, whole) for number in range(num_whole)]
    if rest:
        products.append((num_whole * vectors.width, write_product(module, "add_rest", rest, vectors, adds=True)))
    return products


def _write_join(module: Any, vectors: Vectors, head_dim: int) -> Any:
    """The output of a KV head from its shares, for all rows."""
    code = _PartCode(module, "join", vectors, head_dim, head=COUNT)
    build, shares = code.build, (count(0), code["num_shares"], count(1))
    with code.loop(count(0), code.folded, count(1)) as row:
        head = build.add(build.mul(code["head"], code["group_size"]), build.udiv(row.index, code["num_rows"]))
        to_output = code.at(code["output"], head, code["output_head"])
        to_output = code.at(to_output, build.urem(row.index, code["num_rows"]), code["output_row"])

        def of_share(number: Any, name: str, width: Any) -> Any:
            part = build.add(build.mul(code["head"], code["num_shares"]), number)
            return code.at(code.scratch_of(part)[name], row.index, width)

        with code.loop(*shares, [code.filled(LOWEST)]) as share:
            largest = code.spread(build.load(of_share(share.index, "largest", count(1))))
            share.following = [code.greater(share.carried[0], largest)]
        largest_of_all = share.carried[0]
        with code.loop(*shares, [code.filled(0.0)]) as share:
            place = of_share(share.index, "largest", count(1))
            faded = code.power_of_two(build.fsub(code.spread(build.load(place)), largest_of_all))
            build.store(build.extract_element(faded, INT(0)), place)
            own = code.spread(build.load(of_share(share.index, "sums", count(1))))
            share.following = [code.multiply_add(own, faded, share.carried[0])]
        total = share.carried[0]
        with code.loop(count(0), code.head_dim, count(vectors.lanes)) as dim:
            with code.loop(*shares, [code.filled(0.0)]) as share:
                faded = code.spread(build.load(of_share(share.index, "largest", count(1))))
                own = code.read(code.at(of_share(share.index, "output", code.head_dim), dim.index))
                share.following = [code.multiply_add(own, faded, share.carried[0])]
            code.write(build.fdiv(share.carried[0], total), code.at(to_output, dim.index))
    return code.finish()


def _write_attend(module: Any, vectors: Vectors, head_dim: int) -> None:
    """What every thread runs: parts until all have begun. Whoever ends the last one joins them."""
    run_part, join = (write(module, vectors, head_dim) for write in (_write_part, _write_join))
    code = _PartCode(module, "attend", vectors, head_dim)
    build, num_parts = code.build, code["num_parts"]

    def take(name: str) -> Any:
        return build.atomic_rmw("add", code.told(name), count(1), "acq_rel")

    with code.loop(take("begun"), num_parts, count(0)) as turn:
        code.call(run_part, code["order"], turn.index)
        is_last = build.icmp_signed("==", take("done"), build.sub(num_parts, count(1)))
        num_heads = build.select(is_last, build.udiv(num_parts, code["num_shares"]), count(0))
        with code.loop(count(0), num_heads, count(1)) as head:
            code.call(join, code["order"], head.index)
        turn.next_index = take("begun")
    code.finish()


# -- the kernel -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Attention:
    """Compiled for one kind of number and width of heads."""

    code: Compiled
    address: int
    run: Callable[[Any], None]
    num_columns: int
    """Keys of a tile."""
    scale_form: str
    """How `struct` packs a scale into 8 bytes."""

    def told(self, scale: float) -> int:
        """How an order has the scale of scores: to the base of 2, as 8 bytes."""
        packed = struct.pack(self.scale_form, scale * math.log2(math.e))
        return int(struct.unpack("=q", packed)[0])


@cache
def attention_for(dtype: torch.dtype, head_dim: int) -> Attention | None:
    """None: it cannot be vectors of this processor."""
    vectors = vectors_for(dtype)
    if vectors is None or head_dim % vectors.lanes:
        return None
    module = ir.Module()
    _write_attend(module, vectors, head_dim)
    code = Compiled(module)
    address = code.address("attend")
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    return Attention(code, address, run, vectors.width, "=d" if vectors.num_bits == 64 else "=fxxxx")


@cache
def _team() -> Callable[[int, Any, int, int], None] | None:
    """Runs a function on the threads that torch's own products use; None: they are not GNU OpenMP's."""
    for path in Path(torch.__file__).parent.glob("lib/libgomp*.so*"):
        run = ctypes.CDLL(str(path)).GOMP_parallel
        run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return run
    return None


class CompiledKernel(MatmulKernel):
    """Compiled code for fp32 and fp64 on a CPU; torch's products for what it is not made for."""

    compiles = True

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        num_threads = torch.get_num_threads()
        attention = attention_for(query.dtype, query.shape[-1])
        if attention is None or not can_read(keys, values, attention.num_columns) or (num_threads > 1 and not _team()):
            return super().attend(query, keys, values, segment, scale)
        heads, num_rows, head_dim = query.shape
        num_rows_at_once = max(MAX_ROWS * len(keys) // heads, 1)
        output = query.new_empty(num_rows, heads, head_dim).transpose(0, 1)
        query = query if query.stride(2) == 1 else query.contiguous()
        mask = segment.window_mask
        if num_rows <= num_rows_at_once:  # decoding: without views, which take as long as a draft's attention
            _run(attention, (query, keys, values, output, mask), segment.past, scale, num_threads)
            return output
        for first in range(0, num_rows, num_rows_at_once):
            rows = slice(first, first + num_rows_at_once)
            block = query[:, rows], keys, values, output[:, rows], mask[rows]
            _run(attention, block, segment.past, scale, num_threads)
        return output


def can_read(keys: Tensor, values: Tensor, num_columns: int) -> bool:
    """Whether keys lie [dim, token] and values [token, dim], and as many keys as a tile has columns may be read
    wherever a block ends, if only to be left out."""
    if keys.stride(1) != 1 or values.stride(2) != 1:
        return False
    num_beyond = -keys.shape[1] % num_columns
    last = sum((size - 1) * stride for size, stride in zip(keys.shape, keys.stride(), strict=True))
    end = keys.storage_offset() + last + num_beyond + 1
    return end * keys.element_size() <= keys.untyped_storage().nbytes()


def _run(
    attention: Attention, tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], past: int, scale: float, threads: int
) -> None:
    """One call: of queries and output [heads, n, d], keys and values, and the mask [n, keys behind the past]."""
    query, keys, values, output, mask = tensors
    (heads, num_rows, head_dim), (kv_heads, num_keys, _) = query.shape, keys.shape
    group_size, num_shares = heads // kv_heads, threads // math.gcd(threads, kv_heads)
    num_parts = kv_heads * num_shares
    scratch = query.new_empty(num_parts * group_size * num_rows * scratch_numbers(head_dim))
    places = [tensor.data_ptr() for tensor in (query, keys, values, output, mask, scratch)]
    distances = [*query.stride()[:2], keys.stride(0), keys.stride(2), *values.stride()[:2], *output.stride()[:2]]
    counts = [num_rows, group_size, num_keys, past, num_shares, num_parts]
    order = (ctypes.c_int64 * len(ORDER))(*places, *distances, *counts, attention.told(scale), 0, 0)
    team = _team() if threads > 1 and num_keys > MIN_SHARED_KEYS else None
    if team is None:
        attention.run(order)
    else:
        team(attention.address, order, threads, 0)
