"""The archive's calls on plain types: with our errors, with patience for a gateway that restarts and a full backlog."""

import asyncio
import itertools
import random
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TypeVar

import grpc

from slipstream.archive.messages import (
    Batch,
    BatchItem,
    BatchOptions,
    Job,
    JobPage,
    JobPart,
    PartPage,
    Submitted,
    prompt_of,
)
from slipstream.archive.quality import BatchNorms
from slipstream.archive.queue import JobState, UnknownBatch
from slipstream.client.connection import Connection, beside_loop, closing_told
from slipstream.config import own_number
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    Overloaded,
    ServiceUnavailable,
    ServiceUnreachable,
    SlipstreamError,
    VideoNotFound,
)
from slipstream.logs import heard
from slipstream.messages import Caption
from slipstream.rpc import archive_codec as codec
from slipstream.rpc.calls import FirstStatus, as_slipstream_error
from slipstream.rpc.v1 import archive_pb2, archive_pb2_grpc

CALL_TIMEOUT_S = 60.0
SUBMIT_TIMEOUT_S = 300.0
PAGE_JOBS = 100
"""A job with its receipt is some 10 kB, and a message is 8 MiB at most."""
PATIENCE_S = 60.0
"""How long a gateway that was there may be away before a caller gives up."""
PAUSE_S = 0.5
MOST_BATCHES = 1000
"""Of one answer."""
QUIET_S = 5.0
"""After which `follow` says again how a batch stands."""
PIECE_ITEMS = 500
"""Items in one call: an error costs the repetition of so many."""
LOOKED_AT = 500
"""Results of a batch that say what is usual in it: the first ones, so that the same batch says the same again."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0

AnswerT = TypeVar("AnswerT")
MessageT = TypeVar("MessageT")
Method = Callable[[archive_pb2_grpc.ArchiveStub], Callable[..., Awaitable[AnswerT]]]
Tell = Callable[[Submitted, str], None]
"""Takes what is handed in so far and what stands in the way now, "" for nothing."""


class ArchiveClient:
    """The Archive service behind a connection. Every method raises what the service says as one of our errors.

    A batch is named by its id, or by the key that its submitter gave it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._metadata = connection.metadata

    # -- submitting ---------------------------------------------------------------------------------------------------

    async def submit(self, batch: BatchOptions, items: Sequence[BatchItem]) -> Submitted:
        """Hands in items in one call. With a key it is safe to repeat, also after an error: nothing is taken twice.
        Where the gateway is away or about to stop, the next call goes to another."""
        await self._connection.settle()
        channel = self._connection.channel
        try:
            with closing_told():
                return await self._submit_at(channel, batch, items)
        except ServiceUnavailable:
            self._connection.turn_from(channel)
            raise

    async def _submit_at(self, channel: grpc.aio.Channel, batch: BatchOptions, items: Sequence[BatchItem]) -> Submitted:
        requests = _each(codec.submit_messages(batch, items))
        call = _stub(channel).SubmitBatch(requests, timeout=SUBMIT_TIMEOUT_S, metadata=self._metadata)
        first_status = FirstStatus(call)
        try:
            return codec.read_submitted(await call)
        except grpc.aio.AioRpcError as error:
            with _our_errors():
                raise await first_status.correct(error) from error
            raise AssertionError("it has been raised as one of ours") from error
        finally:
            call.cancel()

    async def submit_all(
        self,
        batch: BatchOptions,
        items: Iterable[BatchItem],
        tell: Tell = lambda submitted, obstacle: None,
        is_left: threading.Event | None = None,
    ) -> Submitted:
        """Hands in all items piece by piece, however long the backlog is full. A batch without a key gets one, by
        which the pieces find it; with a key of the caller's it is safe to repeat. Items are made on another thread:
        `is_left` is set when none is wanted any more, also where this is cancelled meanwhile.

        Raises `VideoNotFound` when there is no item, and `ServiceUnavailable` when the gateway stays away.
        """
        batch = batch if batch.key else replace(batch, key=f"made-{secrets.token_hex(16)}")
        is_left = is_left or threading.Event()
        submitted, pieces = Submitted(), _Pieces(iter(items), is_left)
        try:
            while piece := await beside_loop(pieces.next):
                batch = replace(batch, more_follows=pieces.more_follow)
                submitted += await self._submit_piece(batch, piece, submitted, tell)
                tell(submitted, "")
        finally:
            is_left.set()
        if not submitted.batch_id:
            raise VideoNotFound("there is nothing to hand in")
        return submitted

    async def _submit_piece(
        self, batch: BatchOptions, piece: Sequence[BatchItem], submitted: Submitted, tell: Tell
    ) -> Submitted:
        pause_s = FIRST_PAUSE_S
        away_since: float | None = None
        num_unreachable = 0
        while True:
            try:
                return await self.submit(batch, piece)
            except Overloaded as error:
                away_since = None
                tell(submitted, f"{error}; waiting for room, {submitted.num_handed_in:,} items are handed in")
                await asyncio.sleep(error.retry_after_s or pause_s * random.uniform(0.5, 1))
            except ServiceUnavailable as error:
                away_since = away_since or time.monotonic()
                num_unreachable += isinstance(error, ServiceUnreachable)
                never_there = num_unreachable > len(self._connection.others) and not submitted.batch_id
                if never_there or self._is_over(away_since):
                    raise _with_progress(error, submitted) from error
                await asyncio.sleep(FIRST_PAUSE_S)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    # -- asking -------------------------------------------------------------------------------------------------------

    async def get(self, batch: str) -> Batch:
        """How the batch stands."""
        return codec.read_batch(
            await self._ask(lambda archive: archive.GetBatch, archive_pb2.GetBatchRequest(batch=batch))
        )

    async def list_batches(self, limit: int) -> list[Batch]:
        """The caller's batches, the latest first. Raises `InvalidRequest` for a limit that is no whole number from 1 to
        `MOST_BATCHES`."""
        number = own_number(limit)
        if type(number) is not int or not 0 < number <= MOST_BATCHES:
            raise InvalidRequest(f"limit must be a whole number from 1 to {MOST_BATCHES}, not {limit!r}")
        answer = await self._ask(lambda archive: archive.ListBatches, archive_pb2.ListBatchesRequest(limit=number))
        return [codec.read_batch(batch) for batch in answer.batches]

    async def cancel(self, batch: str) -> Batch:
        """Stops what waits and what runs; results stay."""
        return codec.read_batch(
            await self._ask(lambda archive: archive.CancelBatch, archive_pb2.CancelBatchRequest(batch=batch))
        )

    async def retry(self, batch: str, include_failed: bool) -> int:
        """Queues dead jobs again, and failed ones where asked; how many those are."""
        request = archive_pb2.RetryDeadRequest(batch=batch, include_failed=include_failed)
        answer: archive_pb2.RetryDeadResponse = await self._ask(lambda archive: archive.RetryDead, request)
        return answer.num_retried

    async def job_page(self, batch: str, states: Collection[JobState] = (), page_token: str = "") -> JobPage:
        """Some jobs in the order they were handed in, from `page_token` on; no `states`: all. Waits for a gateway that
        restarts."""
        request = archive_pb2.ListJobsRequest(
            batch=batch,
            states=codec.job_state_numbers(states),
            page_token=page_token,
            page_size=PAGE_JOBS,
        )
        return codec.read_job_page(await self._with_patience(lambda archive: archive.ListJobs, request))

    async def jobs(self, batch: str, states: Collection[JobState] = ()) -> AsyncGenerator[Job, None]:
        """The jobs in the order they were handed in, fetched page by page; no `states`: all."""
        page_token = ""
        while True:
            page = await self.job_page(batch, states, page_token)
            for job in page.jobs:
                yield job
            page_token = page.next_page_token
            if not page_token:
                return

    async def parts(self, batch: str, job: Job) -> AsyncGenerator[JobPart, None]:
        """The pages of a document that are read, in order, fetched a few at a time; none of a video."""
        page_token = ""
        while job.parts_done:
            page = await self.part_page(batch, job.job_id, page_token)
            for part in page.parts:
                yield part
            page_token = page.next_page_token
            if not page_token:
                return

    async def part_page(self, batch: str, job_id: str, page_token: str = "") -> PartPage:
        """Some pages or segments of a job, in order, from `page_token` on. Waits for a gateway that restarts."""
        request = archive_pb2.ListPartsRequest(batch=batch, job_id=job_id, page_token=page_token)
        answer: archive_pb2.ListPartsResponse = await self._with_patience(lambda archive: archive.ListParts, request)
        return PartPage(codec.read_parts(answer), answer.next_page_token)

    async def norms(self, batch: str) -> BatchNorms:
        """What is usual in the batch: of its first `LOOKED_AT` texts, be they of videos, pages or segments."""
        said: list[tuple[str, Caption]] = []
        async with aclosing(self.jobs(batch, {JobState.DONE})) as jobs:
            async for job in jobs:
                said += await self._answers(batch, job)
                if len(said) >= LOOKED_AT:
                    break
        return BatchNorms.of(said[:LOOKED_AT])

    async def _answers(self, batch: str, job: Job) -> list[tuple[str, Caption]]:
        """Prompts and texts of the job, or of its parts."""
        if job.caption is not None:
            return [(prompt_of(job), job.caption)]
        async with aclosing(self.parts(batch, job)) as parts:
            return [(prompt_of(part), part.caption) async for part in parts if part.caption is not None]

    async def watch(self, batch: str) -> AsyncGenerator[Batch, None]:
        """The batch now and after every change until it has ended, through restarts of the gateway."""
        await self._connection.settle()
        was_there, away_since = False, None
        untried = len(self._connection.others)
        while True:
            channel = self._connection.channel
            try:
                async with aclosing(self._watch_once(channel, batch)) as snapshots:
                    async for snapshot in snapshots:
                        was_there, away_since = True, None
                        yield snapshot
                        if snapshot.is_ended:
                            return
            except ServiceUnavailable:
                away_since = away_since or time.monotonic()
                self._connection.turn_from(channel)
                if not (was_there or untried) or self._is_over(away_since):
                    raise
                untried = max(untried - 1, 0)
            await asyncio.sleep(PAUSE_S)

    async def follow(self, batch: str) -> AsyncGenerator[Batch, None]:
        """The same for whoever shows it, or does something from time to time: also again, where nothing has changed for
        `QUIET_S`."""
        async with aclosing(self.watch(batch)) as snapshots:
            coming = heard(asyncio.ensure_future(anext(snapshots, None)))
            try:
                latest = await coming
                while latest is not None:
                    yield latest
                    coming = heard(asyncio.ensure_future(anext(snapshots, None))) if coming.done() else coming
                    await asyncio.wait({coming}, timeout=QUIET_S)
                    latest = coming.result() if coming.done() else latest
            finally:
                coming.cancel()
                await asyncio.wait({coming})

    async def _watch_once(self, channel: grpc.aio.Channel, batch: str) -> AsyncGenerator[Batch, None]:
        with _our_errors():
            call = _stub(channel).WatchBatch(archive_pb2.WatchBatchRequest(batch=batch), metadata=self._metadata)
            try:
                async for snapshot in call:
                    yield codec.read_batch(snapshot)
            finally:
                call.cancel()

    async def _with_patience(self, method: Method[AnswerT], request: object) -> AnswerT:
        """A call that may be repeated, through restarts of the gateway."""
        since = time.monotonic()
        while True:
            try:
                return await self._ask(method, request)
            except ServiceUnavailable:
                if self._is_over(since):
                    raise
            await asyncio.sleep(PAUSE_S)

    def _is_over(self, away_since: float) -> bool:
        """Nobody waits any longer for gateways that are away since then."""
        return self._connection.is_closed or time.monotonic() - away_since > PATIENCE_S

    async def _ask(self, method: Method[AnswerT], request: object) -> AnswerT:
        async def ask(channel: grpc.aio.Channel) -> AnswerT:
            with _our_errors():
                return await method(_stub(channel))(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)

        return await self._connection.ask(ask)


