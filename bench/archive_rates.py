"""Videos an hour of an archive with 1, 2 and 4 workers, plain against Slipstream.

A worker is a gateway that runs one archive caption at a time; all share one target, one draft and one queue. Each
round starts every number of workers once and drains one batch by each method on them, so that a machine whose speed
drifts does not favour one. No result, prefill or embedding is used twice.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import CLIP_FOLDER, MODELS, held_out_clips, machine_facts, make_parser, run_to_end, say
from bench.faults.batches import list_jobs, submit, wait_ended
from bench.output import finish
from bench.tables import print_rows
from slipstream import AsyncCaptioner, Caption, CaptionOptions, Timings
from slipstream.archive.messages import BatchItem, Job
from slipstream.archive.queue import JobState
from slipstream.stack.local import FRESH
from tests.support.cluster import Cluster, ClusterOptions

WORKERS = (1, 2, 4)
METHODS = ("autoregressive", "slipstream")
BATCH_TIMEOUT_S = 1800.0
STAGES = {name: name for name in ("decode_s", "generate_s")} | {
    name: f"target_{name}" for name in ("encode_s", "prefill_s")
}
"""Of a job -> of its summary."""


@dataclass(frozen=True)
class Drained:
    """One batch: wall seconds from the first start to the last end, and its jobs."""

    workers: int
    method: str
    wall_s: float
    jobs: Sequence[Job]

    @property
    def videos_per_h(self) -> float:
        return 3600 * len(self.jobs) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return sum(caption.num_tokens for caption in self.captions) / self.wall_s

    @property
    def captions(self) -> list[Caption]:
        return [job.caption for job in self.jobs if job.caption is not None]


async def run(given: argparse.Namespace, clips: Sequence[Path]) -> list[Drained]:
    drained = []
    seeds = itertools.count()
    for number_, workers in itertools.product(range(given.rounds), WORKERS):
        options = ClusterOptions(
            given.target, given.draft, CLIP_FOLDER, gateways=workers, slots=1, ahead=1, lease_s=15.0, flags=FRESH
        )
        async with Cluster(options, say) as cluster, cluster.captioner() as captioner:
            for method in METHODS if number_ % 2 == 0 else reversed(METHODS):
                caption = CaptionOptions(
                    method=method,
                    num_frames=given.frames,
                    max_new_tokens=given.max_new_tokens,
                    seed=next(seeds),  # greedy, so the text does not depend on it; but no result is taken over
                )
                drained.append(await _drain(captioner, workers, method, clips, caption))
                say(f"{workers} workers, {method}: {drained[-1].videos_per_h:.0f} videos/h")
    return drained


async def _drain(
    captioner: AsyncCaptioner, workers: int, method: str, clips: Sequence[Path], caption: CaptionOptions
) -> Drained:
    items = [BatchItem(clip.stem, str(clip), caption.given()) for clip in clips]
    batch = await submit(captioner, f"{method}-{caption.seed}", items)
    await wait_ended([captioner], batch, BATCH_TIMEOUT_S)
    jobs = await list_jobs(captioner, batch)
    bad = [job for job in jobs if job.state is not JobState.DONE]
    if bad:
        raise SystemExit(f"{bad[0].custom_id}: {bad[0].error or bad[0].state}")
    wall_s = max(job.ended_s for job in jobs) - min(job.started_s for job in jobs)
    return Drained(workers, method, wall_s, jobs)


def _rows(drained: Sequence[Drained]) -> list[dict[str, Any]]:
    rows = []
    for method, workers in itertools.product(METHODS, WORKERS):
        own, plain = ([b for b in drained if (b.method, b.workers) == (name, workers)] for name in (method, METHODS[0]))
        jobs = [job for batch in own for job in batch.jobs]
        captions = [caption for batch in own for caption in batch.captions]
        rate = statistics.median(batch.videos_per_h for batch in own)
        rows.append(
            {
                "method": method,
                "workers": workers,
                "videos_per_h": rate,
                "speedup": rate / statistics.median(batch.videos_per_h for batch in plain),
                "rounds": [round(batch.videos_per_h, 1) for batch in own],
                "tokens_per_s": statistics.median(batch.tokens_per_s for batch in own),
                "tokens": statistics.mean(caption.num_tokens for caption in captions),
                "runs": statistics.mean(job.receipt.runs for job in jobs if job.receipt),
                **_stages([caption.timings for caption in captions]),
            }
        )
    return rows


def _stages(timings: Sequence[Timings]) -> dict[str, float]:
    """Mean seconds of a job by stage; `rest_s` is what a caption took beyond them: the draft's start, waiting for
    the models, messages."""
    means = {name: statistics.mean(getattr(times, field) for times in timings) for name, field in STAGES.items()}
    total_s = statistics.mean(times.total_s for times in timings)
    return means | {"rest_s": max(0.0, total_s - sum(means.values()))}


def main(argv: Sequence[str]) -> None:
    counts = {"videos": (12, "of a batch"), "rounds": 3, "frames": 32, "max_new_tokens": 192}
    given = make_parser("archive", "How fast is the archive?", **counts, **MODELS).parse_args(argv)
    drained = run_to_end(run(given, held_out_clips(given.videos)))
    rows = _rows(drained)
    print_rows("an archive on one target and one draft (medians over rounds)", rows)
    texts = {(job.custom_id, str(job.caption)) for batch in drained for job in batch.jobs}
    identical = len(texts) == len({clip for clip, _ in texts})
    finish("archive", {"identical": identical, "rows": rows, "machine": machine_facts()})
    sys.exit(0 if identical else 1)
