"""One gateway with two targets and a draft, as real processes: who takes a caption, and what becomes of those that run
where a target is full, is drained or is killed."""

import asyncio
import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc, target_pb2_grpc
from slipstream.stack.process import ServiceProcess
from tests.services.model_sessions import open_session, target_end, target_start
from tests.support.gateway_client import Captioned, caption
from tests.support.processes import (
    START_S,
    all_running,
    eventually,
    failed_start,
    logged,
    model_flags,
    new_process,
    running,
)
from tests.support.world import NUM_FRAMES, NUM_TOKENS, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False}


@dataclass
class Placed:
    """Two targets, one draft, one gateway."""

    targets: list[ServiceProcess]
    gateway: ServiceProcess
    channel: grpc.aio.Channel
    world: World

    def num_sessions(self) -> list[int]:
        """That were opened at each target so far."""
        return [len(logged(target.log_path, "session.opened")) for target in self.targets]

    async def check(self, clip: int, on_event: Any = None, **options: Any) -> Captioned:
        """A caption that must be the reference's."""
        asked = ASKED | options
        captioned = await caption(self.channel, self.world.clips[clip], on_event=on_event, **asked)
        expected = self.world.answer(clip, asked["max_new_tokens"], num_frames=asked["num_frames"])
        assert captioned.token_ids == expected
        return captioned

    async def peers(self) -> list[gateway_pb2.PeerInfo]:
        """As the gateway tells of them."""
        info = await gateway_pb2_grpc.GatewayStub(self.channel).GetGateway(gateway_pb2.GetGatewayRequest())
        return list(info.peers)

    async def until_known(self, *left_out: bool) -> None:
        """The gateway knows which of its targets are left out."""

        async def is_known() -> bool:
            return [bool(peer.left_out) for peer in await self.peers()] == list(left_out)

        await eventually(is_known, START_S)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def placed(world: World, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Placed]:
    folder = tmp_path_factory.mktemp("placed")
    flags = model_flags(world.pair.target, "--kv-budget-mb", "3", "--prefix-cache-mb", "8", "--drain-s", "120")
    async with AsyncExitStack() as exits:
        targets = [new_process("target", folder / str(number), *flags) for number in range(2)]
        for target in targets:
            target.log_path.parent.mkdir(exist_ok=True)
            await target.start()
            exits.push_async_callback(target.stop, 1)
        draft = await exits.enter_async_context(running("draft", folder, *model_flags(world.pair.draft)))
        for target in targets:
            await target.wait_serving(START_S)
        told = ",".join(target.address for target in targets)
        more = ("--draft-timeout-s", "30", "--metrics", "0")
        gateway = await exits.enter_async_context(
            running("gateway", folder, "--target", told, "--draft", draft.address, *more)
        )
        channel = await exits.enter_async_context(open_channel(gateway.address))
        yield Placed(targets, gateway, channel, world)


@contextlib.asynccontextmanager
async def nearly_full(target: ServiceProcess) -> AsyncIterator[None]:
    """Somebody has most of the target's memory."""
    async with open_channel(target.address) as channel:
        session = open_session(target_pb2_grpc.TargetStub(channel))
        await session.send(*target_start(max_new_tokens=1900))
        await session.read_until("verdict")
        yield
        await session.send(target_end())
        while await session.read() is not None:
            pass


async def test_a_full_target_is_passed_by(placed: Placed) -> None:
    await placed.until_known(False, False)
    async with nearly_full(placed.targets[0]):
        before = placed.num_sessions()
        for clip in (0, 1, 0, 1):
            await placed.check(clip)
        assert placed.num_sessions() == [before[0], before[1] + 4]
        first, second = await placed.peers()
        assert (first.role, first.number, second.number) == ("target", 1, 2)
        assert first.load.kv_bytes > first.load.kv_budget_bytes / 2 and second.placed >= 4


async def test_the_same_video_goes_where_its_prefill_is(placed: Placed) -> None:
    before = placed.num_sessions()
    for number in range(4):
        captioned = await placed.check(0, max_new_tokens=8 + number)
    assert captioned.summary.video.reused_tokens > 0
    assert sorted(now - then for now, then in zip(placed.num_sessions(), before, strict=True)) == [0, 4]


async def test_many_at_once_use_both(placed: Placed) -> None:
    before = placed.num_sessions()
    asked = [ASKED | {"max_new_tokens": 32, "num_frames": number} for number in (5, 6, 7, 8, 9, 10)]
    await asyncio.gather(*(caption(placed.channel, placed.world.clips[0], **each) for each in asked))
    assert min(now - then for now, then in zip(placed.num_sessions(), before, strict=True)) > 0