def _stub(channel: grpc.aio.Channel) -> archive_pb2_grpc.ArchiveStub:
    return archive_pb2_grpc.ArchiveStub(channel)


async def _each(messages: Iterable[MessageT]) -> AsyncIterator[MessageT]:
    for message in messages:
        yield message


class _Pieces:
    """Items, piece by piece. Ends early where nobody waits for them any more: a process does not end before it has."""

    def __init__(self, items: Iterator[BatchItem], is_left: threading.Event) -> None:
        self.more_follow = True
        """Behind the piece that was given: an item, or the error of the next, as far as was asked."""
        self._is_left = is_left
        self._items = itertools.takewhile(lambda item: not is_left.is_set(), items)
        self._ahead: list[BatchItem] = []
        self._error: Exception | None = None

    def next(self) -> list[BatchItem]:
        """Raises what making an item raises, with the piece behind those that were made."""
        if self._error is not None:
            raise self._error
        piece = self._ahead + list(itertools.islice(self._items, PIECE_ITEMS - len(self._ahead)))
        try:
            self._ahead = list(itertools.islice(self._items, 1))
        except Exception as error:
            self._ahead, self._error = [], error
        self.more_follow = bool(self._ahead) or self._error is not None or self._is_left.is_set()
        return piece


def _with_progress(error: SlipstreamError, submitted: Submitted) -> SlipstreamError:
    if not submitted.batch_id:
        return error
    return ServiceUnavailable(f"{error}; {submitted.num_handed_in:,} items are handed in, the same again goes on")


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        with closing_told():
            yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise InvalidConfig("this gateway has no archive: start it with --redis, or use `slipstream up`") from error
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise UnknownBatch(error.details() or "there is no such batch") from error
        raise as_slipstream_error(error, "gateway") from error
