"""An estimate of what an archive will take, by captioning a sample of it."""

import os
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.archive.estimates import UNKNOWN_SIZE, UNSIZED, Estimate, Sampled, Span, choose, estimate, strata_of
from slipstream.archive.messages import BatchItem, BatchOptions, BatchTotals, Job, JobKind, JobPart
from slipstream.archive.queue import JobState
from slipstream.archive.records import tallies
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.trial_batch import Follow, run_trial, unwatched
from slipstream.errors import InvalidRequest, VideoNotFound

SEED_BITS = 62
NumBytes = Callable[[Job, Sequence[JobPart]], int]


@dataclass(frozen=True)
class SampledArchive:
    """A sample that was captioned, and what it is a sample of."""

    sample: tuple[Sampled, ...]
    chosen: tuple[int, ...]
    """Which items they are, in the order that these are listed."""
    strata: tuple[int, ...]
    """Of all items."""
    totals: BatchTotals
    """Of the sample: what speculation gained in it."""
    failures: tuple[str, ...] = ()
    """Why items of the sample have no result; nothing is known of such, and they count as no work."""

    @property
    def num_unsized(self) -> int:
        """Items whose size nobody knows: of these the sample is a plain one."""
        return self.strata.count(UNSIZED)

    def estimate(self, *, only_unsampled: bool = False) -> Estimate:
        """Of all items, or of those that were not in the sample."""
        counts = Counter(self.strata)
        if only_unsampled:
            counts -= Counter(self.strata[place] for place in self.chosen)
        return estimate(self.sample, counts)


async def caption_sample(
    client: ArchiveClient,
    items: Iterable[BatchItem],
    options: BatchOptions,
    num_sampled: int,
    seed: int,
    num_bytes: NumBytes,
    follow: Follow = unwatched,
) -> SampledArchive:
    """Captions `num_sampled` of the items, which are gone through twice, as a batch of its own.

    Results that the archive has already are not taken over, as they would cost nothing: the sample has a seed of its
    own, on which the text depends only where it is sampled.

    Args:
        seed: names the sample.
        num_bytes: of a job's result, as it would be written.

    Raises:
        VideoNotFound: there is no item.
        InvalidRequest: no item of the sample could be captioned.
    """
    strata = stratified(items)
    chosen = choose(strata, num_sampled, seed)
    if not chosen:
        raise VideoNotFound("there is nothing to estimate: no video was found")
    wanted = frozenset(chosen)
    sampled = [_fresh(item, place) for place, item in enumerate(items) if place in wanted]
    sample: list[Sampled] = []
    failures: list[str] = []
    sums: Counter[str] = Counter()
    async with aclosing(run_trial(client, "estimate", options, sampled, follow)) as jobs:
        async for job, parts in jobs:
            place = int(job.custom_id)
            if job.state is not JobState.DONE:
                failures.append(f"{job.source}: {job.error or job.state}")
                continue
            done = [job.caption, *(part.caption for part in parts)]
            of_job: Counter[str] = Counter()
            for caption in done:
                of_job.update(tallies(caption) if caption is not None else {})
            sums += of_job
            size = num_bytes(job, parts)
            sample.append(Sampled(int(strata[place]), _span(job), of_job["tokens"], size, of_job["video_s"]))
    if not sample:
        raise InvalidRequest(f"no item of the sample could be captioned; the first: {failures[0]}")
    known = {name: sums[name] for name in ("tokens", "generate_s", "plain_generate_s", "judged", "accepted")}
    return SampledArchive(tuple(sample), tuple(chosen), tuple(strata.tolist()), BatchTotals(**known), tuple(failures))


def stratified(items: Iterable[BatchItem]) -> NDArray[np.int64]:
    """[num_items] the stratum of each: by its size, as a listing or this machine knows it, and its suffix."""
    sizes, formats, suffixes = array("q"), array("l"), dict[str, int]()
    for item in items:
        sizes.append(_size(item))
        suffix = os.path.splitext(item.source)[1].lower()
        formats.append(suffixes.setdefault(suffix, len(suffixes)))
    return strata_of(sizes, formats)


def _fresh(item: BatchItem, place: int) -> BatchItem:
    """Named by its place, and not to be had from earlier batches."""
    return replace(item, custom_id=str(place), caption={**item.caption, "seed": secrets.randbits(SEED_BITS)})


def _span(job: Job) -> Span:
    """When it was worked at. A video's caption says how long that took without waiting for a slot; a job of parts has
    its slots part by part, and counts as a whole."""
    if job.kind is JobKind.VIDEO and job.caption is not None:
        timings = job.caption.timings
        return Span(job.ended_s - timings.total_s, job.ended_s)
    return Span(job.started_s, job.ended_s)


def _size(item: BatchItem) -> int:
    if item.num_bytes is not None:
        return item.num_bytes
    try:
        return os.stat(item.source).st_size
    except (OSError, ValueError):
        return UNKNOWN_SIZE
