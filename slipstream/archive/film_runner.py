"""Runs one film of the archive: each segment is a part, kept as soon as it is captioned.

Frames are decoded ahead of the models, some segments at a time, and as many segments are captioned at once as the
gateway has archive slots.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from slipstream.archive.duplicates import DuplicateFinder
from slipstream.archive.messages import JobPart
from slipstream.archive.model_runs import ModelRuns, check_digest, opened
from slipstream.archive.part_keeper import PartKeeper, PartNames
from slipstream.archive.queue import JobQueue, JobState, Lease, Outcome
from slipstream.archive.records import (
    BatchPayload,
    JobPayload,
    content_key,
    make_receipt,
    receipt_of_whole,
    tallies,
    write_part,
    write_parts_result,
)
from slipstream.archive.worker import RetryLater
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.duplicates import caption_sparingly
from slipstream.captioning.film_captioner import DecodedSegment, EarlierTexts, Film, FilmCaptioner, cut_of
from slipstream.captioning.media import VideoFile
from slipstream.captioning.plan import CaptionPlan
from slipstream.errors import SlipstreamError, UnreadableVideo
from slipstream.messages import Caption, ModelInfo, Segment, SharedFrom
from slipstream.options import CaptionOptions

NAMES = PartNames("film", "segment", "ask for longer segments, or cut the film")


@dataclass(frozen=True)
class _FilmFile:
    """A film as it was found."""

    sha256: str
    num_bytes: int


@dataclass
class _Run:
    """One lease on a film."""

    lease: Lease
    options: CaptionOptions
    plan: CaptionPlan
    content: _FilmFile
    target: ModelInfo
    draft: ModelInfo | None
    parts: PartKeeper
    earlier: EarlierTexts = field(default_factory=EarlierTexts)
    """Of segments that this lease has captioned."""
    failed: list[Segment] = field(default_factory=list)
    """Segments without frames that are not kept yet: a film of nothing else has failed as a whole."""

    @property
    def key(self) -> str:
        return f"{content_key(self.content.sha256, self.plan, self.target, self.draft)} segments"


class FilmRunner:
    """Turns leases on films into outcomes. Each segment has one of the gateway's archive slots while it is captioned.

    Args:
        decoders: one is held by whoever decodes for the archive.
    """

    def __init__(
        self,
        config: GatewayConfig,
        captioner: GatewayCaptioner,
        queue: JobQueue,
        models: ModelRuns,
        decoders: asyncio.Semaphore,
        duplicates: DuplicateFinder,
    ) -> None:
        self._config = config
        self._captioner = captioner
        self._queue = queue
        self._models = models
        self._duplicates = duplicates
        self._films = FilmCaptioner(config, captioner, decoders)

    async def run(self, lease: Lease, job: JobPayload, batch: BatchPayload, progress: Callable[[str], None]) -> Outcome:
        """Raises what a worker's handler may."""
        options = job.merged_options(batch)
        plan = await self._models.plan(lease, options)
        media = self._captioner.media
        async with opened(media, job.source, plan.owner, whole=bool(job.sha256)) as file:
            content = _FilmFile(*await media.digest(file))
            check_digest(job.sha256, content.sha256)
            target, draft = self._models_now()
            parts = PartKeeper(self._queue, lease, NAMES, progress)
            run = _Run(lease, options, plan, content, target, draft, parts)
            await parts.open(run.key)
            if not parts.state.total:
                film = await self._films.cut(plan, file, cut_of(plan))
                await parts.open(run.key, film.facts.num_segments, _write_layout(film))
            await self._caption_missing(run, file, _read_layout(parts.state.layout))
        result = write_parts_result(
            replace(parts.state, layout=""), receipt_of_whole(plan, content, target, lease.epoch)
        )
        return Outcome(JobState.DONE, result, tallies={"segments": parts.state.total})

    async def _caption_missing(self, run: _Run, file: VideoFile, film: Film) -> None:
        """Segment after segment, as many at once as there are slots."""
        room = asyncio.Semaphore(max(self._config.archive_slots, 1))
        missing = run.parts.state.missing
        try:
            async with (
                aclosing(self._films.decoded(run.plan, file, film, missing)) as segments,
                asyncio.TaskGroup() as group,
            ):
                while True:
                    await room.acquire()
                    decoded = await anext(segments, None)
                    if decoded is None:
                        break
                    task = group.create_task(self._make(run, film, decoded))
                    task.add_done_callback(lambda _, decoded=decoded: _ended(decoded, room))  # type: ignore[misc]
        except ExceptionGroup as failures:  # the first that failed has ended the others
            raise failures.exceptions[0] from None
        if run.failed and not run.parts.state.done:
            raise UnreadableVideo(run.failed[0].error)
        await self._keep_failed(run)

    async def _make(self, run: _Run, film: Film, decoded: DecodedSegment) -> None:
        """Captions one segment, and keeps it."""
        segment = decoded.segment
        if decoded.video is None:
            run.failed.append(segment)
            return
        async with self._models.slots:
            plan = await self._models.plan(run.lease, run.options)
            if self._models_now()[0].revision != run.target.revision:
                raise RetryLater("the target is another one than at the film's beginning", counted=False)
            known = self._duplicates.among(plan, run.target, run.draft, run.lease.owner)
            made_for = SharedFrom(run.lease.job_id, segment.number)
            make = partial(self._caption, run, decoded)
            made = await caption_sparingly(run.earlier.of(plan), decoded.video, known, made_for, make)
        caption = made.caption
        run.earlier.add(caption)
        if segment.number == 0:  # the job as a whole has no place for them
            video = replace(caption.video, warnings=(*film.warnings, *caption.video.warnings))
            caption = replace(caption, video=video)
        receipt = make_receipt(made.plan, run.content, caption, run.target, run.draft, run.lease.epoch)
        part = JobPart(segment.number, caption=caption, receipt=receipt, segment=segment)
        await run.parts.keep(segment.number, segment.number, write_part(part), tallies(caption))
        await self._keep_failed(run)

    async def _caption(self, run: _Run, decoded: DecodedSegment, plan: CaptionPlan) -> Caption:
        limit_s = self._config.request_timeout_s
        async with self._models.captioning(run.lease, plan):
            try:
                async with asyncio.timeout(limit_s):
                    return await self._films.caption(plan, decoded, lambda event: None)
            except TimeoutError:
                raise SlipstreamError(
                    f"segment {decoded.segment.number} was not captioned within this server's limit of {limit_s:g} s"
                ) from None

    async def _keep_failed(self, run: _Run) -> None:
        """Marks the segments that have no frames, now that others have captions."""
        while run.failed:
            segment = run.failed.pop()
            part = JobPart(segment.number, segment=segment, error=segment.error)
            await run.parts.keep(segment.number, segment.number, write_part(part), {})

    def _models_now(self) -> tuple[ModelInfo, ModelInfo | None]:
        peers = self._captioner.peers
        assert peers.target.model is not None, "the target has been asked"
        return peers.target.model, peers.draft.model if peers.draft else None


def _ended(decoded: DecodedSegment, room: asyncio.Semaphore) -> None:
    """Also of a segment whose task was ended before it began."""
    if decoded.video is not None:
        decoded.video.close()
    room.release()


def _write_layout(film: Film) -> str:
    """Where a film was cut: the parts of a later run are those of the first."""
    return json.dumps([film.start_s, film.bounds, film.warnings], separators=(",", ":"))


def _read_layout(layout: str) -> Film:
    """Raises `SlipstreamError` for one that was damaged."""
    try:
        start_s, bounds, warnings = json.loads(layout)
        return Film(float(start_s), tuple(map(float, bounds)), tuple(map(str, warnings)))
    except (ValueError, TypeError) as error:
        raise SlipstreamError(f"where the film is cut cannot be read from the store: {error}") from error
