"""The processes of a benchmark: stacks with every service's use of processor and memory, and the outside reference.

While one of them works the others are idle, so that each has the cores to itself.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from bench import reference
from bench.captions import Captioned, run_caption
from bench.methods import SLOW_DRAFT_PASS_S, SLOWER_DRAFT_PASS_S, Place
from bench.reference import start_reference
from bench.replay.tables import replaying
from bench.running import say
from bench.tasks import Generated, Task
from bench.usage import Usage, cpu_s, forget_peak, peak_bytes
from slipstream.client.caption_client import gateway_info
from slipstream.rpc.channels import open_channel
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions
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
async def start_processes(target: Path, draft: Path, *, sweeps: bool = True) -> AsyncIterator[Processes]:
    """Starts them all, those that only sweeps need as well or not; they have ended when this is left."""
    async with AsyncExitStack() as running:
        outside = running.enter_context(start_reference(min(os.sched_getaffinity(0))))
        folder = Path(running.enter_context(TemporaryDirectory(prefix="slipstream-bench-")))
        stacks: dict[Place, MeasuredStack] = {}
        for place, options in _settings(target, draft, folder, sweeps=sweeps).items():
            say(f"starting the stack: {place}")
            stack = await running.enter_async_context(Stack(options))
            channel = await running.enter_async_context(open_channel(stack.gateway_address))
            pids = {name: process.pid for name, process in stack.processes.items()}
            stacks[place] = MeasuredStack(channel, pids, options.threads or 1)
        info = await gateway_info(stacks[Place.PAIR].channel)
        yield Processes(stacks, outside, info.default_prompt, info.max_frames)


def _settings(target: Path, draft: Path, folder: Path, *, sweeps: bool) -> dict[Place, StackOptions]:
    pair = StackOptions(target, draft, threads=1, pin=True, extra_flags=FRESH)
    num_cores = len(os.sched_getaffinity(0))
    settings = {
        Place.PAIR: pair,
        Place.SAME: replace(pair, draft_model=target),
        Place.BOTH_CORES: StackOptions(target, None, threads=num_cores, extra_flags=FRESH),
    }
    if sweeps:
        settings[Place.SLOW_DRAFT] = _slowed(pair, SLOW_DRAFT_PASS_S, folder)
        settings[Place.SLOWER_DRAFT] = _slowed(pair, SLOWER_DRAFT_PASS_S, folder)
    return settings


def _slowed(pair: StackOptions, pass_s: float, folder: Path) -> StackOptions:
    """The pair with a draft whose passes last `pass_s` at least; all else lasts what it really takes."""
    path = folder / f"draft-{pass_s}.json"
    table = {"name": f"draft {pass_s} s", "source": "made up, for a sweep", "draft": {"pass_s": {"0": pass_s}}}
    path.write_text(json.dumps(table))
    return replaying(pair, path, roles=("draft",))
