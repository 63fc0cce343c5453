"""Programs at a real gateway before real models: the target's text, and captions that end when nobody reads them."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import slipstream
from slipstream.errors import InvalidRequest
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from tests.support.processes import eventually, logged, running
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES}
LONG = 3000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def measured(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServiceProcess]:
    """A gateway of our own before the shared models, with metrics."""
    peers = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    more = ("--max-new-tokens", str(LONG), "--metrics", "0")
    async with running("gateway", tmp_path_factory.mktemp("measured"), *peers, *more) as process:
        yield process


async def num_cancelled(process: ServiceProcess) -> float:
    (entry,) = logged(process.log_path, "metrics.ready")

    def read() -> str:
        with urllib.request.urlopen(f"http://{entry['address']}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    lines = (await asyncio.to_thread(read)).splitlines()
    counts = [
        line.split()[-1] for line in lines if line.startswith("slipstream_captions_total") and "CANCELLED" in line
    ]
    return sum(map(float, counts))


async def is_cancelled_soon(process: ServiceProcess, before: float) -> None:
    start = time.monotonic()
    while await num_cancelled(process) == before:
        assert time.monotonic() - start < 60, "it takes well below a second, but on a busy machine"
        await asyncio.sleep(0.02)


async def test_the_targets_text(stack: Stack, world: World, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(world.clips[0])
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        captions = await asyncio.gather(
            *(captioner.caption(video, max_new_tokens=24, **ASKED) for video in (path, world.clips[0], str(path)))
        )
        for caption in captions:
            assert [token.token_id for token in caption.tokens] == world.answer(0, 24)
            assert caption.options["method"] == "slipstream" and caption.video.num_frames == NUM_FRAMES
        stream = captioner.stream(path, max_new_tokens=24, **ASKED)
        assert "".join([str(piece) async for piece in stream]) == captions[0].text
        with pytest.raises(InvalidRequest, match="the file is no video"):
            await captioner.caption(b"no video at all", **ASKED)


async def test_leaving_a_stream_ends_its_caption(measured: ServiceProcess, stack: Stack, world: World) -> None:
    before = await num_cancelled(measured)
    async with slipstream.connect_async(measured.address) as captioner:
        async for piece in captioner.stream(world.clips[1], max_new_tokens=LONG, request_id="left", **ASKED):
            if piece.tokens:
                break
        await is_cancelled_soon(measured, before)
    await eventually(lambda: logged(stack.processes["target"].log_path, "session.closed", request_id="left"))


async def test_leaving_a_synchronous_stream_ends_its_caption(measured: ServiceProcess, world: World) -> None:
    before = await num_cancelled(measured)

    def read_a_little() -> None:
        for piece in captioner.stream(world.clips[1], max_new_tokens=LONG, **ASKED):
            if piece.tokens:
                break

    with slipstream.connect(measured.address) as captioner:
        await asyncio.to_thread(read_a_little)
        await is_cancelled_soon(measured, before)


async def test_a_gateway_says_how_many_targets_its_draft_should_serve(
    stack: Stack, world: World, tmp_path: Path
) -> None:
    peers = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    async with running("gateway", tmp_path, *peers) as process, slipstream.connect_async(process.address) as captioner:
        await captioner.caption(world.clips[0], max_new_tokens=8, method="autoregressive", **ASKED)
        assert not (await captioner.info()).placements, "no draft has been measured"
        for _ in range(40):  # where the machine is busy, a caption may end before its draft is there
            await captioner.caption(world.clips[0], max_new_tokens=200, gate=False, **ASKED)
            if found := (await captioner.info()).placements:
                break
    assert [each.targets for each in found] == [1, 2, 4]
    assert all(0 < each.devices_at_least <= each.devices_at_most for each in found)
    assert all(each.devices_at_most < max(each.decoding_at_most, 1) for each in found), "prefills and the draft count"
