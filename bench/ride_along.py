"""What prompts that ride along are worth: an archive's time a clip with and without, and what people beside it notice.

One stack after the other, without the target's `--ride-along` and with it: a caption alone, a batch alone, and captions
one after the other beside a batch. With --tables the same at the pace of other devices (REPLAY); what a pass with rows
that ride takes there is no measurement: `--overlap` says which share of a decoding pass hides their arithmetic.
"""

import itertools
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import (
    CLIP_FOLDER,
    MODELS,
    cpu_s,
    held_out_clips,
    machine_facts,
    make_parser,
    run_caption,
    run_to_end,
    say,
)
from bench.faults.batches import archive_of, list_jobs, submit, wait_ended
from bench.output import finish
from bench.replay.rows import TABLES, open_replay, replaying
from bench.tables import print_rows
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.archive.messages import BatchItem
from slipstream.archive.queue import JobState
from slipstream.engine import load_model
from slipstream.engine.ride_plan import RideCounts, alone_counts
from slipstream.engine.row_prefill import Ride, RowPrefill
from slipstream.engine.target_engine import default_guidance_layer
from slipstream.stack.local import FRESH, Stack, StackOptions

METHODS = ("autoregressive", "slipstream")
RIDES, SIDE = (1, 4, 16, 64, 256), 224
ALPHA, WARM_UP_TOKENS, BATCH_TIMEOUT_S = 0.9, 16, 1800.0
_seeds = itertools.count()
"""Greedy texts do not depend on it, but no result is taken over."""


@dataclass(frozen=True)
class Archived:
    """One batch."""

    clip_s: float
    """From the first start to the last end, a clip."""
    texts: Mapping[str, str]
    """By the name of the clip."""
    target_cpu_s: float = 0.0
    """Processor time of the target, a clip."""


@dataclass(frozen=True)
class Heard:
    """Captions one after the other, as their client sees them."""

    token_s: Sequence[float]
    """Of every token behind a caption's first: those that come together share the time since the last."""
    texts: Mapping[str, str]

    @property
    def p95_s(self) -> float:
        return sorted(self.token_s)[int(0.95 * (len(self.token_s) - 1))]


@dataclass(frozen=True)
class Found:
    """Of one method in one stack."""

    archived: Archived
    alone: Heard
    beside: Heard
    """While a batch is in work."""


# -- rows on this CPU --------------------------------------------------------------------------------------------------


def _thread_s(work: Callable[[], object], repeats: int) -> float:
    """Least processor seconds of this thread: other processes do not count."""
    taken = []
    for _ in range(repeats):
        began_s = time.thread_time()
        work()
        taken.append(time.thread_time() - began_s)
    return min(taken)


