"""Runs one archive job: open, decode, caption, receipt; documents and films have runners of their own.

A caption is of one piece: it takes seconds to minutes and its state lives in the models, so a run that was lost begins
anew and nothing is saved on the way. Decoding runs ahead: it needs no slot, the models do.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

from slipstream import metrics
from slipstream.archive.document_runner import DocumentRunner, DocumentSource
from slipstream.archive.duplicates import DuplicateFinder
from slipstream.archive.film_runner import FilmRunner
from slipstream.archive.messages import JobKind, Receipt
from slipstream.archive.model_runs import ModelRuns, check_digest, for_others, opened
from slipstream.archive.queue import DamagedRecord, JobQueue, JobState, Lease, Outcome, QueueUnavailable
from slipstream.archive.records import (
    JobPayload,
    OtherVersion,
    content_key,
    make_receipt,
    read_batch,
    read_job,
    read_result,
    tallies,
    write_result,
)
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.duplicates import caption_sparingly
from slipstream.captioning.plan import CaptionPlan
from slipstream.captioning.stats import CaptionStats
from slipstream.errors import SlipstreamError
from slipstream.logs import get_logger
from slipstream.messages import Caption, CaptionEvent, CommittedText, SharedFrom, StageChange
from slipstream.rpc.peers import models_of
from slipstream.time_limits import within_limit
from slipstream.video.messages import SampledVideo

NUM_RECENT = 256
Progress = Callable[[str], None]


class ArchiveRunner:
    """Turns leases into outcomes, several at once. One per gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        captioner: GatewayCaptioner,
        queue: JobQueue,
        on_target_lost: Callable[[], None] = lambda: None,
        documents: DocumentSource | None = None,
        stopping: asyncio.Event | None = None,
    ) -> None:
        """`documents`: what reads them; without it they are left to other gateways. `stopping`: set when this one is to
        end; a film then ends behind the segments that it has begun."""
        self._config = config
        self._captioner = captioner
        self._queue = queue
        self._models = ModelRuns(config, captioner, on_target_lost, stopping)
        self._documents = DocumentRunner(config, captioner, queue, self._models, documents)
        # One decoder is left to people, if there are two.
        self._decoders = asyncio.Semaphore(max(config.decode_workers - 1, 1))
        self._duplicates = DuplicateFinder(queue, config.duplicates_kept)
        self._films = FilmRunner(config, captioner, queue, self._models, self._decoders, self._duplicates)
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._recent: OrderedDict[str, tuple[str, Outcome]] = OrderedDict()
        """By content key, the job it was made for and how that ended; the queue has results only once they are
        committed."""

    async def run(self, lease: Lease, progress: Progress) -> Outcome:
        """The worker's handler. Raises `RetryLater`, `RunnerDied`, or an error that is the item's own."""
        try:
            job, batch = read_job(lease.payload), read_batch(lease.options)
        except OtherVersion as error:
            raise for_others(str(error)) from error
        if job.kind is JobKind.DOCUMENT:
            return await self._documents.run(lease, job, batch, progress)
        if job.kind is JobKind.FILM:
            return await self._films.run(lease, job, batch, progress)
        plan = await self._models.plan(lease, job.merged_options(batch))
        reporter = Reporter(progress)
        video, stats = await self._decode(job, plan, reporter)
        with video:
            check_digest(job.sha256, video.sha256)
            return await self._known_or_made(lease, plan, video, stats, reporter)

    async def _known_or_made(
        self, lease: Lease, plan: CaptionPlan, video: SampledVideo, stats: CaptionStats, reporter: "Reporter"
    ) -> Outcome:
        key = self._content_key(lease, video, plan)
        async with self._making.setdefault(key, asyncio.Lock()):  # duplicates wait for the first
            made_for, made = self._recent.get(key, ("", None))
            if (known := await self._known(key, made)) is not None:
                caption, receipt = known
                if made is not None and made_for == lease.job_id:  # by a run whose lease was lost
                    return replace(made, result=write_result(caption, replace(receipt, runs=lease.epoch)))
                caption = replace(caption, request_id="")  # that of the job it was made for
                result = write_result(caption, replace(receipt, reused=True, runs=lease.epoch))
                return Outcome(JobState.DONE, result, content_key=key, tallies={"reused": 1})
            async with self._models.slots:
                now = asyncio.get_running_loop().time()
                metrics.WAIT_SECONDS.labels("archive_slot").observe(now - stats.sampled)
                stats.waited_until(now)
                return await self._make(lease, plan, video, stats, reporter)

    async def _decode(
        self, job: JobPayload, plan: CaptionPlan, reporter: "Reporter"
    ) -> tuple[SampledVideo, CaptionStats]:
        async with self._decoders:
            stats = CaptionStats(arrived=asyncio.get_running_loop().time())
            async with opened(self._captioner.media, job.source, plan.owner, whole=bool(job.sha256)) as (file, _):
                video = await self._captioner.sample(plan, file, reporter.emit, stats, digest=True)
        return video, stats

    async def _known(self, key: str, made: Outcome | None) -> tuple[Caption, Receipt] | None:
        try:
            result = made.result if made is not None else await self._queue.find_result(key)
            return read_result(result) if result else None
        except (DamagedRecord, OtherVersion, QueueUnavailable) as error:  # a store that is away is no reason to stop
            get_logger().warning("results.unread", error=str(error))
            return None

    async def _make(
        self, lease: Lease, plan: CaptionPlan, video: SampledVideo, stats: CaptionStats, reporter: "Reporter"
    ) -> Outcome:
        plan, target = await self._models.settled(plan)
        _, draft = models_of(self._captioner.peers)
        key = self._content_key(lease, video, plan)
        make = partial(self._caption, lease, video, stats, reporter)
        if plan.is_sparing:
            known = self._duplicates.among(plan, target, draft, lease.owner)
            made = await caption_sparingly(plan, video, known, SharedFrom(lease.job_id), make)
            caption, plan = made.caption, made.plan
        else:
            caption = await make(plan)
        result = write_result(caption, make_receipt(plan, video, caption, target, draft, runs=lease.epoch))
        made_now = Outcome(JobState.DONE, result, content_key=key, tallies=tallies(caption))
        self._recent[key] = lease.job_id, made_now
        if len(self._recent) > NUM_RECENT:
            self._recent.popitem(last=False)
        return made_now

    async def _caption(
        self, lease: Lease, video: SampledVideo, stats: CaptionStats, reporter: "Reporter", plan: CaptionPlan
    ) -> Caption:
        limit = within_limit(self._config.request_timeout_s, "the caption was not done", SlipstreamError)
        async with self._models.captioning(lease, plan), limit:
            return await self._captioner.caption(plan, video, reporter.emit, stats)

    def _content_key(self, lease: Lease, video: SampledVideo, plan: CaptionPlan) -> str:
        """Of results that the job may take over: its owner's own, unless all share theirs."""
        owner = "" if self._config.share_results else lease.owner
        return content_key(video.sha256, plan, *models_of(self._captioner.peers), owner=owner)


class Reporter:
    """Turns a caption's events into a line of progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num_tokens = 0

    def emit(self, event: CaptionEvent) -> None:
        if isinstance(event, CommittedText):
            self._num_tokens += len(event.tokens)
            self._progress(f"generate {self._num_tokens}")
        elif isinstance(event, StageChange) and not event.stage.startswith("draft_"):
            self._progress(f"{event.stage} {event.done}/{event.total}" if event.total else event.stage)
