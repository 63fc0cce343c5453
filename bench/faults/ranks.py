"""A target spread over processes, of which one is killed or frozen in the middle of a caption; with ordinary passes and
with static steps."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from bench.common import say
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from tests.support.gateway_client import Captioned, caption
from tests.support.processes import START_S, eventually, is_running, logged
from tests.support.tiny_checkpoint import write_tiny_llava
from tests.support.world import NUM_FRAMES, PROMPT, World, make_world

Blow = tuple[int, signal.Signals]
"""The rank that is struck, and how. A rank 0 that is frozen is one that the stack finds out."""
BLOWS: dict[int, Sequence[Blow]] = {
    2: ((1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)) * 3,
    4: (*((rank, signal.SIGKILL) for rank in range(4)), (3, signal.SIGSTOP)),
}
"""By how many ranks there are."""
STEPS = {"ordinary": (), "static": ("--static-steps", "on", "--kv-budget-mb", "256", "--prefix-cache-mb", "64")}
NUM_TOKENS, STRIKE_AFTER = 96, 12
GONE_S = 5.0
"""Within which all processes of a target have to end that has lost one."""


async def run_ranks() -> dict[str, Any]:
    """Seconds from each blow to the end of all processes; every caption goes on, and is plain transformers' text."""
    gone_s: dict[str, list[float]] = {}
    identical = 0
    with tempfile.TemporaryDirectory(prefix="slipstream-ranks-") as folder:
        world = make_world(Path(folder), partial(write_tiny_llava, kv_heads=max(BLOWS)))
        for size in BLOWS:
            for steps in STEPS:
                identical += await _strike(world, size, steps, gone_s)
    slowest = max(max(times) for times in gone_s.values())
    passed = slowest <= GONE_S and identical == len(STEPS) * sum(map(len, BLOWS.values()))
    found = {"ranks": list(BLOWS), "identical": identical, "gone_s": gone_s, "slowest_gone_s": slowest}
    return {"passed": passed, **found}


async def _strike(world: World, size: int, steps: str, gone_s: dict[str, list[float]]) -> int:
    """All blows at a target of `size` ranks. How many texts were the right ones."""
    identical = 0
    options = world.stack_options("--resume-wait-s", "120", restart=True)
    flags = {**options.extra_flags, "target": ("--ranks", str(size), *STEPS[steps])}
    async with Stack(replace(options, extra_flags=flags)) as stack, open_channel(stack.gateway_address) as channel:
        target = stack.processes["target"]
        if bool(logged(target.log_path, "static_steps.on")) != bool(STEPS[steps]):
            raise RuntimeError(f"the target does not take {steps} steps")
        for rank, number in BLOWS[size]:
            await eventually(lambda: target.is_serving, START_S)
            seconds, captioned = await _struck(world, target, channel, size, (rank, number))
            name = f"{steps}, {number.name} of rank {rank} of {size}"
            gone_s.setdefault(name, []).append(round(seconds, 2))
            identical += captioned.token_ids == world.answer(0, NUM_TOKENS)
            say(f"ranks: {name}: all had ended after {seconds:.2f} s")
    return identical


async def _struck(
    world: World, target: ServiceProcess, channel: grpc.aio.Channel, size: int, blow: Blow
) -> tuple[float, Captioned]:
    """A caption in whose middle a process of the target is struck, and how long the last of them lived on."""
    before, struck_at = target.pid, 0.0
    assert before is not None
    followers = [logged(target.log_path, "rank.ready", rank=rank)[-1]["pid"] for rank in range(1, size)]
    rank, number = blow

    def on_event(captioned: Captioned) -> None:
        nonlocal struck_at
        if not struck_at and len(captioned.token_ids) >= STRIKE_AFTER:
            struck_at = time.monotonic()
            os.kill((before, *followers)[rank], number)

    async def ended() -> float:
        await eventually(lambda: _has_ended(target, before) and not any(map(is_running, followers)), START_S)
        return time.monotonic()

    ending = asyncio.create_task(ended())
    asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False}
    captioned = await caption(channel, world.clips[0], on_event=on_event, **asked)
    return await ending - struck_at, captioned


def _has_ended(target: ServiceProcess, pid: int) -> bool:
    return target.pid != pid or target.exit_status is not None
