"""Runs one film of the archive: each segment is a part, kept as soon as it is captioned; of several prompts each answer
is one, and the summary of the whole is the last. Where that needs summaries of groups first, each is kept as a note.

Frames are decoded ahead of the models, some segments at a time, and as many segments are captioned at once as the
gateway has archive slots.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from slipstream.archive.duplicates import DuplicateFinder
from slipstream.archive.messages import JobPart
from slipstream.archive.model_runs import ModelRuns, check_digest, opened
from slipstream.archive.part_keeper import PartKeeper, PartNames
from slipstream.archive.parts import PartRecord
from slipstream.archive.queue import JobQueue, JobState, Lease, Outcome
from slipstream.archive.records import (
    BatchPayload,
    JobPayload,
    content_key,
    make_receipt,
    part_of,
    receipt_of_whole,
    tallies,
    write_part,
    write_parts_result,
)
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.duplicates import KnownCaptions, Sparing, caption_sparingly
from slipstream.captioning.film_captioner import (
    CANNOT_SUM_UP,
    DecodedSegment,
    EarlierTexts,
    Film,
    FilmCaptioner,
    cut_of,
)
from slipstream.captioning.film_summary import TimedText
from slipstream.captioning.plan import CaptionPlan
from slipstream.errors import Overloaded, SlipstreamError, UnreadableVideo
from slipstream.messages import Caption, Segment, SharedFrom
from slipstream.options import CaptionOptions
from slipstream.rpc.peers import models_of
from slipstream.service_info import ModelInfo
from slipstream.time_limits import within_limit
from slipstream.video.files import VideoFile

NAMES = PartNames("film", "segment", "ask for longer segments, or cut the film")


@dataclass(frozen=True)
class _FilmFile:
    """A film as it was found."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class FilmParts:
    """How a film's parts are numbered: the answers about one segment after the other, and the summary."""

    num_segments: int
    num_prompts: int
    has_summary: bool

    @property
    def total(self) -> int:
        return self.num_segments * self.num_prompts + self.has_summary

    def number(self, segment: Segment) -> int:
        """Of the part that this is."""
        return self.total - 1 if segment.is_summary else segment.number * self.num_prompts + segment.prompt

    def segments_of(self, numbers: Sequence[int]) -> list[int]:
        """The segments that have one of these parts, ascending."""
        return sorted({number // self.num_prompts for number in numbers} - {self.num_segments})


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
    check: Callable[[], Awaitable[None]]
    """Before a part is kept: raises `ObjectChanged` where the film is not the one any more that it was."""
    earlier: EarlierTexts = field(default_factory=EarlierTexts)
    """Of segments that this lease has captioned."""
    known: dict[str, KnownCaptions] = field(default_factory=dict)
    """By prompt, those that segments may share: held, as there may be more prompts than sets that stay at hand."""
    failed: list[Segment] = field(default_factory=list)
    """Segments without frames that are not kept yet: a film of nothing else has failed as a whole."""

    @property
    def key(self) -> str:
        """Names all that the parts depend on."""
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
        async with opened(media, job.source, plan.owner, whole=bool(job.sha256)) as (file, check):
            content = _FilmFile(*await media.digest(file))
            check_digest(job.sha256, content.sha256)
            target, draft = models_of(self._captioner.peers)
            parts = PartKeeper(self._queue, lease, _names(plan), progress)
            run = _Run(lease, options, plan, content, target, draft, parts, check)
            await parts.open(run.key)
            if not parts.state.total:
                film = await self._films.cut(plan, file, cut_of(plan))
                await parts.open(run.key, _numbering(plan, film).total, _write_layout(film))
            film = _read_layout(parts.state.layout)
            await self._caption_missing(run, file, film)
        await self._sum_up(run, film)
        result = write_parts_result(
            replace(parts.state, layout=""), receipt_of_whole(plan, content, target, lease.epoch)
        )
        return Outcome(JobState.DONE, result, tallies={"segments": film.facts.num_segments})

    async def _caption_missing(self, run: _Run, file: VideoFile, film: Film) -> None:
        """Segment after segment, as many at once as there are slots. Raises behind those that have begun, so that none
        is made twice: `RetryLater` when the gateway is to end, and what keeps the next ones from being decoded or one
        from being captioned, as a full target does that sends the archive's away and serves the others."""
        room = asyncio.Semaphore(max(self._config.archive_slots, 1))
        obstacle: SlipstreamError | None = None
        numbering = _numbering(run.plan, film)
        missing = numbering.segments_of(run.parts.state.missing)

        async def make(decoded: DecodedSegment) -> None:
            nonlocal obstacle
            try:
                await self._make(run, film, decoded)
            except Overloaded as error:
                obstacle = error

        try:
            async with (
                aclosing(self._films.decoded(run.plan, file, film, missing)) as segments,
                asyncio.TaskGroup() as group,
            ):
                while True:
                    await room.acquire()
                    try:
                        decoded = None if obstacle or self._models.is_ending else await anext(segments, None)
                    except SlipstreamError as error:  # a store that is away, no room for more frames
                        decoded, obstacle = None, error
                    if decoded is None:
                        break
                    task = group.create_task(make(decoded))
                    task.add_done_callback(lambda _, decoded=decoded: _ended(decoded, room))  # type: ignore[misc]
        except ExceptionGroup as failures:  # the first that failed has ended the others
            raise failures.exceptions[0] from None
        if obstacle is not None:
            raise obstacle
        if {*numbering.segments_of(run.parts.state.missing)} - {segment.number for segment in run.failed}:
            self._models.check_stays()
        if run.failed and not run.parts.state.done:
            raise UnreadableVideo(run.failed[0].error)
        await self._keep_failed(run, film)

    async def _make(self, run: _Run, film: Film, decoded: DecodedSegment) -> None:
        """Captions one segment for all prompts that it lacks an answer to, and keeps each answer."""
        if decoded.video is None:
            run.failed.append(decoded.segment)
            return
        numbering = _numbering(run.plan, film)
        for number, prompt in enumerate(run.plan.options.questions):
            segment = replace(decoded.segment, prompt=number)
            if numbering.number(segment) in run.parts.state.done:
                continue
            async with self._models.slots:
                made = await self._make_sparingly(run, prompt, replace(decoded, segment=segment))
            caption = made.caption
            run.earlier.add(prompt, caption)
            if _is_first(segment):
                video = replace(caption.video, warnings=(*film.warnings, *caption.video.warnings))
                caption = replace(caption, video=video)
            await run.check()
            await self._keep(run, numbering, segment, made.plan, caption)
        await self._keep_failed(run, film)

    async def _make_sparingly(self, run: _Run, prompt: str, decoded: DecodedSegment) -> Sparing:
        """The answer about a segment with frames, unless a near-duplicate's serves."""
        assert decoded.video is not None, "a segment without frames has no caption"
        plan = (await self._plan_now(run)).asking(prompt)
        known = run.known[prompt] = self._duplicates.among(plan, run.target, run.draft, run.lease.owner)
        made_for = SharedFrom(run.lease.job_id, decoded.segment.number)
        make = partial(self._caption, run, decoded)
        return await caption_sparingly(run.earlier.of(plan), decoded.video, known, made_for, make)

    async def _sum_up(self, run: _Run, film: Film) -> None:
        """Makes the summary where one is asked for and missing; all segments are there."""
        whole, numbering = film.whole(), _numbering(run.plan, film)
        if not numbering.has_summary or not run.parts.state.missing:
            return
        self._models.check_stays()
        said = await self._said(run.lease)
        try:
            async with self._models.slots:
                plan = await self._plan_now(run)
                async with self._captioning(run, plan, "the summary"):
                    caption = await self._films.sum_up(plan, said, partial(_once, run.parts))
        except CANNOT_SUM_UP as error:
            part = JobPart(numbering.total - 1, segment=film.whole(str(error)), error=str(error))
            await run.parts.keep(part.number, whole.number, write_part(part), {})
        else:
            await self._keep(run, numbering, whole, plan, caption)

    async def _said(self, lease: Lease) -> list[TimedText]:
        """What the segments are captioned with, by the store: this run may not have made them."""
        captions: dict[int, tuple[Segment, list[Caption]]] = {}
        after = 0
        while True:
            records, after = await self._queue.list_parts(lease.batch_id, lease.job_id, after)
            for part in map(part_of, records):
                if part.segment is not None and part.caption is not None:
                    captions.setdefault(part.segment.number, (part.segment, []))[1].append(part.caption)
            if not after:
                return [TimedText.of(segment, said) for _, (segment, said) in sorted(captions.items())]

    async def _plan_now(self, run: _Run) -> CaptionPlan:
        """For the models there are. Raises `RetryLater` where the target is another one than for the other parts."""
        plan = await self._models.plan(run.lease, run.options)
        await self._models.check_target(run.target)
        return plan

    async def _keep(
        self, run: _Run, numbering: FilmParts, segment: Segment, plan: CaptionPlan, caption: Caption
    ) -> None:
        """Of a film's seconds each counts once, however many prompts there are."""
        await self._models.check_target(run.target)
        receipt = make_receipt(plan, run.content, caption, run.target, run.draft, run.lease.epoch)
        part = JobPart(numbering.number(segment), caption=caption, receipt=receipt, segment=segment)
        counted = dict(tallies(caption)) | ({"video_s": 0.0} if segment.prompt else {})
        await run.parts.keep(part.number, segment.number, write_part(part), counted)

    async def _caption(self, run: _Run, decoded: DecodedSegment, plan: CaptionPlan) -> Caption:
        async with self._captioning(run, plan, f"segment {decoded.segment.number}"):
            return await self._films.caption(plan, decoded, lambda event: None)

    @asynccontextmanager
    async def _captioning(self, run: _Run, plan: CaptionPlan, what: str) -> AsyncIterator[None]:
        """Surrounds a caption. Raises `SlipstreamError` for one that takes too long."""
        limit = within_limit(self._config.request_timeout_s, f"{what} was not captioned", SlipstreamError)
        async with self._models.captioning(run.lease, plan), limit:
            yield

    async def _keep_failed(self, run: _Run, film: Film) -> None:
        """Marks the segments that have no frames, now that others have captions."""
        numbering = _numbering(run.plan, film)
        while run.failed:
            segment = run.failed.pop()
            await run.check()
            for number in range(numbering.num_prompts):
                failed = replace(segment, prompt=number)
                error = "; ".join((segment.error, *film.warnings)) if _is_first(failed) else segment.error
                part = JobPart(numbering.number(failed), segment=failed, error=error)
                await run.parts.keep(part.number, segment.number, write_part(part), {})


async def _once(parts: PartKeeper, prompt: str, make: Callable[[], Awaitable[Caption]]) -> Caption:
    """The text of a group of segments, by the job's note of it where it was made before. Notes are named by whole
    prompts, so no other group's is taken for it."""
    note = await parts.find_note(prompt)
    known = part_of(PartRecord(0, note)).caption if note is not None else None
    if known is not None:
        return known
    made = await make()
    await parts.keep_note(prompt, write_part(JobPart(0, caption=made)))
    return made


def _is_first(segment: Segment) -> bool:
    """Whether what is to be said of the film is said with this part: the job as a whole has no place for it."""
    return segment.number == segment.prompt == 0


def _ended(decoded: DecodedSegment, room: asyncio.Semaphore) -> None:
    """Also of a segment whose task was ended before it began."""
    if decoded.video is not None:
        decoded.video.close()
    room.release()


def _names(plan: CaptionPlan) -> PartNames:
    """Where each answer is a part, or the summary is one, there are more parts than segments."""
    is_segments = len(plan.options.questions) == 1 and not plan.options.get("summary", False)
    return NAMES if is_segments else replace(NAMES, counted="part")


def _numbering(plan: CaptionPlan, film: Film) -> FilmParts:
    options = plan.options
    return FilmParts(film.facts.num_segments, len(options.questions), options.get("summary", False))


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
