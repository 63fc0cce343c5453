"""LLVM code of loops over vectors of numbers, and its compilation for the processor at hand."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir

HALF, INT, COUNT, VOID = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.VoidType()
LOWEST = -3e38
"""Below every score, and finite: what is masked may be subtracted from it."""


@dataclass(frozen=True)
class Vectors:
    """How numbers lie in this processor's registers, and how many results of a product its registers hold."""

    number: Any
    """LLVM's type of one."""
    lanes: int
    """Numbers in a register."""
    across: int
    """Registers beside one another in a tile of results, and `rows` of those below one another."""
    rows: int = 6

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.lanes * self.across

    @property
    def pointer(self) -> Any:
        return self.number.as_pointer()

    @property
    def vector(self) -> Any:
        return ir.VectorType(self.number, self.lanes)

    @property
    def suffix(self) -> str:
        """Of LLVM's own functions of vectors."""
        return f"v{self.lanes}f{self.num_bits}"

    @property
    def num_bits(self) -> int:
        """Of a number."""
        return 32 if self.number == ir.FloatType() else 64


@cache
def vectors_for(dtype: torch.dtype) -> Vectors | None:
    """As wide as this processor has them; None: it has none that pay, or numbers of another kind."""
    numbers = {torch.float32: (ir.FloatType(), 1), torch.float64: (ir.DoubleType(), 2)}
    features = llvm.get_host_cpu_features()
    if dtype not in numbers or not features.get("fma"):
        return None
    number, size = numbers[dtype]
    if features.get("avx512f"):
        return Vectors(number, 16 // size, 4)  # 24 of 32 registers
    return Vectors(number, 8 // size, 2) if features.get("avx2") else None  # 12 of 16


@dataclass
class Turn:
    """A loop's turn while it is written; `carried` are its results afterwards."""

    index: Any
    carried: Sequence[Any]
    following: Sequence[Any] = field(default=())
    """What the next turn has for `carried`."""
    next_index: Any = None
    """The next turn's index, if the step does not say it."""


class Code:
    """One function while it is written. Counts are 64 bits wide.

    Args:
        parameters: types by name.
        is_entry: whether it is called from outside.
    """

    def __init__(
        self, module: Any, name: str, parameters: dict[str, Any], vectors: Vectors, *, is_entry: bool = False
    ) -> None:
        self.function = ir.Function(module, ir.FunctionType(VOID, list(parameters.values())), name)
        if not is_entry:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
        self.vectors = vectors
        self.build = ir.IRBuilder(self.function.append_basic_block())
        self._arguments = dict(zip(parameters, self.function.args, strict=True))

    def __getitem__(self, name: str) -> Any:
        """A parameter's value."""
        return self._arguments[name]

    def finish(self) -> Any:
        """The function, complete."""
        self.build.ret_void()
        return self.function

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any, carried: Sequence[Any] = ()) -> Iterator[Turn]:
        """`for index in range(start, stop, step)`."""
        before = self.build.block
        head, body, behind = (self.function.append_basic_block() for _ in range(3))
        self.build.branch(head)
        self.build.position_at_end(head)
        turn = Turn(self.build.phi(COUNT), [self.build.phi(value.type) for value in carried])
        self.build.cbranch(self.build.icmp_signed("<", turn.index, stop), body, behind)
        self.build.position_at_end(body)
        yield turn
        following = (turn.next_index or self.build.add(turn.index, step), *turn.following)
        end = self.build.block
        self.build.branch(head)
        for phi, first, after in zip((turn.index, *turn.carried), (start, *carried), following, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(after, end)
        self.build.position_at_end(behind)

    def call(self, function: Any, *arguments: Any) -> Any:
        return self.build.call(function, arguments)

    # -- counts and places

    def least(self, first: Any, second: Any) -> Any:
        return self.build.select(self.build.icmp_signed("<", first, second), first, second)

    def rounded_up(self, number: Any, step: int) -> Any:
        """To a multiple of a power of two."""
        return self.build.and_(self.build.add(number, count(step - 1)), count(-step))

    def at(self, place: Any, *distance: Any) -> Any:
        """The place that lies the product of all these behind another one."""
        numbers = distance[0]
        for factor in distance[1:]:
            numbers = self.build.mul(numbers, factor)
        return self.build.gep(place, [numbers])

    # -- numbers and vectors

    def number(self, value: float) -> Any:
        return ir.Constant(self.vectors.number, value)

    def filled(self, value: float) -> Any:
        """A vector of one constant."""
        return ir.Constant(self.vectors.vector, [value] * self.vectors.lanes)

    def spread(self, number: Any) -> Any:
        """A vector of one number."""
        undefined = ir.Constant(self.vectors.vector, ir.Undefined)
        first = self.build.insert_element(undefined, number, INT(0))
        return self.build.shuffle_vector(first, undefined, ir.VectorType(INT, self.vectors.lanes)(None))

    def read(self, place: Any) -> Any:
        """A vector; numbers are aligned as such only."""
        loaded = self.build.load(self._as_vector(place))
        loaded.align = self.vectors.num_bits // 8
        return loaded

    def read_halves(self, place: Any) -> Any:
        """A vector of numbers that lie as bfloat16: the upper halves of numbers of 32 bits."""
        kind, wide = (ir.VectorType(each, self.vectors.lanes) for each in (HALF, INT))
        loaded = self.build.load(self.build.bitcast(place, kind.as_pointer()))
        loaded.align = 2
        shifted = self.build.shl(self.build.zext(loaded, wide), wide([16] * self.vectors.lanes))
        return self.build.bitcast(shifted, self.vectors.vector)

    def write(self, vector: Any, place: Any) -> None:
        self.build.store(vector, self._as_vector(place)).align = self.vectors.num_bits // 8

    def _as_vector(self, place: Any) -> Any:
        return self.build.bitcast(place, self.vectors.vector.as_pointer())

    def multiply_add(self, first: Any, second: Any, added: Any) -> Any:
        """Rounded once."""
        return self._own("fma", self.vectors.vector, first, second, added)

    def greater(self, first: Any, second: Any) -> Any:
        return self._own("maxnum", self.vectors.vector, first, second)

    def root(self, vector: Any) -> Any:
        return self._own("sqrt", self.vectors.vector, vector)

    def magnitude(self, vector: Any) -> Any:
        return self._own("fabs", self.vectors.vector, vector)

    def largest(self, vector: Any) -> Any:
        return self._own("vector.reduce.fmax", self.vectors.number, vector)

    def total(self, vector: Any) -> Any:
        """Of halves, and halves of those, in an order that depends on nothing."""
        lanes, build = self.vectors.lanes, self.build
        while lanes > 1:
            lanes //= 2
            low, high = (ir.VectorType(INT, lanes)([*range(first, first + lanes)]) for first in (0, lanes))
            vector = build.fadd(build.shuffle_vector(vector, vector, low), build.shuffle_vector(vector, vector, high))
        return build.extract_element(vector, INT(0))

    def totals(self, vectors: Sequence[Any]) -> Any:
        """Of as many vectors as one has lanes, the vector of their totals: halves of two are added side by side, then
        quarters of two of those, and so on."""
        lanes, build = self.vectors.lanes, self.build
        while (num_pairs := len(vectors) // 2) > 0:
            starts = [start + of for start in range(0, lanes, 2 * num_pairs) for of in (0, lanes)]
            masks = [
                ir.VectorType(INT, lanes)([start + first + lane for start in starts for lane in range(num_pairs)])
                for first in (0, num_pairs)
            ]
            pairs = zip(vectors[:num_pairs], vectors[num_pairs:], strict=True)
            vectors = [build.fadd(*(build.shuffle_vector(*pair, mask) for mask in masks)) for pair in pairs]
        return vectors[0]

    def power_of_two(self, vector: Any) -> Any:
        """2 to the power of numbers that are 0 or less: 0 where that is below what a number can be.

        The exponent's whole part goes into the result's bits, the rest, at most a half, into a series.
        """
        is_single = self.vectors.num_bits == 32
        mantissa, bias, degree = (23, 127, 7) if is_single else (52, 1023, 13)
        kind = ir.VectorType(ir.IntType(self.vectors.num_bits), self.vectors.lanes)
        bounded = self.greater(vector, self.filled(-bias))
        whole = self._own("rint", self.vectors.vector, bounded)
        rest = self.build.fsub(bounded, whole)
        terms = [math.log(2) ** power / math.factorial(power) for power in range(degree + 1)]
        series = self.filled(terms[-1])
        for term in reversed(terms[:-1]):
            series = self.multiply_add(series, rest, self.filled(term))
        exponent = self.build.add(self.build.fptosi(whole, kind), kind([bias] * self.vectors.lanes))
        shifted = self.build.shl(exponent, kind([mantissa] * self.vectors.lanes))
        return self.build.fmul(series, self.build.bitcast(shifted, self.vectors.vector))

    def prefetch(self, place: Any) -> None:
        """Has memory fetch what lies there; nothing happens where nothing is."""
        byte, name = ir.IntType(8).as_pointer(), "llvm.prefetch.p0"
        kind = ir.FunctionType(VOID, [byte, INT, INT, INT])
        module = self.function.module
        fetch = module.globals.get(name) or ir.Function(module, kind, name)
        self.build.call(fetch, [self.build.bitcast(place, byte), INT(0), INT(3), INT(1)])

    def _own(self, name: str, result: Any, *arguments: Any) -> Any:
        """Calls a function of LLVM's that every processor has."""
        full_name, module = f"llvm.{name}.{self.vectors.suffix}", self.function.module
        kinds = [argument.type for argument in arguments]
        known = module.globals.get(full_name) or ir.Function(module, ir.FunctionType(result, kinds), full_name)
        return self.build.call(known, arguments)


def count(number: int) -> Any:
    """A constant."""
    return ir.Constant(COUNT, number)


class Compiled:
    """Functions in memory, as long as this lives."""

    def __init__(self, module: Any) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features, opt=2
        )
        parsed = llvm.parse_assembly(str(module))
        options = llvm.create_pipeline_tuning_options(speed_level=1)
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(parsed, passes)
        self._engine = llvm.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Of a function that is an entry."""
        return int(self._engine.get_function_address(name))
