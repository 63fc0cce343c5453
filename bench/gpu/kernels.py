"""`gpu-kernels`: every way to attend over a past that is here, beside maths in fp64; the fastest right one is named.

A way takes the queries of all rows of a window folded into blocks, one for each KV head, and a past in a roomier
buffer, as a pool has it; what it gives is joined to the window as static steps join it. Runs are timed as a CUDA graph
over many caches, as a pass goes through its layers, so that neither the host nor what a cache of the device holds is
measured.
"""

import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bench.common import say
from bench.gpu.checks import Report, bounded, make_gpu_parser, parse_device
from bench.gpu.measure import Clock, attempt, measure_bandwidth
from slipstream.engine.attention import Kernel, PastAttention, by_flash, by_matmul, flash_of, join_window
from slipstream.engine.kernels import get_kernel
from slipstream.engine.kv_cache import KVCache, Layout
from slipstream.engine.segments import Segment
from slipstream.engine.static.accord import Accord
from slipstream.engine.static.glue import compiled
from slipstream.engine.static.pool import KVPool
from slipstream.engine.static.step import Recorder
from slipstream.engine.static.steps import CAPACITIES
from slipstream.engine.static.trials import choose_join
from slipstream.engine.static.windows import Join

PASTS, ROWS, HEADS, HEAD_DIM = (1_024, 8_192, 25_088), (1, 8, 16, 32), ((28, 4), (64, 8)), 128
TINY_PASTS, TINY_HEAD_DIM = (64, 200), 16
ROOM = 512
"""Of the buffer behind the past: what lies there must not count."""
JOINED_LAYERS = 28
"""Of what joins are compared over."""
COLD_BYTES = 256 << 20
"""Of caches that one run goes through; more than a device keeps close at hand."""
MOST_ERROR, MOST_OVER_READING = 2e-2, 2.0
JUDGED_PAST = 8_192
"""Least past whose time is judged: reading a shorter one takes no longer than launching the kernels that do it."""

# -- ways to attend ---------------------------------------------------------------------------------------------------


def _by_varlen(query: Tensor, keys: Tensor, values: Tensor, scale: float, *, as_heads: bool) -> tuple[Tensor, Tensor]:
    """Torch's packed flash attention over one sequence. The queries are heads of one row, for which it splits the keys
    over the device, or rows of as many heads as there are of keys. Older versions know fewer keywords."""
    from torch.nn.attention import varlen

    kv_heads, num_queries, head_dim = query.shape
    past, num_rows = keys.shape[1], 1 if as_heads else num_queries
    known = inspect.signature(varlen.varlen_attn).parameters
    bounds = _bounds(num_rows, past, query.device)
    asked: dict[str, Any] = {"enable_gqa": as_heads, "seqused_k": bounds[1, 1:], "scale": scale}
    output, lse = varlen.varlen_attn(
        query.reshape(1, -1, head_dim) if as_heads else query.transpose(0, 1).contiguous(),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        bounds[0],
        bounds[1],
        num_rows,
        _capacity(past) if "seqused_k" in known else past,
        return_aux=varlen.AuxRequest(lse=True),
        **{name: value for name, value in asked.items() if name in known},
    )
    return (output.view(query.shape) if as_heads else output.transpose(0, 1)), lse.view(kv_heads, num_queries)


def _capacity(past: int) -> int:
    """What a static step takes for the most keys that there may be, by which the kernel splits them over the device."""
    return next((size for size in CAPACITIES if size >= past), past)


@lru_cache(maxsize=64)
def _bounds(num_rows: int, past: int, device: torch.device) -> Tensor:
    """Where the one sequence begins and ends, of queries and of keys. Kept, as a graph takes nothing from the host."""
    return torch.tensor([[0, num_rows], [0, past]], dtype=torch.int32, device=device)


