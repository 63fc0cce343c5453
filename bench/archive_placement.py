"""Two plain targets against a target and its draft, on the same two cores: which captions more videos an hour.

Both placements have two model processes of one thread each. So many sessions caption the same clips at once; of two
targets each has half of them. No prefill or embedding is used twice, and the order changes from round to round.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import held_out_clips, say
from bench.tables import print_rows
from slipstream import AsyncCaptioner, Caption, connect_async
from slipstream.stack.local import FRESH, Stack, StackOptions

SESSIONS = (1, 2, 4, 8)
DEVICES = 2


@dataclass(frozen=True)
class Placed:
    """What runs on the two devices."""

    name: str
    method: str
    num_stacks: int
    has_draft: bool


PLACEMENTS = (
    Placed("two plain targets", "autoregressive", 2, False),
    Placed("target and draft", "slipstream", 1, True),
)


@dataclass(frozen=True)
class Measured:
    """All clips, captioned once."""

    placed: Placed
    sessions: int
    wall_s: float
    captions: Mapping[Path, Caption]
    load_before: float
    """Of the machine, before anything of this round was started."""

    @property
    def videos_per_h(self) -> float:
        return 3600 * len(self.captions) / self.wall_s

    @property
    def tokens_per_s_a_device(self) -> float:
        return sum(caption.num_tokens for caption in self.captions.values()) / self.wall_s / DEVICES


async def run_placement(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `placement`."""
    clips = held_out_clips(given.placement_videos)
    measured: list[Measured] = []
    for number in range(given.placement_rounds):
        for placed in PLACEMENTS if number % 2 == 0 else reversed(PLACEMENTS):
            measured += await _measure(placed, clips, given)
    rows = [_row(placed, sessions, measured) for sessions in SESSIONS for placed in PLACEMENTS]
    print_rows("Placement on equal hardware: two cores, two model processes", rows)
    texts = {(clip, caption.text) for one in measured for clip, caption in one.captions.items()}
    return {
        "rows": rows,
        "faster": {str(sessions): _faster(rows, sessions) for sessions in SESSIONS},
        "differing": len(texts) - len(clips),
        "largest_load_before": max(one.load_before for one in measured),
    }


async def _measure(placed: Placed, clips: Sequence[Path], given: argparse.Namespace) -> list[Measured]:
    load_before = os.getloadavg()[0]
    options = StackOptions(
        target_model=given.target,
        draft_model=given.draft if placed.has_draft else None,
        threads=1,
        extra_flags=FRESH,
    )
    async with AsyncExitStack() as exits:
        stacks = [await exits.enter_async_context(Stack(options)) for _ in range(placed.num_stacks)]
        captioners = [await exits.enter_async_context(connect_async(stack.gateway_address)) for stack in stacks]
        asked = {
            "method": placed.method,
            "num_frames": given.placement_frames,
            "max_new_tokens": given.placement_tokens,
        }
        for captioner in captioners:  # the first caption of a process is slower
            await captioner.caption(clips[0], **asked)
        measured = []
        for sessions in SESSIONS:
            began = time.monotonic()
            captions = await _captioned(captioners, clips, sessions, asked)
            measured.append(Measured(placed, sessions, time.monotonic() - began, captions, load_before))
            say(f"{placed.name}, {sessions} sessions: {measured[-1].videos_per_h:.0f} videos/h")
        return measured


async def _captioned(
    captioners: Sequence[AsyncCaptioner], clips: Sequence[Path], sessions: int, asked: Mapping[str, Any]
) -> dict[Path, Caption]:
    """Of every clip; each session takes the next one when it is done with one."""
    left, captions = list(reversed(clips)), {}

    async def work(captioner: AsyncCaptioner) -> None:
        while left:
            clip = left.pop()
            captions[clip] = await captioner.caption(clip, **asked)

    async with asyncio.TaskGroup() as group:
        for number in range(sessions):
            group.create_task(work(captioners[number % len(captioners)]))
    return captions


def _row(placed: Placed, sessions: int, measured: Sequence[Measured]) -> dict[str, Any]:
    """Medians over the rounds."""
    own = [one for one in measured if one.placed is placed and one.sessions == sessions]
    return {
        "sessions": sessions,
        "placement": placed.name,
        "videos_per_h": round(statistics.median(one.videos_per_h for one in own), 1),
        "tokens_per_s_a_device": round(statistics.median(one.tokens_per_s_a_device for one in own), 1),
        "rounds": [round(one.videos_per_h, 1) for one in own],
    }


def _faster(rows: Sequence[Mapping[str, Any]], sessions: int) -> dict[str, Any]:
    """The placement with more videos an hour, and how many times as many as the other has."""
    other, best = sorted((row for row in rows if row["sessions"] == sessions), key=lambda row: row["videos_per_h"])
    return {"placement": best["placement"], "times": round(best["videos_per_h"] / other["videos_per_h"], 2)}
