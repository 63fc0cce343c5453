"""A long film in segments, in an archive whose processes are killed at random points.

The film is rendered, so it is known when its scenes begin. Undisturbed captions of its segments are the reference: each
time is held against the scenes, and so are the shots that are found in the film; some texts against plain captions of
clips of the same frames. Then the film is handed to the archive, and gateway and target are killed until there were
enough deaths; where a film ends before, it is handed in again. It is a file, or an object of an S3 bucket (moto's
server) that the gateway reads by ranges; then the reader is cut off from the bucket, too, in the middle of whatever it
reads.
"""

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.common import say
from bench.faults.batches import archive_of, list_jobs, submit, wait_ended
from slipstream import AsyncCaptioner, SegmentCaption
from slipstream.archive.messages import BatchItem, JobPart
from slipstream.archive.queue import JobState
from slipstream.errors import SlipstreamError
from slipstream.objects.cached_reader import BLOCK_BYTES, READ_AHEAD_BLOCKS
from slipstream.stack.local import FRESH
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.films import Film, frame_times, make_film, scene, write_film
from tests.support.object_store import BUCKET as BUCKET_NAME
from tests.support.object_store import ObjectServer, object_server
from tests.support.processes import logged

STEP_S, START_PTS_S = 0.125, 4.0
CLIPS_COMPARED = 6
MOST_AFTER_S = 2.0
"""A process is killed up to so long after a part was kept."""
GATEWAY, TARGET, BUCKET = "gateway-0", "target", "bucket"
SHARES = {TARGET: 0.25, BUCKET: 0.25}
"""Of the deaths; the others are the gateway's."""
CUT_OFF_S = 1.0
EDGE_BLOCKS = 4
"""Blocks that lie partly within: at both ends of the index, and of the segments that are missing."""
LOSSLESS: dict[str, Any] = {"codec": "ffv1"}
RANGED: dict[str, Any] = {
    "codec": "libx264",
    "container": "mp4",
    "key_every": 1,
    "codec_options": {"qp": "0", "preset": "ultrafast"},
}
"""Lossless, too, and with an index; too large to be fetched whole."""
FILM_TIMEOUT_S, GETS_ON_S = 1800.0, 300.0
Report = Mapping[str, Any]
ResultT = TypeVar("ResultT")


@dataclass
class _FilmRun:
    """What is asked of every segment, and what undisturbed captions said."""

    given: argparse.Namespace
    film: Film
    path: Path
    cluster: Cluster
    captioner: AsyncCaptioner
    bucket: ObjectServer | None = None
    """Where the film lies, too."""
    reference: list[SegmentCaption] = field(default_factory=list)
    read_by: list[int] = field(default_factory=list)
    """Segments that each gateway had to read: what was missing when it began, or all of another film later on."""
    chance: random.Random = field(default_factory=random.Random)

    @property
    def options(self) -> dict[str, Any]:
        given = self.given
        asked = {"num_frames": given.frames, "max_new_tokens": given.max_new_tokens}
        return asked | {"segments": f"fixed:{given.seconds}s"}


async def run_film(given: argparse.Namespace) -> Report:
    """The part `film`."""
    async with _film_run(given, None) as run:
        report = await _undisturbed(run)
        return report | await _disturbed(run)


async def run_bucket_film(given: argparse.Namespace) -> Report:
    """The part `film-bucket`."""
    async with object_server() as bucket:
        os.environ.update(bucket.environment)
        async with _film_run(given, bucket) as run:
            report = await _undisturbed(run)
            bucket.put(run.path.name, run.film.data)
            given_before = bucket.given
            report |= await _disturbed(run)
            fetched = bucket.given - given_before
        needed = needed_bytes(run.film.data, run.read_by, given.segments, report["deaths"].get(BUCKET, 0))
        facts = {"film_bytes": len(run.film.data), "read_by": run.read_by, "needed_bytes": needed}
        return report | facts | {"fetched_bytes": fetched}


