"""The archive's client: its calls with our errors, pages joined, and a watch that outlives the gateway's restarts.

A batch is handed in piece by piece, with patience for a full backlog.
"""

import asyncio
import hashlib
import itertools
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc

from slipstream.client.connection import Connection, FirstStatus
from slipstream.errors import (
    InvalidConfig,
    Overloaded,
    ServiceUnavailable,
    ServiceUnreachable,
    SlipstreamError,
    VideoNotFound,
)
from slipstream.rpc.channels import as_slipstream_error
from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.rpc.v1 import archive_pb2_grpc
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions

# -- client -----------------------------------------------------------------------------------------------------------

CALL_TIMEOUT_S = 60.0
SUBMIT_TIMEOUT_S = 300.0
PAGE_JOBS = 100
"""A job with its receipt is some 10 kB, and a message is 8 MiB at most."""
PATIENCE_S = 60.0
"""How long a gateway that was there may be away before a command gives up."""
PAUSE_S = 0.5
ENDED = (pb.BATCH_STATE_COMPLETED, pb.BATCH_STATE_CANCELLED)

AnswerT = TypeVar("AnswerT")


class ArchiveClient:
    """The Archive service behind a connection. Every method raises what the service says as one of our errors."""

    def __init__(self, connection: Connection) -> None:
        self._stub = archive_pb2_grpc.ArchiveStub(connection.channel)
        self._metadata = connection.metadata

    async def submit(self, batch: pb.BatchOptions, items: Sequence[pb.BatchItem]) -> pb.SubmitBatchResponse:
        """Hands in items. Safe to repeat, also after an error: nothing is taken twice."""

        async def requests() -> AsyncIterator[pb.SubmitBatchRequest]:
            yield pb.SubmitBatchRequest(batch=batch)
            for item in items:
                yield pb.SubmitBatchRequest(item=item)

        call = self._stub.SubmitBatch(requests(), timeout=SUBMIT_TIMEOUT_S, metadata=self._metadata)
        first_status = FirstStatus(call)
        try:
            answer: pb.SubmitBatchResponse = await call
        except grpc.aio.AioRpcError as error:
            with _our_errors():
                raise await first_status.correct(error) from error
        finally:
            call.cancel()
        return answer

    async def get(self, batch: str) -> pb.Batch:
        """The batch of this id or key."""
        return await self._ask(self._stub.GetBatch, pb.GetBatchRequest(batch=batch))

    async def list_batches(self, limit: int) -> Sequence[pb.Batch]:
        """The caller's batches, the latest first."""
        answer = await self._ask(self._stub.ListBatches, pb.ListBatchesRequest(limit=limit))
        return list(answer.batches)

    async def cancel(self, batch: str) -> pb.Batch:
        """Stops what waits and what runs; results stay."""
        return await self._ask(self._stub.CancelBatch, pb.CancelBatchRequest(batch=batch))

    async def retry(self, batch: str, include_failed: bool) -> int:
        """Queues given-up jobs again; how many those are."""
        request = pb.RetryDeadRequest(batch=batch, include_failed=include_failed)
        answer: pb.RetryDeadResponse = await self._ask(self._stub.RetryDead, request)
        return answer.num_retried

    async def jobs(self, batch: str, states: Sequence[pb.JobState] = ()) -> AsyncGenerator[pb.Job, None]:
        """The jobs in the order they were handed in, fetched page by page."""
        request = pb.ListJobsRequest(batch=batch, states=states, page_size=PAGE_JOBS)
        while True:
            page = await self._with_patience(self._stub.ListJobs, request)
            for job in page.jobs:
                yield job
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def watch(self, batch: str) -> AsyncGenerator[pb.Batch, None]:
        """The batch now and after every change until it has ended, through restarts of the gateway."""
        last_heard = 0.0
        while True:
            try:
                async for snapshot in self._watch_once(batch):
                    last_heard = time.monotonic()
                    yield snapshot
                    if snapshot.state in ENDED:
                        return
            except ServiceUnavailable:
                if not last_heard or time.monotonic() - last_heard > PATIENCE_S:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _watch_once(self, batch: str) -> AsyncIterator[pb.Batch]:
        call = self._stub.WatchBatch(pb.WatchBatchRequest(batch=batch), metadata=self._metadata)
        try:
            with _our_errors():
                async for snapshot in call:
                    yield snapshot
        finally:
            call.cancel()

    async def _with_patience(self, method: Callable[..., Awaitable[AnswerT]], request: object) -> AnswerT:
        """A call that may be repeated, through restarts of the gateway."""
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await self._ask(method, request)
            except ServiceUnavailable:
                if time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, method: Callable[..., Awaitable[AnswerT]], request: object) -> AnswerT:
        with _our_errors():
            return await method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise InvalidConfig("this gateway has no archive: start it with --redis, or use `slipstream up`") from error
        raise as_slipstream_error(error, "gateway") from error


