"""Which way to attend the static steps of a model take: the fastest here of those that are right."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.attention import join_window
from slipstream.engine.kv_cache import LayerBuffers
from slipstream.engine.static.accord import Accord
from slipstream.engine.static.glue import compiled
from slipstream.engine.static.pool import Extent, KVPool
from slipstream.engine.static.step import Recorder
from slipstream.engine.static.windows import (
    Join,
    MakeWindows,
    StepPlaces,
    StepShape,
    WholeWindows,
    fold,
    known_windows,
)
from slipstream.engine.thread import finish_work
from slipstream.engine.trial import MAX_ERROR, relative_error, tried
from slipstream.logs import get_logger

NUM_ROWS = 8
"""Of the windows that ways are compared on."""
MOST_TOKENS = {"cuda": 32_768, "cpu": 4096}
"""Of a session that ways are compared on. What a long video costs decides on a GPU; a CPU has no choice worth a start
that takes longer."""
_REPEATS = 5


def choose_windows(pool: KVPool, num_heads: int, recorder: Recorder, accord: Accord) -> tuple[str, MakeWindows]:
    """By its name. Recorded as a step's layers are: what the host takes to launch a way's kernels counts for nothing
    in a step, and would decide here. `num_heads` are those of queries at this rank."""
    timed: dict[str, float] = {}
    ways = dict(known_windows(pool, choose_join(pool, num_heads, recorder, accord)))
    for name, make in ways.items():
        measured = tried("static_attention", name, partial(_measure, pool, make, num_heads, recorder))
        if measured is None:
            continue
        seconds, error = measured
        get_logger().info("static_attention.tried", name=name, seconds=seconds, error=error)
        if error <= MAX_ERROR:
            timed[name] = seconds
    name = accord.agree(timed, fastest)
    return name, ways.get(name, WholeWindows)


def fastest(timed: Sequence[Mapping[str, float]]) -> str:
    """The way that is right at all ranks and whose slowest rank is the fastest, of the seconds that each rank tells."""
    usable = [name for name in timed[0] if all(name in of_rank for of_rank in timed)]
    return min(usable, key=lambda name: max(of_rank[name] for of_rank in timed), default="whole")


# -- joining ----------------------------------------------------------------------------------------------------------

MANY_SESSIONS, MANY_ROWS = 3, 5
"""Of samples that stand for any number of them."""


def known_joins(device: torch.device) -> Mapping[str, Callable[[], Join]]:
    """Beside upstream's operations, of which a window takes a dozen a layer."""
    return {"compiled": lambda: compiled(join_window)} if device.type == "cuda" else {}


def choose_join(pool: KVPool, num_heads: int, recorder: Recorder, accord: Accord) -> Join:
    """What joins windows to their past: what a compiler makes of it, if that works, is right, and is faster, at all
    ranks."""
    faster: dict[str, Join] = {}
    for name, make in known_joins(pool.keys[0].device).items():
        measured = tried("static_join", name, partial(_measure_join, pool, make, num_heads, recorder))
        if measured is None:
            continue
        join, seconds, plain_s, error = measured
        get_logger().info("static_join.tried", name=name, seconds=seconds, plain_s=plain_s, error=error)
        if error <= MAX_ERROR and seconds < plain_s:
            faster[name] = join
    return faster.get(accord.agree(list(faster), of_all), join_window)


def _measure_join(
    pool: KVPool, make: Callable[[], Join], num_heads: int, recorder: Recorder
) -> tuple[Join, float, float, float]:
    """The join, its seconds and those of upstream's operations, of one session, and its largest error."""
    join = make()
    samples = [_sample(pool.keys[0], num_heads, sessions) for sessions in (1, MANY_SESSIONS)]
    with torch.inference_mode():
        error = float(np.max([_join_error(join, sample) for sample in samples]))
        plain_s, seconds = (_join_s(each, samples[0], len(pool.keys), recorder) for each in (join_window, join))
    return join, seconds, plain_s, error


def of_all(said: Sequence[Sequence[str]]) -> str:
    """For `Accord.agree`: what every rank names; empty when there is nothing."""
    return next((name for name in said[0] if all(name in of_rank for of_rank in said)), "")