def needed_bytes(film: bytes, read_by: Sequence[int], num_segments: int, cut_offs: int) -> int:
    """At most of an MP4 for gateways that read so many of its segments each, none of them twice: these, once more the
    index, and what lies in the first and last blocks of all that beside it. Who is cut off loses what was on its way.
    """
    index = film.index(b"moov") - 4
    index_bytes = int.from_bytes(film[index : index + 4], "big")
    each = [len(film) * number // num_segments + index_bytes + EDGE_BLOCKS * BLOCK_BYTES for number in read_by]
    return sum(each) + cut_offs * READ_AHEAD_BLOCKS * BLOCK_BYTES


@asynccontextmanager
async def _film_run(given: argparse.Namespace, bucket: ObjectServer | None) -> AsyncIterator[_FilmRun]:
    scenes = [round(given.seconds / STEP_S)] * given.segments
    times_s = frame_times(scenes, STEP_S, START_PTS_S)
    flags = FRESH | {"gateway": (*FRESH["gateway"], "--object-roots", f"s3://{BUCKET_NAME}")} if bucket else FRESH
    with tempfile.TemporaryDirectory(prefix="slipstream-film-") as folder:
        film = make_film(scenes, times_s, **(RANGED if bucket else LOSSLESS))
        path = Path(folder) / ("film.mp4" if bucket else "film.mkv")
        path.write_bytes(film.data)
        options = ClusterOptions(given.target, given.draft, Path(folder), gateways=1, slots=2, lease_s=2.0, flags=flags)
        async with Cluster(options, say) as cluster, cluster.captioner() as captioner:
            yield _FilmRun(given, film, path, cluster, captioner, bucket, chance=random.Random(given.seed))


async def _undisturbed(run: _FilmRun) -> dict[str, Any]:
    """Times and texts of the segments by themselves."""
    began = time.monotonic()
    run.reference = [part async for part in run.captioner.caption_segments(run.path, **run.options)]
    seconds = time.monotonic() - began
    say(f"{len(run.reference)} segments in {seconds:.0f} s")
    ends_s = [*run.film.scenes_s[1:], run.film.times_s[-1] + STEP_S]
    off_s = [abs(part.segment.start_s - at_s) for part, at_s in zip(run.reference, run.film.scenes_s, strict=True)]
    off_s += [abs(part.segment.end_s - at_s) for part, at_s in zip(run.reference, ends_s, strict=True)]
    asked = run.options | {"segments": "shots", "num_frames": 1, "max_new_tokens": 1}
    shots_s = [part.segment.start_s async for part in run.captioner.caption_segments(run.path, **asked)]
    differing = 0
    for number in run.chance.sample(range(len(run.reference)), min(CLIPS_COMPARED, len(run.reference))):
        length = round(run.given.seconds / STEP_S)
        how = RANGED if run.bucket else LOSSLESS
        clip = write_film(scene(number, length), frame_times([length], STEP_S), **how)
        plain = {name: value for name, value in run.options.items() if name != "segments"}
        caption = await run.captioner.caption(clip, method="autoregressive", **plain)
        differing += caption.text != run.reference[number].text
    return {
        "film_s": run.film.times_s[-1] + STEP_S - START_PTS_S,
        "segments": len(run.reference),
        "shots_found": len(shots_s),
        "shots_wrong": unpaired(shots_s, run.film.scenes_s, STEP_S),
        "largest_time_error_s": round(max(off_s), 6),
        "frame_step_s": STEP_S,
        "clips_compared": min(CLIPS_COMPARED, len(run.reference)),
        "clips_differing": differing,
        "interactive_s": round(seconds, 2),
    }


def unpaired(found_s: Sequence[float], true_s: Sequence[float], within_s: float) -> int:
    """Times of either kind beside which, so near, there is none of the other."""

    def lonely(some_s: Sequence[float], others_s: Sequence[float]) -> int:
        return sum(all(abs(one - other) > within_s for other in others_s) for one in some_s)

    return lonely(found_s, true_s) + lonely(true_s, found_s)


async def _disturbed(run: _FilmRun) -> dict[str, Any]:
    """The film in the archive, until there were enough deaths."""
    deaths: Counter[str] = Counter()
    batches: list[str] = []
    began = time.monotonic()
    while deaths.total() < run.given.kills:
        batch = await _hand_in(run, f"film-{len(batches)}")
        batches.append(batch)
        run.read_by[-1:] = [len(run.reference)]
        while deaths.total() < run.given.kills and await _gets_on(run, batch):
            await asyncio.sleep(run.chance.uniform(0, MOST_AFTER_S))
            name = _whose_turn(run)
            await _strike(run, name)
            deaths[name] += 1
            if name == GATEWAY:
                run.read_by.append(len(run.reference) - (await _progress(run, batch))[0])
            say(f"{deaths.total()} of {run.given.kills} deaths, the last of {name}")
        await wait_ended([run.captioner], batch, FILM_TIMEOUT_S)
    report = {"deaths": dict(deaths), "films": len(batches), "archive_s": round(time.monotonic() - began, 2)}
    found = [await _check(run, batch) for batch in batches]
    return report | {name: sum(one[name] for one in found) for name in found[0]}


def _whose_turn(run: _FilmRun) -> str:
    share = run.chance.random()
    if share < SHARES[TARGET]:
        return TARGET
    return BUCKET if run.bucket and share < SHARES[TARGET] + SHARES[BUCKET] else GATEWAY


async def _strike(run: _FilmRun, name: str) -> None:
    """Returns when it serves again."""
    if run.bucket is not None and name == BUCKET:
        run.bucket.cut_off()
        await asyncio.sleep(CUT_OFF_S)
        run.bucket.is_cut_off = False
        return
    starts = run.cluster.processes[name].starts
    run.cluster.kill(name)
    await run.cluster.wait_serving(name, starts + 1)


async def _hand_in(run: _FilmRun, key: str) -> str:
    source = f"s3://{BUCKET_NAME}/{run.path.name}" if run.bucket else str(run.path)
    item = BatchItem("film", source, run.options)
    return await _patiently(lambda: submit(run.captioner, key, [item]))


async def _gets_on(run: _FilmRun, batch: str) -> bool:
    """Returns when one more segment is kept; False when the film has ended."""
    before, has_ended = await _progress(run, batch)
    async with asyncio.timeout(GETS_ON_S):
        while not has_ended:
            await asyncio.sleep(0.05)
            now, has_ended = await _progress(run, batch)
            if now > before:
                return not has_ended
    return False


async def _progress(run: _FilmRun, batch: str) -> tuple[int, bool]:
    """Segments that are kept, and whether the film has ended."""
    archive = await archive_of(run.captioner)
    found = await _patiently(lambda: archive.get(batch))
    return found.parts_done, found.is_ended


async def _patiently(ask: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """What a gateway says that is away now and then."""
    deadline = time.monotonic() + GETS_ON_S
    while True:
        try:
            return await ask()
        except (SlipstreamError, TimeoutError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


async def _check(run: _FilmRun, batch: str) -> dict[str, int]:
    """What is wrong with one film; all zeros: nothing."""
    (job,) = await list_jobs(run.captioner, batch)
    parts: list[JobPart] = [part async for part in (await archive_of(run.captioner)).parts(batch, job)]
    made_in = {part.number: part.receipt.runs for part in parts if part.receipt}
    kept = Counter(
        entry["segment"]
        for entry in logged(run.cluster.log("gateway-0"), "part.kept", answer="kept")
        if str(entry.get("request_id")).startswith(job.job_id)
    )
    names = [str(entry.get("request_id")) for entry in logged(run.cluster.log("target"), "session.opened")]
    begun = [tuple(map(int, name.replace("-s", "-").split("-")[-2:])) for name in names if job.job_id in name]
    same = [
        part.segment == reference.segment and part.caption is not None and part.caption.text == reference.text
        for part, reference in zip(parts, run.reference, strict=False)
    ]
    return {
        "not_done": int(job.state is not JobState.DONE),
        "missing": len(run.reference) - len(parts),
        "differing": same.count(False),
        "kept_twice": sum(count - 1 for count in kept.values()),
        "kept_unlogged": len(run.reference) - len(kept),
        "begun_after_kept": sum(epoch > made_in.get(number, epoch) for epoch, number in begun),
        "begun_in_vain": len(begun) - len(set(number for _, number in begun)),
    }
