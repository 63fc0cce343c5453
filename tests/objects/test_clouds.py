"""Objects of `gs://` and `az://`, on servers that answer as these clouds do: one gateway reads its videos there by
ranges and leaves its results there, and the command line its manifest and its output."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.object_ranges import promises_of, read_film
from slipstream.objects.store import ObjectUrl
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.worlds import until
from tests.support.archive_client import archive_at
from tests.support.cloud_servers import CloudServer, cloud_server, missing
from tests.support.films import make_noise_film
from tests.support.gateway_client import caption
from tests.support.processes import logged, running
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 6, "max_new_tokens": 24}
OPTIONS = ("--prompt", PROMPT, "--frames", "6", "--max-new-tokens", "24")


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["gs", "az"])
async def cloud(request: pytest.FixtureRequest) -> AsyncIterator[CloudServer]:
    if lacks := missing(request.param):
        pytest.skip(lacks)
    with pytest.MonkeyPatch.context() as patch:
        async with cloud_server(request.param) as served:
            for name, value in served.environment.items():
                patch.setenv(name, value)
            yield served


async def test_an_object_is_written_once_and_known_when_it_changes(cloud: CloudServer) -> None:
    assert await promises_of(cloud.url("checks")) == {
        "written_once": True,
        "change_is_told": True,
        "listed": True,
        "gone": True,
    }


async def test_a_large_film_is_read_by_ranges(cloud: CloudServer, tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(make_noise_film(1500, size=(160, 128)))
    row = await read_film(ObjectUrl.parse(await cloud.put("film.mp4", path.read_bytes())), path, 8)
    assert row["same_frames"] and row["fetched_again"] == 0 and row["share"] < 0.25


async def test_an_archive_lives_in_the_cloud(cloud: CloudServer, stack: Stack, world: World, tmp_path: Path) -> None:
    for name, clip in (("a", world.clips[0]), ("b", world.clips[1])):
        await cloud.put(f"shown/{name}.mp4", clip)
    manifest = await cloud.put("list.jsonl", b'{"source": "shown/a.mp4"}\n{"source": "shown/b.mp4"}\n')
    models = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    results = ("--results-to", f"{cloud.address}/results", "--result-file-age-s", "0")
    async with EmbeddedServer(tmp_path / "redis") as redis:
        flags = (*models, "--redis", redis.url, "--object-roots", f"{cloud.address}/shown", *results)
        async with (
            running("gateway", tmp_path / "gateway", *flags, **cloud.environment) as gateway,
            open_channel(gateway.address) as channel,
        ):
            words = (manifest, "--name", "all", "--output", f"{cloud.address}/out.jsonl", "--gateway", gateway.address)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "slipstream.cli", "archive", "submit", *words, *OPTIONS),
                env={**os.environ, **cloud.environment},
            )
            assert await process.wait() == 0
            lines = {
                line["custom_id"]: line
                for line in map(json.loads, (await cloud.get("out.jsonl")).decode().splitlines())
            }
            texts = [(await caption(channel, clip, **SMALL)).text for clip in world.clips[:2]]
            assert [lines[name]["text"] for name in sorted(lines)] == texts

            async def is_written() -> bool:
                return sum(line["num_jobs"] for line in logged(gateway.log_path, "results.written")) == 2

            await until(is_written)
            jobs = [job async for job in archive_at(channel).batch("all").jobs()]
            assert [job.caption.text if job.caption else "" for job in jobs] == texts, "read back from the files"
