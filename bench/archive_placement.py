"""Two plain targets against a target and its draft, on the same two cores: which captions more videos an hour.

Both placements have two model processes of one thread each. So many sessions caption the same clips at once; of two
targets each has half of them. No prefill or embedding is used twice, and the order changes from round to round. What
`archive estimate` would advise, from the target and its draft alone, is held against what was faster.
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
from slipstream.client.archive_estimate import drafted_time, rest_time
from slipstream.speculation.placement import ABOUT, Advice, Compared, PlainTime, captions_of_each, compare
from slipstream.stack.local import FRESH, Stack, StackOptions

SESSIONS = (1, 2, 4, 8)
DEVICES = 2
COMPARED = 4
"""Clips that the target captions plainly, too, for the advice."""


@dataclass(frozen=True)
class Placed:
    """What runs on the two devices."""

    name: str
    method: str
    num_stacks: int
    has_draft: bool


PLAIN, DRAFTED = (
    Placed("two plain targets", "autoregressive", 2, False),
    Placed("target and draft", "slipstream", 1, True),
)
PLACEMENTS = (PLAIN, DRAFTED)


@dataclass(frozen=True)
class Measured:
    """All clips, captioned once."""

    placed: Placed
    sessions: int
    wall_s: float
    captions: Mapping[Path, Caption]
    load_before: float
    """Of the machine, before anything of this round was started."""
    compared: Compared | None = None
    """What an estimate would say of it; of the target and its draft."""

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
    advised = {str(sessions): _advised(rows, sessions, measured) for sessions in SESSIONS}
    texts = {(clip, caption.text) for one in measured for clip, caption in one.captions.items()}
    return {
        "rows": rows,
        "faster": {str(sessions): _faster(rows, sessions) for sessions in SESSIONS},
        "advised": advised,
        "advised_wrong": sum(one["is_wrong"] for one in advised.values()),
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
            wall_s, compared = time.monotonic() - began, None
            if placed is DRAFTED:
                plain = await _plainly(captioners[0], clips, captions_of_each(sessions, DEVICES), asked)
                compared = compare(drafted_time(wall_s, list(captions.values())), plain, 1, DEVICES)
            measured.append(Measured(placed, sessions, wall_s, captions, load_before, compared))
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


async def _plainly(
    captioner: AsyncCaptioner, clips: Sequence[Path], at_once: int, asked: Mapping[str, Any]
) -> PlainTime:
    """Of some clips by the target alone, so many at a time, as an estimate has it."""

    async def caption(clip: Path) -> tuple[float, Caption]:
        made = await captioner.caption(clip, **{**asked, "method": PLAIN.method})
        return time.monotonic(), made

    rest_s, num_tokens, chosen = 0.0, 0, clips[: max(COMPARED, at_once)]
    for first in range(0, len(chosen), at_once):
        made = await asyncio.gather(*map(caption, chosen[first : first + at_once]))
        rest_s += rest_time(made)
        num_tokens += sum(one.num_tokens for _, one in made)
    return PlainTime(rest_s, num_tokens)


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


def _advised(rows: Sequence[Mapping[str, Any]], sessions: int, measured: Sequence[Measured]) -> dict[str, Any]:
    """What estimates would say on a median, beside how it was."""
    said = [one.compared for one in measured if one.compared is not None and one.sessions == sessions]
    median = sorted(said, key=lambda one: one.times)[len(said) // 2]
    rate = {row["placement"]: row["videos_per_h"] for row in rows if row["sessions"] == sessions}
    times = rate[DRAFTED.name] / rate[PLAIN.name]
    return {
        "recommended": median.advice,
        "foreseen_times": round(median.times, 2),
        "measured_times": round(times, 2),
        "is_wrong": is_wrong(median.advice, times),
    }


def is_wrong(advice: Advice, times: float) -> bool:
    """Whether plain targets, which took so many times as long, were clearly not what was advised."""
    return times < 1 / ABOUT if advice is not Advice.PLAIN else times > ABOUT
