"""Medians of repeated runs: CUDA events on a GPU, the clock on a CPU. Knows nothing of what it times."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import SlipstreamError

Timing = dict[str, float]


@dataclass(frozen=True)
class Clock:
    """How things are timed on one device. Every run ends when the device has nothing left to do."""

    device: torch.device
    repeats: int = 20
    warm_up: int = 3

    def time(self, run: Callable[[], object], *, repeats: int | None = None) -> Timing:
        """The run's median and extremes in seconds, after some runs that do not count."""
        count = repeats or self.repeats
        with torch.inference_mode():
            for _ in range(min(self.warm_up, max(1, count // 3))):
                run()
            seconds = [self._once(run) for _ in range(count)]
        return {"s": statistics.median(seconds), "low_s": min(seconds), "high_s": max(seconds), "n": count}

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        self.finish()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def finish(self) -> None:
        """Waits until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_bytes(self, run: Callable[[], object]) -> int | None:
        """The most memory that tensors took while `run()` ran; None where the device does not tell."""
        if self.device.type != "cuda":
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        with torch.inference_mode():
            run()
        self.finish()
        return int(torch.cuda.max_memory_allocated(self.device))


def attempt(measure: Callable[[], Any]) -> Any:
    """What it returns, or {"error": why}: one kernel that does not work here must not end the whole run."""
    try:
        return measure()
    except (RuntimeError, ImportError, SlipstreamError) as error:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # most likely it was memory
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