def fused_rows(
    make: Callable[..., Tensor], num_rows: int, num_heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [heads, rows, d] in the strides of those of `FusedLayers`: what is compiled for others
    is compiled anew in the middle of serving. `make` takes a shape."""
    rotated = make(num_rows, num_heads + kv_heads, head_dim).transpose(0, 1)
    packed = make(num_rows, num_heads + 2 * kv_heads, head_dim).transpose(0, 1)
    return rotated[:num_heads], rotated[num_heads:], packed[num_heads + kv_heads :]


JoinSample = tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor, Tensor, float]
"""What a `Join` takes."""


def _sample(like: Tensor, num_heads: int, num_sessions: int) -> JoinSample:
    """Of so many sessions; compiled code takes it for one of any number of them above one, and of any rows."""
    shape, (kv_heads, head_dim) = StepShape(num_sessions, MANY_ROWS, 0), like.shape[1:]
    generator = torch.Generator(like.device).manual_seed(0)

    def random(*size: int, dtype: torch.dtype = like.dtype) -> Tensor:
        return torch.randn(size, dtype=dtype, device=like.device, generator=generator)

    with torch.inference_mode():
        of_rows = fused_rows(random, shape.num_all_rows, num_heads, kv_heads, head_dim)
        query, keys, values = (fold(each, kv_heads, shape) for each in of_rows)
        lse = random(kv_heads * query.shape[2], num_sessions, dtype=torch.float32).T  # as `past_by_varlen` has it
        of_past = random(*query.shape), lse.reshape(query.shape[:-1])
        mask = random(num_sessions, 1, query.shape[2], MANY_ROWS, dtype=torch.float32)
        for each in (*of_past, query, keys, values, mask):
            for dim in (0, *range(2, 4 if each is mask else 3)):
                if each.shape[dim] > 1:
                    torch._dynamo.maybe_mark_dynamic(each, dim)
    return of_past, query, keys, values, mask, head_dim**-0.5


def _join_error(join: Join, sample: JoinSample) -> float:
    """Beside the largest number of the same in fp64."""
    (of_past, past_lse), query, keys, values, mask, scale = sample
    wide = query.double(), keys.double(), values.double(), mask.double()
    right = join_window((of_past.double(), past_lse.double()), *wide, scale)
    return relative_error(join(*sample).double(), right)


def _join_s(join: Join, sample: JoinSample, num_layers: int, recorder: Recorder) -> float:
    """Seconds of all layers, recorded."""
    output = torch.empty_like(sample[1])

    def run() -> None:
        for _ in range(num_layers):
            output.copy_(join(*sample))

    return _seconds(recorder.record(run), output.device)


# -- attending --------------------------------------------------------------------------------------------------------


def _measure(pool: KVPool, make: MakeWindows, num_heads: int, recorder: Recorder) -> tuple[float, float]:
    """Seconds of the attention of all layers and the windows of two sessions, and the largest error of the first layer
    beside the largest number, in fp64."""
    length = min(MOST_TOKENS[pool.keys[0].device.type], pool.num_free // 2)
    extents = [cast(Extent, pool.take(size, pool)) for size in (length // 2, length)]
    try:
        with torch.inference_mode():
            return _timed_and_compared(pool, make, num_heads, recorder, extents[::-1])
    finally:
        for extent in extents:
            pool.give_back(extent)


def _timed_and_compared(
    pool: KVPool, make: MakeWindows, num_heads: int, recorder: Recorder, extents: Sequence[Extent]
) -> tuple[float, float]:
    like, head_dim = pool.keys[0], pool.keys[0].shape[-1]
    generator = torch.Generator(like.device).manual_seed(0)
    for extent in extents:
        for held in (pool.view(0, extent).keys, pool.view(0, extent).values):
            held.normal_(generator=generator)
    past = [extent.length - NUM_ROWS * (1 + index) for index, extent in enumerate(extents)]
    shape = StepShape(len(extents), NUM_ROWS, extents[0].length)
    places = _places(shape, extents, past, like.device)
    random = partial(torch.randn, dtype=like.dtype, device=like.device, generator=generator)
    query, keys, values = fused_rows(random, shape.num_all_rows, num_heads, like.shape[1], head_dim)
    windows, output = make(pool, places), like.new_empty(shape.num_all_rows, num_heads, head_dim)

    def attend() -> None:
        windows.begin()
        of_layers = [windows(layer, query, keys, values, head_dim**-0.5) for layer in range(len(pool.keys))]
        output.copy_(of_layers[0])

    seconds = _seconds(recorder.record(attend), like.device)
    by_session = zip(output.split(NUM_ROWS), query.split(NUM_ROWS, dim=1), extents, past, strict=True)
    errors = [_error(rows, asked, pool.view(0, extent), seen) for rows, asked, extent, seen in by_session]
    return seconds, float(np.max(errors))  # NaN where one is


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of some runs."""
    seconds = []
    for _ in range(_REPEATS):
        finish_work(device)
        started = time.perf_counter()
        run()
        finish_work(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _places(shape: StepShape, extents: Sequence[Extent], past: Sequence[int], device: torch.device) -> StepPlaces:
    rows = torch.arange(shape.num_rows, device=device)
    firsts = [extent.start + seen for extent, seen in zip(extents, past, strict=True)]
    return StepPlaces(
        shape,
        torch.tensor([extent.start for extent in extents], device=device),
        torch.tensor([extent.length for extent in extents], device=device),
        torch.tensor(past, device=device),
        torch.cat([first + rows for first in firsts]),
        (rows[:, None] >= rows).long().expand(shape.num_sessions, -1, -1),
    )


def _error(output: Tensor, query: Tensor, held: LayerBuffers, past: int) -> float:
    """Of [rows, heads, d] behind `past` tokens, beside the largest number of the same in fp64. One KV head at a time:
    the pool has taken most of the memory."""
    num_rows, head_dim = query.shape[1:]
    unseen = torch.ones(num_rows, past + num_rows, dtype=torch.bool, device=query.device).triu(1 + past)
    by_head = zip(query.chunk(len(held.keys)), output.chunk(len(held.keys), dim=1), held.keys, held.values, strict=True)
    errors, largest = [], []
    for asked, found, keys, values in by_head:
        scores = asked.double() @ keys[: past + num_rows].double().T * head_dim**-0.5
        right = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1) @ values[: past + num_rows].double()
        errors.append((found.transpose(0, 1).double() - right).abs().max())
        largest.append(right.abs().max())
    return float(torch.stack(errors).max() / torch.stack(largest).max())
