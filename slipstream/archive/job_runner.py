"""Runs one archive job: open, decode, caption, receipt.

A caption is one segment: it takes seconds to minutes and its state lives in the models, so a run that was lost begins
anew and nothing is saved on the way. Decoding runs ahead: it needs no slot, the models do.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from weakref import WeakValueDictionary

import structlog

from slipstream import metrics
from slipstream.archive.messages import Receipt
from slipstream.archive.queue import JobQueue, JobState, Lease, Outcome, QueueUnavailable
from slipstream.archive.records import (
    OtherVersion,
    content_key,
    make_receipt,
    read_batch,
    read_job,
    read_result,
    tallies,
    write_result,
)
from slipstream.archive.worker import RetryLater, RunnerDied
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.media import VideoFile
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.captioning.stats import CaptionStats
from slipstream.errors import InvalidRequest, ServiceUnavailable, SessionExists, SlipstreamError, VersionMismatch
from slipstream.messages import Caption, CaptionEvent, CommittedText, StageChange
from slipstream.video.messages import SampledVideo

ELSEWHERE_S = 30.0
"""Until a job that this gateway cannot run is offered again: one of another release, or models that do not fit."""
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
    ) -> None:
        self._config = config
        self._captioner = captioner
        self._queue = queue
        self._on_target_lost = on_target_lost
        self._slots = asyncio.Semaphore(max(config.archive_slots, 1))
        # One decoder is left to people, if there are two.
        self._decoders = asyncio.Semaphore(max(config.decode_workers - 1, 1))
        self._co_runners = CoRunners()
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._recent: OrderedDict[str, str] = OrderedDict()
        """Results by content key; the queue has them too, but only once they are committed."""

    async def run(self, lease: Lease, progress: Progress) -> Outcome:
        """The worker's handler. Raises `RetryLater`, `RunnerDied`, or an error that is the item's own."""
        try:
            job, batch = read_job(lease.payload), read_batch(lease.options)
        except OtherVersion as error:
            raise RetryLater(str(error), counted=False, delay_s=ELSEWHERE_S) from error
        request_id = f"{lease.job_id}-{lease.epoch}"  # an earlier run may still linger in the models
        structlog.contextvars.bind_contextvars(request_id=request_id)
        plan = make_plan(job.merged_options(batch), self._config, request_id=request_id, owner=lease.owner)
        try:
            plan = self._captioner.settled(plan, await self._captioner.check(plan))
        except ServiceUnavailable:
            self._on_target_lost()
            raise
        except VersionMismatch as error:  # the operator's fault, not the item's
            raise RetryLater(str(error), counted=False, delay_s=ELSEWHERE_S) from error
        await self._captioner.look_for_draft(plan)
        reporter = Reporter(progress)
        video, stats = await self._decode(job.source, plan, reporter)
        with video:
            check_digest(job.sha256, video.sha256)
            return await self._known_or_made(lease, plan, video, stats, reporter)

    async def _known_or_made(
        self, lease: Lease, plan: CaptionPlan, video: SampledVideo, stats: CaptionStats, reporter: "Reporter"
    ) -> Outcome:
        key = self._content_key(lease, video, plan)
        async with self._making.setdefault(key, asyncio.Lock()):  # duplicates wait for the first
            if (known := await self._known(key)) is not None:
                caption, receipt = known
                caption = replace(caption, request_id="")  # that of the job it was made for
                result = write_result(caption, replace(receipt, reused=True, runs=lease.epoch))
                return Outcome(JobState.DONE, result, content_key=key, tallies={"reused": 1})
            async with self._slots:
                now = asyncio.get_running_loop().time()
                metrics.WAIT_SECONDS.labels("archive_slot").observe(now - stats.sampled)
                stats.waited_until(now)
                return await self._make(lease, plan, video, stats, reporter)

    async def _decode(self, source: str, plan: CaptionPlan, reporter: "Reporter") -> tuple[SampledVideo, CaptionStats]:
        async with self._decoders:
            stats = CaptionStats(arrived=asyncio.get_running_loop().time())
            async with self._open(source, plan.owner) as file:
                video = await self._captioner.sample(plan, file, reporter.emit, stats, digest=True)
        return video, stats

    @contextlib.asynccontextmanager
    async def _open(self, source: str, owner: str) -> AsyncIterator[VideoFile]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                file = await stack.enter_async_context(self._captioner.media.open_source(source, owner=owner))
            except ServiceUnavailable as error:  # the host it is fetched from, which may never come back
                raise RetryLater(str(error), counted=True) from error
            yield file

    async def _known(self, key: str) -> tuple[Caption, Receipt] | None:
        try:
            result = self._recent.get(key) or await self._queue.find_result(key)
            return read_result(result) if result else None
        except (OtherVersion, QueueUnavailable):  # a store that is away is no reason to stop
            return None

    async def _make(
        self, lease: Lease, plan: CaptionPlan, video: SampledVideo, stats: CaptionStats, reporter: "Reporter"
    ) -> Outcome:
        target = await self._captioner.check(plan)  # the models may be others than before the wait
        plan = self._captioner.settled(plan, target)
        await self._captioner.look_for_draft(plan)
        draft = self._captioner.peers.draft.model if self._captioner.peers.draft else None
        key = self._content_key(lease, video, plan)
        caption = await self._caption(lease, plan, video, stats, reporter)
        result = write_result(caption, make_receipt(plan, video, caption, target, draft, runs=lease.epoch))
        self._recent[key] = result
        if len(self._recent) > NUM_RECENT:
            self._recent.popitem(last=False)
        return Outcome(JobState.DONE, result, content_key=key, tallies=tallies(caption))

    async def _caption(
        self, lease: Lease, plan: CaptionPlan, video: SampledVideo, stats: CaptionStats, reporter: "Reporter"
    ) -> Caption:
        limit_s = self._config.request_timeout_s
        metered = self._captioner.metrics.captioning(plan.method.name, door="archive")
        with metered, self._co_runners.running(lease) as co_runner:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._captioner.caption(plan, video, reporter.emit, stats)
            except TimeoutError:
                raise SlipstreamError(f"the caption was not done within this server's limit of {limit_s:g} s") from None
            except SessionExists as error:  # somebody's session has the name of this run, which is no fault of the item
                raise RetryLater(str(error), counted=False) from error
            except ServiceUnavailable as error:
                if await self._target_answers():
                    raise RetryLater(str(error), counted=True) from error
                if co_runner.beside_suspect:
                    raise RetryLater(str(error), counted=False) from error
                raise RunnerDied("the target died or vanished while it captioned this") from error

    async def _target_answers(self) -> bool:
        try:
            await self._captioner.peers.target.ask()
        except SlipstreamError:
            self._on_target_lost()
            return False
        return True

    def _content_key(self, lease: Lease, video: SampledVideo, plan: CaptionPlan) -> str:
        """Of results that the job may take over: its owner's own, unless all share theirs."""
        peers = self._captioner.peers
        assert peers.target.model is not None, "the target has been asked"
        owner = "" if self._config.share_results else lease.owner
        draft = peers.draft.model if peers.draft else None
        return content_key(video.sha256, plan, peers.target.model, draft, owner=owner)


class CoRunner:
    """One caption at the models."""

    def __init__(self, lease: Lease, beside_suspect: bool) -> None:
        self.is_suspect = lease.is_suspect
        self.beside_suspect = beside_suspect
        """A job that is suspected of killing what runs it was there at the same time."""


class CoRunners:
    """Who is at the target together: when it dies beside a suspect, nobody else is blamed."""

    def __init__(self) -> None:
        self._present: set[CoRunner] = set()

    @contextlib.contextmanager
    def running(self, lease: Lease) -> Iterator[CoRunner]:
        """For the time of a caption."""
        suspects = any(other.is_suspect for other in self._present)
        co_runner = CoRunner(lease, beside_suspect=suspects and not lease.is_suspect)
        if lease.is_suspect:
            for other in self._present:
                other.beside_suspect = not other.is_suspect
        self._present.add(co_runner)
        try:
            yield co_runner
        finally:
            self._present.discard(co_runner)


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


def check_digest(given: str, actual: str) -> None:
    """Raises `InvalidRequest` when the file is not the one that was meant."""
    if given and given.lower() != actual:
        raise InvalidRequest(f"the file has the SHA-256 {actual}, not the one that was given")
