"""What services hold after captions: of large ones that ended in any way (`faults`), and over a thousand small ones."""

import asyncio
import itertools
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from bench.common import MODELS, machine_facts, make_parser, run_to_end, say
from bench.output import finish
from slipstream.stack.local import FRESH
from slipstream.stack.process import ServiceProcess
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.gateway_client import caption
from tests.support.held_memory import (
    MIB,
    MOMENTS,
    SLACK_BYTES,
    Held,
    finish_and_hang_up,
    hung_up,
    look,
    rested,
    write_clip,
)

NUM_FRAMES, NUM_PAIRS = 256, 10
WITHIN_S = 1.0
SMALL: Mapping[str, Any] = {"num_frames": 8, "max_new_tokens": 24, "gate": False}
"""Without the gate, which would leave out a draft that does not pay for so short a text."""
HANG_UP_EVERY = 5
LOOKS = 200
"""At most so many points of a line."""
Processes = Mapping[str, ServiceProcess]


@asynccontextmanager
async def _stack(num_frames: int) -> AsyncIterator[tuple[Processes, grpc.aio.Channel, Path]]:
    """The pocket pair behind a gateway, to which every clip is new; and a clip of large frames."""
    with tempfile.TemporaryDirectory(prefix="slipstream-memory-") as folder:
        clip = write_clip(Path(folder), num_frames)
        options = ClusterOptions(MODELS["target"], MODELS["draft"], Path(folder), gateways=1, slots=0, flags=FRESH)
        async with Cluster(options, say) as cluster, cluster.channel() as channel:
            yield cluster.processes, channel, clip


async def run_memory() -> dict[str, Any]:
    """The part of `faults`: finished captions and hung up ones of the largest size, one after another, behind as many
    as there are moments to hang up, whose first time takes memory that later ones use again."""
    async with _stack(NUM_FRAMES) as (processes, channel, clip):
        await finish_and_hang_up(channel, clip, [NUM_FRAMES] * len(MOMENTS))
        await asyncio.sleep(WITHIN_S)
        before = look(processes)
        await finish_and_hang_up(channel, clip, [NUM_FRAMES] * NUM_PAIRS)
        after = await rested(processes, before, WITHIN_S)
    return {
        "passed": after.is_like(before),
        "held_by_idle_mb": round(max(after.grown(before).values()) / MIB, 1),
        "grown_mb": {name: round(grown / MIB, 1) for name, grown in after.grown(before).items()},
        "resident_mb": {name: resident >> 20 for name, resident in after.resident.items()},
        "frame_memories": after.num_frame_memories,
    }


async def _soak(num_captions: int) -> list[Held]:
    moments, held = itertools.cycle(MOMENTS), []
    async with _stack(SMALL["num_frames"]) as (processes, channel, clip):
        for number in range(num_captions):
            if number % HANG_UP_EVERY:
                await caption(channel, path=str(clip), **SMALL)
            else:
                await hung_up(channel, clip, next(moments), **SMALL)
            if number % max(1, num_captions // LOOKS) == 0:
                held.append(look(processes))
                say(f"soak: {number}: { ({name: size >> 20 for name, size in held[-1].resident.items()}) } MiB")
    return held


def _lines(held: Sequence[Held]) -> dict[str, list[float]]:
    return {name: [round(one.resident[name] / MIB, 1) for one in held] for name in held[0].resident}


def _draw(lines: Mapping[str, Sequence[float]], num_captions: int, path: Path) -> None:
    from bench.report.pictures import BLUE, GREEN, RED, new_figure, panels, save, styled

    with styled():
        figure = new_figure(7.6, 2.6)
        axes = panels(figure)[0]
        for (name, line), colour in zip(lines.items(), (BLUE, GREEN, RED), strict=False):
            axes.plot([num_captions * i / len(line) for i in range(len(line))], line, color=colour, label=name)
        axes.set(xlabel="captions", ylabel="resident MiB", ylim=(0, None), title="Memory of the services")
        axes.legend()
        save(figure, path)


def main(argv: Sequence[str]) -> None:
    parser = make_parser("soak", "Does memory stay level?", captions=(1000, "small ones, one in five hung up"))
    parser.add_argument("--picture", type=Path, help="an SVG of the lines")
    given = parser.parse_args(argv)
    lines = _lines(run_to_end(_soak(given.captions)))
    quarter = len(next(iter(lines.values()))) // 4
    grown = {
        name: round(median(line[-quarter:]) - median(line[quarter : 2 * quarter]), 1) for name, line in lines.items()
    }
    if given.picture is not None:
        _draw(lines, given.captions, given.picture)
    level = max(grown.values()) <= SLACK_BYTES / MIB
    finish("soak", {"ok": level, "grown_mb": grown, "lines": lines, "machine": machine_facts()}, series=("lines",))
    sys.exit(0 if level else 1)
