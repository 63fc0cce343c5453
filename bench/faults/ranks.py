"""A target spread over processes, of which one is killed or frozen in the middle of a caption."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from bench.common import say
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from tests.support.gateway_client import Captioned, caption
from tests.support.processes import START_S, eventually, logged
from tests.support.world import NUM_FRAMES, PROMPT, World, make_world

RANKS, ROUNDS = 2, 3
NUM_TOKENS, STRIKE_AFTER = 96, 12
GONE_S = 5.0
"""Within which a target has to end that has lost a process."""


async def run_ranks() -> dict[str, Any]:
    """Seconds from each blow to the end of the target; every caption goes on, and is plain transformers' text."""
    gone_s: dict[str, list[float]] = {}
    identical = 0
    with tempfile.TemporaryDirectory(prefix="slipstream-ranks-") as folder:
        world = make_world(Path(folder))
        options = world.stack_options("--resume-wait-s", "120", restart=True)
        flags = {**options.extra_flags, "target": ("--ranks", str(RANKS))}
        async with Stack(replace(options, extra_flags=flags)) as stack, open_channel(stack.gateway_address) as channel:
            target = stack.processes["target"]
            for number in [signal.SIGKILL, signal.SIGSTOP] * ROUNDS:
                await eventually(lambda: target.is_serving, START_S)
                seconds, captioned = await _struck(world, target, channel, number)
                gone_s.setdefault(number.name, []).append(round(seconds, 2))
                identical += captioned.token_ids == world.answer(0, NUM_TOKENS)
                say(f"ranks: {number.name}: the target ended after {seconds:.2f} s")
    slowest = max(max(times) for times in gone_s.values())
    passed = slowest <= GONE_S and identical == 2 * ROUNDS
    return {"passed": passed, "ranks": RANKS, "identical": identical, "gone_s": gone_s, "slowest_gone_s": slowest}


async def _struck(
    world: World, target: ServiceProcess, channel: grpc.aio.Channel, number: signal.Signals
) -> tuple[float, Captioned]:
    """A caption in whose middle the latest follower is struck, and how long the target lived on."""
    before, struck_at = target.pid, 0.0
    follower = logged(target.log_path, "rank.ready", rank=RANKS - 1)[-1]["pid"]

    def on_event(captioned: Captioned) -> None:
        nonlocal struck_at
        if not struck_at and len(captioned.token_ids) >= STRIKE_AFTER:
            struck_at = time.monotonic()
            os.kill(follower, number)

    async def ended() -> float:
        await eventually(_has_ended(target, before), START_S)
        return time.monotonic()

    ending = asyncio.create_task(ended())
    asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False}
    captioned = await caption(channel, world.clips[0], on_event=on_event, **asked)
    return await ending - struck_at, captioned


def _has_ended(target: ServiceProcess, pid: int) -> Callable[[], bool]:
    return lambda: target.pid != pid or target.exit_status is not None
