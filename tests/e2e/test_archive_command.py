"""`slipstream archive` against a real stack with its own queue: captions, receipts, repetition, a queue that dies."""

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from tests.support.gateway_client import caption
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

OPTIONS = ("--prompt", PROMPT, "--frames", "6", "--max-new-tokens", "24")


async def run(stack: Stack, *words: object) -> tuple[int, str]:
    """Exit status and stderr of one command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "slipstream.cli", "archive", *map(str, words), "--gateway", stack.gateway_address),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    return process.returncode or 0, errors.decode()


async def test_a_folder_becomes_a_file(world: World, tmp_path: Path) -> None:
    folder, output = tmp_path / "videos", tmp_path / "out.jsonl"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "1.mp4").write_bytes(world.clips[1])
    (folder / "0.mp4").write_bytes(world.clips[0])
    (folder / "bad.mp4").write_bytes(b"no video at all")
    options = replace(
        world.stack_options(),
        draft_model=None,
        archive=True,
        data=tmp_path / "data",
        video_roots=(folder,),
        restart=True,
    )
    async with Stack(options) as stack:
        assert stack.queue is not None
        status, errors = await run(stack, "submit", folder, "--output", output, *OPTIONS)
        assert (status, "3 added, 0 known" in errors) == (5, True), errors
        lines = {line["custom_id"]: line for line in map(json.loads, output.read_text().splitlines())}
        async with open_channel(stack.gateway_address) as channel:
            for name, clip in (("0.mp4", world.clips[0]), ("deep/1.mp4", world.clips[1])):
                direct = await caption(channel, clip, prompt=PROMPT, num_frames=6, max_new_tokens=24)
                assert lines[name]["text"] == direct.text
        receipt = lines["0.mp4"]["receipt"]
        assert receipt["runs"] == 1 and receipt["target"]["revision"] and receipt["text_sha256"]
        errors_file = tmp_path / "out.jsonl.errors.jsonl"
        assert [json.loads(line)["custom_id"] for line in errors_file.read_text().splitlines()] == ["bad.mp4"]

        os.kill(stack.queue.pid, signal.SIGKILL)
        await stack.wait_started("redis", 2)
        before = output.read_bytes()
        status, errors = await run(stack, "submit", folder, "--output", output, *OPTIONS)
        assert (status, "0 added, 3 known" in errors) == (5, True), errors
        assert output.read_bytes() == before
