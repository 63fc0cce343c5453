"""An estimate of what an archive will take, by captioning a sample of it."""

import os
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from slipstream.archive.estimates import (
    NO_WORK,
    UNKNOWN_SIZE,
    UNSIZED,
    Estimate,
    Sampled,
    Span,
    choose,
    estimate,
    strata_of,
    together,
)
from slipstream.archive.messages import BatchItem, BatchOptions, BatchTotals, Job, JobKind, JobPart
from slipstream.archive.queue import JobState
from slipstream.archive.records import tallies
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.batch_handles import is_url
from slipstream.client.trial_batch import Follow, run_trial, unwatched
from slipstream.errors import InvalidRequest, VideoNotFound
from slipstream.messages import Caption
from slipstream.options import OF_FILMS, OPTIONS_BY_NAME
from slipstream.speculation.placement import DraftedTime, PlainTime

SEED_BITS = 62
PLAIN = "autoregressive"
_OF_ANY_TEXT = ("common", "sampling")
"""Groups of options that say something of a plain caption."""
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
    captioned: tuple[BatchItem, ...] = ()
    """Those that have one, documents left out."""
    drafted: DraftedTime | None = None
    """What they took; None where no draft took part."""

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
    said, by_place = _Said(), {item.custom_id: item for item in sampled}
    async with aclosing(run_trial(client, "estimate", options, sampled, follow)) as jobs:
        async for job, parts in jobs:
            said.add(by_place[job.custom_id], int(strata[int(job.custom_id)]), job, parts, num_bytes)
    if len(said.failures) == len(said.sample):
        raise InvalidRequest(f"no item of the sample could be captioned; the first: {said.failures[0]}")
    known = {name: said.sums[name] for name in ("tokens", "generate_s", "plain_generate_s", "judged", "accepted")}
    return SampledArchive(
        tuple(said.sample),
        tuple(chosen),
        tuple(strata.tolist()),
        BatchTotals(**known),
        tuple(said.failures),
        tuple(said.captioned),
        _drafted_time(said.spans, said.captions),
    )


@dataclass
class _Said:
    """What the jobs of a sample said, one by one."""

    sample: list[Sampled] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    sums: Counter[str] = field(default_factory=Counter)
    """Of all captions, see `tallies`."""
    captioned: list[BatchItem] = field(default_factory=list)
    """Documents left out, here and in what follows."""
    spans: list[Span] = field(default_factory=list)
    captions: list[Caption] = field(default_factory=list)
    """Those that were made."""

    def add(self, item: BatchItem, stratum: int, job: Job, parts: Sequence[JobPart], num_bytes: NumBytes) -> None:
        """One that has ended."""
        if job.state is not JobState.DONE:
            self.failures.append(f"{job.source}: {job.error or job.state}")
            self.sample.append(Sampled(stratum, NO_WORK))
            return
        done = [caption for caption in (job.caption, *(part.caption for part in parts)) if caption is not None]
        of_job = _tallies(done)
        self.sums += of_job
        if job.kind is not JobKind.DOCUMENT:
            self.captions += [caption for caption in done if not (caption.shared or caption.skipped)]
            self.spans.append(_span(job))
            self.captioned.append(item)
        self.sample.append(Sampled(stratum, _span(job), of_job["tokens"], num_bytes(job, parts), of_job["video_s"]))


async def caption_plainly(
    client: ArchiveClient,
    sampled: SampledArchive,
    options: BatchOptions,
    num_items: int,
    at_once: int,
    follow: Follow = unwatched,
) -> PlainTime | None:
    """Captions some of the sample again without the draft, so many at a time: what a target without one takes. Of a
    film it is one caption of the whole, which is as long as that of a segment. None where that gave no text."""
    plain = replace(options, caption=_plain_options(options.caption))
    items = [replace(item, caption=_plain_options(item.caption)) for item in sampled.captioned[:num_items]]
    rest_s, num_tokens = 0.0, 0
    for first in range(0, len(items), at_once):
        async with aclosing(run_trial(client, "estimate", plain, items[first : first + at_once], follow)) as jobs:
            made = [(job.ended_s, job.caption) async for job, _ in jobs if job.caption is not None]
        if made:
            rest_s += rest_time(made)
            num_tokens += sum(caption.num_tokens for _, caption in made)
    return PlainTime(rest_s, num_tokens) if num_tokens else None


def rest_time(made: Sequence[tuple[float, Caption]]) -> float:
    """Seconds beside prefills of captions that were made at a time, each with when it ended."""
    timings = [caption.timings for _, caption in made]
    began_s = min(ended_s - caption.timings.total_s for ended_s, caption in made)
    wall_s = max(ended_s for ended_s, _ in made) - began_s
    prefill_s = sum(one.target_encode_s + one.target_prefill_s for one in timings)
    return max(wall_s - prefill_s, *(one.generate_s / len(made) for one in timings), 0.0)


def drafted_time(wall_s: float, captions: Sequence[Caption]) -> DraftedTime:
    """Of captions that took so long together."""
    timings = [caption.timings for caption in captions]
    return DraftedTime(
        wall_s,
        sum(one.total_s for one in timings) / wall_s,
        sum(one.target_encode_s + one.target_prefill_s for one in timings),
        sum(caption.num_tokens for caption in captions),
    )


def _drafted_time(spans: Sequence[Span], captions: Sequence[Caption]) -> DraftedTime | None:
    """Of the jobs that the captions are of; None where a draft had no part in them."""
    if not _tallies(captions)["judged"]:
        return None
    wall_s = sum(span.seconds for span in spans) / together(spans)
    return drafted_time(wall_s, captions) if wall_s > 0 else None


def _plain_options(given: Mapping[str, Any]) -> dict[str, Any]:
    names = {name for name, spec in OPTIONS_BY_NAME.items() if spec.group in _OF_ANY_TEXT and name not in OF_FILMS}
    return {name: value for name, value in given.items() if name in names} | {"method": PLAIN}


def _tallies(captions: Iterable[Caption]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for caption in captions:
        sums.update(tallies(caption))
    return sums


def stratified(items: Iterable[BatchItem]) -> NDArray[np.int64]:
    """[num_items] the stratum of each: by its size, as a listing or this machine knows it, and its suffix."""
    sizes, formats, suffixes = array("q"), array("l"), dict[str, int]()
    for item in items:
        sizes.append(_size(item))
        source = urlsplit(item.source).path if is_url(item.source) else item.source
        suffix = os.path.splitext(source)[1].lower()
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
