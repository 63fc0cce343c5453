"""Runs one archive job: open, decode, caption, receipt. Knows no wire of its own and no store but the queue's protocol.

A caption is one segment: it takes seconds to minutes and its state lives in the models, so a run that was lost begins
anew and nothing is saved on the way. Decoding runs ahead: it needs no slot, the models do.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import BinaryIO
from weakref import WeakValueDictionary

import structlog

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
from slipstream.captioning.captioner import Captioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.options import CaptionOptions, resolve_options
from slipstream.captioning.stats import Ledger
from slipstream.errors import InvalidRequest, ModelNotUsable, ServiceUnavailable, SlipstreamError
from slipstream.rpc.v1 import archive_pb2, gateway_pb2
from slipstream.video.sampled import SampledVideo

ELSEWHERE_S = 30.0
"""Until a job that this gateway cannot run is offered again: one of another release, or models that do not fit."""
NUM_RECENT = 256
Progress = Callable[[str], None]


class ArchiveRunner:
    """Turns leases into outcomes, several at once. One per gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        captioner: Captioner,
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
        self._neighbours = Neighbours()
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._recent: OrderedDict[str, str] = OrderedDict()
        """Results by content key; the queue has them too, but only once they are committed."""

    async def run(self, lease: Lease, progress: Progress) -> Outcome:
        """The worker's handler. Raises `RetryLater`, `RunnerDied`, or an error that is the item's own."""
        try:
            job, batch = read_job(lease.payload), read_batch(lease.options)
        except OtherVersion as error:
            raise RetryLater(str(error), counted=False, delay_s=ELSEWHERE_S) from error
        message = job.merged_options(batch)
        message.ClearField("trace")  # kept with every result, it would be larger than all else
        message.request_id = f"{lease.job_id}-{lease.epoch}"  # an earlier run may still linger in the models
        structlog.contextvars.bind_contextvars(request_id=message.request_id)
        options = resolve_options(message, self._config)
        try:
            await self._captioner.check(options)
        except ServiceUnavailable:
            self._on_target_lost()
            raise
        except ModelNotUsable as error:  # the operator's fault, not the item's
            raise RetryLater(str(error), counted=False, delay_s=ELSEWHERE_S) from error
        reporter = Reporter(progress)
        video, ledger = await self._decode(job.source, options, reporter)
        check_digest(job.sha256, video.sha256)
        key = self._content_key(video, options)
        async with self._making.setdefault(key, asyncio.Lock()):  # duplicates wait for the first
            if (known := await self._known(key)) is not None:
                summary, receipt = known
                receipt.reused, receipt.runs = True, lease.epoch
                result = write_result(summary, receipt)
                return Outcome(JobState.DONE, result, content_key=key, tallies={"reused": 1})
            async with self._slots:
                ledger.waited_until(asyncio.get_running_loop().time())
                return await self._make(lease, options, video, ledger, reporter)

    async def _decode(self, source: str, options: CaptionOptions, reporter: "Reporter") -> tuple[SampledVideo, Ledger]:
        async with self._decoders:
            ledger = Ledger(arrived=asyncio.get_running_loop().time())
            async with self._open(source) as file:
                video = await self._captioner.sample(options, file, reporter.emit, ledger, digest=True)
        return video, ledger

    @contextlib.asynccontextmanager
    async def _open(self, source: str) -> AsyncIterator[BinaryIO]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                file = await stack.enter_async_context(self._captioner.media.open_source(source))
            except ServiceUnavailable as error:  # the host it is fetched from, which may never come back
                raise RetryLater(str(error), counted=True) from error
            yield file

    async def _known(self, key: str) -> tuple[gateway_pb2.Summary, archive_pb2.Receipt] | None:
        try:
            result = self._recent.get(key) or await self._queue.find_result(key)
            return read_result(result) if result else None
        except (OtherVersion, QueueUnavailable):  # a store that is away is no reason to stop
            return None

    async def _make(
        self, lease: Lease, options: CaptionOptions, video: SampledVideo, ledger: Ledger, reporter: "Reporter"
    ) -> Outcome:
        target = await self._captioner.check(options)  # the models may be others than before the wait
        draft = self._captioner.peers.draft.model if self._captioner.peers.draft else None
        key = self._content_key(video, options)
        summary = await self._caption(lease, options, video, ledger, reporter)
        receipt = make_receipt(options, video, summary, target, draft)
        receipt.runs = lease.epoch
        result = write_result(summary, receipt)
        self._recent[key] = result
        if len(self._recent) > NUM_RECENT:
            self._recent.popitem(last=False)
        return Outcome(JobState.DONE, result, content_key=key, tallies=tallies(summary))

    async def _caption(
        self, lease: Lease, options: CaptionOptions, video: SampledVideo, ledger: Ledger, reporter: "Reporter"
    ) -> gateway_pb2.Summary:
        limit_s = self._config.request_timeout_s
        metered = self._captioner.metrics.captioning(options.method, door="archive")
        with metered, self._neighbours.running(lease) as neighbour:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._captioner.caption(options, video, reporter.emit, ledger)
            except TimeoutError:
                raise SlipstreamError(f"the caption was not done within this server's limit of {limit_s:g} s") from None
            except ServiceUnavailable as error:
                if await self._target_answers():
                    raise RetryLater(str(error), counted=True) from error
                if neighbour.beside_suspect:
                    raise RetryLater(str(error), counted=False) from error
                raise RunnerDied("the target died or vanished while it captioned this") from error

    async def _target_answers(self) -> bool:
        try:
            await self._captioner.peers.target.ask()
        except SlipstreamError:
            self._on_target_lost()
            return False
        return True

    def _content_key(self, video: SampledVideo, options: CaptionOptions) -> str:
        peers = self._captioner.peers
        assert peers.target.model is not None, "the target has been asked"
        return content_key(video.sha256, options, peers.target.model, peers.draft.model if peers.draft else None)


class Neighbour:
    """One caption at the models."""

    def __init__(self, lease: Lease, beside_suspect: bool) -> None:
        self.is_suspect = lease.is_suspect
        self.beside_suspect = beside_suspect
        """A job that is suspected of killing what runs it was there at the same time."""


class Neighbours:
    """Who is at the target together: when it dies beside a suspect, nobody else is blamed."""

    def __init__(self) -> None:
        self._present: set[Neighbour] = set()

    @contextlib.contextmanager
    def running(self, lease: Lease) -> Iterator[Neighbour]:
        """For the time of a caption."""
        suspects = any(other.is_suspect for other in self._present)
        neighbour = Neighbour(lease, beside_suspect=suspects and not lease.is_suspect)
        if lease.is_suspect:
            for other in self._present:
                other.beside_suspect = not other.is_suspect
        self._present.add(neighbour)
        try:
            yield neighbour
        finally:
            self._present.discard(neighbour)


class Reporter:
    """Turns a caption's events into a line of progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num_tokens = 0

    def emit(self, event: gateway_pb2.CaptionEvent) -> None:
        if event.WhichOneof("message") == "text":
            self._num_tokens += len(event.text.tokens)
            self._progress(f"generate {self._num_tokens}")
        elif event.stage.stage and not event.stage.stage.startswith("draft_"):
            stage = event.stage
            self._progress(f"{stage.stage} {stage.done}/{stage.total}" if stage.total else stage.stage)


def check_digest(given: str, actual: str) -> None:
    """Raises `InvalidRequest` when the file is not the one that was meant."""
    if given and given.lower() != actual:
        raise InvalidRequest(f"the file has the SHA-256 {actual}, not the one that was given")
