"""Which static step a pass takes: by its sessions, their rows and the room of their caches."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.budget import available_bytes
from slipstream.engine.forward import Begun, DecodeState, Note, Runner
from slipstream.engine.fused_layers import FusedLayers, can_fuse, glue_shape
from slipstream.engine.fused_runner import FusedRunner
from slipstream.engine.kv_cache import KVCache, round_up
from slipstream.engine.segments import PassRows
from slipstream.engine.static.accord import Accord, first_complaint, rank_0s
from slipstream.engine.static.glue import choose_glue
from slipstream.engine.static.pool import Extent, KVPool, PooledCache
from slipstream.engine.static.step import MAX_AHEAD, Entry, Recorder, RunLayers, StaticStep, StepParts
from slipstream.engine.static.trials import choose_windows
from slipstream.engine.static.widths import WIDTHS, WidthTimes, choose_width
from slipstream.engine.static.windows import MakeWindows, StepShape, WholeWindows
from slipstream.engine.thread import finish_work, is_device_lost
from slipstream.errors import DeviceLost, ModelNotUsable
from slipstream.logs import get_logger
from slipstream.speculation.protocol import TokenTree

NUM_SESSIONS = (1, 2, 4)
NUM_ROWS = (1, 2, 4, 8, 16, 32)
CAPACITIES = (4096, 8192, 16384, 32768, 65536)
_REPEATS = 5
_DONE, _NO_ROOM, _FAILED = range(3)
"""What became of a step; the worst of all ranks counts."""
FIRST_PATIENCE, MOST_PATIENCE = 256, 65_536
"""Passes of a shape that go without a step for which there was no room, until it is tried again: twice as many each
time. To try takes runs that warm up, a wait and the allocator's empty cache."""


