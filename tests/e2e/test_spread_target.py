"""A target of two processes through the whole stack, with ordinary passes and with static steps: every method's text is
that of plain transformers, and a process that is lost is one target that is lost."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.speculation.methods import LOSSY_METHODS, METHODS
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from tests.faults.conftest import Strike
from tests.support.gateway_client import Captioned, caption, until
from tests.support.processes import START_S, STOP_S, eventually, is_running, logged, model_flags, read_log, running
from tests.support.tiny_families import write_tiny_qwen3
from tests.support.tiny_glm4v import write_tiny_glm4v
from tests.support.tiny_pair import WriteCheckpoint
from tests.support.tiny_qwen3_5 import write_tiny_qwen3_5
from tests.support.variants import some
from tests.support.world import NUM_FRAMES, PROMPT, World, make_endless_world

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 64
GONE_S = 5.0
STATIC = ("--static-steps", "on", "--kv-budget-mb", "256")
STEPS = ["ordinary", pytest.param("static", marks=pytest.mark.long)]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 5}


@dataclass
class Spread:
    """A running stack, its target on two processes."""

    stack: Stack
    channel: grpc.aio.Channel
    world: World

    @property
    def target(self) -> Any:
        return self.stack.processes["target"]

    def follower_pid(self) -> int:
        """Of the process that the running target shares its model with."""
        pid: int = logged(self.target.log_path, "rank.ready", rank=1)[-1]["pid"]
        return pid

    async def caption(self, clip: int = 0, on_event: Any = None, **options: Any) -> Captioned:
        asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False} | options
        return await caption(self.channel, self.world.clips[clip], on_event=on_event, **asked)

    async def check(self, clip: int = 0, **options: Any) -> Captioned:
        captioned = await self.caption(clip, **options)
        assert captioned.token_ids == self.world.answer(clip, NUM_TOKENS)
        return captioned


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=STEPS)
async def spread(request: pytest.FixtureRequest, world: World) -> AsyncIterator[Spread]:
    options = world.stack_options("--resume-wait-s", "60", restart=True)
    static = (*STATIC, "--prefix-cache-mb", "64") if request.param == "static" else ()
    flags = {**options.extra_flags, "target": ("--ranks", "2", *static)}
    async with Stack(replace(options, extra_flags=flags)) as stack, open_channel(stack.gateway_address) as channel:
        assert bool(logged(stack.processes["target"].log_path, "static_steps.on")) == bool(static)
        yield Spread(stack, channel, world)
        assert read_log(stack.processes["target"].log_path), "and every line is JSON, whoever wrote it"


@pytest.mark.parametrize("method", some(METHODS, keep=("autoregressive", "slipstream", "slipstream_tree", "hints")))
async def test_methods(spread: Spread, method: str) -> None:
    is_plain, asked = method == "autoregressive", dict[str, Any](method=method, alpha=0.1)
    if METHODS[method].takes_hints:
        asked["prediction"] = (spread.world.reference.text(spread.world.answer(0, NUM_TOKENS)),)
    await until(lambda one: is_plain or one.summary.speculation.judged > 0, lambda: spread.check(**asked))


@pytest.mark.long
async def test_several_at_once_and_their_prefills_again(spread: Spread) -> None:
    for _ in range(2):
        await asyncio.gather(*(spread.check(clip) for clip in (0, 1)))
    assert (await spread.check(1)).summary.video.reused_tokens > 0


@pytest.mark.long
async def test_sampled_text_is_that_of_one_process(spread: Spread, gateway: grpc.aio.Channel) -> None:
    asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, **SAMPLED}
    alone = await caption(gateway, spread.world.clips[0], **asked, method="autoregressive")
    for method in ("slipstream", "autoregressive"):
        assert (await spread.caption(**SAMPLED, method=method)).token_ids == alone.token_ids


@pytest.mark.parametrize("lossy", some(LOSSY_METHODS, keep=("pyramiddrop",)))
async def test_pruned_targets(spread: Spread, gateway: grpc.aio.Channel, lossy: str) -> None:
    """They rank by the attention of all heads."""
    asked = {"method": "autoregressive", "lossy": lossy, "lossy_keep": 0.5}
    options = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS} | asked
    alone = await caption(gateway, spread.world.clips[1], **options)
    assert (await spread.caption(1, **asked)).token_ids == alone.token_ids


MIXTURES: dict[str, WriteCheckpoint] = {
    "glm4v_moe": partial(write_tiny_glm4v, model_type="glm4v_moe"),
    "qwen3_5_moe": partial(write_tiny_qwen3_5, num_experts=4),
    "qwen3_vl_moe": partial(write_tiny_qwen3, num_experts=4),
}


@pytest.mark.parametrize("family", some(MIXTURES, keep=("qwen3_5_moe",)))
async def test_mixtures_of_experts(tmp_path: Path, family: str) -> None:
    """And layers that recur: chains, trees, and another prompt about a video whose prefill is there."""
    world = make_endless_world(tmp_path, MIXTURES[family], extra_layers=2)
    options = world.stack_options()
    flags = {**options.extra_flags, "target": ("--ranks", "2")}
    async with Stack(replace(options, extra_flags=flags)) as stack, open_channel(stack.gateway_address) as channel:
        found = Spread(stack, channel, world)
        for method in ("autoregressive", "slipstream", "slipstream_tree"):
            captioned = await found.check(method=method, alpha=0.1)
        assert captioned.summary.video.reused_tokens > 0


@pytest.mark.long
async def test_a_lost_process_is_a_lost_target(spread: Spread) -> None:
    """Which ends, is started again, and the caption goes on. `bench faults` also freezes it."""
    target = spread.target
    before, follower = target.pid, spread.follower_pid()

    def strike() -> None:
        os.kill(follower, signal.SIGKILL)

    captioned = await spread.caption(on_event=Strike(lambda one: len(one.token_ids) >= 8, strike), max_new_tokens=96)
    assert captioned.token_ids == spread.world.answer(0)
    assert captioned.summary.timings.resumptions == 1
    assert target.pid != before or target.exit_status is not None
    await eventually(lambda: target.is_serving, START_S)
    assert spread.follower_pid() != follower
    with pytest.raises(ProcessLookupError):
        os.kill(follower, 0)


@pytest.mark.long
async def test_a_killed_rank_0_takes_the_others_along(spread: Spread) -> None:
    target = spread.target
    before, follower = target.pid, spread.follower_pid()
    captioned = await spread.caption(
        on_event=Strike(lambda one: len(one.token_ids) >= 8, lambda: os.kill(before, signal.SIGKILL)),
        max_new_tokens=96,
    )
    assert captioned.token_ids == spread.world.answer(0)
    assert captioned.summary.timings.resumptions == 1
    await eventually(lambda: not is_running(follower), GONE_S)
    await eventually(lambda: target.is_serving, START_S)


@pytest.mark.long
async def test_a_draft_of_two_processes_with_static_steps(world: World) -> None:
    """The target's twin, whose lines are right but where two tokens are as likely; so it is the draft that writes."""
    options = world.stack_options()
    flags = {**options.extra_flags, "draft": ("--ranks", "2", *STATIC)}
    twins = replace(options, draft_model=options.target_model, extra_flags=flags)
    async with Stack(twins) as stack, open_channel(stack.gateway_address) as channel:
        assert logged(stack.processes["draft"].log_path, "static_steps.on")
        asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS}
        asked |= {"gate": False, "alpha": 0.0, "policy": "fixed"}
        captioned = await until(
            lambda one: one.summary.speculation.judged > 0, lambda: caption(channel, world.clips[0], **asked)
        )
    assert captioned.token_ids == world.answer(0, NUM_TOKENS)
    assert captioned.summary.speculation.accepted >= 0.8 * captioned.summary.speculation.judged