def row_costs(num_frames: int, repeats: int) -> list[dict[str, Any]]:
    """What a row of a prompt takes of the pocket target, in processor time: alone, and beside passes of 1 and 8 rows,
    all from the middle of the prompt on. The last row is of whole prompts: layer by layer, and in chunks."""
    torch.set_num_threads(1)
    model = load_model(str(MODELS["target"]), dtype="float32")
    plan = model.plan_prompt("Describe this video in detail.", num_frames)
    frames = np.random.default_rng(0).integers(0, 256, (num_frames, SIDE, SIDE, 3), dtype=np.uint8)
    embeddings, layer = model.encode_frames(frames), default_guidance_layer(model.info.num_layers)
    state, _ = model.start_prefill(plan, embeddings).finish()
    whole_s = _thread_s(lambda: model.start_prefill(plan, embeddings).finish(), repeats)

    def at_middle() -> RowPrefill:
        prefill = model.start_row_prefill(plan, embeddings, guidance_layer=layer)
        prefill.run_alone(RideCounts(plan.num_tokens // 2, plan.num_tokens // 2))
        return prefill

    def chunked() -> None:
        prefill = model.start_row_prefill(plan, embeddings, guidance_layer=layer)
        while not prefill.is_done:
            prefill.run_alone(alone_counts(prefill.num_done, plan.num_tokens))

    def step(num_rows: int, ride: Ride | None = None) -> None:
        model.step([(state, [5] * num_rows)], ride)
        state.rollback(plan.num_tokens)

    chunks_s = _thread_s(chunked, repeats)
    rows: list[dict[str, Any]] = []
    for number in RIDES:
        costs: dict[str, Any] = {"rows": number}
        counts = RideCounts(number, number)
        costs["alone"] = 1e3 * min(_thread_s(partial(at_middle().run_alone, counts), 1) for _ in range(repeats))
        for num_rows in (1, 8):
            plain_s = _thread_s(partial(step, num_rows), 3 * repeats)
            ride_s = min(_thread_s(partial(step, num_rows, Ride(at_middle(), counts)), 1) for _ in range(repeats))
            costs[f"beside {num_rows}"] = 1e3 * (ride_s - plain_s)
        rows.append({name: value if name == "rows" else round(value / number, 3) for name, value in costs.items()})
    whole, chunks = (round(1e3 * seconds / plan.num_tokens, 3) for seconds in (whole_s, chunks_s))
    return [*rows, {"rows": plan.num_tokens, "alone": whole, "in chunks": chunks}]


# -- archive and people ------------------------------------------------------------------------------------------------


def _options(given: Namespace, share: float, table: Path | None) -> StackOptions:
    target = (*FRESH["target"], "--ride-along", str(share))
    gateway = (*FRESH["gateway"], "--archive-ahead", "2")
    flags = {**FRESH, "target": target, "gateway": gateway}
    options = StackOptions(
        threads=1, pin=True, archive=True, archive_slots=given.slots, video_roots=(CLIP_FOLDER,), extra_flags=flags
    )
    if table is None:
        return options
    options = replaying(options, table, open_replay(table, given.speed).speed)
    overlap = (*options.extra_flags["target"], "--replay-overlap", str(given.overlap))
    return replace(options, extra_flags={**options.extra_flags, "target": overlap})


async def _measure_stack(given: Namespace, share: float, table: Path | None, clips: Sequence[Path]) -> list[Found]:
    found = []
    template = CaptionOptions(num_frames=given.frames, max_new_tokens=given.tokens, alpha=ALPHA)
    async with Stack(_options(given, share, table)) as stack, connect_async(stack.gateway_address) as captioner:
        for method in METHODS:
            asked = replace(template, method=method)
            await run_caption(captioner, clips[0], replace(asked, max_new_tokens=WARM_UP_TOKENS))
            alone = await _heard(captioner, clips[:1], asked)
            pid = stack.processes["target"].pid
            began_cpu_s = cpu_s(pid)
            archived = await _drained(captioner, await _begun(captioner, clips, asked))
            archived = replace(archived, target_cpu_s=(cpu_s(pid) - began_cpu_s) / len(clips))
            batch = await _begun(captioner, clips, asked)
            beside = await _heard(captioner, clips[: given.people], asked)
            await (await archive_of(captioner)).cancel(batch)
            await wait_ended([captioner], batch, BATCH_TIMEOUT_S)
            found.append(Found(archived, alone, beside))
            say(f"  {share:g} {method}: {archived.clip_s:.2f} s a clip, p95 {1e3 * beside.p95_s:.1f} ms a token")
    return found


async def _heard(captioner: AsyncCaptioner, clips: Sequence[Path], asked: CaptionOptions) -> Heard:
    token_s: list[float] = []
    texts = {}
    for clip in clips:
        arrived = list[tuple[int, float]]()
        on_tokens = partial(_note, arrived)
        captioned = await run_caption(captioner, clip, asked, on_tokens)
        token_s += _shared(arrived)
        texts[clip.stem] = str(captioned.caption)
    return Heard(token_s, texts)


def _note(arrived: list[tuple[int, float]], num_tokens: int, has_draft: bool) -> None:
    arrived.append((num_tokens, time.perf_counter()))


def _shared(arrived: Sequence[tuple[int, float]]) -> Iterator[float]:
    for (before, began_s), (now, ended_s) in itertools.pairwise(arrived):
        yield from [(ended_s - began_s) / (now - before)] * (now - before)


async def _begun(captioner: AsyncCaptioner, clips: Sequence[Path], asked: CaptionOptions) -> str:
    """A batch of all clips; its id."""
    seed = next(_seeds)
    items = [BatchItem(clip.stem, str(clip), replace(asked, seed=seed).given()) for clip in clips]
    return await submit(captioner, f"ride-{seed}-{time.time():.0f}", items)


async def _drained(captioner: AsyncCaptioner, batch: str) -> Archived:
    """Waits for the end of a batch. Ends the program where a clip has failed."""
    await wait_ended([captioner], batch, BATCH_TIMEOUT_S)
    jobs = await list_jobs(captioner, batch)
    bad = [job for job in jobs if job.state is not JobState.DONE]
    if bad:
        sys.exit(f"the batch failed: {[job.error or str(job.state) for job in bad]}")
    wall_s = max(job.ended_s for job in jobs) - min(job.started_s for job in jobs)
    return Archived(wall_s / len(jobs), {job.custom_id: str(job.caption) for job in jobs})


def _rows(name: str, share: float, without: Sequence[Found], riding: Sequence[Found]) -> list[dict[str, Any]]:
    rows = []
    for method, before, after in zip(METHODS, without, riding, strict=True):
        expected = before.archived.texts
        texts = [after.archived.texts, before.beside.texts, after.beside.texts]
        rows.append(
            {
                "device": name,
                "method": method,
                "share": share,
                "clip_s": round(before.archived.clip_s, 3),
                "riding_clip_s": round(after.archived.clip_s, 3),
                "faster": round(before.archived.clip_s / after.archived.clip_s, 3),
                "target_cpu_s": round(before.archived.target_cpu_s, 3),
                "riding_target_cpu_s": round(after.archived.target_cpu_s, 3),
                "p95_alone_ms": round(1e3 * before.alone.p95_s, 2),
                "p95_beside_ms": round(1e3 * before.beside.p95_s, 2),
                "riding_p95_beside_ms": round(1e3 * after.beside.p95_s, 2),
                "p95_over_without": round(after.beside.p95_s / before.beside.p95_s, 3),
                "median_beside_ms": round(1e3 * statistics.median(before.beside.token_s), 2),
                "riding_median_beside_ms": round(1e3 * statistics.median(after.beside.token_s), 2),
                "identical": all(text == expected[name] for each in texts for name, text in each.items()),
            }
        )
    return rows


async def measure(given: Namespace, clips: Sequence[Path]) -> list[dict[str, Any]]:
    """A row for each device and method."""
    rows: list[dict[str, Any]] = []
    tables: list[Path | None] = [] if given.no_cpu else [None]
    for table in [*tables, *(Path(path) for path in given.tables if str(path))]:
        name = "this CPU" if table is None else f"REPLAY {table.stem}"
        say(name)
        without = await _measure_stack(given, 0.0, table, clips)
        rows += _rows(name, given.share, without, await _measure_stack(given, given.share, table, clips))
    return rows


def main(argv: Sequence[str]) -> None:
    flags: dict[str, Any] = {"clips": 6, "frames": 32, "tokens": 192, "slots": (2, "archive captions at once")}
    flags |= {"share": (1.0, "the target's --ride-along"), "tables": ([Path()], "of devices to replay")}
    flags |= {"speed": (8.0, "divides a table's times, or less"), "overlap": (1.0, "see --replay-overlap")}
    flags["people"] = (2, "captions one after the other beside a batch")
    flags["rows_alone"] = (False, "only what rows take on this CPU, in processor time")
    flags["no_cpu"] = (False, "replays alone")
    given = make_parser("ride-along", "What are prompts that ride along worth?", ("people",), **flags).parse_args(argv)
    costs = [] if given.no_cpu else row_costs(given.frames, repeats=3)
    print_rows("milliseconds of processor time that a row of a prompt takes", costs)
    if given.rows_alone:
        finish("ride-along", {"frames": given.frames, "row_ms": costs, "machine": machine_facts()})
        return
    given.tables = [TABLES / path if not path.exists() else path for path in given.tables if path != Path()]
    rows = run_to_end(measure(given, held_out_clips(given.clips)))
    print_rows("prompts that ride along", rows)
    shape = {name: getattr(given, name) for name in ("clips", "frames", "tokens", "slots", "share", "speed", "overlap")}
    identical = all(row["identical"] for row in rows)
    finish("ride-along", {**shape, "identical": identical, "row_ms": costs, "rows": rows, "machine": machine_facts()})
    sys.exit(0 if identical else 1)
