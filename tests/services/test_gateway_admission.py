"""Who holds the gateway's places: captions that are made, not uploads that stall, and nobody more than a share."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.client.caption_client import FirstStatus
from slipstream.rpc.calls import open_channel, token_metadata
from slipstream.rpc.probe import probe
from slipstream.rpc.security import new_token
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from slipstream.stack.addresses import gateway_address
from slipstream.stack.local import Stack
from tests.support.gateway_client import caption, options_message, refusal, upload_messages
from tests.support.processes import eventually, logged, running
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 2, "max_new_tokens": 4, "method": "autoregressive"}
EXHAUSTED, ABORTED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED


@contextlib.asynccontextmanager
async def gateway_with(stack: Stack, folder: Path, *flags: str, listen: str = "") -> AsyncIterator[Any]:
    target = stack.processes["target"].address
    async with running("gateway", folder, "--target", target, *flags, listen=listen) as process:
        yield process


async def stalled(channel: grpc.aio.Channel, metadata: Any = None) -> Any:
    """An upload that began and says no more."""
    call = gateway_pb2_grpc.GatewayStub(channel).Caption(metadata=metadata)
    await call.write(options_message(**SMALL))
    assert (await call.read()).stage.stage == "receive"
    return call


async def refused_of(*calls: Any) -> Any:
    """The one of them that the gateway ends: they may be admitted in any order."""
    ends = {asyncio.ensure_future(call.code()): call for call in calls}
    ended, waiting = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    (one,) = ended
    return ends[one]


async def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details() or ""


async def test_stalled_uploads_take_no_place(stack: Stack, world: World, tmp_path: Path) -> None:
    flags = ("--max-captions", "2", "--max-uploads", "6", "--upload-idle-s", "600", "--video-roots", str(world.folder))
    (world.folder / "admitted.mp4").write_bytes(world.clips[0])
    async with gateway_with(stack, tmp_path, *flags) as process, open_channel(process.address) as channel:
        uploads = [await stalled(channel) for _ in range(6)]
        captioned = await caption(channel, path=str(world.folder / "admitted.mp4"), **SMALL)
        assert captioned.summary.num_tokens == 4
        uploads.append(await stalled(channel))
        late = await refused_of(*uploads)
        assert (await end_of(late))[0] is EXHAUSTED and "6 uploads are open" in await late.details()
        assert dict(await late.trailing_metadata())["retry-after-ms"] == "1000"
        for upload in uploads:
            upload.cancel()


async def test_uploads_that_stall_or_trickle_are_ended(stack: Stack, world: World, tmp_path: Path) -> None:
    flags = ("--upload-idle-s", "4", "--min-upload-rate", "100000")
    async with gateway_with(stack, tmp_path, *flags) as process, open_channel(process.address) as channel:

        async def trickle() -> AsyncIterator[gateway_pb2.CaptionRequest]:
            yield options_message(**SMALL)
            while True:
                yield gateway_pb2.CaptionRequest(video=b"x")
                await asyncio.sleep(0.1)

        silent = await stalled(channel)
        call = gateway_pb2_grpc.GatewayStub(channel).Caption(trickle())
        first_status = FirstStatus(call)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            [event async for event in call]
        error = await first_status.correct(ended.value)
        assert error.code() is ABORTED and "less than 100000 bytes a second" in (error.details() or "")
        code, message = await end_of(silent)
        assert code is ABORTED and "nothing was said for 4 s" in message
        assert (await caption(channel, world.clips[0], **SMALL)).summary.num_tokens == 4


async def test_more_captions_than_places(stack: Stack, world: World, tmp_path: Path) -> None:
    flags = ("--max-captions", "1")
    async with gateway_with(stack, tmp_path, *flags) as process, open_channel(process.address) as channel:
        begun = asyncio.Event()
        options = SMALL | {"num_frames": NUM_FRAMES, "max_new_tokens": 1500}
        first = asyncio.create_task(
            caption(channel, world.clips[1], on_event=lambda c: begun.set() if c.tokens else None, **options)
        )
        await begun.wait()
        code, message = await refusal(channel, [options_message()])
        assert code is EXHAUSTED and "1 captions are in work, as many as this service takes" in message
        assert not first.done()
        first.cancel()
        await asyncio.wait({first})


async def test_one_owner_leaves_room_for_another(stack: Stack, world: World, tmp_path: Path) -> None:
    made = {owner: new_token(owner) for owner in ("alice", "bob")}
    (tmp_path / "tokens").write_text("\n".join(line for _, line in made.values()))
    flags = ("--tokens", str(tmp_path / "tokens"), "--max-uploads", "8", "--max-upload-bytes", "4000000")
    async with gateway_with(stack, tmp_path, *flags, "--max-video-bytes", "1500000") as process:
        async with open_channel(process.address) as channel:
            alice, bob = (token_metadata(process.address, None, made[owner][0]) for owner in ("alice", "bob"))
            uploads = [await stalled(channel, alice) for _ in range(3)]
            third = await refused_of(*uploads)
            code, message = await end_of(third)
            assert code is EXHAUSTED and "2 uploads of yours are open, and one caller may have 2 of 8" in message
            uploads.remove(third)
            for upload in uploads:
                await upload.write(gateway_pb2.CaptionRequest(video=bytes(900_000)))
            second = await refused_of(*uploads)
            code, message = await end_of(second)
            assert code is EXHAUSTED and "upload_bytes of yours" in message
            whole = gateway_pb2_grpc.GatewayStub(channel).Caption(
                iter([options_message(**SMALL), *upload_messages(world.clips[0])]), metadata=bob
            )
            assert [event async for event in whole][-1].summary.num_tokens == 4
            for upload in uploads:
                upload.cancel()
        refused = logged(process.log_path, "request.refused", owner="alice")
        assert len(refused) == 2 and {entry["peer"] for entry in refused} == {"unix"}
        method = "/slipstream.rpc.v1.Gateway/Caption"
        assert logged(process.log_path, "audit", owner="bob", outcome="OK", peer="unix", method=method)
        assert len(logged(process.log_path, "audit", owner="alice", outcome="RESOURCE_EXHAUSTED")) == 2


async def test_silent_connections_do_not_lock_the_gateway(stack: Stack, world: World, tmp_path: Path) -> None:
    async with gateway_with(stack, tmp_path, listen=gateway_address(None)) as process:
        host, _, port = process.address.rpartition(":")
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (128, 128))
        with contextlib.ExitStack() as silent:
            for _ in range(150):
                silent.enter_context(socket.create_connection((host, int(port))))
            await eventually(lambda: logged(process.log_path, "descriptors.low"))
            while await probe(process.address, timeout_s=1.0) != "SERVING":
                pass
            async with open_channel(process.address) as channel:
                assert (await caption(channel, world.clips[0], **SMALL)).summary.num_tokens == 4


async def test_the_limit_of_descriptors_is_raised(stack: Stack, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        async with gateway_with(stack, tmp_path) as process:
            (ready,) = logged(process.log_path, "service.ready")
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == ready["max_descriptors"]
            assert ready["max_descriptors"] == min(hard, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_flood_of_watchers_without_a_token(stack: Stack, world: World, tmp_path: Path) -> None:
    token, line = new_token("alice")
    (tmp_path / "tokens").write_text(line)
    async with gateway_with(stack, tmp_path, "--tokens", str(tmp_path / "tokens")) as process:
        async with contextlib.AsyncExitStack() as exits:
            attackers = [await exits.enter_async_context(open_channel(process.address)) for _ in range(5)]
            calls: list[Any] = [
                health_pb2_grpc.HealthStub(attackers[number % 5]).Watch(health_pb2.HealthCheckRequest())
                for number in range(1000)
            ]
            answers = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
            assert sum(isinstance(answer, health_pb2.HealthCheckResponse) for answer in answers) <= 64
            assert await probe(process.address) == "SERVING"
            channel = await exits.enter_async_context(open_channel(process.address))
            whole = gateway_pb2_grpc.GatewayStub(channel).Caption(
                iter([options_message(**SMALL), *upload_messages(world.clips[0])]),
                metadata=token_metadata(process.address, None, token),
            )
            assert [event async for event in whole][-1].summary.num_tokens == 4
        assert len(logged(process.log_path, "request.refused")) <= 300, "and the log stays small"


async def test_the_tokens_file_may_give_more_than_a_share_or_nothing(
    stack: Stack, world: World, tmp_path: Path
) -> None:
    made = {owner: new_token(owner) for owner in ("alice", "bob")}
    (tmp_path / "tokens").write_text(f"{made['alice'][1]} max-captions=2\n{made['bob'][1]} max-captions=0\n")
    flags = ("--tokens", str(tmp_path / "tokens"), "--max-captions", "4", "--owner-share", "0.25")
    async with gateway_with(stack, tmp_path, *flags) as process, open_channel(process.address) as channel:
        alice, bob = (token_metadata(process.address, None, made[owner][0]) for owner in ("alice", "bob"))
        stub = gateway_pb2_grpc.GatewayStub(channel)

        def asked(**more: Any) -> list[gateway_pb2.CaptionRequest]:
            return [options_message(**SMALL | more), *upload_messages(world.clips[1])]

        long = stub.Caption(iter(asked(num_frames=NUM_FRAMES, max_new_tokens=1500)), metadata=alice)
        while not (await long.read()).HasField("text"):
            pass
        second = stub.Caption(iter(asked()), metadata=alice)
        assert [event async for event in second][-1].summary.num_tokens == 4, "the share is one"
        upload = stub.Caption(metadata=bob)
        await upload.write(options_message(**SMALL))
        code, message = await end_of(upload)
        assert code is EXHAUSTED and "one caller may have 0 of 4" in message
        long.cancel()
