"""How near `slipstream archive estimate` comes: a sample of held-out clips is captioned by real services, and then all
the others, which it did not see.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from bench.common import CLIP_FOLDER, held_out_clips, say
from bench.faults.batches import archive_of, list_jobs, submit, wait_ended
from bench.tables import print_rows
from slipstream.archive.estimates import Interval
from slipstream.archive.messages import BatchItem, BatchOptions
from slipstream.archive.queue import JobState
from slipstream.cli.archive.estimate import result_bytes
from slipstream.client.archive_estimate import caption_sample
from slipstream.stack.local import FRESH
from tests.support.cluster import Cluster, ClusterOptions

TIMEOUT_S = 3600.0


async def run_estimate(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `estimate`."""
    clips = held_out_clips(given.estimate_clips)
    items = [BatchItem(clip.stem, str(clip)) for clip in clips]
    asked = {"num_frames": given.estimate_frames, "max_new_tokens": given.estimate_tokens}
    options = ClusterOptions(given.target, given.draft, CLIP_FOLDER, gateways=1, slots=2, lease_s=15.0, flags=FRESH)
    async with Cluster(options, say) as cluster, cluster.captioner() as captioner:
        warm = await submit(captioner, "warm", [BatchItem("warm", str(clips[0]), asked | {"seed": given.seed})])
        await wait_ended([captioner], warm, TIMEOUT_S)
        client = await archive_of(captioner)
        sampled = await caption_sample(
            client, items, BatchOptions(caption=asked), given.estimate_sample, given.seed, result_bytes
        )
        say(f"{len(sampled.chosen)} of {len(items)} captioned")
        seen = set(sampled.chosen)
        others = [
            BatchItem(item.custom_id, item.source, asked) for place, item in enumerate(items) if place not in seen
        ]
        batch = await submit(captioner, "others", others)
        await wait_ended([captioner], batch, TIMEOUT_S)
        jobs = await list_jobs(captioner, batch)
    bad = [job for job in jobs if job.state is not JobState.DONE]
    if bad or sampled.failures:
        raise SystemExit(f"{bad[0].custom_id}: {bad[0].error}" if bad else sampled.failures[0])
    found = sampled.estimate(only_unsampled=True)
    truth = {
        "seconds": max(job.ended_s for job in jobs) - min(job.started_s for job in jobs),
        "tokens": sum(job.caption.num_tokens for job in jobs if job.caption),
        "result_bytes": sum(result_bytes(job, ()) for job in jobs),
        "video_s": sum(job.caption.video.duration_s for job in jobs if job.caption),
    }
    rows = [_row(name, getattr(found, name), true) for name, true in truth.items()]
    print_rows(f"estimate: {len(jobs)} held-back clips from a sample of {len(seen)}", rows)
    largest = max(abs(row["error"]) for row in rows)
    return {"items": len(jobs), "sampled": len(seen), "at_once": found.at_once, "rows": rows, "estimate_error": largest}


def _row(name: str, said: Interval, true: float) -> dict[str, Any]:
    return {
        "figure": name,
        "estimate": round(said.value, 1),
        "low": round(said.low, 1),
        "high": round(said.high, 1),
        "truth": round(true, 1),
        "error": round(said.value / true - 1, 4),
    }
