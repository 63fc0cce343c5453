"""Films in a bucket through a real gateway: the text of the local file, few of its bytes, and stores that fail."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.errors import InvalidConfig, PermissionDenied, ServiceUnavailable, SlipstreamError
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from tests.support.films import make_noise_film
from tests.support.gateway_client import caption
from tests.support.object_store import ObjectServer, object_server
from tests.support.processes import running
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 6, "max_new_tokens": 24}
SPARSE: dict[str, Any] = {**SMALL, "num_frames": 16}
TIMEOUT_S = 3.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def objects() -> AsyncIterator[ObjectServer]:
    async with object_server() as served:
        yield served


@pytest.fixture(scope="module")
def film() -> bytes:
    """Two minutes, of tens of MB."""
    return make_noise_film(3000, size=(160, 128))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def door(
    stack: Stack, objects: ObjectServer, film: bytes, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[grpc.aio.Channel]:
    """A gateway that opens objects of one folder of the bucket, and files of one folder."""
    folder = tmp_path_factory.mktemp("objects")
    (folder / "videos").mkdir()
    (folder / "videos" / "film.mp4").write_bytes(film)
    models = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    roots = ("--object-roots", "s3://films/shown, s3://films/of/{owner}", "--video-roots", str(folder / "videos"))
    limits = ("--object-timeout-s", str(TIMEOUT_S), "--max-video-bytes", str(200_000_000))
    gateway = running("gateway", folder, *models, *roots, *limits, **objects.environment)
    async with gateway as process, open_channel(process.address) as channel:
        yield channel


async def test_a_clip_in_a_bucket_has_the_text_of_the_uploaded_one(
    door: grpc.aio.Channel, objects: ObjectServer, world: World
) -> None:
    uploaded = await caption(door, world.clips[0], **SMALL)
    found = await caption(door, path=objects.put("shown/0.mp4", world.clips[0]), **SMALL)
    assert found.token_ids == uploaded.token_ids and found.text


async def test_of_a_large_film_few_bytes_are_fetched_and_none_twice(
    door: grpc.aio.Channel, objects: ObjectServer, film: bytes
) -> None:
    address = objects.put("shown/deep/film.mp4", film)
    local = await caption(door, path="film.mp4", **SPARSE)
    before = objects.given
    found = await caption(door, path=address, **SPARSE)
    first = objects.given - before
    again = await caption(door, path=address, **SPARSE)
    second = objects.given - before - first
    assert local.token_ids == found.token_ids == again.token_ids
    assert len(film) > 30_000_000 and first < 0.25 * len(film)
    assert second < 0.01 * len(film)


async def test_a_file_may_be_named_as_an_address_below_the_video_roots_alone(
    door: grpc.aio.Channel, tmp_path_factory: pytest.TempPathFactory, film: bytes
) -> None:
    folder = next(tmp_path_factory.getbasetemp().glob("objects?/videos/film.mp4")).parent
    found = await caption(door, path=f"file://{folder}/%66ilm.mp4", **SPARSE)
    assert found.token_ids == (await caption(door, path="film.mp4", **SPARSE)).token_ids
    with pytest.raises(SlipstreamError, match="no readable video") as refused:
        await caption(door, path=f"file://{Path(__file__)}", **SMALL)
    assert refused.value.status == "NOT_FOUND"


@pytest.mark.parametrize(
    ("address", "status", "message"),
    [
        ("s3://films/shown/none.mp4", "NOT_FOUND", "no object"),
        ("s3://films/hidden/a.mp4", "PERMISSION_DENIED", "--object-roots"),
        ("s3://films/shownother/a.mp4", "PERMISSION_DENIED", "--object-roots"),
        ("s3://other/shown/a.mp4", "PERMISSION_DENIED", "--object-roots"),
        ("s3://films/of/{owner}/a.mp4", "PERMISSION_DENIED", "--object-roots"),
        ("gs://films/shown/a.mp4", "PERMISSION_DENIED", "--object-roots"),
        ("s3://films/shown/../hidden/a.mp4", "INVALID_ARGUMENT", "own key"),
        ("s3://", "INVALID_ARGUMENT", "no bucket"),
        ("s3://films/shown//a.mp4", "INVALID_ARGUMENT", "a step without a name"),
    ],
)
async def test_what_is_not_there_or_not_for_callers_is_refused(
    door: grpc.aio.Channel, objects: ObjectServer, world: World, address: str, status: str, message: str
) -> None:
    objects.put("hidden/a.mp4", world.clips[0])
    with pytest.raises(SlipstreamError, match=message) as refused:
        await caption(door, path=address, **SMALL)
    assert refused.value.status == status


async def test_a_gateway_without_roots_opens_no_objects(gateway: grpc.aio.Channel) -> None:
    """Which is no fault of whoever names one: a row of Ray Data is not kept as failed for it."""
    with pytest.raises(InvalidConfig, match="--object-roots"):
        await caption(gateway, path="s3://films/shown/0.mp4", **SMALL)


async def test_without_rights_it_says_so_and_no_secret(
    door: grpc.aio.Channel, objects: ObjectServer, world: World
) -> None:
    address = objects.put("shown/closed.mp4", world.clips[0])
    objects.forbids = True
    try:
        with pytest.raises(PermissionDenied, match="credentials of this server do not open") as refused:
            await caption(door, path=address, **SMALL)
    finally:
        objects.forbids = False
    assert "tester" not in str(refused.value) and "secret" not in str(refused.value)
    assert (await caption(door, path=address, **SMALL)).text


async def test_a_store_that_hangs_hurts_nobody_else(
    door: grpc.aio.Channel, objects: ObjectServer, film: bytes, world: World
) -> None:
    address = objects.put("shown/hangs.mp4", film + bytes(8))
    objects.pause_after = 3_000_000
    try:
        hanging = asyncio.create_task(caption(door, path=address, **SPARSE))
        assert (await caption(door, world.clips[1], **SMALL)).text
        with pytest.raises(ServiceUnavailable, match="did not come within this server's limit"):
            await hanging
    finally:
        objects.resume()
    assert (await caption(door, path="film.mp4", **SPARSE)).text


@pytest.mark.long
async def test_an_object_that_changes_while_it_is_read_is_no_mixture(
    door: grpc.aio.Channel, objects: ObjectServer, film: bytes
) -> None:
    address = objects.put("shown/changes.mp4", film)
    objects.pause_after = 3_000_000
    task = asyncio.create_task(caption(door, path=address, **SPARSE))
    try:
        await objects.paused()
        objects.put("shown/changes.mp4", film[:-1] + b"\0")
    finally:
        objects.resume()
    with pytest.raises(SlipstreamError, match="changed while it was read") as refused:
        await task
    assert isinstance(refused.value.__cause__, grpc.aio.AioRpcError)
    assert refused.value.__cause__.code() is grpc.StatusCode.ABORTED
    assert (await caption(door, path=address, **SPARSE)).text


async def test_a_store_that_is_away_is_said_to_be(stack: Stack, tmp_path: Path, world: World) -> None:
    async with contextlib.AsyncExitStack() as exits:
        async with object_server() as gone:
            flags = ("--target", stack.processes["target"].address, "--object-roots", "s3://films")
            process = await exits.enter_async_context(
                running("gateway", tmp_path, *flags, "--object-timeout-s", "2", **gone.environment)
            )
            channel = await exits.enter_async_context(open_channel(process.address))
            address = gone.put("0.mp4", world.clips[0])
            assert (await caption(channel, path=address, **SMALL)).text
        with pytest.raises(ServiceUnavailable, match=r"s3://films/0.mp4"):
            await caption(channel, path=address, **SMALL)
        assert (await caption(channel, world.clips[0], **SMALL)).text
