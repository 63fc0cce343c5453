"""CUDA graphs: what a device was given is kept, and done again on the same tensors."""

import itertools
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pretended_gpu import queue

_pools = itertools.count(1)
_of_pool: dict[Any, "weakref.WeakSet[CUDAGraph]"] = {}
"""Graphs by the memory that they were recorded in, of all memory that ever was recorded in."""
_recorded_into: set[Any] = set()
"""Memory that is being recorded in, or was when a recording failed."""


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_pools))


def end_allocating(device: Any, pool: Any) -> None:
    """`torch._C._cuda_endAllocateToPool`."""
    if pool not in _recorded_into:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    _recorded_into.remove(pool)


def _begin_allocating(pool: Any) -> None:
    """As torch's allocator at its worst: it takes memory for lost when the last graph that was recorded in it is gone,
    where some of it cannot be returned yet, and up to 2.11 a recording that failed has not ended."""
    if pool in _recorded_into:
        raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
    if pool in _of_pool and not _of_pool[pool]:
        raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
    _recorded_into.add(pool)
    _of_pool.setdefault(pool, weakref.WeakSet())


class _Recording(TorchDispatchMode):
    """All operations of a thread on the tensors inside; what they did is undone at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, Tensor] = {}
        self._given: set[int] = set()
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        for tensor in _tensors((args, kwargs)):
            place = queue.watch(tensor)
            if place not in self.made:
                self._given.add(place)
        for argument, value in zip(schema.arguments, args, strict=False):
            self._keep(argument, value)
        for argument in schema.arguments:
            if argument.name in kwargs:
                self._keep(argument, kwargs[argument.name])
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            place = queue.watch(tensor)
            if place not in self._given:
                self.made.setdefault(place, tensor)
        if schema.is_mutable:
            self.work.append((func, args, kwargs, None))
        elif not _places(out) <= _places((args, kwargs)):  # else it is a view
            self.work.append((func, args, kwargs, out))
        return out

    def _keep(self, argument: Any, value: Any) -> None:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in _tensors(value):
                self._before.append((tensor, tensor.clone()))

    def undo(self) -> None:
        for tensor, before in reversed(self._before):
            tensor.copy_(before)
        self._before.clear()
        for tensor in self.made.values():
            queue.spoil(_whole(tensor))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _places(tree: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(tree)}


def _whole(tensor: Tensor) -> Tensor:
    """All memory that a tensor lies in, as its dtype."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (storage.nbytes() // tensor.element_size(),))


class CUDAGraph:
    def __init__(self, keep_graph: bool = False) -> None:
        self._recording: _Recording | None = None
        self._work: list[tuple[Any, Any, Any, Any]] = []
        self._made: dict[int, Tensor] = {}
        self._takes: list[Tensor] = []
        self._pool: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._pool = pool or graph_pool_handle()
        _begin_allocating(self._pool)
        self._recording = _Recording()
        queue.record(self._recording)
        self._recording.__enter__()

    def capture_end(self, failed: bool = False) -> None:
        assert self._recording is not None
        recording, self._recording = self._recording, None
        recording.__exit__(None, None, None)
        queue.record(None)
        with torch.inference_mode():
            recording.undo()
        if failed:
            return
        end_allocating(None, self._pool)
        self._work, self._made = recording.work, recording.made
        earlier = _of_pool[self._pool]
        self._takes = [
            tensor
            for graph in earlier
            for place, tensor in graph._made.items()
            if not queue.is_held(place) and place not in self._made
        ]
        earlier.add(self)

    def replay(self) -> None:
        queue.check_not_lost()
        queue.refuse_while_recording("replay")
        queue.CALLS["replay"] += 1
        with torch.inference_mode():
            for tensor in self._takes:
                queue.spoil(_whole(tensor))
            for func, args, kwargs, out in self._work:
                again = func(*args, **kwargs)
                if out is not None:
                    for tensor, found in zip(_tensors(out), _tensors(again), strict=True):
                        tensor.copy_(found)

    def pool(self) -> Any:
        return self._pool

    def reset(self) -> None:
        _of_pool.get(self._pool, weakref.WeakSet()).discard(self)
        self._work, self._made = [], {}


class graph:
    """`torch.cuda.graph`."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> None:
        self._graph, self._pool, self._mode = cuda_graph, pool, capture_error_mode
        self._on_stream = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        queue.wait("capture begins")
        self._on_stream.__enter__()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As torch's: where what was recorded is not permitted, the stream is not left."""
        failed = queue.broken()
        self._graph.capture_end(failed)
        if failed:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._on_stream.__exit__(kind, error, trace)
