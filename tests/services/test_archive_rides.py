"""An archive whose prompts ride along, through real services: its texts, and those of people beside it."""

import asyncio
from pathlib import Path

import grpc
import pytest

from slipstream.archive.messages import BatchItem
from slipstream.archive.queue import JobState
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.archive_client import archive_at, jobs_of
from tests.support.gateway_client import caption
from tests.support.processes import failed_start, logged, running
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED = {"prompt": PROMPT, "num_frames": 12, "max_new_tokens": 96}
METHODS = ("autoregressive", "slipstream", "slipstream_tree")


async def test_texts_are_those_of_transformers_and_prompts_rode(
    gateway: grpc.aio.Channel, stack: Stack, world: World, tmp_path: Path
) -> None:
    for index, clip in enumerate(world.clips):
        (tmp_path / f"{index}.mp4").write_bytes(clip)
    items = [
        BatchItem(f"{index}-{method}", str(tmp_path / f"{index}.mp4"), {"method": method, "seed": seed})
        for seed, method in enumerate(METHODS)
        for index in range(len(world.clips))
    ]
    model = ("--model", str(world.pair.target), "--threads", "1", "--prefix-cache-mb", "0", "--ride-along", "0.5")
    async with EmbeddedServer(tmp_path / "redis") as redis, running("target", tmp_path, *model) as target:
        flags = ("--target", target.address, "--draft", stack.processes["draft"].address, "--draft-timeout-s", "30")
        archive = ("--redis", redis.url, "--video-roots", str(tmp_path), "--archive-slots", "3")
        async with (
            running("gateway", tmp_path, *flags, *archive) as process,
            open_channel(process.address) as channel,
        ):
            batch = await archive_at(channel).submit(items, key="rides", **ASKED)
            people = [caption(channel, clip, **ASKED) for clip in world.clips]
            beside = await asyncio.gather(*people)
            ended = await batch.wait()
            jobs = await jobs_of(archive_at(channel).batch("rides"))
        assert logged(target.log_path, "session.rode")
    assert ended.counts.done == len(items) and {job.state for job in jobs.values()} == {JobState.DONE}
    expected = [world.answer(index, ASKED["max_new_tokens"]) for index in range(len(world.clips))]
    for name, job in jobs.items():
        tokens = expected[int(name[0])]
        assert job.caption is not None and job.caption.num_tokens == len(tokens), name
        assert job.caption.text == world.reference.text(tokens), name
    assert [[token.token_id for token in one.tokens] for one in beside] == expected


@pytest.mark.parametrize("flags", [("--strict-width", "8"), ("--ranks", "2")])
async def test_a_model_whose_passes_carry_nothing_does_not_start(
    world: World, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    model = ("--model", str(world.pair.target), "--ride-along", "1")
    status, log = await failed_start("target", tmp_path, *model, *flags)
    assert status == 2 and "--ride-along is for a model in one process" in str(log[-1])
