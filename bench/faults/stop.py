"""How long `slipstream up` takes to end after Ctrl-C or SIGTERM: idle, captioning, and with an archive at work."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import say
from slipstream.stack.local import STOP_LIMIT_S
from training.data import render_folder
from training.world import HELD_OUT_SEEDS

NUM_CLIPS = 4
LONG = ("--frames", "256", "--max-new-tokens", "2000")
LOADS: dict[str, tuple[str, ...]] = {"idle": (), "captions": ("caption",), "both": ("caption", "archive")}
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLD = "is stopping"
START_S = 300.0


@dataclass(frozen=True)
class Running:
    """A stack that `slipstream up` keeps, and where it logs."""

    process: Process
    address: str
    logs: Path


async def run_stop() -> dict[str, Any]:
    """Seconds from each signal to the end of the command under each load; every caption must be told why it ended."""
    seconds, told = {}, []
    with tempfile.TemporaryDirectory(prefix="slipstream-stop-") as folder:
        clips = render_folder(Path(folder), range(HELD_OUT_SEEDS.start, HELD_OUT_SEEDS.start + NUM_CLIPS))
        for load, kinds in LOADS.items():
            for number in SIGNALS:
                name = f"{load} {number.name}"
                seconds[name], answers = await _measure(clips, kinds, number)
                told += answers
                say(f"stop: {name}: {seconds[name]:.2f} s")
    slowest = max(seconds.values())
    return {
        "passed": slowest <= STOP_LIMIT_S and all(told),
        "slowest_s": round(slowest, 2),
        "limit_s": STOP_LIMIT_S,
        "captions_told": sum(told),
        "captions_cut": len(told),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }


async def _measure(clips: Sequence[Path], kinds: Sequence[str], number: signal.Signals) -> tuple[float, list[bool]]:
    """Seconds to the end, and for every caption that it cut off whether that was told."""
    async with _up(clips[0].parent) as up:
        clients = []
        for clip in clips if "caption" in kinds else ():
            clients.append(await _command("caption", clip, "--gateway", up.address, *LONG, stderr=PIPE))
        if "archive" in kinds:
            await (await _command("archive", "submit", clips[0].parent, "--gateway", up.address, *LONG)).wait()
        await _busy(up, len(clients))
        began = time.monotonic()
        up.process.send_signal(number)
        await up.process.wait()
        ended_s = time.monotonic() - began
        outputs = [(await client.communicate())[1].decode() for client in clients]
    return ended_s, [TOLD in output for output, client in zip(outputs, clients, strict=True) if client.returncode]


@contextlib.asynccontextmanager
async def _up(video_root: Path) -> AsyncIterator[Running]:
    with tempfile.TemporaryDirectory(prefix="slipstream-stop-") as data:
        process = await _command("up", "--video-root", video_root, "--data", data, stdout=PIPE, stderr=PIPE)
        assert process.stdout is not None and process.stderr is not None
        try:
            async with asyncio.timeout(START_S):
                address = (await process.stdout.readline()).decode().split()[1]
                while not (line := (await process.stderr.readline()).decode()).startswith("logs: "):
                    pass
            yield Running(process, address, Path(line.removeprefix("logs: ").strip()))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def _command(*words: object, stdout: int = DEVNULL, stderr: int = DEVNULL) -> Process:
    argv = (sys.executable, "-m", "slipstream.cli", *map(str, words))
    return await asyncio.create_subprocess_exec(*argv, stdout=stdout, stderr=stderr, env=os.environ)


async def _busy(up: Running, num_captions: int) -> None:
    """Returns when the target has as many sessions as captions were asked for."""
    async with asyncio.timeout(START_S):
        while (up.logs / "target.log").read_text().count('"session.opened"') < num_captions:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.1)