async def test_what_is_told_of_them(placed: Placed) -> None:
    [entry] = logged(placed.gateway.log_path, "metrics.ready")
    with await asyncio.to_thread(urllib.request.urlopen, f"http://{entry['address']}/metrics") as answer:
        page = answer.read().decode()
    for number in (1, 2):
        assert f'slipstream_peer_up{{number="{number}",role="target"}} 1.0' in page
        assert f'slipstream_peer_placed_total{{number="{number}",role="target"}}' in page
    assert "unix:" not in page and json.dumps(placed.targets[0].address) not in page


class UntilAllWrite:
    """Captions that run at once; tells when each has written some tokens."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.all_write = asyncio.Event()

    def watch(self) -> Any:
        seen = False

        def on_event(captioned: Captioned) -> None:
            nonlocal seen
            if not seen and len(captioned.token_ids) >= 4:
                seen = True
                self._left -= 1
                if not self._left:
                    self.all_write.set()

        return on_event


async def strike_under_load(placed: Placed, number: int) -> tuple[list[asyncio.Task[Captioned]], list[int]]:
    """Captions that are under way, of which this target has had some, and how many sessions each has had."""
    for num_frames in range(NUM_FRAMES, 2 * NUM_FRAMES):  # of videos that no prefill draws to the other target
        started, before = UntilAllWrite(4), placed.num_sessions()
        checks = [placed.check(clip, started.watch(), num_frames=num_frames) for clip in (0, 1, 0, 1)]
        tasks = [asyncio.create_task(check) for check in checks]
        await asyncio.wait_for(started.all_write.wait(), START_S)
        counts = placed.num_sessions()
        if counts[number] > before[number]:
            return tasks, counts
        await asyncio.gather(*tasks)
    raise AssertionError(f"no caption went to target {number}")


async def test_a_drained_target_takes_nothing_new_and_its_captions_end(placed: Placed) -> None:
    drained = placed.targets[1]
    async with open_channel(drained.address) as channel:
        held = open_session(target_pb2_grpc.TargetStub(channel))
        await held.send(*target_start("held", max_new_tokens=64))
        await held.read_until("verdict")
        tasks, counts = await strike_under_load(placed, 1)
        drained_pid = drained.pid
        os.kill(drained_pid, signal.SIGTERM)
        await placed.until_known(False, True)
        for clip in (0, 1, 0):
            await placed.check(clip)
        assert placed.num_sessions()[1] == counts[1], "nothing new"
        for task in tasks:
            assert (await task).summary.timings.resumptions == 0, "what ran there ended there"
        assert drained.exit_status is None, "and it waits for the last session"
        await held.send(target_end())
        while await held.read() is not None:
            pass
    assert await asyncio.wait_for(drained.wait_exit(), START_S) == 0
    await drained.start()
    await drained.wait_serving(START_S)
    assert drained.pid != drained_pid
    await placed.until_known(False, False)


@pytest.mark.long
async def test_a_killed_target_costs_no_caption(placed: Placed) -> None:
    killed = placed.targets[0]
    tasks, counts = await strike_under_load(placed, 0)
    killed.kill()
    captions = [await task for task in tasks]
    await placed.check(0)
    assert placed.num_sessions()[0] == counts[0]
    moved = sum(each.summary.timings.resumptions for each in captions)
    assert moved == 0 or placed.num_sessions()[1] > counts[1]
    await killed.wait_exit()
    await killed.start()
    await killed.wait_serving(START_S)
    await placed.until_known(False, False)
    async with nearly_full(placed.targets[1]):
        await placed.check(1)
    assert placed.num_sessions()[0] > counts[0], "it takes captions again"


async def test_targets_of_two_models_are_refused_at_start(world: World, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with all_running(
        running("target", tmp_path, *model_flags(world.pair.target)),
        running("target", tmp_path / "other", *model_flags(world.pair.draft)),
    ) as (one, other):
        status, log = await failed_start("gateway", tmp_path, "--target", f"{one.address},{other.address}")
    assert status == 2
    assert "another model than" in log[-1]["error"] and "the same checkpoint" in log[-1]["error"]


async def test_addresses_that_make_no_sense(tmp_path: Path) -> None:
    for told, complaint in (("unix:/a,,unix:/b", "an empty address"), ("unix:/a,unix:/a", "'unix:/a' twice")):
        status, log = await failed_start("gateway", tmp_path, "--target", told)
        assert status == 2 and complaint in log[-1]["error"]