@pytest.mark.long
async def test_ranks_of_torchrun(world: World, tmp_path: Path) -> None:
    """As across machines: the same command for every rank, and all of them are told to stop at once: then the captions
    in work have `--drain-s` as anywhere."""
    address = f"unix:{tmp_path / 'target.sock'}"
    words = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    service = ("slipstream.services.target", "--listen", address, *model_flags(world.pair.target))
    process = ServiceProcess("target", (*words, *service), address, tmp_path / "target.log", os.environ)
    await process.start()
    try:
        await process.wait_serving(START_S)
        async with (
            running("gateway", tmp_path, "--target", address) as gateway,
            open_channel(gateway.address) as channel,
        ):
            asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS}
            assert (await caption(channel, world.clips[2], **asked)).token_ids == world.answer(2, NUM_TOKENS)
            strike = Strike(lambda one: len(one.token_ids) >= 8, lambda: os.kill(process.pid, signal.SIGTERM))
            last = await caption(channel, world.clips[2], **asked, on_event=strike)
            assert strike.num_tokens is not None and last.summary.timings.resumptions == 0
            assert last.token_ids == world.answer(2, NUM_TOKENS)
            await asyncio.wait_for(process.wait_exit(), STOP_S)
    finally:
        await process.stop(STOP_S)
