"""Which static step a pass takes: by its sessions, their rows and the room of their caches."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.engine.forward import DecodeState, Runner
from slipstream.engine.fused_layers import FusedLayers, FusedRunner, can_fuse, glue_shape
from slipstream.engine.kv_cache import LayerBuffers, round_up
from slipstream.engine.segments import PassRows
from slipstream.engine.static.glue import choose_glue
from slipstream.engine.static.pool import Extent, KVPool, PooledCache
from slipstream.engine.static.step import MAX_AHEAD, Entry, Recorder, RunLayers, StaticStep, StepParts
from slipstream.engine.static.widths import WIDTHS, WidthTimes, choose_width
from slipstream.engine.static.windows import MakeWindows, Places, StepShape, WholeWindows, known_windows
from slipstream.engine.thread import finish_work, is_device_lost
from slipstream.errors import ModelNotUsable
from slipstream.logs import get_logger
from slipstream.speculation.protocol import TokenTree

NUM_SESSIONS = (1, 2, 4)
NUM_ROWS = (1, 2, 4, 8, 16, 32)
CAPACITIES = (4096, 8192, 16384, 32768, 65536)
MAX_ERROR = 2e-2
"""Of a way to attend in 16 bits, beside the largest number that there is."""
_REPEATS = 5


class StaticSteps:
    """The static steps of one model, each recorded when it is first needed. Belongs to the model's thread.

    Args:
        runner: whose caches lie in the pool from now on.
        num_bytes: of the pool.
        num_axes: of position ids.
        width: above 0, the rows of every step, one session at a time: then a token has the same bits in any window.

    Raises:
        ModelNotUsable: the device has no room for the pool.
    """

    def __init__(self, runner: Runner, num_bytes: int, num_axes: int, *, width: int = 0) -> None:
        attention = cast(Any, runner.decoder.layers[0]).self_attn
        like, head_dim = attention.k_proj.weight, attention.head_dim
        num_rows = num_bytes // runner.kv_bytes_per_token
        try:
            self.pool = KVPool(runner.num_layers, num_rows, like.shape[0] // head_dim, head_dim, like)
        except torch.OutOfMemoryError as error:
            raise ModelNotUsable(
                f"{num_bytes / 1e9:.1f} GB for keys and values do not fit on {like.device}; set --kv-budget-mb and"
                " --prefix-cache-mb, or start with --static-steps off"
            ) from error
        self._width = width
        self.fixed_widths: dict[int, int] = {}
        """By capacity, the rows of the steps of one chain alone, see `fix_widths`; 0: as many as it needs."""
        self._steps: dict[StepShape, StaticStep | None] = {}
        runner.pool = self.pool
        self.attention, make_windows = self._choose_windows(int(runner.decoder.config.num_attention_heads))
        most_rows = width or NUM_SESSIONS[-1] * NUM_ROWS[-1]
        vocab_size = cast(Any, runner.lm_head).weight.shape[0]
        logits = torch.empty(most_rows, vocab_size, dtype=torch.float32, device=like.device)
        decoder, recorder = runner.decoder, Recorder(like.device)
        self.layers = "upstream"
        """How layers are computed: by upstream's own code, or fused, by the name of what lies between the products."""
        run_layers: RunLayers = runner.run_through
        if isinstance(runner, FusedRunner):
            self.layers, run_layers = "exact", runner.fused
        elif can_fuse(decoder, num_axes):
            self.layers, glue = choose_glue(glue_shape(decoder), like)
            run_layers = FusedLayers(decoder, lambda _: glue)
        self._parts = StepParts(
            decoder.embed_tokens, run_layers, runner.lm_head, self.pool, make_windows, num_axes, logits, recorder
        )

    def fix_widths(self) -> None:
        """Has the windows of sessions that step alone take a fixed number of rows, where that costs next to nothing;
        a token then has the same bits in any window that fits, as with a `width`. Trees, longer windows and sessions
        that share a pass take steps of other shapes, as ever."""
        assert not self._width, "all windows have that width"
        for capacity in self._needed_capacities():
            times = self._times(capacity)
            width = self.fixed_widths[capacity] = 0 if times is None else choose_width(times)
            for other in WIDTHS:
                if other != width:
                    self._steps.pop(StepShape(1, other, capacity), None)
            times_s = {} if times is None else vars(times)
            get_logger().info("static_steps.fixed_width", capacity=capacity, width=width, **times_s)

    def _times(self, capacity: int) -> WidthTimes | None:
        """None where there is nothing to compare."""
        one = self._make(StepShape(1, 1, capacity))
        whole = replace(self._parts, make_windows=WholeWindows)
        fixed = {width: self._make(StepShape(1, width, capacity), whole) for width in WIDTHS}
        granule = round_up(1)
        extent = self.pool.take(min(capacity, self.pool.num_free // granule * granule), self.pool)
        if extent is None or one is None:
            return None
        try:
            fixed_s = {width: _step_s(step, extent, width) for width, step in fixed.items() if step is not None}
            return WidthTimes(_step_s(one, extent, 1), fixed_s)
        finally:
            self.pool.give_back(extent)

    def prepare(self) -> None:
        """Records the steps of one session, so that no caption waits for that: those that a pool of this size needs."""
        for capacity in self._needed_capacities():
            least = self.fixed_widths.get(capacity, 0)
            for num_rows in (self._width,) if self._width else NUM_ROWS:
                shape = StepShape(1, num_rows, capacity)
                if shape not in self._steps and num_rows >= least:
                    self._make(shape)

    def _needed_capacities(self) -> Sequence[int]:
        most = next((size for size in CAPACITIES if size >= self.pool.num_free), CAPACITIES[-1])
        return [size for size in CAPACITIES if size <= most]

    def run(self, batch: Sequence[tuple[DecodeState, Sequence[int] | TokenTree]]) -> list[PassRows] | None:
        """As `VideoLM.step`, but for the wait at its end; None, and nothing has happened, for a batch that no static
        step fits."""
        entries = _entries(batch)
        step = None if entries is None else self._find(entries)
        if entries is None or step is None:
            return None
        found = step.run(entries)
        for (state, _), entry in zip(batch, entries, strict=True):
            state.cache.advance(len(entry.token_ids))
        return found

    def write_ahead(self, batch: Sequence[tuple[DecodeState, int]], num_tokens: int) -> list[list[int]] | None:
        """See `VideoLM.write_ahead`."""
        num_tokens = min(num_tokens, MAX_AHEAD)
        for state, _ in batch:
            state.cache.reserve(state.num_tokens + num_tokens)
        entries = None if self._width or self.fixed_widths else _entries([(state, (token,)) for state, token in batch])
        step = None if entries is None else self._find(entries)
        if entries is None or step is None:
            return None
        written = step.write_ahead(entries, num_tokens)
        for state, _ in batch:
            state.cache.advance(num_tokens)
        return written

    def _find(self, entries: Sequence[Entry]) -> StaticStep | None:
        shape = self._shape_of(entries)
        if shape is None:
            return None
        return self._steps[shape] if shape in self._steps else self._make(shape)

    def _shape_of(self, entries: Sequence[Entry]) -> StepShape | None:
        """The least that fits."""
        most_rows = max(len(entry.token_ids) for entry in entries)
        sessions = _at_least(len(entries), (1,) if self._width else NUM_SESSIONS)
        rows = _at_least(most_rows, (self._width,) if self._width else NUM_ROWS)
        capacity = _at_least(max(entry.extent.length for entry in entries), CAPACITIES)
        if capacity is not None and len(entries) == 1 and entries[0].tree is None:
            fixed = self.fixed_widths.get(capacity, 0)
            rows = fixed if most_rows <= fixed else rows
        return None if sessions is None or rows is None or capacity is None else StepShape(sessions, rows, capacity)

    def _make(self, shape: StepShape, parts: StepParts | None = None) -> StaticStep | None:
        """None where it cannot be recorded: passes of this shape go on without."""
        started = time.perf_counter()
        step = None
        try:
            step = StaticStep(parts or self._parts, shape)
        except RuntimeError as error:
            if is_device_lost(error) and "captur" not in str(error):  # what a recording does not allow harms nothing
                raise
            get_logger().warning("static_step.failed", shape=str(shape), error=str(error).partition("\n")[0])
            if "out of memory" in str(error):
                return None  # it may go well another time
        self._steps[shape] = step
        get_logger().debug("static_step.recorded", shape=str(shape), seconds=round(time.perf_counter() - started, 3))
        return step

    def _choose_windows(self, num_heads: int) -> tuple[str, MakeWindows]:
        """The fastest way to attend that is right here; with a fixed width the one whose bits stay the same, as with a
        pool in which no video has room."""
        if self._width or self.pool.num_free < CAPACITIES[0]:
            return "whole", WholeWindows
        ways = known_windows(self.pool)
        timed = []
        for name, make in ways:
            try:
                seconds, error = _try(self.pool, make, num_heads)
            except (RuntimeError, ImportError, TypeError) as failure:  # of another torch, too
                if is_device_lost(failure):
                    raise
                get_logger().info("static_attention.unusable", name=name, error=str(failure).partition("\n")[0])
                continue
            if error <= MAX_ERROR:
                timed.append((seconds, name, make))
        assert timed, "a masked attention works everywhere"
        _, name, make = min(timed, key=lambda way: way[0])
        return name, make


NUM_TRIED = 8
"""Rows of the windows that ways to attend are compared on."""


def _try(pool: KVPool, make: MakeWindows, num_heads: int) -> tuple[float, float]:
    """Seconds of the attention of one layer and the windows of two sessions, and its largest error beside the largest
    number, in fp64."""
    length = min(CAPACITIES[0], pool.num_free // 2)
    extents = [cast(Extent, pool.take(size, pool)) for size in (length // 2, length)]
    try:
        with torch.inference_mode():
            return _timed_and_compared(pool, make, num_heads, extents[::-1])
    finally:
        for extent in extents:
            pool.give_back(extent)


def _timed_and_compared(
    pool: KVPool, make: MakeWindows, num_heads: int, extents: Sequence[Extent]
) -> tuple[float, float]:
    like, head_dim = pool.keys[0], pool.keys[0].shape[-1]
    generator = torch.Generator(like.device).manual_seed(0)
    for extent in extents:
        for held in (pool.view(0, extent).keys, pool.view(0, extent).values):
            held.normal_(generator=generator)
    past = [extent.length - NUM_TRIED * (1 + index) for index, extent in enumerate(extents)]
    shape = StepShape(len(extents), NUM_TRIED, extents[0].length)
    places = _places(shape, extents, past, like.device)
    size = (num_heads, shape.num_all_rows, head_dim)
    query = torch.randn(size, dtype=like.dtype, device=like.device, generator=generator)
    keys, values = (held[0][places.write_rows].transpose(0, 1) for held in (pool.keys, pool.values))
    windows = make(pool, places)
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        windows.begin()
        output = windows(0, query, keys, values, head_dim**-0.5)
        finish_work(like.device)
        seconds.append(time.perf_counter() - started)
    by_session = zip(output.split(NUM_TRIED), query.split(NUM_TRIED, dim=1), extents, past, strict=True)
    errors = [_error(rows, asked, pool.view(0, extent), seen) for rows, asked, extent, seen in by_session]
    return statistics.median(seconds), max(errors)


def _step_s(step: StaticStep, extent: Extent, num_rows: int) -> float:
    """Seconds of a step at the end of an extent, the median of some."""
    past, token_ids = extent.length - num_rows, [0] * num_rows
    entry = Entry(extent, past, token_ids, range(past, extent.length))
    seconds = []
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        step.run([entry])
        finish_work(step.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _places(shape: StepShape, extents: Sequence[Extent], past: Sequence[int], device: torch.device) -> Places:
    rows = torch.arange(shape.num_rows, device=device)
    firsts = [extent.start + seen for extent, seen in zip(extents, past, strict=True)]
    return Places(
        shape,
        torch.tensor([extent.start for extent in extents], device=device),
        torch.tensor([extent.length for extent in extents], device=device),
        torch.tensor(past, device=device),
        torch.cat([first + rows for first in firsts]),
        (rows[:, None] >= rows).long().expand(shape.num_sessions, -1, -1),
    )


def _error(output: Tensor, query: Tensor, held: LayerBuffers, past: int) -> float:
    """Of [rows, heads, d] behind `past` tokens, beside the largest number of the same in fp64."""
    num_heads, num_rows, head_dim = query.shape
    keys, values = (rows[:, : past + num_rows].double() for rows in (held.keys, held.values))
    folded = query.double().reshape(len(keys), -1, head_dim)
    scores = folded @ keys.transpose(1, 2) * head_dim**-0.5
    unseen = torch.ones(num_rows, keys.shape[1], dtype=torch.bool, device=query.device)
    unseen = unseen.triu(1 + past).repeat(num_heads // len(keys), 1)
    right = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1) @ values
    right = right.view(num_heads, num_rows, head_dim).transpose(0, 1)
    return float((output.double() - right).abs().max() / right.abs().max())


def _entries(batch: Sequence[tuple[DecodeState, Sequence[int] | TokenTree]]) -> list[Entry] | None:
    """None when a session's rows do not lie in the pool as a step needs them."""
    entries = []
    for state, window in batch:
        tree = window if isinstance(window, TokenTree) else None
        if tree is not None and tree.num_cached:
            return None
        token_ids = window if not isinstance(window, TokenTree) else window.new_token_ids
        cache = state.cache
        cache.reserve(cache.length + len(token_ids))
        if not isinstance(cache, PooledCache) or cache.extent is None or not cache.is_whole:
            return None
        depths = range(len(token_ids)) if tree is None else tree.depths
        positions = [state.next_position + depth for depth in depths]
        entries.append(Entry(cache.extent, cache.length, token_ids, positions, tree))
    return entries


def _at_least(number: int, sizes: Sequence[int]) -> int | None:
    return next((size for size in sizes if size >= number), None)