class StaticSteps:
    """The static steps of one model, each recorded when it is first needed. Belongs to the model's thread.

    Args:
        runner: whose caches lie in the pool from now on.
        num_bytes: of the pool.
        num_axes: of position ids.
        width: above 0, the rows of every step, one session at a time: then a token has the same bits in any window.
        accord: with the other ranks, of which each has steps of its own; None: there are none.

    Raises:
        ModelNotUsable: the device has no room for the pool.
    """

    def __init__(
        self, runner: Runner, num_bytes: int, num_axes: int, *, width: int = 0, accord: Accord | None = None
    ) -> None:
        attention = cast(Any, runner.decoder.layers[0]).self_attn
        like, head_dim = attention.k_proj.weight, attention.head_dim
        self._accord = accord or Accord()
        self.pool = _make_pool(self._accord, runner, num_bytes)
        self._width = width
        self.fixed_widths: dict[int, int] = {}
        """By capacity, the rows of the steps of one chain alone, see `fix_widths`; 0: as many as it needs."""
        self._steps: dict[StepShape, StaticStep | None] = {}
        self._no_room: dict[StepShape, _Patience] = {}
        runner.pool = self.pool
        make_windows = cast(MakeWindows, WholeWindows)
        self.attention = "whole"
        """How windows attend. With a fixed width by the way whose bits stay the same, as over a pool in which no video
        has room."""
        if not width and self.pool.num_free >= CAPACITIES[0]:
            num_heads = attention.q_proj.weight.shape[0] // head_dim
            trials = Recorder(like.device)  # of their own: what they took is free again, and steps take far less
            self.attention, make_windows = choose_windows(self.pool, num_heads, trials, self._accord)
            del trials
        most_rows = width or NUM_SESSIONS[-1] * NUM_ROWS[-1]
        vocab_size = cast(Any, runner.lm_head).out_features
        logits = torch.empty(most_rows, vocab_size, dtype=torch.float32, device=like.device)
        self.layers, run_layers = _choose_layers(runner, num_axes, like, self._accord)
        """How layers are computed: by upstream's own code, or fused, by the name of what lies between the products."""
        embed_tokens, head = runner.decoder.embed_tokens, runner.lm_head
        tail = num_axes, logits, Recorder(like.device), self._accord
        self._parts = StepParts(embed_tokens, run_layers, head, self.pool, make_windows, *tail)

    def fix_widths(self) -> None:
        """Has the windows of sessions that step alone take a fixed number of rows, where that costs next to nothing;
        a token then has the same bits in any window that fits, as with a `width`. Trees, longer windows and sessions
        that share a pass take steps of other shapes, as ever."""
        assert not self._width, "all windows have that width"
        for capacity in self._needed_capacities():
            times = self._times(capacity)
            width = self._accord.agree(0 if times is None else choose_width(times), rank_0s)
            self.fixed_widths[capacity] = width
            for other in WIDTHS:
                if other != width:
                    self._steps.pop(StepShape(1, other, capacity), None)
            times_s = {} if times is None else vars(times)
            get_logger().info("static_steps.fixed_width", capacity=capacity, width=width, **times_s)

    def _times(self, capacity: int) -> WidthTimes | None:
        """None where there is nothing to compare."""
        one = self.make(StepShape(1, 1, capacity))
        whole = replace(self._parts, make_windows=WholeWindows)
        fixed = {width: self.make(StepShape(1, width, capacity), whole) for width in WIDTHS}
        if one is None:
            return None
        granule = round_up(1)
        extent = self.pool.take(min(capacity, self.pool.num_free // granule * granule), self.pool)
        if extent is None:
            return None
        try:
            with self._accord.together():
                fixed_s = {width: _step_s(step, extent, width) for width, step in fixed.items() if step is not None}
                return WidthTimes(_step_s(one, extent, 1), fixed_s)
        finally:
            self.pool.give_back(extent)

    @property
    def missing(self) -> list[StepShape]:
        """What could not be recorded so far, and is done without."""
        return sorted([*(shape for shape, step in self._steps.items() if step is None), *self._no_room])

    def prepare(self) -> None:
        """Records the steps of one session, so that no caption waits for that: those that a pool of this size needs."""
        for capacity in self._needed_capacities():
            least = self.fixed_widths.get(capacity, 0)
            for num_rows in (self._width,) if self._width else NUM_ROWS:
                shape = StepShape(1, num_rows, capacity)
                if shape not in self._steps and num_rows >= least:
                    self.make(shape)

    def _needed_capacities(self) -> Sequence[int]:
        most = next((size for size in CAPACITIES if size >= self.pool.num_free), CAPACITIES[-1])
        return [size for size in CAPACITIES if size <= most]

    def run(self, batch: Sequence[tuple[DecodeState, Sequence[int] | TokenTree]]) -> list[PassRows] | None:
        """As `VideoLM.step`, but for the wait at its end; None, and nothing has happened, for a batch that no static
        step fits."""
        entries = self._entries(batch)
        step = None if entries is None else self._find(entries)
        if entries is None or step is None:
            return None
        found = self._run(step, [state for state, _ in batch], entries)
        for (state, _), entry in zip(batch, entries, strict=True):
            state.cache.advance(len(entry.token_ids))
        return found

    def write_ahead(self, batch: Begun, num_tokens: int, note: Note | None) -> list[list[int]] | None:
        """See `VideoLM.write_ahead`."""
        num_tokens = min(num_tokens, MAX_AHEAD)
        for state, _ in batch:
            self._reserve(state.cache, state.num_tokens + num_tokens)
        begun = [(state, (token,)) for state, token in batch]
        entries = None if self._width or self.fixed_widths else self._entries(begun)
        step = None if entries is None else self._find(entries)
        if entries is None or step is None:
            return None
        written = self._write(step, [state for state, _ in batch], entries, num_tokens, note)
        for state, _ in batch:
            state.cache.advance(num_tokens)
        return written

    def _reserve(self, cache: KVCache, num_tokens: int) -> None:
        cache.reserve(num_tokens)

    def _run(self, step: StaticStep, states: Sequence[DecodeState], entries: Sequence[Entry]) -> list[PassRows]:
        """Takes a step of the states' entries."""
        return step.run(entries)

    def _write(
        self,
        step: StaticStep,
        states: Sequence[DecodeState],
        entries: Sequence[Entry],
        num_tokens: int,
        note: Note | None,
    ) -> list[list[int]]:
        """Takes a step of the states' entries so many times."""
        return step.write_ahead(entries, num_tokens, note)

    def _entries(self, batch: Sequence[tuple[DecodeState, Sequence[int] | TokenTree]]) -> list[Entry] | None:
        """None when a session's rows do not lie in the pool as a step needs them."""
        entries = []
        for state, window in batch:
            tree = window if isinstance(window, TokenTree) else None
            if tree is not None and tree.num_cached:
                return None
            token_ids = window if not isinstance(window, TokenTree) else window.new_token_ids
            cache = state.cache
            self._reserve(cache, cache.length + len(token_ids))
            if not isinstance(cache, PooledCache) or cache.extent is None or not cache.is_whole:
                return None
            depths = range(len(token_ids)) if tree is None else tree.depths
            positions = [state.next_position + depth for depth in depths]
            entries.append(Entry(cache.extent, cache.length, token_ids, positions, tree))
        return entries

    def _find(self, entries: Sequence[Entry]) -> StaticStep | None:
        shape = self._shape_of(entries)
        if shape is None or (shape in self._no_room and self._no_room[shape].goes_on()):
            return None
        return self.step(shape)

    def step(self, shape: StepShape) -> StaticStep | None:
        """Recorded, if it was not. None where it cannot be."""
        return self._steps[shape] if shape in self._steps else self.make(shape)

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

    def make(self, shape: StepShape, parts: StepParts | None = None) -> StaticStep | None:
        """Records a step, at all ranks. None where it cannot be recorded: passes of this shape go on without."""
        started = time.perf_counter()
        made: list[StaticStep] = []
        outcome = self._settle(shape, lambda: made.append(StaticStep(parts or self._parts, shape)))
        if outcome == _DONE:
            outcome = self._settle(shape, made[0].record)
        if outcome == _NO_ROOM:
            self._no_room.setdefault(shape, _Patience()).begin()
            return None
        self._no_room.pop(shape, None)
        self._steps[shape] = step = made[0] if outcome == _DONE else None
        get_logger().debug("static_step.recorded", shape=str(shape), seconds=round(time.perf_counter() - started, 3))
        return step

    def _settle(self, shape: StepShape, work: Callable[[], None]) -> int:
        """How it went at the rank where it went worst. Nobody records before all have room: within what is recorded
        ranks wait for each other."""
        outcome = _DONE
        try:
            work()
        except Exception as error:  # a compiler raises dozens of types
            if isinstance(error, DeviceLost) or is_device_lost(error):
                raise
            get_logger().warning("static_step.failed", shape=str(shape), error=str(error).partition("\n")[0])
            outcome = _NO_ROOM if "out of memory" in str(error) else _FAILED
        return self._accord.agree(outcome, max)

    def drop(self) -> None:
        """They are not to be taken: what was recorded goes, at all ranks. The pool stays."""
        self._steps.clear()


def _make_pool(accord: Accord, runner: Runner, num_bytes: int) -> KVPool:
    """Of so many bytes, at each rank. Raises `ModelNotUsable` at all of them where one has no room."""
    attention = cast(Any, runner.decoder.layers[0]).self_attn
    like, head_dim = attention.k_proj.weight, attention.head_dim
    num_rows, pool, complaint = num_bytes // runner.kv_bytes_per_token, None, ""
    try:
        pool = accord.pool_type(runner.num_layers, num_rows, like.shape[0] // head_dim, head_dim, like)
    except torch.OutOfMemoryError:
        complaint = _no_room(num_bytes, like.device)
    complaint = accord.agree(complaint, first_complaint)
    if pool is None or complaint:
        raise ModelNotUsable(complaint)
    return pool


def _no_room(num_bytes: int, device: torch.device) -> str:
    """For a pool; a part of it may have been taken and given back."""
    free = _free_bytes(device)
    missing = max(0, num_bytes - free)
    return (
        f"{num_bytes / 1e9:.1f} GB for keys and values do not fit on {device}, where {free / 1e9:.1f} GB are free"
        f" ({missing / 1e9:.1f} GB are missing)"
    )


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return available_bytes()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


class _Patience:
    """How long a shape goes without a step because there was no room for it."""

    def __init__(self) -> None:
        self._passes_left = 0
        self._next = FIRST_PATIENCE

    def begin(self) -> None:
        """There was none, once more."""
        self._passes_left, self._next = self._next, min(2 * self._next, MOST_PATIENCE)

    def goes_on(self) -> bool:
        """Whether the pass that is asked for goes without."""
        self._passes_left -= 1
        return self._passes_left >= 0


def _choose_layers(runner: Runner, num_axes: int, like: Tensor, accord: Accord) -> tuple[str, RunLayers]:
    """By the name of what lies between the products, or "upstream"."""
    if isinstance(runner, FusedRunner):
        return "exact", runner.fused
    if not can_fuse(runner.decoder, num_axes):
        return "upstream", runner.run_through
    name, glue = choose_glue(glue_shape(runner.decoder), like, accord)
    fused = None
    try:
        fused = FusedLayers(runner.decoder, lambda _: glue)
    except torch.OutOfMemoryError as error:  # the layers that were joined so far compute what they did before
        get_logger().warning("static_layers.no_room", error=str(error).partition("\n")[0])
    if accord.agree(fused is not None, all) and fused is not None:
        return name, fused
    return "upstream", runner.run_through


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


def _at_least(number: int, sizes: Sequence[int]) -> int | None:
    return next((size for size in sizes if size >= number), None)
