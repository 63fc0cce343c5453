"""Clients that cancel or vanish at every stage: the model services end the session, free it, and serve the next one."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import gateway_pb2_grpc
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from tests.support.gateway_client import Captioned, caption, options_message, refusal, upload_messages
from tests.support.media import ClipSpec, even_times_ms, make_clip
from tests.support.processes import eventually, logged, running
from tests.support.variants import one_in
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 3000

CLIENT = """
import sys, grpc
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc
address, path, request_id = sys.argv[1:]
options = gateway_pb2.CaptionOptions(request_id=request_id, max_new_tokens=3000, num_frames=12)
requests = [gateway_pb2.CaptionRequest(options=options), gateway_pb2.CaptionRequest(video=open(path, "rb").read())]
for event in gateway_pb2_grpc.GatewayStub(grpc.insecure_channel(address)).Caption(iter(requests)):
    if event.HasField("text"):
        print("text", flush=True)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def narrow(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServiceProcess]:
    """A gateway that takes one caption at a time: a slot that is not freed shows."""
    flags = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    more = ("--max-captions", "1", "--max-new-tokens", str(LONG))
    async with running("gateway", tmp_path_factory.mktemp("narrow"), *flags, *more) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="session")
async def channel(narrow: ServiceProcess) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(narrow.address) as opened:
        yield opened


async def serves_again(channel: grpc.aio.Channel, world: World) -> None:
    """The only slot of the gateway is free soon, and nothing of the cancelled caption is left."""

    async def has_room() -> bool:
        return (await refusal(channel, [options_message()]))[0] is not grpc.StatusCode.RESOURCE_EXHAUSTED

    await eventually(has_room)
    captioned = await caption(
        channel, world.clips[0], prompt=PROMPT, num_frames=NUM_FRAMES, max_new_tokens=24, alpha=0.0
    )
    assert captioned.token_ids == world.answer(0, 24)


def sessions_are_closed(stack: Stack, request_id: str) -> bool:
    """Whatever session was opened under this id has been closed."""
    return all(
        len(logged(process.log_path, "session.opened", request_id=request_id))
        == len(logged(process.log_path, "session.closed", request_id=request_id))
        for name, process in stack.processes.items()
        if name != "gateway"
    )


@pytest.mark.parametrize("method", ["slipstream", "autoregressive"])
@pytest.mark.parametrize("stage", ["receive", "decode", "encode", "prefill", "generate", "draft_ready", "text"])
@one_in(2, "stage", "method")
async def test_cancelled(stack: Stack, channel: grpc.aio.Channel, world: World, stage: str, method: str) -> None:
    if stage == "draft_ready" and method == "autoregressive":
        stage = "queued"  # there is no such stage: the text follows
    request_id = f"cancelled-{stage}-{method}"

    def on_event(captioned: Captioned) -> bool:
        return stage in captioned.stage_names or bool(captioned.token_ids)

    asked: dict[str, Any] = {"method": method, "max_new_tokens": LONG, "gate": False}
    captioned = await caption(channel, world.clips[1], on_event=on_event, request_id=request_id, **asked)
    assert not captioned.summaries
    await serves_again(channel, world)
    await eventually(lambda: sessions_are_closed(stack, request_id))
    if stage == "text":
        for name in ("target", *(["draft"] if method == "slipstream" else [])):
            assert logged(stack.processes[name].log_path, "session.closed", request_id=request_id)


async def test_cancelled_while_a_long_video_is_decoded(channel: grpc.aio.Channel, world: World) -> None:
    long_video = make_clip(ClipSpec(even_times_ms(3000)))

    def on_event(captioned: Captioned) -> bool:
        return bool(captioned.stages[-1].done)

    captioned = await caption(channel, long_video, on_event=on_event, num_frames=200)
    assert captioned.stage_names[-1] == "decode" and captioned.stages[-1].done < 200
    await serves_again(channel, world)


async def test_cancelled_while_it_uploads(channel: grpc.aio.Channel, world: World) -> None:
    call = gateway_pb2_grpc.GatewayStub(channel).Caption()
    await call.write(options_message())
    await call.write(upload_messages(world.clips[0][:1000])[0])
    assert (await call.read()).stage.stage == "receive"
    call.cancel()
    await serves_again(channel, world)


async def test_a_client_that_is_killed(
    stack: Stack, narrow: ServiceProcess, channel: grpc.aio.Channel, world: World
) -> None:
    path = world.folder / "killed.mp4"
    path.write_bytes(world.clips[0])
    argv = [sys.executable, "-c", CLIENT, narrow.address, str(path), "killed"]
    client = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert client.stdout is not None
    assert await asyncio.wait_for(client.stdout.readline(), 120) == b"text\n"
    os.kill(client.pid, signal.SIGKILL)
    await client.communicate()
    await serves_again(channel, world)
    await eventually(lambda: sessions_are_closed(stack, "killed"))
    assert logged(stack.processes["target"].log_path, "session.closed", request_id="killed")


async def test_many_cancelled_captions_leave_room(stack: Stack, gateway: grpc.aio.Channel, world: World) -> None:
    """More than the 16 sessions that a model service holds at once."""

    async def cancelled(number: int) -> None:
        await caption(
            gateway,
            world.clips[number % 3],
            on_event=lambda captioned: len(captioned.token_ids) > number % 5,
            request_id=f"crowd-{number}",
            num_frames=2,
            max_new_tokens=LONG,
        )

    for first in range(0, 20, 4):
        await asyncio.gather(*(cancelled(number) for number in range(first, first + 4)))
    await eventually(lambda: all(sessions_are_closed(stack, f"crowd-{number}") for number in range(20)))
    await serves_again(gateway, world)
