"""The processes of a benchmark: stacks with every service's use of processor and memory, and the outside reference.

While one of them works the others are idle, so that each has the cores to itself.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import reference
from bench.common import Captioned, Task, Usage, cpu_s, forget_peak, peak_bytes, run_caption, say
from bench.methods.listing import Place
from bench.reference import Generated, start_reference
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.stack.local import FRESH, Stack, StackOptions

OUTSIDE: Mapping[str, Callable[[Task], Generated]] = {
    "transformers": reference.generate,
    "transformers_assisted": reference.generate_assisted,
    "transformers_assisted_shown": reference.generate_assisted_with_video,
    "transformers_prompt_lookup": reference.generate_with_prompt_lookup,
}


@dataclass(frozen=True)
class MeasuredStack:
    """A running stack whose captions are measured one at a time."""

    captioner: AsyncCaptioner
    pids: Mapping[str, int]
    cores: int
    """That each model may run on at a time."""

    async def caption(self, clip: Path, options: CaptionOptions) -> tuple[Captioned, dict[str, Usage]]:
        """The caption; seconds of processor time from its first token to its last, and memory peaks over all of it."""
        meter = _Meter(self.pids, self.cores)
        captioned = await run_caption(self.captioner, clip, options, meter.on_tokens)
        return captioned, meter.usage()


class _Meter:
    def __init__(self, pids: Mapping[str, int], cores: int) -> None:
        self._pids = pids
        self._cores = cores
        self._at_first: dict[str, float] = {}
        for pid in pids.values():
            forget_peak(pid)

    def on_tokens(self, num_tokens: int, has_draft: bool) -> None:
        if not self._at_first:
            self._at_first = {name: cpu_s(pid) for name, pid in self._pids.items()}

    def usage(self) -> dict[str, Usage]:
        return {
            name: Usage(cpu_s(pid) - self._at_first.get(name, 0.0), peak_bytes(pid), self._cores)
            for name, pid in self._pids.items()
        }


@dataclass(frozen=True)
class Processes:
    """All that captions."""

    stacks: Mapping[Place, MeasuredStack]
    outside: ProcessPoolExecutor
    default_prompt: str

    async def call_outside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function in the reference's process."""
        return await asyncio.get_running_loop().run_in_executor(self.outside, partial(function, *args))


@asynccontextmanager
async def start_processes(target: Path, draft: Path, device: str) -> AsyncIterator[Processes]:
    """Starts them all; they have ended when this is left."""
    async with AsyncExitStack() as running:
        outside = running.enter_context(start_reference(min(os.sched_getaffinity(0))))
        stacks: dict[Place, MeasuredStack] = {}
        for place, options in _settings(target, draft, device).items():
            say(f"starting the stack: {place}")
            stack = await running.enter_async_context(Stack(options))
            captioner = await running.enter_async_context(connect_async(stack.gateway_address))
            pids = {name: process.pid for name, process in stack.processes.items()}
            stacks[place] = MeasuredStack(captioner, pids, options.threads or 1)
        info = await stacks[Place.PAIR].captioner.info()
        yield Processes(stacks, outside, info.default_prompt)


def _settings(target: Path, draft: Path, device: str) -> dict[Place, StackOptions]:
    pair = StackOptions(target, draft, device=device, threads=1, pin=True, extra_flags=FRESH)
    settings = {Place.PAIR: pair, Place.SAME: replace(pair, draft_model=target)}
    if device == "cpu":
        num_cores = len(os.sched_getaffinity(0))
        settings[Place.BOTH_CORES] = StackOptions(target, None, threads=num_cores, extra_flags=FRESH)
    return settings