def _by_flash_package(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`flash-attn`: all queries of a KV head are rows of one block."""
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found,unused-ignore]

    batch = (tensor.transpose(0, 1)[None] for tensor in (query, keys, values))
    output, lse, *_ = flash_attn_with_kvcache(*batch, softmax_scale=scale, causal=False, return_softmax_lse=True)
    return output[0].transpose(0, 1), lse[0]


def _by_flashinfer(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """FlashInfer, whose logarithms have base 2."""
    from flashinfer import single_prefill_with_kv_cache  # type: ignore[import-not-found,unused-ignore]

    output, lse = single_prefill_with_kv_cache(
        query.transpose(0, 1).contiguous(), keys, values, sm_scale=scale, kv_layout="HND", return_lse=True
    )
    return output.transpose(0, 1), lse.T * math.log(2)


Way = Callable[["Case"], Tensor]
Heads = tuple[int, int]
"""Of queries, and of keys and values."""


def choose_joins(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[Heads, str]:
    """By heads, "compiled" or "plain": what static steps join with, as a service chooses it at its start."""
    chosen, like = dict[Heads, str](), torch.empty(0, dtype=dtype, device=device)
    for heads in HEADS:
        pool = KVPool(JOINED_LAYERS, 0, heads[1], head_dim, like)
        join = choose_join(pool, heads[0], Recorder(device), Accord())
        chosen[heads] = "plain" if join is join_window else "compiled"
    return chosen


def make_join(chosen: Mapping[Heads, str], heads: Heads) -> Join:
    """Code of its own for each caller: what is compiled takes tensors of a few layouts, which ways do not share."""
    return compiled(join_window) if chosen.get(heads) == "compiled" else join_window


def _joined(attend_past: PastAttention, join_of: Callable[[Heads], Join], case: "Case") -> Tensor:
    """The past's attention and the window's in one, as `JoinedWindows` has them; one row sees all there is, and needs
    no join."""
    kv_heads = case.keys.shape[0]
    folded = case.query.reshape(kv_heads, -1, case.query.shape[-1])
    if case.num_rows == 1:
        return attend_past(folded, *case.seen, case.scale)[0].reshape(case.query.shape)
    keys, values = (held[:, : case.past] for held in case.seen)
    output, lse = attend_past(folded, keys, values, case.scale)
    join = join_of((len(case.query), kv_heads))
    joined = join((output[None], lse[None]), folded[None], *case.window, case.window_mask, case.scale)
    return joined.reshape(case.query.shape)


def _whole(kernel: Kernel, case: "Case") -> Tensor:
    return kernel.attend(case.query, *case.seen, case.segment, case.scale)


def make_ways(
    device: torch.device, dtype: torch.dtype, joins: Mapping[Heads, str] = MappingProxyType({})
) -> dict[str, Callable[[], Way]]:
    """By name, what makes the way, or fails where it is not here. `joins`: see `choose_joins`; plain ones without."""

    def joined_by(attend_past: PastAttention) -> Way:
        return partial(_joined, attend_past, cache(partial(make_join, joins)))

    whole = {name: partial(lambda n: partial(_whole, get_kernel(n, device, dtype)), name) for name in ("sdpa", "flash")}
    pasts: dict[str, PastAttention] = {
        "matmul": by_matmul,
        "torch flash": by_flash,
        "varlen": partial(_by_varlen, as_heads=True),
        "varlen rows": partial(_by_varlen, as_heads=False),
        "flash-attn": _by_flash_package,
        "flashinfer": _by_flashinfer,
    }
    joined = {f"joined, {name}": partial(joined_by, attend) for name, attend in pasts.items()}
    swapped = {
        f"joined, varlen {name}": partial(partial, _under, partial(flash_of, name), joined_by(pasts["varlen"]))
        for name in ("FA3", "FA4")
    }
    return {**whole, **joined, **swapped}


def _under(context: Callable[[], Any], way: Way, case: "Case") -> Tensor:
    with context():
        return way(case)


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A window over a past: query [heads, rows, head_dim], keys and values [kv_heads, past + rows + room, head_dim]."""

    query: Tensor
    keys: Tensor
    values: Tensor
    past: int

    @property
    def num_rows(self) -> int:
        return self.query.shape[1]

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    @property
    def seen(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the past and the window."""
        return self.keys[:, : self.past + self.num_rows], self.values[:, : self.past + self.num_rows]

    @cached_property
    def segment(self) -> Segment:
        layout = Layout.HEAD_TOKEN_DIM
        cache = KVCache(1, capacity=self.keys.shape[1], key_layout=layout, value_layout=layout)
        return Segment(0, self.num_rows, cache, self.past, self.query.device, self.query.dtype)

    @cached_property
    def window(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the window alone, [1, kv_heads, rows, head_dim], as a step has them beside its pool."""
        keys, values = (held[None, :, self.past :].contiguous() for held in self.seen)
        return keys, values

    @cached_property
    def window_mask(self) -> Tensor:
        """As a step has it for all of its layers, [1, 1, rows of a group, rows]."""
        return self.segment.window_mask.float().repeat(len(self.query) // self.keys.shape[0], 1)[None, None]

    @property
    def kv_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.seen)

    def maths(self) -> Tensor:
        """The same in fp64, straight from the definition."""
        kv_heads = self.keys.shape[0]
        keys, values = (tensor.double() for tensor in self.seen)
        query = self.query.double().reshape(kv_heads, -1, self.query.shape[-1])
        scores = query @ keys.transpose(1, 2) * self.scale
        rows = torch.arange(self.num_rows, device=scores.device).repeat(len(self.query) // kv_heads)
        hidden = torch.arange(scores.shape[-1], device=scores.device) > self.past + rows[:, None]
        return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ values).view(self.query.shape)


def make_case(
    heads: tuple[int, int], head_dim: int, past: int, num_rows: int, device: torch.device, dtype: torch.dtype, seed: int
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)
    shapes = (heads[0], num_rows, head_dim), *[(heads[1], past + num_rows + ROOM, head_dim)] * 2
    with torch.inference_mode():  # compiled code tells tensors made there from others
        query, keys, values = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes)
    return Case(query, keys, values, past)


def has_fixed_bits(way: Way, case: Case) -> bool:
    """Whether rows come out alike, bit by bit, whatever fills up the window behind them."""
    whole = way(case)
    for real in {1, case.num_rows // 2, case.num_rows - 1} - {0}:
        filled = replace(case, query=case.query.clone(), keys=case.keys.clone(), values=case.values.clone())
        filled.query[:, real:] *= -1
        for rows in (filled.keys, filled.values):
            rows[:, case.past + real :] *= -1
        if not torch.equal(way(filled)[:, :real], whole[:, :real]):
            return False
    return True


def has_bits_of_one_row(way: Way, case: Case) -> bool:
    """Whether a row comes out alike in the middle of a window and as the first of the next one, which has more past:
    what makes windows of a fixed width write plain decoding's text."""
    half = case.num_rows // 2
    later = replace(case, query=case.query.roll(-half, dims=1), past=case.past + half)
    return torch.equal(way(later)[:, 0], way(case)[:, half])


# -- measuring --------------------------------------------------------------------------------------------------------


def time_cold(clock: Clock, way: Way, case: Case) -> float:
    """Seconds of one run, over caches that are not at hand; from a CUDA graph where there is CUDA."""
    if clock.device.type != "cuda":
        return clock.time(lambda: way(case))["s"]
    count = max(2, -(-COLD_BYTES // case.kv_bytes))
    with torch.inference_mode():
        cases = [replace(case, keys=case.keys.clone(), values=case.values.clone()) for _ in range(count)]

        def attend_all() -> None:
            for one in cases:
                way(one)

        replay = Recorder(clock.device).record(attend_all)
    return clock.time(replay)["s"] / count


def measure_way(way: Way, case: Case, clock: Clock, bandwidth: float) -> dict[str, Any]:
    with torch.inference_mode():
        exact = case.maths()
        error = float((way(case).double() - exact).norm() / exact.norm())
        bits = has_fixed_bits(way, case)
        shifted = has_bits_of_one_row(way, case)
    seconds = attempt(partial(time_cold, clock, way, case))
    timed = (
        seconds if isinstance(seconds, dict) else {"s": seconds, "over_reading": seconds * bandwidth / case.kv_bytes}
    )
    return {"past": case.past, "error_of_maths": error, "fixed_bits": bits, "bits_of_one_row": shifted, **timed}


def measure_ways(given: Namespace, report: Report) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What is true of all of them, and by way and case what was found, or {"error": ...}."""
    bandwidth = measure_bandwidth(Clock(given.device, given.repeats), (1 << 20) if given.tiny else (4 << 30))
    pasts, head_dim = (TINY_PASTS, TINY_HEAD_DIM) if given.tiny else (PASTS, HEAD_DIM)
    clock, found = Clock(given.device, given.repeats), dict[str, dict[str, Any]]()
    facts: dict[str, Any] = {"bandwidth_bytes_per_s": bandwidth}
    with bounded() as bound:
        joins = choose_joins(given.device, given.dtype, head_dim)
        facts["joins"] = {f"{heads}/{kv_heads} heads": name for (heads, kv_heads), name in joins.items()}
        for name, make in make_ways(given.device, given.dtype, joins).items():
            say(f"gpu-kernels: {name}")
            found[name] = attempt(partial(_measure_cases, make, pasts, head_dim, clock, given.dtype, bandwidth))
    report.in_time(bound)
    return facts, found


def _measure_cases(
    make: Callable[[], Way], pasts: Sequence[int], head_dim: int, clock: Clock, dtype: torch.dtype, bandwidth: float
) -> dict[str, Any]:
    way, rows = make(), {}
    for heads, past, num_rows in product(HEADS, pasts, ROWS):
        case = make_case(heads, head_dim, past, num_rows, clock.device, dtype, seed=1)
        rows[f"{heads[0]}/{heads[1]} heads, {past} + {num_rows}"] = measure_way(way, case, clock, bandwidth)
    return rows


def summary(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Of one way: the worst of its cases, and the seconds of all together, which decide."""
    if "error" in rows:
        return dict(rows)
    cases = list(rows.values())
    worst = {
        "error_of_maths": max(case["error_of_maths"] for case in cases),
        "fixed_bits": all(case["fixed_bits"] for case in cases),
        "bits_of_one_row": all(case["bits_of_one_row"] for case in cases),
    }
    untimed = [case["error"] for case in cases if "error" in case]
    if untimed:
        return {**worst, "error": untimed[0]}
    return {
        **worst,
        "s_of_all": sum(case["s"] for case in cases),
        "over_reading": {name: round(case["over_reading"], 2) for name, case in rows.items()},
    }


def decide(ways: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The fastest way that is right: near maths, and with fixed bits."""
    right = {
        name: way["s_of_all"]
        for name, way in ways.items()
        if "error" not in way and way["error_of_maths"] < MOST_ERROR and way["fixed_bits"]
    }
    return min(right, key=right.__getitem__) if right else None


def judge_times(report: Report, chosen: str, cases: Mapping[str, Mapping[str, Any]]) -> None:
    for name, case in cases.items():
        told, over = f"{chosen}: {name}: time over KV bytes/bandwidth", round(case["over_reading"], 2)
        if case["past"] < JUDGED_PAST:
            report.shows(told, over)
        else:
            report.at_most(told, over, MOST_OVER_READING)


def main(argv: Sequence[str]) -> None:
    given = parse_device(make_gpu_parser("gpu-kernels", "Ways to attend over a past.", repeats=20), argv)
    given.dtype, report = torch.bfloat16, Report(given)
    facts, found = measure_ways(given, report)
    ways = {name: summary(rows) for name, rows in found.items()}
    chosen = decide(ways)
    report.equals("a way that is right was found", chosen is not None, True)
    for name, way in ways.items():
        if "error" not in way:
            report.equals(f"{name}: error below {MOST_ERROR:g}", way["error_of_maths"] < MOST_ERROR, True)
    if chosen is not None:
        judge_times(report, chosen, found[chosen])
    facts |= {"ways": ways, "cases": found}
    report.finish(series=("ways", "cases"), labels=(), decision=chosen, brief=_brief(ways), **facts)


def _brief(ways: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: {key: value for key, value in way.items() if key != "over_reading"} for name, way in ways.items()}
