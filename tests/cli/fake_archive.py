"""A gateway with an archive and no models: what becomes of an item depends on its file's name."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import grpc

from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.rpc.v1 import archive_pb2_grpc, reader_pb2
from tests.cli.fake_gateway import FakeGateway, make_summary

Context = grpc.aio.ServicerContext[Any, Any]
TEXT = "A red circle moves left. Then\x1b it stops! Why?"
PAGE = 2
OUTCOMES = {
    "bad": (pb.JOB_STATE_FAILED, "the file holds no video\x1b stream", "INVALID_ARGUMENT"),
    "dead": (pb.JOB_STATE_DEAD, "whatever ran it died 3 times", "INTERNAL"),
    "stuck": (pb.JOB_STATE_RUNNING, "", ""),
    "torn": (pb.JOB_STATE_FAILED, "page 3 cannot be opened", "INVALID_ARGUMENT"),
}
NUM_PAGES = 3


@dataclass
class FakeBatch:
    """One batch; `jobs` by custom id, in the order they came."""

    options: pb.BatchOptions
    jobs: dict[str, pb.Job] = field(default_factory=dict)
    items: dict[str, pb.BatchItem] = field(default_factory=dict)
    cancelled: bool = False
    """It was asked for, if only when all had ended."""


class FakeArchive(FakeGateway, archive_pb2_grpc.ArchiveServicer):
    """`refusals` holds statuses with which the next submits end after having taken `room` items each, with the metadata
    `refused_with`.
    """

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        super().__init__(address)
        self.batches: dict[str, FakeBatch] = {}
        self.submits = 0
        self.refusals: list[grpc.StatusCode] = []
        self.refused_with: tuple[tuple[str, str], ...] = ()
        self.room = 1
        self.hint_ms = 10
        """How long a refused caller is told to wait."""
        self.lost_watches = 0
        self.page_states: list[list[int]] = []

    def register(self, server: grpc.aio.Server) -> None:
        super().register(server)
        archive_pb2_grpc.add_ArchiveServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def SubmitBatch(
        self, request_iterator: AsyncIterator[pb.SubmitBatchRequest], context: Context
    ) -> pb.SubmitBatchResponse:
        self.submits += 1
        refusal = self.refusals.pop(0) if self.refusals else None
        opened = (await anext(aiter(request_iterator))).batch
        batch = self.batches.setdefault(opened.key, FakeBatch(opened))
        answer = pb.SubmitBatchResponse(batch_id=f"batch-{list(self.batches).index(opened.key)}")
        async for request in request_iterator:
            if refusal is not None and answer.num_added == self.room:
                await context.abort(
                    refusal, "as many jobs wait as may", (("retry-after-ms", str(self.hint_ms)), *self.refused_with)
                )
            self._take(batch, request.item, answer)
        return answer

    def _take(self, batch: FakeBatch, item: pb.BatchItem, answer: pb.SubmitBatchResponse) -> None:
        known = batch.items.get(item.custom_id)
        if known == item:
            answer.num_known += 1
        elif known is not None:
            answer.num_conflicts += 1
            answer.conflicts.append(item.custom_id)
        else:
            batch.items[item.custom_id] = item
            batch.jobs[item.custom_id] = _run(item, batch.options, len(batch.jobs))
            answer.num_added += 1
            answer.num_rejected += batch.jobs[item.custom_id].state == pb.JOB_STATE_FAILED

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.Batch:
        return self._describe(await self._find(request.batch, context))

    async def WatchBatch(self, request: pb.WatchBatchRequest, context: Context) -> AsyncIterator[pb.Batch]:
        batch = await self._find(request.batch, context)
        whole = self._describe(batch)
        early = pb.Batch()
        early.CopyFrom(whole)
        early.state = pb.BATCH_STATE_IN_PROGRESS
        early.ended_s = 0
        early.counts.done = 0
        early.counts.queued = whole.counts.done
        yield early
        if self.lost_watches:
            self.lost_watches -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway stops")
        while not self._describe(batch).ended_s:  # noqa: ASYNC110 (its end is a call in any task)
            await asyncio.sleep(0.02)
        yield self._describe(batch)

    async def ListBatches(self, request: pb.ListBatchesRequest, context: Context) -> pb.ListBatchesResponse:
        return pb.ListBatchesResponse(batches=[self._describe(batch) for batch in reversed(self.batches.values())])

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        batch = await self._find(request.batch, context)
        self.page_states.append(list(request.states))
        start = int(request.page_token or 0)
        page = list(batch.jobs.values())[start : start + PAGE]
        more = start + PAGE < len(batch.jobs)
        wanted = [job for job in page if not request.states or job.state in request.states]
        return pb.ListJobsResponse(jobs=wanted, next_page_token=str(start + PAGE) if more else "")

    async def ListParts(self, request: pb.ListPartsRequest, context: Context) -> pb.ListPartsResponse:
        """One part an answer."""
        batch = await self._find(request.batch, context)
        (job,) = (job for job in batch.jobs.values() if job.job_id == request.job_id)
        number = int(request.page_token or 0)
        more = str(number + 1) if number + 1 < job.parts_done else ""
        return pb.ListPartsResponse(parts=[_page(number)], next_page_token=more)

    async def CancelBatch(self, request: pb.CancelBatchRequest, context: Context) -> pb.Batch:
        batch = await self._find(request.batch, context)
        batch.cancelled = True
        for job in batch.jobs.values():
            if job.state == pb.JOB_STATE_RUNNING:
                job.state = pb.JOB_STATE_CANCELLED
        return self._describe(batch)

    async def RetryDead(self, request: pb.RetryDeadRequest, context: Context) -> pb.RetryDeadResponse:
        batch = await self._find(request.batch, context)
        wanted = {pb.JOB_STATE_DEAD} | ({pb.JOB_STATE_FAILED} if request.include_failed else set())
        return pb.RetryDeadResponse(num_retried=sum(job.state in wanted for job in batch.jobs.values()))

    async def _find(self, name: str, context: Context) -> FakeBatch:
        for number, (key, batch) in enumerate(self.batches.items()):
            if name in (key, f"batch-{number}"):
                return batch
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no batch {name}")
        raise AssertionError("abort raises")

    def _describe(self, batch: FakeBatch) -> pb.Batch:
        states = [job.state for job in batch.jobs.values()]
        counts = pb.JobCounts(
            total=len(states),
            running=states.count(pb.JOB_STATE_RUNNING),
            done=states.count(pb.JOB_STATE_DONE),
            failed=states.count(pb.JOB_STATE_FAILED),
            dead=states.count(pb.JOB_STATE_DEAD),
            cancelled=states.count(pb.JOB_STATE_CANCELLED),
        )
        ended = not counts.running
        state = pb.BATCH_STATE_COMPLETED if ended else pb.BATCH_STATE_IN_PROGRESS
        if batch.cancelled and not ended:
            state = pb.BATCH_STATE_CANCELLING
        return pb.Batch(
            batch_id=f"batch-{list(self.batches).index(batch.options.key)}",
            key=batch.options.key,
            state=pb.BATCH_STATE_CANCELLED if counts.cancelled and ended else state,
            metadata=batch.options.metadata,
            counts=counts,
            created_s=1000.0,
            ended_s=1036.0 if ended else 0.0,
            totals=pb.BatchTotals(tokens=5 * counts.done, generate_s=0.5, plain_generate_s=0.75),
            parts_total=sum(job.parts_total for job in batch.jobs.values()),
            parts_done=sum(job.parts_done for job in batch.jobs.values()),
        )


def _run(item: pb.BatchItem, batch: pb.BatchOptions, number: int) -> pb.Job:
    """The job of an item at its end."""
    job = pb.Job(job_id=f"job-{number}", custom_id=item.custom_id, source=item.source, attempts=0)
    if is_document := item.source.endswith(".pdf"):
        job.kind, job.parts_total, job.parts_done = pb.JOB_KIND_DOCUMENT, NUM_PAGES, NUM_PAGES
    outcome = OUTCOMES.get(PurePath(item.source).stem)
    if outcome is not None:
        job.state, job.error, job.error_code = outcome
        job.parts_done = max(job.parts_done - 1, 0)
        return job
    job.state = pb.JOB_STATE_DONE
    if is_document:
        job.receipt.slipstream_version = "9.9.9"
        job.receipt.video_sha256 = "ef" * 32
        return job
    job.summary.CopyFrom(make_summary(text=TEXT))
    job.summary.video.duration_s = 10.0
    job.summary.video.timestamps_s.extend([0.0, 5.0])
    job.summary.speculation.kept_digest = "cafe"
    job.receipt.slipstream_version = "9.9.9"
    job.receipt.target.CopyFrom(pb.ModelReceipt(model_id="big", revision="ab" * 32, dtype="float32"))
    job.receipt.draft.CopyFrom(pb.ModelReceipt(model_id="small", revision="cd" * 32, dtype="float32"))
    job.receipt.options.CopyFrom(batch.caption)
    job.receipt.options.MergeFrom(item.caption)
    job.receipt.video_sha256 = "ef" * 32
    job.receipt.video_bytes = 2**40
    job.receipt.runs = 1
    return job


def _page(number: int) -> pb.JobPart:
    """A page with a region."""
    part = pb.JobPart(number=number, page=number + 1, width=30, height=40, dpi=150.0)
    part.summary.CopyFrom(make_summary(text=f"Page {number + 1}\x1b."))
    part.receipt.text_sha256 = "aa" * 32
    region = {"left": 1, "top": 2, "right": 9, "bottom": 9, "kind": 1, "origin": 2, "text": "ocr", "score": 0.5}
    part.draft.CopyFrom(reader_pb2.PageDraft(page=number + 1, regions=[reader_pb2.Region(**region)]))
    return part
