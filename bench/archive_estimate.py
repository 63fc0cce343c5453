"""How near `slipstream archive estimate` comes: a sample of held-out clips is captioned by real services, and all the
others, which it did not see. Half of them go before and half behind it: a machine that others use too does not stay as
fast. The clips are files, or objects of an S3 bucket (moto's server).
"""

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.common import CLIP_FOLDER, held_out_clips, say
from bench.faults.batches import archive_of, list_jobs, submit, wait_ended
from bench.tables import print_rows
from slipstream import AsyncCaptioner
from slipstream.archive.estimates import Interval, choose
from slipstream.archive.messages import BatchItem, BatchOptions, Job
from slipstream.archive.queue import JobState
from slipstream.cli.archive.estimate import result_bytes
from slipstream.cli.archive.sources import Sources
from slipstream.client.archive_estimate import caption_sample, stratified
from slipstream.stack.local import FRESH
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.object_store import BUCKET, object_server

TIMEOUT_S = 3600.0


async def run_estimate(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `estimate`."""
    clips = held_out_clips(given.estimate_clips)
    return await _estimated(given, [BatchItem(clip.stem, str(clip)) for clip in clips], FRESH)


async def run_bucket_estimate(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `estimate-bucket`: sizes are those that the bucket's listing says."""
    async with object_server() as bucket:
        os.environ.update(bucket.environment)
        for clip in held_out_clips(given.estimate_clips):
            bucket.put(f"held-out/{clip.name}", clip.read_bytes())
        items = await asyncio.to_thread(list, Sources([f"s3://{BUCKET}/held-out/"]))
        flags = FRESH | {"gateway": (*FRESH["gateway"], "--object-roots", f"s3://{BUCKET}")}
        unsized = sum(item.num_bytes is None for item in items)
        return {**await _estimated(given, items, flags), "without_size": unsized}


async def _estimated(
    given: argparse.Namespace, items: Sequence[BatchItem], flags: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The same of items, wherever they lie."""
    asked = {"num_frames": given.estimate_frames, "max_new_tokens": given.estimate_tokens}
    options = ClusterOptions(given.target, given.draft, CLIP_FOLDER, gateways=1, slots=2, lease_s=15.0, flags=flags)
    unsampled = _unsampled(items, given)
    before, after = unsampled[::2], unsampled[1::2]
    async with Cluster(options, say) as cluster, cluster.captioner() as captioner:
        await _captioned(captioner, "warm", [replace(items[0], custom_id="warm", caption={"seed": given.seed})], asked)
        jobs = await _captioned(captioner, "before", before, asked)
        sampled = await caption_sample(
            await archive_of(captioner),
            items,
            BatchOptions(caption=asked),
            given.estimate_sample,
            given.seed,
            result_bytes,
        )
        say(f"{len(sampled.chosen)} of {len(items)} captioned")
        seconds = [_wall_s(jobs)]
        jobs += (later := await _captioned(captioner, "after", after, asked))
        seconds.append(_wall_s(later))
    bad = [job for job in jobs if job.state is not JobState.DONE]
    if bad or sampled.failures:
        raise SystemExit(f"{bad[0].custom_id}: {bad[0].error}" if bad else sampled.failures[0])
    found = sampled.estimate(only_unsampled=True)
    truth = {
        "seconds": sum(seconds),
        "tokens": sum(job.caption.num_tokens for job in jobs if job.caption),
        "result_bytes": sum(result_bytes(job, ()) for job in jobs),
        "video_s": sum(job.caption.video.duration_s for job in jobs if job.caption),
    }
    rows = [_row(name, getattr(found, name), true) for name, true in truth.items()]
    print_rows(f"estimate: {len(jobs)} held-back clips from a sample of {len(sampled.chosen)}", rows)
    return {
        "items": len(jobs),
        "sampled": len(sampled.chosen),
        "at_once": found.at_once,
        "seconds_before_and_after": [round(part, 1) for part in seconds],
        "rows": rows,
        "estimate_error": max(abs(row["error"]) for row in rows),
    }


def _unsampled(items: Sequence[BatchItem], given: argparse.Namespace) -> list[BatchItem]:
    """Those that the sample will not have."""
    seen = set(choose(stratified(items), given.estimate_sample, given.seed))
    return [item for place, item in enumerate(items) if place not in seen]


async def _captioned(
    captioner: AsyncCaptioner, key: str, items: Sequence[BatchItem], asked: Mapping[str, Any]
) -> list[Job]:
    batch = await submit(captioner, key, [replace(item, caption={**asked, **item.caption}) for item in items])
    await wait_ended([captioner], batch, TIMEOUT_S)
    return await list_jobs(captioner, batch)


def _wall_s(jobs: Sequence[Job]) -> float:
    return max(job.ended_s for job in jobs) - min(job.started_s for job in jobs)


def _row(name: str, said: Interval, true: float) -> dict[str, Any]:
    return {
        "figure": name,
        "estimate": round(said.value, 1),
        "low": round(said.low, 1),
        "high": round(said.high, 1),
        "truth": round(true, 1),
        "error": round(said.value / true - 1, 4),
    }
