"""Whose prompt goes first: how long a short caption waits for its first token, alone, beside long captions of others
that came before it, and beside an archive of long ones; and what that costs those. With `--places` the target has room
for so many captions at once, and the others wait for that."""

import asyncio
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import CLIP_FOLDER, held_out_clips, machine_facts, make_parser, run_caption, run_to_end, say
from bench.faults.batches import list_jobs, submit, wait_ended
from bench.output import finish
from bench.tables import print_rows
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.archive.messages import BatchItem
from slipstream.archive.queue import JobState
from slipstream.stack.local import FRESH, Stack, StackOptions

HEAD_START_S = 0.5
"""Of the long captions."""
BATCH_TIMEOUT_S = 1800.0


async def _first_token_s(captioner: AsyncCaptioner, clip: Path, asked: CaptionOptions) -> float:
    """From asking to the first token."""
    began_s, first_s = time.perf_counter(), list[float]()

    def heard(num_tokens: int, has_draft: bool) -> None:
        first_s.append(time.perf_counter() - began_s)

    await run_caption(captioner, clip, asked, heard)
    return first_s[0]


async def _whole_s(captioner: AsyncCaptioner, clip: Path, asked: CaptionOptions) -> float:
    began_s = time.perf_counter()
    await run_caption(captioner, clip, asked)
    return time.perf_counter() - began_s


async def _beside_people(
    captioner: AsyncCaptioner, clips: Sequence[Path], short: CaptionOptions, long: CaptionOptions
) -> tuple[float, float]:
    """The short one's wait, and the mean time of the long ones."""
    longs = [asyncio.create_task(_whole_s(captioner, clip, long)) for clip in clips[1:]]
    await asyncio.sleep(HEAD_START_S)
    first_s = await _first_token_s(captioner, clips[0], short)
    return first_s, statistics.mean(await asyncio.gather(*longs))


async def _beside_archive(
    captioner: AsyncCaptioner, clips: Sequence[Path], short: CaptionOptions, long: CaptionOptions, repeats: int
) -> tuple[list[float], float]:
    """The waits of short ones, one after the other, and the batch's time a clip."""
    items = [
        BatchItem(f"{number}-{clip.stem}", str(clip), replace(long, seed=number).given())
        for number in range(repeats)
        for clip in clips[1:]
    ]
    batch = await submit(captioner, f"turns-{time.time():.0f}", items)
    await asyncio.sleep(HEAD_START_S)
    firsts = [await _first_token_s(captioner, clips[0], short) for _ in range(repeats)]
    await wait_ended([captioner], batch, BATCH_TIMEOUT_S)
    jobs = await list_jobs(captioner, batch)
    assert all(job.state is JobState.DONE for job in jobs), "the batch failed"
    return firsts, (max(job.ended_s for job in jobs) - min(job.started_s for job in jobs)) / len(jobs)


async def measure(given: Namespace, clips: Sequence[Path]) -> list[dict[str, Any]]:
    """A row for each kind of company."""
    long = CaptionOptions(num_frames=given.frames, max_new_tokens=given.tokens)
    short = replace(long, num_frames=given.short_frames)
    slots = len(clips) - 1
    places = ("--max-sessions", str(given.places)) if given.places else ()
    flags = FRESH | {"target": (*FRESH["target"], *places)}
    options = StackOptions(
        threads=1, pin=True, archive=True, archive_slots=slots, video_roots=(CLIP_FOLDER,), extra_flags=flags
    )
    async with Stack(options) as stack, connect_async(stack.gateway_address) as captioner:
        alone = [await _first_token_s(captioner, clips[0], short) for _ in range(given.repeats + 1)][1:]
        long_s = statistics.mean([await _whole_s(captioner, clip, long) for clip in clips[1:]])
        people = [await _beside_people(captioner, clips, short, long) for _ in range(given.repeats)]
        say(f"beside people: {[round(first_s, 2) for first_s, _ in people]}")
        archived, clip_s = await _beside_archive(captioner, clips, short, long, given.repeats)
    return [
        _row("alone", alone, long_s),
        _row(f"{slots} long ones of people", [first_s for first_s, _ in people], statistics.mean(s for _, s in people)),
        _row(f"{slots} long ones of an archive at a time", archived, clip_s),
    ]


def _row(beside: str, first_s: Sequence[float], long_s: float) -> dict[str, Any]:
    return {
        "beside": beside,
        "first_token_s": round(statistics.median(first_s), 2),
        "worst_s": round(max(first_s), 2),
        "long_s": round(long_s, 2),
    }


def main(argv: Sequence[str]) -> None:
    """Prints a table. `long_s`: of a long caption alone, on the average of several at once, and of a batch a clip."""
    flags: dict[str, Any] = {"repeats": 5, "long": (3, "long captions at once"), "frames": 128, "tokens": 48}
    flags |= {"short_frames": (8, "of the short one"), "places": (0, "that the target has; 0: its default")}
    given = make_parser("prompt-turns", str(__doc__), **flags).parse_args(argv)
    rows = run_to_end(measure(given, held_out_clips(given.long + 1)))
    print_rows("whose prompt goes first", rows)
    finish("prompt-turns", {"rows": rows, "asked": vars(given), "machine": machine_facts()})
