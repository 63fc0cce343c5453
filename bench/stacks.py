"""The processes of a benchmark: stacks with every service's use of processor and memory, and the outside reference.

While one of them works the others are idle, so that each has the cores to itself.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from bench import reference
from bench.captions import Captioned, run_caption
from bench.methods import Place
from bench.reference import start_reference
from bench.running import say
from bench.tasks import Generated, Task
from bench.usage import Usage, cpu_s, forget_peak, peak_bytes
from slipstream.cli.client import gateway_info
from slipstream.cli.launch import FRESH
from slipstream.cli.stack import Stack, StackOptions
from slipstream.rpc.client import open_channel
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions

OUTSIDE: Mapping[str, Callable[[Task], Generated]] = {
    "transformers": reference.generate,
    "transformers_assisted": reference.generate_assisted,
    "transformers_assisted_shown": reference.generate_assisted_with_video,
    "transformers_prompt_lookup": reference.generate_with_prompt_lookup,
}


@dataclass(frozen=True)
class MeasuredStack:
    """A running stack whose captions are measured one at a time."""

    channel: grpc.aio.Channel
    pids: Mapping[str, int]
    cores: int
    """That each model may run on at a time."""

    async def caption(self, clip: Path, options: CaptionOptions) -> tuple[Captioned, dict[str, Usage]]:
        """The caption; seconds of processor time from its first token to its last, and memory peaks over all of it."""
        meter = _Meter(self.pids, self.cores)
        captioned = await run_caption(self.channel, clip, options, meter.on_tokens)
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
    max_frames: int

    async def call_outside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function in the reference's process."""
        return await asyncio.get_running_loop().run_in_executor(self.outside, partial(function, *args))


@asynccontextmanager
async def start_processes(target: Path, draft: Path) -> AsyncIterator[Processes]:
    """Starts them all; they have ended when this is left."""
    num_cores = len(os.sched_getaffinity(0))
    settings = {
        Place.PAIR: StackOptions(target, draft, threads=1, pin=True, extra_flags=FRESH),
        Place.SAME: StackOptions(target, target, threads=1, pin=True, extra_flags=FRESH),
        Place.BOTH_CORES: StackOptions(target, None, threads=num_cores, extra_flags=FRESH),
    }
    async with AsyncExitStack() as running:
        outside = running.enter_context(start_reference(min(os.sched_getaffinity(0))))
        stacks: dict[Place, MeasuredStack] = {}
        for place, options in settings.items():
            say(f"starting the stack: {place}")
            stack = await running.enter_async_context(Stack(options))
            channel = await running.enter_async_context(open_channel(stack.gateway_address))
            pids = {name: process.pid for name, process in stack.processes.items()}
            stacks[place] = MeasuredStack(channel, pids, options.threads or 1)
        info = await gateway_info(stacks[Place.PAIR].channel)
        yield Processes(stacks, outside, info.default_prompt, info.max_frames)
