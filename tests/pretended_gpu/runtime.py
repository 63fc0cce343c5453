"""`torch.cuda` of one device."""

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.pretended_gpu import graphs, queue

NAME = "a pretended GPU"
NUM_BYTES, NUM_FREE = 8 << 30, 256 << 20
"""What is said of its memory, which nobody keeps count of."""
_thread = threading.local()


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda:0")
        self.cuda_stream = id(self)

    def wait_stream(self, other: "Stream") -> None: ...

    def wait_event(self, event: "Event") -> None: ...

    def synchronize(self) -> None:
        queue.wait("stream")

    def query(self) -> bool:
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


class Event:
    """Over when somebody has waited for the device since it was recorded."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._enable_timing = enable_timing
        self._waits: int | None = None
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        queue.check_not_lost()
        self._waits, self._seconds = queue.num_waits(), time.perf_counter()

    def query(self) -> bool:
        return self._waits is None or queue.num_waits() > self._waits

    def synchronize(self) -> None:
        if not self.query():
            queue.wait("event")

    def wait(self, stream: Stream | None = None) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        assert self._enable_timing and self.query() and end.query()
        return (end._seconds - self._seconds) * 1000


_default = Stream()


def current_stream(device: Any = None) -> Stream:
    found: Stream = getattr(_thread, "stream", _default)
    return found


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    before = current_stream()
    _thread.stream = chosen or before
    try:
        yield
    finally:
        _thread.stream = before


@contextlib.contextmanager
def on_device(device: Any) -> Iterator[None]:
    _check(device)
    yield


def _check(device: Any) -> None:
    number = device if isinstance(device, int) else torch.device(device).index if device is not None else 0
    if number not in (None, 0):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")


def properties(device: Any = None) -> Any:
    _check(device)
    return SimpleNamespace(
        name=NAME, uuid="GPU-pretended", total_memory=NUM_BYTES, major=9, minor=0, multi_processor_count=8, warp_size=32
    )


FUNCTIONS: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": graphs.CUDAGraph,
    "graph": graphs.graph,
    "graph_pool_handle": graphs.graph_pool_handle,
    "stream": stream,
    "device": on_device,
    "current_stream": current_stream,
    "default_stream": lambda device=None: _default,
    "synchronize": lambda device=None: queue.wait("device"),
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_current_stream_capturing": lambda: queue.recording() is not None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _check,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": properties,
    "mem_get_info": lambda device=None: (NUM_FREE, NUM_BYTES),
    "empty_cache": queue.check_not_lost,
    "ipc_collect": lambda: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
}