# -- submit -----------------------------------------------------------------------------------------------------------

# Hands a batch in, piece by piece, with patience for a full backlog.

PIECE_ITEMS = 500
"""Items in one call: an error costs the repetition of so many."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
KEY_DIGITS = 40

Tell = Callable[[int, str], None]
"""Takes how many items are handed in and what stands in the way now, "" for nothing."""


@dataclass
class Submitted:
    """What became of the items so far."""

    batch_id: str = ""
    added: int = 0
    known: int = 0
    num_conflicts: int = 0
    rejected: int = 0
    conflicts: list[str] = field(default_factory=list)
    """Custom ids, at most 100 a call."""

    @property
    def handed_in(self) -> int:
        """Items that the queue has."""
        return self.added + self.known

    def add(self, answer: pb.SubmitBatchResponse) -> None:
        """Counts one call's answer."""
        self.batch_id = answer.batch_id
        self.added += answer.num_added
        self.known += answer.num_known
        self.num_conflicts += answer.num_conflicts
        self.rejected += answer.num_rejected
        self.conflicts += answer.conflicts


def batch_key(options: CaptionOptions, output: Path | None, names: Sequence[str]) -> str:
    """Names the same batch for the same command: by where its results go (else what it reads) and what it asks."""
    what = ["output", str(output.resolve())] if output is not None else ["sources", *names]
    content = json.dumps([what, options.SerializeToString(deterministic=True).hex()])
    return f"cli-{hashlib.sha256(content.encode()).hexdigest()[:KEY_DIGITS]}"


async def submit(
    client: ArchiveClient,
    batch: pb.BatchOptions,
    items: Iterable[pb.BatchItem],
    submitted: Submitted,
    tell: Tell,
) -> None:
    """Hands in all items, counting into `submitted`, however long the backlog is full. Repeating it is safe.

    Raises `VideoNotFound` when there are none, and `ServiceUnavailable` when the gateway stays away.
    """
    remaining = iter(items)
    while piece := await asyncio.to_thread(_next_piece, remaining):
        submitted.add(await _submit_piece(client, batch, piece, submitted, tell))
        tell(submitted.handed_in, "")
    if not submitted.batch_id:
        raise VideoNotFound("there is no video to hand in")


def _next_piece(items: Iterator[pb.BatchItem]) -> list[pb.BatchItem]:
    return list(itertools.islice(items, PIECE_ITEMS))


async def _submit_piece(
    client: ArchiveClient,
    batch: pb.BatchOptions,
    piece: Sequence[pb.BatchItem],
    submitted: Submitted,
    tell: Tell,
) -> pb.SubmitBatchResponse:
    pause_s = FIRST_PAUSE_S
    away_since: float | None = None
    while True:
        try:
            return await client.submit(batch, piece)
        except Overloaded as error:
            away_since = None
            tell(submitted.handed_in, f"{error}; waiting for room, {submitted.handed_in:,} items are handed in")
            await asyncio.sleep(error.retry_after_s or pause_s * random.uniform(0.5, 1))
        except ServiceUnavailable as error:
            away_since = away_since or time.monotonic()
            never_there = isinstance(error, ServiceUnreachable) and not submitted.batch_id
            if never_there or time.monotonic() - away_since > PATIENCE_S:
                raise _with_progress(error, submitted) from error
            await asyncio.sleep(FIRST_PAUSE_S)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _with_progress(error: SlipstreamError, submitted: Submitted) -> SlipstreamError:
    if not submitted.batch_id:
        return error
    return ServiceUnavailable(f"{error}; {submitted.handed_in:,} items are handed in, the same command goes on")
