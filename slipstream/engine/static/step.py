"""A pass of one fixed shape: on CUDA recorded once and replayed as one graph, elsewhere run as it is."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.engine.attention import Attend
from slipstream.engine.forward import Note
from slipstream.engine.fused_layers import on_axes
from slipstream.engine.segments import PassRows
from slipstream.engine.static.accord import Accord
from slipstream.engine.static.pool import NUM_SCRATCH_ROWS, Extent, KVPool
from slipstream.engine.static.windows import MakeWindows, StepPlaces, StepShape
from slipstream.sampling.sampler import largest_of
from slipstream.speculation.protocol import TokenTree

MAX_AHEAD = 4
"""Most tokens that are written before the host reads the first: what a restart of the line throws away at most."""
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """One session's rows of a step."""

    extent: Extent
    past: int
    """Tokens in the cache."""
    token_ids: Sequence[int]
    positions: Sequence[int]
    tree: TokenTree | None = None
    """Whose nodes these are; None: a chain."""


class Recorder:
    """Records what a device does again and again, in memory and on a stream that all recordings share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Which torch's allocators may ask for ever whose memory a tensor is."""

    def record(
        self, compute: Callable[[], None], together: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Callable[[], Any]:
        """What does the same again with the tensors that it has now: a replay of it on CUDA, itself elsewhere.

        Args:
            together: around what runs at once, see `Accord.together`. It runs before anything is recorded, so that what
                ranks need to reach each other is there. What is recorded does not run, and may fail at one rank alone.
        """
        if self._device.type != "cuda":
            return compute
        # The inner of the two `stream` contexts of a recording that fails is not left, so there is one around it.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            if self._keeper is None:
                self._begin()
            self._stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(self._stream), together():
                    for _ in range(_WARM_UPS):
                        compute()
            finally:
                torch.cuda.current_stream().wait_stream(self._stream)
            return self._captured(compute).replay

    def _begin(self) -> None:
        """In memory of its own. Torch takes memory for lost when all that was captured in it is gone, and then captures
        nothing more in it; so there is something in it that nobody lets go."""
        self._stream = torch.cuda.Stream(self._device)
        self._memory = torch.cuda.graph_pool_handle()
        self._keeper = self._captured(torch.zeros(1, device=self._device).zero_)

    def _captured(self, compute: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads copy guidance to the host meanwhile, which is none of this recording's business.
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        except Exception:
            if self._goes_on():
                self._failed.append(graph)
                self._keeper = None  # the next recording begins anew
            raise
        return graph

    def _goes_on(self) -> bool:
        """Whether the allocator takes a capture that has failed for going on, as it does up to torch 2.11; it is told
        otherwise."""
        try:
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._memory)
        except AttributeError:  # before torch 2.8
            return True
        except RuntimeError:
            return False
        return True


RunLayers = Callable[[Tensor, Tensor, Attend], Tensor]
"""Embeddings [1, rows, hidden], position ids -> what the head takes, [rows, hidden]."""


@dataclass(frozen=True, eq=False)
class StepParts:
    """What the steps of one model share."""

    embed_tokens: nn.Embedding
    run_layers: RunLayers
    lm_head: nn.Module
    pool: KVPool
    make_windows: MakeWindows
    num_axes: int
    """Of position ids."""
    logits: Tensor
    """Where each step leaves its own, fp32 [rows of the widest step, vocab]."""
    recorder: Recorder
    accord: Accord = field(default_factory=Accord)


class StaticStep:
    """One shape of steps of one model."""

    def __init__(self, parts: StepParts, shape: StepShape) -> None:
        self._parts = parts
        self.shape = shape
        self._inputs = _Inputs(shape, parts.logits.device)
        self._windows = parts.make_windows(parts.pool, self._inputs.places)
        self._logits = parts.logits[: shape.num_all_rows]
        self._largest = torch.zeros(shape.num_all_rows, dtype=torch.int64, device=parts.logits.device)
        self._inputs.fill(())
        self._replay: Callable[[], Any] = self._compute

    def record(self) -> None:
        """Before the first run: until then it computes as it is. With all ranks, which wait for each other here."""
        with torch.inference_mode():
            self._replay = self._parts.recorder.record(self._compute, self._parts.accord.together)

    @property
    def device(self) -> torch.device:
        return self._logits.device

    def run(self, entries: Sequence[Entry]) -> list[PassRows]:
        """What follows each entry's tokens, without a wait for it."""
        with torch.inference_mode():
            self._inputs.fill(entries)
            self._replay()
            by_session = (each.unflatten(0, (self.shape.num_sessions, -1)) for each in (self._logits, self._largest))
            return [
                PassRows(*(rows[: len(entry.token_ids)].clone() for rows in pair))
                for *pair, entry in zip(*by_session, entries, strict=False)
            ]

    def write_ahead(self, entries: Sequence[Entry], num_tokens: int, note: Note | None) -> list[list[int]]:
        """For each entry of one token the greedy tokens that follow it, each fed to the model by the device itself;
        `NO_TOKEN` where logits are not finite. The cache then holds all of them but the last. One row shapes only."""
        assert self.shape.num_rows == 1 and 0 < num_tokens <= MAX_AHEAD
        with torch.inference_mode():
            self._inputs.fill(entries)
            for _ in range(num_tokens):
                self._replay()
                if note is not None:
                    note(self._logits[: len(entries)])
            written: list[list[int]] = self._inputs.written[: len(entries), :num_tokens].tolist()
        return written

    def _compute(self) -> None:
        parts, inputs = self._parts, self._inputs
        self._windows.begin()
        hidden = parts.accord.embed(parts.embed_tokens, inputs.token_ids)[None]
        hidden = parts.run_layers(hidden, on_axes(inputs.positions[None], parts.num_axes), self._windows)
        self._logits.copy_(parts.lm_head(hidden))
        self._largest.copy_(largest_of(self._logits))
        if self.shape.num_rows == 1:
            inputs.feed(self._largest)


class _Inputs:
    """All that differs between two runs, which goes to the device in one copy."""

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        sessions, rows = shape.num_sessions, shape.num_rows
        sizes = [*[(sessions, rows)] * 3, *[(sessions,)] * 4, (1,), (sessions, rows, rows)]
        ends = accumulate((int(np.prod(size)) for size in sizes), initial=0)
        spans = [slice(start, end) for start, end in pairwise(ends)]
        self._host = torch.zeros(spans[-1].stop, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = self._host.to(device, copy=True)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        """Behind the last copy: until then the host's numbers are still to be read."""
        numbers: list[NDArray[np.int64]] = [
            self._host.numpy()[span].reshape(size) for span, size in zip(spans, sizes, strict=True)
        ]
        tensors = [self._device[span].view(size) for span, size in zip(spans, sizes, strict=True)]
        self._ids, self._positions, self._write_rows, *by_session, self._count, self._visible = numbers
        self._starts, self._lengths, self._past, self._is_real = by_session
        ids, positions, write_rows, starts, lengths, past, self._advance, self._written_count, visible = tensors
        self.token_ids, self.positions = ids.view(-1), positions.view(-1)
        self.places = StepPlaces(shape, starts, lengths, past, write_rows.view(-1), visible)
        self.written = torch.zeros(sessions, MAX_AHEAD, dtype=torch.int64, device=device)
        self._shape = shape
        self._scratch = Extent(0, NUM_SCRATCH_ROWS, ref(self))
        self._chain = np.tril(np.ones((rows, rows), dtype=np.int64))

    def fill(self, entries: Sequence[Entry]) -> None:
        """What a run starts from; sessions and rows beyond those of the entries do harm to nobody."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        nobody = Entry(self._scratch, 1, (0,), (0,))
        self._count[:] = 0
        for session in range(self._shape.num_sessions):
            is_real = session < len(entries)
            entry = entries[session] if is_real else nobody
            num_new = len(entry.token_ids)
            self._ids[session, :num_new], self._ids[session, num_new:] = entry.token_ids, entry.token_ids[-1]
            self._positions[session, :num_new] = entry.positions
            self._positions[session, num_new:] = entry.positions[-1]
            self._write_rows[session] = np.arange(self._shape.num_rows) % NUM_SCRATCH_ROWS
            if is_real:
                first = entry.extent.start + entry.past
                self._write_rows[session, :num_new] = np.arange(first, first + num_new)
            self._starts[session], self._lengths[session] = entry.extent.start, entry.extent.length
            self._past[session], self._is_real[session] = entry.past, is_real
            self._visible[session] = self._chain
            if entry.tree is not None:
                self._visible[session, :num_new] = 0
                self._visible[session][entry.tree.visible()] = 1
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def feed(self, largest: Tensor) -> None:
        """The next step takes in these tokens, one place further on."""
        self.written.index_copy_(1, self._written_count, largest[:, None])
        self.token_ids.copy_(largest.clamp(min=0))  # a number of no token is no place to read from
        for moving in (self.positions, self.places.write_rows, self.places.past):
            moving.add_(self._advance)
        self._written_count.add_(1)
