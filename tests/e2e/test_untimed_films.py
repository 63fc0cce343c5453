"""Films without timestamps, at the interactive door and in the archive: a marked text or a clear error, and the rest of
a batch goes on."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import slipstream
from slipstream.archive.messages import BatchItem
from slipstream.archive.queue import JobState
from slipstream.client.batch_handles import AsyncArchive
from slipstream.errors import InvalidRequest, SlipstreamError
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.archive_client import archive_at, jobs_of
from tests.support.media import ClipSpec, even_times_ms, make_clip
from tests.support.processes import running
from tests.support.untimed_clips import still_mp4, unstamped_ts
from tests.support.world import PROMPT

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 4, "max_new_tokens": 16}
SEGMENTS = {"segments": "fixed:1s"}
FEWER = "4 frames were asked for, but the video has only 1 at these times"
NO_SEGMENTS = "the frames of this file have no times of their own, so it has no segments; write it anew with timestamps"
NO_TIMES = "no frame of this file says when it is shown; write it anew with timestamps"
TIMES_MS, NO_REORDERING = even_times_ms(50), {"bf": "0"}


@pytest.fixture(scope="module")
def clip() -> bytes:
    return make_clip(ClipSpec(TIMES_MS, codec_options=NO_REORDERING))


@pytest.fixture(scope="module")
def still(clip: bytes) -> bytes:
    """All frames have the same time."""
    return still_mp4(clip)


@pytest.fixture(scope="module", params=["libx264", "mpeg2video"])
def unstamped(request: pytest.FixtureRequest) -> bytes:
    """No frame has a time."""
    spec = ClipSpec(TIMES_MS, container="mpegts", codec=request.param, codec_options=NO_REORDERING)
    return unstamped_ts(make_clip(spec))


async def test_of_a_film_whose_frames_share_one_time_the_text_is_marked_and_there_are_no_segments(
    stack: Stack, still: bytes
) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        caption = await captioner.caption(still, **SMALL)
        assert caption.text and FEWER in caption.video.warnings
        with pytest.raises(InvalidRequest, match=NO_SEGMENTS):
            [part async for part in captioner.caption_segments(still, **SEGMENTS, **SMALL)]


async def test_a_film_without_any_time_is_said_to_be_one(stack: Stack, unstamped: bytes) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        with pytest.raises(SlipstreamError, match=NO_TIMES) as refused:
            await captioner.caption(unstamped, **SMALL)
        assert refused.value.status == "INVALID_ARGUMENT"
        with pytest.raises(SlipstreamError, match=NO_TIMES):
            [part async for part in captioner.caption_segments(unstamped, **SEGMENTS, **SMALL)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def archive(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[AsyncArchive, Path]]:
    """An archive, and the folder of its films."""
    folder = tmp_path_factory.mktemp("untimed")
    models = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    async with EmbeddedServer(folder / "redis") as redis:
        flags = (*models, "--redis", redis.url, "--video-roots", str(folder), "--draft-timeout-s", "30")
        async with running("gateway", folder / "gateway", *flags) as process, open_channel(process.address) as channel:
            yield archive_at(channel), folder


async def test_in_the_archive_such_films_fail_or_are_marked_and_the_rest_goes_on(
    archive: tuple[AsyncArchive, Path], clip: bytes, still: bytes, unstamped: bytes
) -> None:
    client, folder = archive
    films = {"timed": clip, "still": still, "unstamped": unstamped}
    for name, data in films.items():
        (folder / name).write_bytes(data)
    items = [BatchItem(name, str(folder / name)) for name in films]
    items += [BatchItem(f"{name} in segments", str(folder / name), SEGMENTS) for name in films]
    batch = await client.submit(items, **SMALL)
    await batch.wait()
    jobs = await jobs_of(batch)
    done = {name for name, job in jobs.items() if job.state is JobState.DONE}
    assert done == {"timed", "still", "timed in segments"}
    marked = jobs["still"].caption
    assert marked is not None and marked.text and FEWER in marked.video.warnings
    assert len([part async for part in batch.parts(jobs["timed in segments"])]) == 2
    failed = {name: job for name, job in jobs.items() if name not in done}
    assert {job.state for job in failed.values()} == {JobState.FAILED}
    assert {job.error_code for job in failed.values()} == {"INVALID_ARGUMENT"}
    assert failed["still in segments"].error.startswith(NO_SEGMENTS)
    assert failed["unstamped"].error == failed["unstamped in segments"].error == NO_TIMES
