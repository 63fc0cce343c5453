"""One SubmitBatch call: items gathered into chunks, each durable before the next, and what became of them all."""

from services.gateway.archive.admission import read_item
from services.gateway.archive.payload import BatchPayload, write_batch
from services.gateway.config import GatewayConfig
from slipstream.errors import InvalidRequest, LimitExceeded
from slipstream.jobs.base import Admission, BacklogFull, BatchSpec, JobQueue, JobSpec, Priority
from slipstream.logs import get_logger
from slipstream.rpc.v1 import archive_pb2

CHUNK = 500
MAX_NAMED_CONFLICTS = 100
RETRY_AFTER_S = 10.0


class Submission:
    """Nothing reaches the queue before the first chunk does. A call that breaks off leaves the batch open, and what
    was accepted of it runs."""

    def __init__(
        self,
        queue: JobQueue,
        config: GatewayConfig,
        batch_id: str,
        owner: str,
        options: archive_pb2.BatchOptions,
        priority: Priority,
    ) -> None:
        self._queue = queue
        self._config = config
        self._priority = priority
        self._batch = BatchPayload(options.key, options.caption)
        self._spec = BatchSpec(batch_id, owner, dict(options.metadata), write_batch(self._batch))
        self._chunk: list[JobSpec] = []
        self._num_items = 0
        self._is_open = False
        self._response = archive_pb2.SubmitBatchResponse(batch_id=batch_id)

    async def add(self, item: archive_pb2.BatchItem) -> None:
        """One more item. Raises `InvalidRequest`, `LimitExceeded`, `BacklogFull` or `QueueUnavailable`."""
        self._num_items += 1
        if self._num_items > self._config.max_batch_items:
            raise LimitExceeded(
                f"a batch may have {self._config.max_batch_items} items; split it, or start the gateways with a higher "
                "--max-batch-items"
            )
        self._chunk.append(read_item(item, self._num_items, self._batch, self._priority, self._config))
        if len(self._chunk) >= CHUNK:
            await self._flush()

    async def end(self) -> archive_pb2.SubmitBatchResponse:
        """No more items come."""
        if not self._num_items:
            raise InvalidRequest("a batch needs at least one item")
        await self._flush()
        await self._queue.seal_batch(self._spec.batch_id)
        response = self._response
        get_logger().info(
            "batch.submitted",
            batch_id=response.batch_id,
            num_added=response.num_added,
            num_known=response.num_known,
            num_conflicts=response.num_conflicts,
            num_rejected=response.num_rejected,
        )
        return response

    async def _flush(self) -> None:
        if not self._chunk:
            return
        if not self._is_open:
            await self._queue.open_batch(self._spec)
            self._is_open = True
        answers = await self._queue.submit(self._spec.batch_id, self._chunk)
        for job, answer in zip(self._chunk, answers, strict=True):
            self._count(job, answer)
        self._chunk = []
        if Admission.FULL in answers:
            response = self._response
            raise BacklogFull(
                f"the archive's backlog is full: {response.num_added} items of this call were accepted and "
                f"{response.num_known} were known; make the same call again later to go on",
                retry_after_s=RETRY_AFTER_S,
            )

    def _count(self, job: JobSpec, answer: Admission) -> None:
        response = self._response
        if answer is Admission.ADDED:
            response.num_added += 1
            response.num_rejected += bool(job.rejection)
        elif answer is Admission.KNOWN:
            response.num_known += 1
        elif answer is Admission.CONFLICT:
            response.num_conflicts += 1
            if len(response.conflicts) < MAX_NAMED_CONFLICTS:
                response.conflicts.append(job.custom_id)
