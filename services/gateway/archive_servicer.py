"""The archive's gRPC face on any job queue."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc
import structlog
from google.protobuf.message import Message

from slipstream.archive.intake import Submission, backlog_full, check_batch, check_rights, find_batch_id, max_waiting
from slipstream.archive.messages import Batch
from slipstream.archive.queue import BatchAbandoned, BatchRecord, JobQueue, JobState, UnknownBatch
from slipstream.archive.records import batch_of, job_of, part_of
from slipstream.captioning.config import GatewayConfig
from slipstream.errors import InvalidConfig, InvalidRequest, Overloaded, ProtocolViolation, ServiceUnavailable
from slipstream.rpc import archive_codec as codec
from slipstream.rpc.message_limits import IdleLimit, first_of
from slipstream.rpc.peers import Peers
from slipstream.rpc.security import current_owner, current_rights
from slipstream.rpc.server import HealthWatch
from slipstream.rpc.tracing import Tracing
from slipstream.rpc.v1 import archive_pb2, archive_pb2_grpc

WATCH_S = 0.5
WATCH_RETRY_AFTER_S = 10.0
SUBMIT_IDLE_S = 600.0
"""Longest pause between two items: whoever hands them in may be listing a slow store."""
ABANDONED_S = 60.0
"""An open batch in which nothing waits, runs or comes in for so long was left by whoever handed it in."""
DEFAULT_PAGE, MAX_PAGE = 100, 1000
AT_ONCE, MAX_READS = 25, 100
"""Jobs or parts read at once, so that a page can end before it is too large for a message; and reads of one page."""
PAGE_BYTES = 2 * 1024**2
RECENT_S = 600.0
"""What kept a job waiting is told for so long; none is given back for longer."""
MessageT = TypeVar("MessageT", bound=Message)


Look = Callable[[str], Awaitable[Batch]]
"""Asks how a batch stands, by its id."""


class BatchWatch:
    """Looks at one batch again and again, for all who watch it."""

    def __init__(self, look: Look, batch_id: str, stopping: asyncio.Event) -> None:
        self.num_watchers = 0
        self._ask = look
        self._batch_id = batch_id
        self._stopping = stopping
        self._next: asyncio.Future[Batch] = asyncio.get_running_loop().create_future()
        self._looking = asyncio.create_task(self._look())

    async def next_look(self) -> Batch:
        """Raises what the look raised."""
        return await asyncio.shield(self._next)

    def close(self) -> None:
        """Nobody watches any more."""
        self._looking.cancel()

    async def _look(self) -> None:
        """A gateway that ends does not wait for those who watch."""
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), WATCH_S)
                break
            looked, self._next = self._next, asyncio.get_running_loop().create_future()
            try:
                looked.set_result(await self._ask(self._batch_id))
            except Exception as error:
                _fail(looked, error)
        _fail(self._next, ServiceUnavailable("this gateway is stopping; watch the batch at another, or later"))


def _fail(looked: asyncio.Future[Batch], error: Exception) -> None:
    looked.set_exception(error)
    looked.exception()  # it may be that nobody waits for it


class ArchiveServicer(archive_pb2_grpc.ArchiveServicer):
    """Implements `proto/slipstream/rpc/v1/archive.proto`. A batch is seen by its owner only."""

    def __init__(
        self,
        config: GatewayConfig,
        queue: JobQueue | None,
        stopping: asyncio.Event,
        tracing: Tracing | None = None,
        peers: Peers | None = None,
        needed: Sequence[HealthWatch] = (),
    ) -> None:
        """`peers`: of which the target says what it honours, as far as that is known. `needed`: without any of these
        this gateway takes no jobs."""
        self._config = config
        self._needed = needed
        self._peers = peers
        self._tracing = tracing
        self._stopping = stopping
        self._queue_or_none = queue
        self._watches: dict[str, BatchWatch] = {}
        self._num_watchers: Counter[str] = Counter()
        """By owner."""

    def register(self, server: grpc.aio.Server) -> None:
        """Serves from now on."""
        archive_pb2_grpc.add_ArchiveServicer_to_server(self, server)

    async def SubmitBatch(
        self, requests: AsyncIterator[archive_pb2.SubmitBatchRequest], context: grpc.aio.ServicerContext
    ) -> archive_pb2.SubmitBatchResponse:
        queue, stream = self._queue, aiter(requests)
        first = await first_of(stream, "batch", "a submit")
        options = codec.read_batch_options(first.batch)
        owner, rights, config = current_owner(), current_rights(), self._config
        target = None if self._peers is None else self._peers.target.model
        check_batch(options, config, target)
        check_rights(options, owner, rights, config)
        most = max_waiting(owner, rights, config)
        submission = Submission(queue, config, owner, options, most, self._tracing, target)
        structlog.contextvars.bind_contextvars(batch_id=submission.batch_id)
        async for request in IdleLimit(stream, SUBMIT_IDLE_S, "the submit was ended; hand the same items in again"):
            if request.WhichOneof("message") != "item":
                raise ProtocolViolation("after `batch` a submit takes `item`s only")
            await submission.add(codec.read_batch_item(request.item))
        return codec.submitted_message(await submission.end())

    async def GetBatch(
        self, request: archive_pb2.GetBatchRequest, context: grpc.aio.ServicerContext
    ) -> archive_pb2.Batch:
        return codec.batch_message(self._seen(await self._find(request.batch)))

    async def WatchBatch(
        self, request: archive_pb2.WatchBatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[archive_pb2.Batch]:
        clock = asyncio.get_running_loop().time
        batch, last, changed = self._seen(await self._find(request.batch)), None, clock()
        with self._watching(batch.batch_id) as watch:
            while True:
                if batch != last:
                    yield codec.batch_message(batch)
                    last, changed = batch, clock()
                if batch.is_ended:
                    return
                if batch.is_idle and clock() - changed > ABANDONED_S:
                    raise BatchAbandoned(
                        "nothing of it waits or runs, and it was not handed in to its end: where its submit broke off,"
                        " submit it again to end it; where that still goes on, watch again"
                    )
                batch = await watch.next_look()

    async def ListBatches(
        self, request: archive_pb2.ListBatchesRequest, context: grpc.aio.ServicerContext
    ) -> archive_pb2.ListBatchesResponse:
        limit = _page_size(request.limit)
        records = await self._queue.list_batches(current_owner(), limit)
        return archive_pb2.ListBatchesResponse(batches=[codec.batch_message(self._seen(record)) for record in records])

    async def ListJobs(
        self, request: archive_pb2.ListJobsRequest, context: grpc.aio.ServicerContext
    ) -> archive_pb2.ListJobsResponse:
        states = codec.read_job_states(list(request.states))
        batch_id = (await self._find(request.batch)).batch_id

        async def read(position: int, most: int) -> tuple[list[archive_pb2.Job], int]:
            records, behind = await self._queue.list_jobs(batch_id, states, position, most)
            return [codec.job_message(job_of(record)) for record in records], behind

        jobs, token = await _page(read, request.page_token, _page_size(request.page_size))
        return archive_pb2.ListJobsResponse(jobs=jobs, next_page_token=token)

    async def ListParts(
        self, request: archive_pb2.ListPartsRequest, context: grpc.aio.ServicerContext
    ) -> archive_pb2.ListPartsResponse:
        batch_id = (await self._find(request.batch)).batch_id

        async def read(position: int, most: int) -> tuple[list[archive_pb2.JobPart], int]:
            try:
                records, behind = await self._queue.list_parts(batch_id, request.job_id, position, most)
            except UnknownBatch:
                raise UnknownBatch.without_job(request.batch, request.job_id) from None
            return [codec.part_message(part_of(record)) for record in records], behind

        parts, token = await _page(read, request.page_token, MAX_PAGE)
        return archive_pb2.ListPartsResponse(parts=parts, next_page_token=token)

    async def CancelBatch(
        self, request: archive_pb2.CancelBatchRequest, context: grpc.aio.ServicerContext
    ) -> archive_pb2.Batch:
        batch_id = (await self._find(request.batch)).batch_id
        await self._queue.cancel_batch(batch_id)
        return codec.batch_message(await self._look(batch_id))

    async def RetryDead(
        self, request: archive_pb2.RetryDeadRequest, context: grpc.aio.ServicerContext
    ) -> archive_pb2.RetryDeadResponse:
        batch_id = (await self._find(request.batch)).batch_id
        states = {JobState.DEAD, JobState.FAILED} if request.include_failed else {JobState.DEAD}
        quota = max_waiting(current_owner(), current_rights(), self._config)
        retried = await self._queue.retry_dead(batch_id, frozenset(states), quota)
        if retried.stopped_by:
            raise backlog_full(retried.stopped_by, quota, f"{retried.num_jobs} jobs of the batch are queued again")
        return archive_pb2.RetryDeadResponse(num_retried=retried.num_jobs)

    @contextlib.contextmanager
    def _watching(self, batch_id: str) -> Iterator[BatchWatch]:
        """For the time of one call. Raises `Overloaded`."""
        owner, most = current_owner(), self._config.owner_max_watches
        if self._num_watchers[owner] >= most:
            raise Overloaded(
                f"you watch {most} times already, as often as one owner may at this gateway; end a watch, or poll",
                retry_after_s=WATCH_RETRY_AFTER_S,
            )
        watch = self._watches.get(batch_id)
        if watch is None:
            watch = self._watches[batch_id] = BatchWatch(self._look, batch_id, self._stopping)
        self._num_watchers[owner] += 1
        watch.num_watchers += 1
        try:
            yield watch
        finally:
            self._num_watchers -= Counter({owner: 1})
            watch.num_watchers -= 1
            if not watch.num_watchers:
                watch.close()
                del self._watches[batch_id]

    async def _look(self, batch_id: str) -> Batch:
        return self._seen(await self._queue.get_batch(batch_id))

    def _seen(self, record: BatchRecord) -> Batch:
        """As its owner sees it. Where all of it waits, this gateway's own trouble is nearer than the queue's, however
        long it lasts."""
        batch, lacked = batch_of(record), next((each for each in self._needed if each.reason), None)
        waits = batch.counts.queued and not batch.counts.running
        if waits and self._config.archive_slots and lacked is not None:
            why = f"the gateway that was asked takes no jobs: {lacked.reason}"
            return replace(batch, obstacle=why, obstacle_s=lacked.since_s)
        is_news = time.time() - batch.obstacle_s < RECENT_S
        return batch if is_news else replace(batch, obstacle="", obstacle_s=0.0)

    @property
    def _queue(self) -> JobQueue:
        if self._queue_or_none is None:
            raise InvalidConfig("this gateway has no archive; start it with --redis URL")
        return self._queue_or_none

    async def _find(self, batch: str) -> BatchRecord:
        queue, owner = self._queue, current_owner()
        batch_id = find_batch_id(owner, batch)
        structlog.contextvars.bind_contextvars(batch_id=batch_id)
        try:
            return await queue.get_batch(batch_id, owner)
        except UnknownBatch:
            raise UnknownBatch.named(batch) from None


async def _page(
    read: Callable[[int, int], Awaitable[tuple[list[MessageT], int]]], page_token: str, most: int
) -> tuple[list[MessageT], str]:
    """Up to `most` messages, and the token of the next page. They have `PAGE_BYTES` together, or it is a single one:
    what is too large for this page is read again for the next.

    `read` gives messages from a position on, at most so many, and the position behind them, 0 at the end.
    """
    position, at_once = _position(page_token), AT_ONCE
    page: list[MessageT] = []
    num_bytes = 0
    for _ in range(MAX_READS):
        messages, behind = await read(position, min(most - len(page), at_once))
        more_bytes = sum(message.ByteSize() for message in messages)
        if num_bytes + more_bytes > PAGE_BYTES and len(page) + len(messages) > 1:
            if page:
                break
            at_once = len(messages) // 2
            continue
        page += messages
        num_bytes += more_bytes
        position = behind
        if not position or len(page) >= most:
            break
    return page, str(position) if position else ""


def _page_size(asked: int) -> int:
    return min(asked or DEFAULT_PAGE, MAX_PAGE)


def _position(page_token: str) -> int:
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdecimal() and len(page_token) < 16):
        raise InvalidRequest("page_token is not a page token of this service")
    return int(page_token)
